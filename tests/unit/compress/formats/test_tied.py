"""Files that hold each number once, under one name of several, load as safetensors' own `load_model` loads them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import nn

from compress.errors import CheckpointError
from compress.formats.checkpoint import load
from compress.model import call

IDS = "ids:int64[batch,seq]"
HERE = "tests.unit.compress.formats.test_tied"


class Tied(nn.Module):
    """A language model whose head is its table."""

    def __init__(self, *, ties: bool = True) -> None:
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(12, 8), nn.Linear(8, 8), nn.Linear(8, 12, bias=False)
        if ties:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(torch.relu(self.body(self.embed(ids))))
        return found


class Twice(nn.Module):
    """A layer that hangs in two places, and a buffer that is a row of another."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.first = nn.Embedding(12, 8), nn.Linear(8, 8)
        self.second = self.first
        self.rows: torch.Tensor
        self.row: torch.Tensor
        self.register_buffer("rows", torch.randn(3, 8))
        self.register_buffer("row", self.rows[1])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.second(torch.relu(self.first(self.embed(ids)))) + self.row
        return found


def tied() -> nn.Module:
    return Tied()


def loose() -> nn.Module:
    return Tied(ties=False)


def twice() -> nn.Module:
    return Twice()


def _kept(module: nn.Module, path: Path, name: str) -> None:
    """With this name of a tied weight, and without the other."""
    other = {"embed.weight": "head.weight", "head.weight": "embed.weight"}[name]
    save_file({key: value.clone() for key, value in module.state_dict().items() if key != other}, path)


@pytest.mark.parametrize("factory", ["tied", "twice"])
def test_what_save_model_writes_loads(factory: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = globals()[factory]().eval()
    save_model(module, str(tmp_path / "m.safetensors"))
    assert len(load_file(tmp_path / "m.safetensors")) < len(module.state_dict())
    model = load(tmp_path / "m.safetensors", model=f"{HERE}:{factory}", inputs=[IDS])
    ids = torch.randint(0, 12, (2, 5))
    (found,) = call(model.module, model.signature.inputs, {"ids": ids}).values()
    torch.testing.assert_close(found, module(ids))


@pytest.mark.parametrize("prefix", ["", "module."])
@pytest.mark.parametrize("name", ["embed.weight", "head.weight"])
@pytest.mark.filterwarnings("ignore:.*behind 'module.'")
def test_either_name_of_a_tied_weight_is_enough(name: str, prefix: str, tmp_path: Path) -> None:
    module = tied().eval()
    _kept(module, tmp_path / "m.safetensors", name)
    save_file(
        {f"{prefix}{key}": value for key, value in load_file(tmp_path / "m.safetensors").items()},
        tmp_path / "m.safetensors",
    )
    model = load(tmp_path / "m.safetensors", model=f"{HERE}:tied", inputs=[IDS])
    ids = torch.randint(0, 12, (2, 5))
    (found,) = call(model.module, model.signature.inputs, {"ids": ids}).values()
    torch.testing.assert_close(found, module(ids))


@pytest.mark.parametrize("factory", ["loose", "tied"])
def test_what_is_really_missing_is_refused_as_load_model_refuses_it(factory: str, tmp_path: Path) -> None:
    state = {key: value.clone() for key, value in tied().state_dict().items() if key != "head.weight"}
    if factory == "tied":
        del state["body.bias"]
    save_file(state, tmp_path / "m.safetensors")
    with pytest.raises(RuntimeError, match="Missing key"):
        load_model(globals()[factory](), str(tmp_path / "m.safetensors"))
    with pytest.raises(CheckpointError, match="don't fit") as caught:
        load(tmp_path / "m.safetensors", model=f"{HERE}:{factory}", inputs=[IDS])
    assert ("head.weight" if factory == "loose" else "body.bias") in caught.value.why
