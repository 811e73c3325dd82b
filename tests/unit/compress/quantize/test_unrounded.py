"""A tensor is rounded for the nodes that compute in 8 bits, and for no others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch import nn

from compress.data.dataset import Dataset
from compress.model import OnnxModel
from compress.quantize.calibrate import calibrate
from compress.quantize.int8_onnx import attention, finish, plain
from compress.quantize.outputs_lost import outputs_lost
from compress.quantize.put_back import Mixed
from compress.quantize.quantize_onnx import QuantizeOnnx, quantize, quantized
from compress.quantize.tied_tables import ties
from compress.quantize.unrounded import ROUNDED, in_float
from compress.runtime.backends import OnnxBackend
from tests.families import family
from tests.unit.compress.onnx_graphs import error_of
from tests.unit.compress.prune.test_prune_channels import quiet
from tests.unit.compress.quantize.test_half_onnx import exported
from tests.unit.compress.quantize.test_half_values import graph_of

COUNT, STEPS, ROWS = 128, 6, 200


class Beside(nn.Module):
    """Something that is decided by columns, and a layer that takes them, too: both go to a head of two layers."""

    layers = 3

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.layer = nn.Embedding(ROWS, 32), nn.Linear(8, 32)
        self.a, self.b = nn.Linear(32, 48), nn.Linear(48, 5)

    def decided(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, 32] of x [batch, steps, 8]."""
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = self.decided(x) + 1e-4 * self.layer(x).mean(1)
        return self.b(torch.relu(self.a(mixed)))  # type: ignore[no-any-return]


class ByGather(Beside):
    """The class of the step that a column says is the last."""

    def decided(self, x: torch.Tensor) -> torch.Tensor:
        last = x[:, :1, 2:3].long().expand(-1, 1, 8)
        return self.table(x.gather(1, last)[:, 0, 0].long())  # type: ignore[no-any-return]


class ByBytes(Beside):
    """A class as a number of 8 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(256, 32)

    def decided(self, x: torch.Tensor) -> torch.Tensor:
        return self.table(x[:, 0, 0].to(torch.uint8).long())  # type: ignore[no-any-return]


class Newest(Beside):
    """The step of the largest time."""

    def decided(self, x: torch.Tensor) -> torch.Tensor:
        at = x[:, :, 0].argmax(1)[:, None, None].expand(-1, 1, 8)
        return torch.log1p(x).gather(1, at)[:, 0, 3:4].expand(-1, 32)


class Sorted(Beside):
    """Steps by their time."""

    def decided(self, x: torch.Tensor) -> torch.Tensor:
        order = x[:, :, 0].argsort(1)[..., None].expand(-1, -1, 8)
        return torch.log1p(x).gather(1, order)[:, :4].flatten(1)


class Weighted(Beside):
    layers = 4

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Linear(8, 32)


class Present(Weighted):
    """Which amounts are there."""

    def decided(self, x: torch.Tensor) -> torch.Tensor:
        return 4 * self.more(torch.relu(x[:, 0] - 40).bool().float())  # type: ignore[no-any-return]


class Near(Weighted):
    """Which steps are near one another."""

    layers = 5  # a product with ones is one

    def decided(self, x: torch.Tensor) -> torch.Tensor:
        places = x[:, :, :1]
        near = ((places[:, :, None] - places[:, None]).norm(dim=-1) < 30.0).float()
        return self.more(near.mean(1) @ torch.ones(STEPS, 8) * near[:, 0, :1])  # type: ignore[no-any-return]


class Logarithms(Weighted):
    """Of amounts up to 100,000."""

    def decided(self, x: torch.Tensor) -> torch.Tensor:
        return self.more(torch.log1p(x[:, 0].abs()))  # type: ignore[no-any-return]


NETWORKS = [ByGather, ByBytes, Newest, Sorted, Present, Near, Logarithms]


def columns() -> Dataset:
    """Classes from 0 to 199, amounts, steps from 0 to 5, and amounts of very unlike size up to 100,000."""
    rng = np.random.default_rng(0)
    x = np.exp(rng.normal(size=(COUNT, STEPS, 8)) * 2.5 + 2).clip(0, 1e5)
    x[..., 0], x[..., 1], x[..., 2] = (
        rng.integers(0, ROWS, (COUNT, STEPS)),
        rng.random((COUNT, STEPS)) * 1e5,
        rng.integers(0, STEPS, (COUNT, STEPS)),
    )
    return Dataset("", {"x": x.astype(np.float32)}, None, "data")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[type[Beside]], OnnxModel]:
    known: dict[type[Beside], OnnxModel] = {}

    def of(network: type[Beside]) -> OnnxModel:
        if network not in known:
            folder = tmp_path_factory.mktemp(network.__name__)
            known[network] = exported(network().eval(), (f"x:float32[batch,{STEPS},8]",), folder)
        return known[network]

    return of


@pytest.mark.parametrize("network", NETWORKS)
def test_what_columns_decide_is_decided_in_float_where_a_layer_takes_them_too(
    network: type[Beside], made: Callable[[type[Beside]], OnnxModel], tmp_path: Path
) -> None:
    model, data = made(network), columns()
    given = QuantizeOnnx("static", data).run(model, tmp_path, quiet)
    assert given.details["outputs_lost"]["share"] < 0.02
    assert given.details["layers"]["int8"] == network.layers, "its layers are in INT8"


@pytest.mark.parametrize("network", [ByGather, Present, Logarithms])
def test_a_mixture_is_the_file_that_excludes_the_same_nodes(
    network: type[Beside], made: Callable[[type[Beside]], OnnxModel], tmp_path: Path
) -> None:
    """So that what `compress explain` measures is what --keep-float makes, whatever node it is."""
    model, data = made(network), columns()
    options, graph = QuantizeOnnx("static", data), plain(model.path)
    ranges = calibrate(model.path, data, "minmax", quiet)
    mixed = Mixed(graph, quantized(options, graph, ranges), rounds_outputs=True)
    assert mixed.units
    for unit in mixed.units:
        finish(mixed.model((unit,)), tmp_path / "mixed.onnx", ties(graph))
        quantize(replace(options, exclude=(unit,)), model.path, tmp_path / "kept.onnx", ranges)
        mine, kept = (
            OnnxBackend(OnnxModel(tmp_path / file, model.signature), 1).infer(data.inputs)
            for file in ("mixed.onnx", "kept.onnx")
        )
        # The scale of what a table gives is its own in the mixture, and that of the data in the other.
        assert error_of(kept, mine) < 0.03, unit


@pytest.mark.parametrize(
    "name", ["residual", "unet", "convnext", "inverted", "squeeze_excite", "mlp", "bert", "vit", "two_towers"]
)
def test_ordinary_networks_have_all_in_8_bits_that_can_be(name: str, tmp_path: Path) -> None:
    net, inputs = family(name)
    graph = plain(exported(net, inputs, tmp_path).path)
    kinds = attention(graph)[0] or ROUNDED
    assert not in_float(graph.graph, {node.name for node in graph.graph.node if node.op_type in kinds})


def node(kind: str, given: list[str], made: str, **fields: int) -> onnx.NodeProto:
    return helper.make_node(kind, given, [made], name=made, **fields)


WEIGHTS = {"w": np.full((6, 6), 0.1, np.float32), "half": np.float32(0.5), "one": np.float32(1)}
LAYER = node("MatMul", ["ids", "w"], "layer")
DOUBLE = node("Mul", ["ids", "half"], "double")
FOUND: dict[str, tuple[list[onnx.NodeProto], set[str]]] = {
    "before a function in float": ([DOUBLE, node("Exp", ["double"], "y")], {"double"}),
    "of an output": ([node("Mul", ["ids", "half"], "y")], {"y"}),
    "between layers": ([DOUBLE, node("MatMul", ["double", "w"], "y")], set()),
    "one after another": ([DOUBLE, node("Add", ["double", "one"], "sum"), node("Exp", ["sum"], "y")], {"double", "sum"}),
    "behind a layer": ([LAYER, node("Mul", ["layer", "half"], "less"), node("Exp", ["less"], "y")], set()),
    "with what a layer gives": ([LAYER, node("Add", ["ids", "layer"], "sum"), node("Exp", ["sum"], "y")], set()),
    "joined with what a layer gives": (
        [LAYER, node("Concat", ["ids", "layer"], "both", axis=1), node("Exp", ["both"], "y")],
        {"both"},
    ),
    "for both": ([DOUBLE, node("Exp", ["double"], "e"), node("MatMul", ["double", "w"], "l"), node("Add", ["e", "l"], "y")],
                 {"double"}),
}  # fmt: skip


@pytest.mark.parametrize("case", list(FOUND))
def test_arithmetic_is_in_float_where_all_that_it_takes_is_exact_and_not_only_8_bits_follow(case: str) -> None:
    nodes, found = FOUND[case]
    eight = {each.name for each in nodes if each.op_type in ROUNDED}
    assert in_float(graph_of(nodes, WEIGHTS, TensorProto.FLOAT).graph, eight) == found


def test_an_output_that_a_layer_takes_too_is_given_as_it_was() -> None:
    nodes = [
        node("Exp", ["ids"], "y"),
        node("MatMul", ["y", "w"], "h"),
        node("MatMul", ["h", "w"], "z"),
    ]
    model = graph_of(nodes, WEIGHTS, TensorProto.FLOAT)
    model.graph.output.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, None))
    ranges = {"ids": (0.0, 5.0), "y": (0.0, 150.0), "h": (0.0, 150.0), "z": (0.0, 150.0)}
    made = quantized(QuantizeOnnx("static"), onnx.shape_inference.infer_shapes(model), ranges)
    makers = {name: each.op_type for each in made.graph.node for name in each.output}
    assert makers["y"] == "Exp"
    assert makers["z"] == "DequantizeLinear", "a layer's 8-bit kernel has nothing else"


def test_a_class_that_columns_decide_is_the_float_models_where_it_is_an_output(tmp_path: Path) -> None:
    class Flagged(Beside):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x), x[:, 0, 0] * 2 > 90.0  # type: ignore[return-value]

    model, data = exported(Flagged().eval(), (f"x:float32[batch,{STEPS},8]",), tmp_path), columns()
    given = QuantizeOnnx("static", data).run(model, tmp_path / "next", quiet)
    assert isinstance(given.model, OnnxModel)
    flags = [OnnxBackend(each, 1).infer(data.inputs) for each in (model, given.model)]
    name = next(name for name, values in flags[0].items() if values.dtype == np.bool_)
    assert np.array_equal(flags[0][name], flags[1][name])
    assert outputs_lost(model, given.model, data) is not None
