"""Model files of PyTorch, changed: compress.save's, layers and weights of torch.save, exported programs."""

from __future__ import annotations

import functools
import io
import json
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import nn

import compress
from tests.hostile.mutations import bytes_changed, placed, rezipped, tree_changed
from tests.models import build as module_named
from tests.models import mlp

__all__ = ["ONE", "Lines", "checkpoint", "native", "native_file", "pack_of", "program"]

Lines = list[tuple[str, list[str]]]
"""Which program (compress, serve, resume, prune), and its arguments."""
INPUT = ["--input", "x:float32[batch,4]"]
ONE = ["--batches", "1", "--rounds", "1"]


def _small() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 3)).eval()


@functools.cache
def native_file(which: int) -> tuple[bytes, str]:
    """A file of compress.save."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.pt"
        if which == 0:
            compress.save(mlp(), path, inputs=INPUT[1])
            return path.read_bytes(), INPUT[1]
        module, inputs = module_named(("residual", "encoder", "recurrent", "two_inputs")[which - 1])
        compress.save(module, path, inputs=list(inputs))
        return path.read_bytes(), ""


def native(random: Random, folder: Path, outside: Path) -> Lines:
    whole, _ = native_file(random.choice((0, 0, 1, 2, 3, 4)))
    path = folder / "model.pt"
    if random.random() < 0.7:
        content = torch.load(io.BytesIO(whole), weights_only=False)
        torch.save(_tensors_changed(tree_changed(content, random, outside), random), path)
    else:
        path.write_bytes(rezipped(whole, random) if random.random() < 0.8 else bytes_changed(whole, random))
    return on_model(path, random, [])


def _tensors_changed(value: Any, random: Random) -> Any:
    if isinstance(value, dict):
        return {key: _tensors_changed(item, random) for key, item in value.items()}
    if isinstance(value, list):
        return [_tensors_changed(item, random) for item in value]
    if isinstance(value, torch.Tensor) and random.random() < 0.05:
        changes: tuple[Callable[[], Any], ...] = (
            lambda: value.double(), lambda: value.half(), lambda: value.long(), lambda: value.to(torch.complex64), lambda: value.reshape(-1)[:0],
            lambda: value.new_zeros(()), lambda: value.new_zeros(1).expand(2**20, 64), lambda: value.unsqueeze(0), lambda: value * torch.nan,
            lambda: value.reshape(-1).flip(0), lambda: nn.Parameter(value.detach().float()), lambda: value.new_zeros((0, 2**40)),
        )  # fmt: skip
        return random.choice(changes)()
    return value


def on_model(path: Path, random: Random, given: Sequence[str]) -> Lines:
    lines = [("compress", ["inspect", str(path), *given])]
    if random.random() < 0.15:
        lines.append(("compress", ["measure", str(path), *given, *ONE]))
    if random.random() < 0.05:
        lines.append(("serve", pack_of(path)))
        lines.append(("compress", ["lint", str(path)]))
    return lines


def checkpoint(random: Random, folder: Path, outside: Path) -> Lines:
    """Layers and weights as torch.save writes them, as a zip and as before."""
    layers: tuple[Callable[[], nn.Module], ...] = (
        _small, lambda: nn.Linear(4, 4), lambda: nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(4, 2), nn.Softmax(1)),
        lambda: nn.Sequential(nn.Unflatten(1, (4, 1)), nn.Conv1d(4, 4, 1), nn.BatchNorm1d(4), nn.MaxPool1d(1), nn.Flatten()),
        lambda: nn.Sequential(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)), lambda: nn.GRU(4, 3, batch_first=True),
    )  # fmt: skip
    module = random.choice(layers)().eval()
    for layer in module.modules():
        own = [name for name in vars(layer) if not name.startswith("_")]
        if own and random.random() < 0.3:
            name = random.choice(own)
            layer.__dict__[name] = tree_changed({"v": layer.__dict__[name]}, random, outside, 1).get("v", 7)
    content: Any = random.choice(
        (module, module, dict(module.state_dict()), {"model": module.state_dict(), "epoch": 3})
    )
    out = io.BytesIO()
    legacy = random.random() < 0.3
    torch.save(_tensors_changed(content, random), out, _use_new_zipfile_serialization=not legacy)
    whole = out.getvalue()
    if random.random() < 0.6:
        whole = bytes_changed(whole, random) if legacy else rezipped(whole, random)
    path = folder / "model.pt"
    path.write_bytes(whole)
    return on_model(path, random, INPUT)


@functools.cache
def _program(which: int) -> bytes:
    batch, seq = torch.export.Dim("batch", min=2, max=64), torch.export.Dim("seq", min=2, max=128)
    module: nn.Module = _small()
    given: tuple[Any, ...] = (torch.ones(3, 4),)
    shapes: Any = ({0: batch},)
    if which == 1:
        module = nn.Sequential(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)).eval()
        given, shapes = (torch.ones(3, 5, 4),), ({0: batch, 1: seq},)
    out = io.BytesIO()
    torch.export.save(torch.export.export(module, given, dynamic_shapes=shapes), out)
    return out.getvalue()


def program(random: Random, folder: Path, outside: Path) -> Lines:
    def change(name: str, data: bytes) -> bytes:
        if not name.endswith(".json") or random.random() < 0.1:
            return bytes_changed(data, random)
        return placed(tree_changed(json.loads(data), random, outside))

    path = folder / "model.pt2"
    whole = _program(random.randrange(2))
    if random.random() < 0.6:  # the entry that says most
        with zipfile.ZipFile(io.BytesIO(whole)) as archive:
            content = {name: archive.read(name) for name in archive.namelist()}
        name = next(name for name in content if name.endswith("models/model.json"))
        content[name] = change(name, content[name])
        with zipfile.ZipFile(path, "w") as archive:
            for entry, data in content.items():
                archive.writestr(entry, data)
    else:
        path.write_bytes(rezipped(whole, random, change))
    return on_model(path, random, [])


def pack_of(path: Path) -> list[str]:
    beside = path if path.is_dir() else path.parent
    return ["pack", str(path), "--repository", str(beside / "repository"), "--name", "m"]
