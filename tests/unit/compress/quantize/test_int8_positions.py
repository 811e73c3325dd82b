"""INT8 leaves what half precision leaves: positions and counts stay whole, arguments of sines keep their last digits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch import nn

from compress.data.dataset import Dataset
from compress.model import OnnxModel
from compress.quantize.half.index_arithmetic import index_arithmetic, kept_from_int8
from compress.quantize.quantize_onnx import QuantizeOnnx, quantized
from compress.quantize.unrounded import in_float
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


class Shared(nn.Module):
    """A row of a table and a layer from the same columns; the first holds whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(LAST, 32), nn.Linear(6, 32)
        self.a, self.b = nn.Linear(32, 64), nn.Linear(64, 5)

    def looked_up(self, columns: torch.Tensor) -> torch.Tensor:
        return self.table(columns[:, 0].long())  # type: ignore[no-any-return]

    def forward(self, columns: torch.Tensor) -> torch.Tensor:
        mixed = self.looked_up(columns) + 1e-4 * self.layer(columns)
        return self.b(torch.relu(self.a(mixed)))  # type: ignore[no-any-return]


class SharedIndex(Shared):
    """The row is reckoned from the first column."""

    def looked_up(self, columns: torch.Tensor) -> torch.Tensor:
        return self.table((columns[:, 0] * 1.7 + 3).long() % LAST)  # type: ignore[no-any-return]


class OneOf(Shared):
    """The first column by comparison with each of the classes."""

    def looked_up(self, columns: torch.Tensor) -> torch.Tensor:
        chosen = (columns[:, :1] == torch.arange(40.0)).float()
        return chosen @ self.table.weight[:40]


class Buckets(Shared):
    """A row by the bounds that a number lies between."""

    def __init__(self) -> None:
        super().__init__()
        self.bounds = nn.Buffer(torch.tensor([1.0, 2, 5, 10, 20, 50, 100, 1000]))

    def looked_up(self, columns: torch.Tensor) -> torch.Tensor:
        return self.table(torch.bucketize(columns[:, 1] * 0.1 + 0.5, self.bounds))  # type: ignore[no-any-return]


class Passed(Buckets):
    """Which bounds a number passes, as zeros and ones."""

    def looked_up(self, columns: torch.Tensor) -> torch.Tensor:
        passed = ((columns[:, 1:2] * 0.1 + 0.5) > self.bounds).float()
        return passed @ self.table.weight[:8]


def columns_of_a_table() -> Dataset:
    """Classes from 0 to 39, a number from 1 to 40,000, and others up to 10,000."""
    rng = np.random.default_rng(0)
    columns = rng.random((COUNT, 6)) * 1e4
    columns[:, 0], columns[:, 1] = rng.integers(0, 40, COUNT), 10 ** (rng.random(COUNT) * 4.6)
    return Dataset("", {"columns": columns.astype(np.float32)}, None, "data")


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


@pytest.mark.parametrize("target", ["cpu", "tensorrt", "cuda"])
@pytest.mark.parametrize("network", [Shared, SharedIndex, OneOf, Buckets, Passed])
def test_an_index_is_exact_where_a_layer_takes_the_same_tensor(
    network: Callable[[], nn.Module], target: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, data = exported(network().eval(), ("columns:float32[batch,6]",), tmp_path), columns_of_a_table()
    given = QuantizeOnnx("static", data, target=target).run(model, tmp_path / "next", quiet)  # type: ignore[arg-type]
    assert isinstance(given.model, OnnxModel)
    assert off_by(model, given.model, data) < 0.05
    assert given.details["layers"]["int8"] >= 3, "its layers are in INT8"


def test_a_node_that_is_kept_in_float_takes_what_was_not_rounded(tmp_path: Path) -> None:
    """So that keeping a node does what `explain` has measured; here an exponential, which no rule finds."""
    nodes = [
        helper.make_node("Slice", ["ids", "zero", "one", "last"], ["first"], name="slice"),
        helper.make_node("Mul", ["first", "half"], ["less"], name="scale"),
        helper.make_node("Exp", ["less"], ["decay"], name="decay"),
        helper.make_node("MatMul", ["ids", "w"], ["h"], name="layer"),
        helper.make_node("Mul", ["h", "decay"], ["y"], name="gate"),
    ]
    weights = {
        "zero": np.array([0]), "one": np.array([1]), "last": np.array([1]), "half": np.float32(-0.5), "w": np.full((6, 4), 0.1, np.float32),
    }  # fmt: skip
    model = graph_of(nodes, weights, TensorProto.FLOAT)
    ranges = {"ids": (0.0, 5e3), "first": (0.0, 5e3), "less": (-2.5e3, 0.0), "decay": (0.0, 1.0)}
    ranges |= {"h": (0.0, 3e3), "y": (0.0, 3e3)}
    made = quantized(QuantizeOnnx("static", exclude=("scale",)), onnx.shape_inference.infer_shapes(model), ranges)
    takes = {node.name: list(node.input) for node in made.graph.node}
    assert takes["slice"][0] == "ids"
    assert takes["scale"][0] == "first"
    assert takes["layer"][0] != "ids", "the layer is in INT8"


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


def compared(nodes: list[onnx.NodeProto]) -> set[str]:
    """Which of some nodes stay in float, of data `x` that a layer gives and `s`, its double."""
    before = [
        helper.make_node("MatMul", ["ids", "w"], ["x"], name="layer"),
        helper.make_node("Add", ["x", "x"], ["s"], name="sum"),
    ]
    weights = {"w": np.ones((6, 4), np.float32), "bound": np.float32(0.5), "one": np.float32(1)}
    return kept_from_int8(graph_of([*before, *nodes], weights, TensorProto.FLOAT))


def node(kind: str, given: list[str], made: str, **fields: int) -> onnx.NodeProto:
    return helper.make_node(kind, given, [made], name=made, **fields)


FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
GREATER = node("Greater", ["s", "bound"], "over")
NUMBERS = {
    "zeros and ones": [GREATER, node("Cast", ["over"], "y", to=FLOAT)],
    "a whole number": [GREATER, node("Cast", ["over"], "at", to=INT64), node("Cast", ["at"], "y", to=FLOAT)],
    "by way of not": [GREATER, node("Not", ["over"], "under"), node("Cast", ["under"], "y", to=FLOAT)],
    "one of two constants": [GREATER, node("Where", ["over", "one", "bound"], "y")],
    "places": [GREATER, node("NonZero", ["over"], "at"), node("Cast", ["at"], "y", to=FLOAT)],
}


@pytest.mark.parametrize("case", list(NUMBERS))
def test_what_is_compared_is_not_rounded_where_the_answer_becomes_a_number(case: str) -> None:
    kept = compared(NUMBERS[case])
    assert {"sum", "over"} <= kept
    assert "layer" not in kept


LESS = node("Mul", ["s", "bound"], "less")


@pytest.mark.parametrize(
    "nodes",
    [
        [GREATER, LESS, node("Where", ["over", "s", "less"], "y")],
        [GREATER, node("Not", ["over"], "under"), LESS, node("Where", ["under", "s", "less"], "y")],
        [
            node("Abs", ["s"], "size"),
            node("Greater", ["size", "bound"], "over"),
            node("Where", ["over", "s", "bound"], "y"),
        ],
    ],
    ids=["leaky", "by way of not", "shrunk"],
)
def test_a_comparison_that_chooses_between_what_is_compared_takes_nothing_from_8_bits(
    nodes: list[onnx.NodeProto],
) -> None:
    assert compared(nodes) == set()


@pytest.mark.parametrize("inverted", [False, True])
def test_a_comparison_that_chooses_between_other_data_decides(inverted: bool) -> None:
    other = [node("MatMul", ["ids", "w"], "a"), node("MatMul", ["ids", "w"], "b")]
    chooses = [node("Not", ["over"], "under")] if inverted else []
    gated = [*other, GREATER, *chooses, node("Where", ["under" if inverted else "over", "a", "b"], "y")]
    kept = compared(gated)
    assert {"sum", "over"} <= kept
    assert not kept & {"layer", "a", "b"}


def test_a_long_way_to_a_node_in_float_is_followed_to_its_end() -> None:
    length = 3000
    nodes = [helper.make_node("Transpose", [f"t{n}"], [f"t{n + 1}"], f"move{n}", perm=[1, 0]) for n in range(length)]
    nodes.append(helper.make_node("Sin", [f"t{length}"], ["y"], "sin"))
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 2]) for name in ("t0", "y")]
    graph = helper.make_graph(nodes, "long", ends[:1], ends[1:])
    assert len(in_float(graph, {node.name for node in nodes[:-1]})) == length
