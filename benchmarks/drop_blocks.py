"""Blocks that go whole against channels, at the same multiply-accumulates: accuracy and latency, without training.

    python benchmarks/drop_blocks.py [--seeds 3] [--networks resnet mobilenet transformer] [--blocks 4 6] [--recover 4]

scikit-learn's handwritten digits. Each seed trains a network of its own and draws 256 unlabelled images to calibrate
on; accuracy is over the 500 images that neither has seen. `--drop-blocks N` comes first, with the repair; channels
alone, and blocks and channels together (`--drop-blocks auto`), are then brought to the multiply-accumulates that it has
left. "error" is how far the outputs for these images are from the original's, by their spread. `--recover` trains each
for so many epochs more. Latency is of ONNX files in turns, one thread, batch 1, for the first seed; there, channels and
both are brought to the latency of the blocks, too. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

from compress.data.dataset import Dataset
from compress.errors import BudgetError, StageError
from compress.model import OnnxModel, TorchModel, infer_signature, sample_inputs
from compress.onnx_export.fold import FoldOnnx
from compress.onnx_export.from_torch import OnnxFromTorch
from compress.options.training import TrainingOptions
from compress.prune.drop_blocks import DropBlocks
from compress.prune.prune_channels import PruneChannels
from compress.prune.prune_to_budget import PruneToBudget
from compress.prune.repair_channels import RepairChannels
from compress.runtime.backends import OnnxBackend
from compress.runtime.latency import latency
from compress.runtime.machine import environment
from compress.runtime.measure import torch_macs
from compress.signature import TensorSpec
from compress.stage import Stage
from compress.training.finetune import Finetune

EPOCHS, BATCH, CALIBRATION, JUDGED = 16, 64, 256, 500
TAIL: tuple[Stage, ...] = (OnnxFromTorch(), FoldOnnx(unfuse=True))


def normed(i: int, o: int, kernel: int = 3, stride: int = 1, groups: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(i, o, kernel, stride, kernel // 2, groups=groups, bias=False), nn.BatchNorm2d(o)
    )  # fmt: skip


class Basic(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = normed(width, width), normed(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x + self.b(F.relu(self.a(x))))


class Inverted(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inside = nn.Sequential(
            normed(width, 4 * width, 1), nn.ReLU6(),
            normed(4 * width, 4 * width, groups=4 * width), nn.ReLU6(),
            normed(4 * width, width, 1),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inside(x)  # type: ignore[no-any-return]


class Encoder(nn.Module):
    """Attention and feed-forward, normalized first."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.two = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.wide, self.narrow = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.one(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.narrow(F.gelu(self.wide(self.two(x))))  # type: ignore[no-any-return]


class OfImages(nn.Module):
    """[batch, 1, 8, 8] -> logits [batch, 10]; five blocks of 32 channels, then four of 64."""

    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        self.stem, self.first = normed(1, 32), nn.Sequential(*(block(32) for _ in range(5)))
        self.down, self.second = normed(32, 64, stride=2), nn.Sequential(*(block(64) for _ in range(4)))
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(F.relu(self.stem(x)))
        return self.head(self.second(F.relu(self.down(x))).mean((2, 3)))  # type: ignore[no-any-return]


class OfRows(nn.Module):
    """[batch, 1, 8, 8] -> logits [batch, 10]; sixteen patches of two by two, five layers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.places = nn.Conv2d(1, 64, 2, 2), nn.Parameter(0.02 * torch.randn(1, 16, 64))
        self.layers, self.norm, self.head = (
            nn.Sequential(*(Encoder(64) for _ in range(5))), nn.LayerNorm(64), nn.Linear(64, 10),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers(self.stem(x).flatten(2).transpose(1, 2) + self.places)
        return self.head(self.norm(x).mean(1))  # type: ignore[no-any-return]


NETWORKS: dict[str, Any] = {
    "resnet": lambda: OfImages(Basic), "mobilenet": lambda: OfImages(Inverted), "transformer": OfRows,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--blocks", type=int, nargs="+", default=[4, 6])
    parser.add_argument("--recover", type=int, default=0, metavar="EPOCHS")
    arguments = parser.parse_args()
    found: list[dict[str, Any]] = []
    for network in arguments.networks:
        rows: dict[tuple[int, str], dict[str, Any]] = {}
        for seed in range(arguments.seeds):
            for row in rows_of(network, arguments.blocks, seed, arguments.recover):
                print(json.dumps(row), file=sys.stderr, flush=True)
                joined = rows.setdefault((row["as_blocks"], row["way"]), {"network": network})
                for name, value in row.items():
                    if name in ("as_blocks", "way"):
                        joined[name] = value
                    else:
                        joined.setdefault(name, []).append(value)
        found += rows.values()
    show(found)
    told = {"benchmark": "drop_blocks", "environment": environment(torch.get_num_threads()), "seeds": arguments.seeds}
    print(json.dumps(told | {"figures": found}))


def rows_of(network: str, counts: Sequence[int], seed: int, epochs: int) -> list[dict[str, Any]]:
    """Of one network, by the number of blocks whose multiply-accumulates go, and by the way in which they go."""
    digits = load_digits()
    order = np.random.default_rng(seed).permutation(len(digits.images))
    images, labels = (digits.images[order, None] / 16).astype(np.float32), digits.target[order].astype(np.int64)
    held, behind = slice(0, JUDGED), slice(JUDGED + CALIBRATION, None)
    train = Dataset("train", {"x": images[behind]}, labels[behind], f"train {seed}")
    calibration = Dataset("calibration", {"x": images[JUDGED : JUDGED + CALIBRATION]}, None, f"calibration {seed}")
    module = trained(network, torch.from_numpy(images[behind]), torch.from_numpy(labels[behind]), seed)
    model = TorchModel(module, infer_signature(module, (TensorSpec.parse("x:float32[batch,1,8,8]"),)))
    whole = torch_macs(module, model.signature)
    models: dict[tuple[int, str], TorchModel] = {(0, "unpruned"): model}
    dropped: dict[tuple[int, str], list[str]] = {}
    seconds: dict[tuple[int, str], float] = {}
    repair = RepairChannels(calibration)
    for count in counts:
        alone = DropBlocks(count, calibration)
        start = time.process_time()
        given, did = made([alone, repair], model)
        seconds[count, "blocks"] = time.process_time() - start
        models[count, "blocks"], dropped[count, "blocks"] = given, list(did[0]["blocks"])
        fraction = 1 - torch_macs(given.module, model.signature) / whole
        for importance in ("magnitude", "obs"):
            prune = PruneChannels(fraction, importance, round_to=4, calibration=calibration)
            ways: dict[str, list[Stage]] = {f"channels, {importance}": [prune, repair]}
            auto = DropBlocks("auto", calibration, prune=prune)
            ways[f"both, {importance}"] = [auto, repair, prune, repair]
            for way, stages in ways.items():
                start = time.process_time()
                try:
                    models[count, way], did = made(stages, model)
                except StageError as err:
                    print(network, count, way, err, file=sys.stderr)
                    continue
                seconds[count, way], dropped[count, way] = time.process_time() - start, list(did[0].get("blocks", {}))
    if epochs:
        for key, each in models.items():
            with tempfile.TemporaryDirectory() as folder:
                recovery = Finetune(train, model, TrainingOptions(epochs=epochs), seed)
                models[key] = cast(TorchModel, recovery.run(each, Path(folder), quiet).model) if key[0] else each
    times = measured(models) if seed == 0 else {}
    if times:
        for count in counts:
            prune = PruneChannels(0.5, "obs", round_to=4, calibration=calibration)
            budget = PruneToBudget(prune, "latency_ms", times[count, "blocks"], TAIL)
            for way, first in (
                ("channels", []),
                ("both", [DropBlocks("auto", calibration, prune=budget), repair]),
            ):
                start, key = time.process_time(), (count, f"{way}, obs, to the blocks' latency")
                try:
                    models[key], did = made([*first, budget, repair], model)
                except (BudgetError, StageError) as err:
                    print(network, count, way, err, file=sys.stderr)
                    continue
                seconds[key], dropped[key] = time.process_time() - start, list(did[0].get("blocks", {}))
        times = measured(models)
    rows = []
    for key, each in models.items():
        with torch.no_grad():
            have, want = (one.module(torch.from_numpy(images[held])).double() for one in (each, model))
        right = have.argmax(1).numpy() == labels[held]
        error = (have - want).square().sum(1).mean() / (want - want.mean(0)).square().sum(1).mean()
        row: dict[str, Any] = {"as_blocks": key[0], "way": key[1], "accuracy": float(right.mean())}
        row["error"] = float(error)
        row |= {"macs_removed": 1 - torch_macs(each.module, model.signature) / whole, "dropped": dropped.get(key, [])}
        rows.append(row | {"cpu_seconds": seconds.get(key, 0.0)} | ({"p50_ms": times[key]} if times else {}))
    return rows


def made(stages: Sequence[Any], model: TorchModel) -> tuple[TorchModel, list[dict[str, Any]]]:
    """What stages make of a model, and what each has told."""
    told = []
    with tempfile.TemporaryDirectory() as name:
        for at, stage in enumerate(stages):
            folder = Path(name) / str(at)
            folder.mkdir()
            given = stage.run(model, folder, quiet)
            model = given.model
            told.append(dict(given.details))
    return dataclasses.replace(model, lost=None), told


def measured(models: dict[tuple[int, str], TorchModel]) -> dict[tuple[int, str], float]:
    """Median milliseconds of each, batch 1, one thread, in turns."""
    with tempfile.TemporaryDirectory() as name:
        opened, signature = {}, next(iter(models.values())).signature
        for at, (key, model) in enumerate(models.items()):
            given: Any = model
            for step, stage in enumerate(TAIL):
                folder = Path(name) / f"{at}-{step}"
                folder.mkdir()
                given = stage.run(given, folder, quiet).model
            opened[f"{key[0]} {key[1]}"] = OnnxBackend(cast(OnnxModel, given), 1)
        found = latency(opened, sample_inputs(signature, 1))
        return {key: found[f"{key[0]} {key[1]}"].p50_ms for key in models}


def trained(network: str, images: torch.Tensor, labels: torch.Tensor, seed: int) -> nn.Module:
    """A network that has learnt the digits."""
    torch.manual_seed(seed)
    net, steps = NETWORKS[network](), EPOCHS * -(-len(images) // BATCH)
    optimizer = torch.optim.AdamW(net.parameters(), weight_decay=0.02)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps)
    for _ in range(EPOCHS):
        for index in torch.split(torch.randperm(len(images)), BATCH):
            optimizer.zero_grad()
            F.cross_entropy(net(images[index]), labels[index]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
    return cast(nn.Module, net.eval())


def show(figures: list[dict[str, Any]]) -> None:
    """As a table."""
    table = Table("network", "as", "way", "MACs", "error", "accuracy", "by seed", "blocks that went", "p50 ms", "CPU s")
    for row in figures:
        table.add_row(
            row["network"],
            f"{row['as_blocks']} blocks" if row["as_blocks"] else "",
            row["way"],
            f"-{statistics.mean(row['macs_removed']):.1%}",
            f"{statistics.mean(row['error']):.2%}",
            f"{statistics.mean(row['accuracy']):.2%}",
            " ".join(f"{each:.1%}" for each in row["accuracy"]),
            " ".join(str(len(each)) for each in row["dropped"]),
            f"{row['p50_ms'][0]:.3f}",
            f"{statistics.mean(row['cpu_seconds']):.1f}",
        )
    Console(stderr=True, width=140).print(table)


def quiet(_done: int, _total: int, _note: str) -> None:
    """Shows nothing."""


if __name__ == "__main__":
    main()
