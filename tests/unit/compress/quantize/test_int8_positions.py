"""INT8 leaves what half precision leaves: positions and counts stay whole, arguments of sines keep their last digits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import helper
from torch import nn

from compress.data.dataset import Dataset
from compress.model import OnnxModel
from compress.quantize.half.index_arithmetic import index_arithmetic, kept_from_int8
from compress.quantize.quantize_onnx import QuantizeOnnx
from tests.families import family
from tests.unit.compress.prune.test_prune_channels import quiet
from tests.unit.compress.quantize.test_half_onnx import exported
from tests.unit.compress.quantize.test_half_values import LONG, cast, graph_of, off_by

COUNT = 64
LAST = 5_000


class Looked(nn.Module):
    """A place in a table, reckoned in float from whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.a, self.b = nn.Embedding(LONG, 32), nn.Linear(32, 64), nn.Linear(64, 5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        at = (ids.float() * 1.7 + 3).long() % LONG
        return self.b(torch.relu(self.a(self.table(at).mean(1))))  # type: ignore[no-any-return]


class Cells(Looked):
    """The same from fractions: the cell of a coordinate."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        at = (ids * LONG).clamp(0, LONG - 1).floor().long()
        return self.b(torch.relu(self.a(self.table(at).mean(1))))  # type: ignore[no-any-return]


class Times(nn.Module):
    """Sines and cosines of whole times."""

    def __init__(self) -> None:
        super().__init__()
        self.frequencies = nn.Buffer(torch.exp(torch.linspace(0, -8, 16)))
        self.a, self.b = nn.Linear(32, 64), nn.Linear(64, 5)

    def angles(self, ids: torch.Tensor) -> torch.Tensor:
        return ids.float().sum(-1, keepdim=True) * self.frequencies

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        angles = self.angles(ids)
        return self.b(torch.relu(self.a(torch.cat((angles.sin(), angles.cos()), -1))))  # type: ignore[no-any-return]


class Column(Times):
    """Times by a layer of one input."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Linear(1, 16)

    def angles(self, ids: torch.Tensor) -> torch.Tensor:
        return self.turn(ids.float().sum(-1, keepdim=True))  # type: ignore[no-any-return]


class Coordinates(Times):
    """Several whole numbers by a matrix of frequencies, which adds them up."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Linear(6, 16, bias=False)

    def angles(self, ids: torch.Tensor) -> torch.Tensor:
        return self.turn(ids.float())  # type: ignore[no-any-return]


class Seconds(Times):
    """Times that are fractions from the start."""

    def angles(self, ids: torch.Tensor) -> torch.Tensor:
        return (ids.sum(-1, keepdim=True) * LAST) * self.frequencies + 0.5


def data_for(kind: str) -> Dataset:
    rng = np.random.default_rng(0)
    ids = rng.integers(0, LAST, (COUNT, 6)) if kind == "int64" else rng.random((COUNT, 6), np.float32)
    return Dataset("", {"ids": ids}, None, "data")


@pytest.mark.parametrize("target", ["cpu", "tensorrt", "cuda", "dynamic"])
@pytest.mark.parametrize(
    ("network", "kind"),
    [
        (Looked, "int64"),
        (Cells, "float32"),
        (Times, "int64"),
        (Column, "int64"),
        (Coordinates, "int64"),
        (Seconds, "float32"),
    ],
)
def test_positions_and_times_are_not_rounded_to_8_bits(
    network: Callable[[], nn.Module], kind: str, target: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, data = exported(network().eval(), (f"ids:{kind}[batch,6]",), tmp_path), data_for(kind)
    mode = "dynamic" if target == "dynamic" else "static"
    stage = QuantizeOnnx(mode, data, target="cpu" if mode == "dynamic" else target)  # type: ignore[arg-type]
    given = stage.run(model, tmp_path / "next", quiet)
    assert isinstance(given.model, OnnxModel)
    assert off_by(model, given.model, data) < 0.04
    assert given.details["layers"]["int8"] == 2, "its layers are in INT8"


@pytest.mark.parametrize("name", ["residual", "unet", "convnext", "bert", "vit", "lstm", "inverted", "two_towers"])
def test_ordinary_networks_keep_their_layers_in_int8(name: str, tmp_path: Path) -> None:
    net, inputs = family(name)
    graph = onnx.load(exported(net, inputs, tmp_path).path)
    kinds = {node.name: node.op_type for node in graph.graph.node}
    kept = {kinds[each] for each in kept_from_int8(graph)}
    assert not kept & {"Conv", "ConvTranspose", "Gemm", "MatMul", "Relu", "Concat", "MaxPool", "LSTM"}, kept


def test_a_layer_between_two_sines_stays_a_layer() -> None:
    """What a sine gives is small: 8 bits hold it, and what follows is a layer like others."""
    nodes = [
        cast("ids", "x"),
        helper.make_node("MatMul", ["x", "w"], ["angles"], name="first"),
        helper.make_node("Sin", ["angles"], ["h"], name="sine"),
        helper.make_node("MatMul", ["h", "v"], ["next"], name="second"),
        helper.make_node("Sin", ["next"], ["y"], name="last"),
    ]
    weights = {"w": np.ones((6, 4), np.float32), "v": np.ones((4, 4), np.float32)}
    assert index_arithmetic(graph_of(nodes, weights), 256).nodes == {"cast_x", "first", "sine"}


def test_a_layer_whose_product_is_no_argument_of_a_sine_stays_a_layer() -> None:
    nodes = [
        cast("ids", "x"),
        helper.make_node("MatMul", ["x", "w"], ["h"], name="layer"),
        helper.make_node("Tanh", ["h"], ["y"], name="after"),
    ]
    assert kept_from_int8(graph_of(nodes, {"w": np.ones((6, 4), np.float32)})) == {"cast_x"}
