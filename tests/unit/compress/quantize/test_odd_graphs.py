"""Graphs that the standard allows and torch does not write, taken in, counted, and in INT8 of each way."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import NodeProto, helper

from compress.model import OnnxModel
from compress.onnx_export.fold import FoldOnnx
from compress.onnx_export.from_file import OnnxFromFile
from compress.quantize.quantize_onnx import QuantizeOnnx
from compress.runtime.backends import OnnxBackend
from compress.runtime.measure import onnx_work
from tests.unit.compress.onnx_graphs import data_for, error_of, normal, written
from tests.unit.compress.prune.test_prune_channels import quiet

WAYS = ("static", "tensorrt", "dynamic")
node = helper.make_node


def image(
    *middle: NodeProto, conv: tuple[str, ...] = ("x", "w0", "b0"), last: tuple[str, ...] = ("f", "w1")
) -> list[NodeProto]:
    """Nodes from `h` to `m`, both [batch, 8, 6, 6], between two layers."""
    return [
        node("Conv", [*conv], ["h"], name="first", pads=[1, 1, 1, 1]),
        *middle,
        node("GlobalAveragePool", ["m"], ["p"]),
        node("Flatten", ["p"], ["f"]),
        node("Gemm", [*last], ["y"], name="last"),
    ]


@dataclass(frozen=True)
class Graph:
    """A row.

    Attributes:
        nodes: from x [batch, 3, 6, 6], or from what `inputs` says, to y.
        weights: beside w0, b0 and w1.
        floats: the nodes with weights that stay in float in static INT8.
    """

    nodes: list[NodeProto]
    weights: dict[str, Any] = field(default_factory=dict)
    inputs: tuple[str, ...] = ("x:float32[batch,3,6,6]",)
    outputs: tuple[str, ...] = ("y:float32[batch,5]",)
    floats: int = 0


BASE = {"w0": normal(8, 3, 3, 3), "b0": normal(8), "w1": normal(8, 5)}


def norm(kind: str, *shapes: tuple[int, ...], out: tuple[str, ...] = ("m",), **how: Any) -> Graph:
    names = ["h", "scale", "shift"][: 1 + len(shapes)]
    values = dict(zip(names[1:], (1 + normal(*each) if each else np.float32(1.5) for each in shapes), strict=True))
    return Graph(image(node(kind, names, [*out], name="norm", **how)), values)


def recurrent(kind: str, gates: int, *out: str, given: tuple[str, ...] = ()) -> Graph:
    nodes = [
        node("Transpose", ["s"], ["t"], perm=[1, 0, 2]),
        node(kind, ["t", "W", "R", *given], [*out], name="layer", hidden_size=16),
        node("Squeeze", ["Yh", "zero"], ["last_state"]),
        node("Gemm", ["last_state", "w1"], ["y"], name="last"),
    ]
    weights = {
        "W": normal(1, 16 * gates, 64) / 8, "R": normal(1, 16 * gates, 16) / 4, "w1": normal(16, 5),
        "zero": np.array([0]),
    }  # fmt: skip
    few = gates * 16 * 16 < 1024  # weights, too few for 8 bits to pay
    return Graph(nodes, weights, inputs=("s:float32[batch,9,64]",), floats=int(few))


def stacked(*shape: int, left: bool = False) -> Graph:
    """A product with a stack of matrices, one for each of 4 heads."""
    nodes = [
        node("MatMul", ["x", "w"], ["h"], name="first"),
        node("Relu", ["h"], ["r"]),
        node("MatMul", ["v", "r"] if left else ["r", "v"], ["m"], name="heads"),
        node("Identity", ["m"], ["y"]),
    ]
    weights = {"w": normal(8, 8), "v": normal(*shape)}
    rows = shape[-2] if left else 6
    size = 8 if left else shape[-1]
    return Graph(nodes, weights, inputs=("x:float32[batch,4,6,8]",), outputs=(f"y:float32[batch,4,{rows},{size}]",))


GRAPHS: dict[str, Graph] = {
    "layer norm over three axes": norm("LayerNormalization", (8, 6, 6), (8, 6, 6), axis=1),
    "layer norm over two axes": norm("LayerNormalization", (6, 6), (6, 6), axis=-2),
    "layer norm without a shift": norm("LayerNormalization", (6, 6), axis=-2),
    "layer norm by one number": norm("LayerNormalization", (1,), (1,), axis=-2),
    "layer norm by a row, shifted by all": norm("LayerNormalization", (6,), (6, 6), axis=-2),
    "layer norm by all, shifted by a row": norm("LayerNormalization", (6, 6), (6,), axis=-2),
    "layer norm with its deviation": norm("LayerNormalization", (6,), (6,), out=("m", "", "inv"), axis=-1),
    "instance norm": norm("InstanceNormalization", (8,), (8,)),
    "RNN, its first output left out": recurrent("RNN", 1, "", "Yh"),
    "GRU, its first output left out": recurrent("GRU", 3, "", "Yh"),
    "LSTM, its first output left out": recurrent("LSTM", 4, "", "Yh", given=("", "", "")),
    "LSTM, but the last left out": recurrent("LSTM", 4, "", "", "Yh"),
    "Conv, its bias left out": Graph(image(node("Relu", ["h"], ["m"]), conv=("x", "w0", ""))),
    "Gemm, its bias left out": Graph(image(node("Relu", ["h"], ["m"]), last=("f", "w1", ""))),
    "Clip without bounds": Graph(image(node("Clip", ["h", "", ""], ["m"]))),
    "Resize, its region and sizes left out": Graph(
        image(node("Resize", ["h", "", "by", ""], ["m"])), {"by": np.array([1, 1, 2, 2], np.float32)}
    ),
    "a stack of matrices": stacked(4, 8, 6),
    "a stack of one matrix": stacked(1, 8, 6),
    "a stack of square matrices": stacked(4, 8, 8),
    "a stack of stacks": stacked(1, 4, 8, 6),
    "a stack of matrices on the left": stacked(4, 5, 6, left=True),
    "a matrix on the left": stacked(5, 6, left=True),
    "a vector": Graph(
        [
            node("MatMul", ["x", "w"], ["h"], name="first"),
            node("MatMul", ["h", "v"], ["m"], name="vector"),
            node("Unsqueeze", ["m", "ones"], ["y"]),
        ],
        {"w": normal(8, 8), "v": normal(8), "ones": np.array([1])},
        ("x:float32[batch,8]",),
        ("y:float32[batch,1]",),
    ),
    "average pool with gaps": Graph(
        image(node("AveragePool", ["h"], ["m"], kernel_shape=[2, 2], dilations=[2, 2])),
    ),
    "average pool without gaps": Graph(
        image(node("AveragePool", ["h"], ["m"], kernel_shape=[2, 2], dilations=[1, 1], ceil_mode=1)),
    ),
    "max pool with gaps": Graph(image(node("MaxPool", ["h"], ["m"], kernel_shape=[2, 2], dilations=[2, 2]))),
    "Split in parts of one size": Graph(
        image(node("Split", ["h"], ["a", "b"], axis=1, num_outputs=2), node("Concat", ["b", "a"], ["m"], axis=1))
    ),
    "Resize, smoothed": Graph(
        image(node("Resize", ["h", "", "by"], ["m"], mode="linear", antialias=1)),
        {"by": np.array([1, 1, 0.5, 0.5], np.float32)},
    ),
    "layer norm, its mean and deviation left out": norm("LayerNormalization", (6,), out=("m", "", "")),
}


def stages(graph: Graph, folder: Path) -> tuple[OnnxModel, OnnxModel]:
    """The file, and what it is quantized from."""
    weights = BASE | graph.weights
    read = {name for each in graph.nodes for name in each.input} | {each.partition(":")[0] for each in graph.outputs}
    kept = {name: values for name, values in weights.items() if name in read}
    model = written(graph.nodes, kept, folder, inputs=graph.inputs, outputs=graph.outputs)
    taken: Any = model
    ways: tuple[Any, ...] = (OnnxFromFile(), FoldOnnx())
    for number, stage in enumerate(ways):
        place = folder / str(number)
        place.mkdir()
        taken = stage.run(taken, place, quiet).model
    return model, taken


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", GRAPHS)
def test_an_odd_graph_is_counted_and_answers_in_int8_as_it_did(name: str, way: str, tmp_path: Path) -> None:
    graph = GRAPHS[name]
    model, folded = stages(graph, tmp_path)
    assert onnx_work(model.path, model.signature).macs > 0
    data = data_for(model)
    how = {"static": ("static", data, "cpu"), "tensorrt": ("static", data, "tensorrt"), "dynamic": ("dynamic", None)}
    mode, calibration, *target = how[way]
    options: Any = {"target": target[0]} if target else {}
    given = QuantizeOnnx(mode, calibration, **options).run(folded, tmp_path, quiet)  # type: ignore[arg-type]
    assert isinstance(given.model, OnnxModel)
    before, after = (OnnxBackend(each, 1).infer(data.inputs) for each in (model, given.model))
    assert error_of(before, after) < 0.1
    if way == "static":
        assert len(given.details["layers_float"]) == graph.floats
