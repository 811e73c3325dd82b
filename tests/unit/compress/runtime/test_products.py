"""Operators that multiply matrices are counted, by figures made by hand, or told to be left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from compress.cli import main
from compress.formats.onnx.read import signature_of_onnx
from compress.runtime.measure import Work, onnx_work
from compress.runtime.products import multiplies

node = helper.make_node
MS: dict[str, Any] = {"domain": "com.microsoft"}
RANDOM = np.random.default_rng(0)


def values(*shape: int) -> np.ndarray[Any, Any]:
    return RANDOM.normal(size=shape).astype(np.float32)


def stored(
    folder: Path,
    nodes: list[onnx.NodeProto],
    weights: dict[str, np.ndarray[Any, Any]],
    shapes: dict[str, list[Any]],
    opset: int = 20,
) -> Path:
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()]
    outputs = [helper.make_empty_tensor_value_info("y")]
    outputs[0].type.tensor_type.elem_type = TensorProto.FLOAT
    stored = [numpy_helper.from_array(value, name) for name, value in weights.items()]
    opsets = [helper.make_opsetid(*each) for each in (("", opset), ("com.microsoft", 1))]
    graph = helper.make_graph(nodes, "g", inputs, outputs, stored)
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), folder / "model.onnx")
    return folder / "model.onnx"


def counted(path: Path) -> Work:
    return onnx_work(path, signature_of_onnx(path))


def packed(name: str, **more: Any) -> list[onnx.NodeProto]:
    return [node(name, ["x", "w", "bias"], ["y"], num_heads=2, **more, **MS)]


def projected(name: str, inputs: list[str], **more: Any) -> list[onnx.NodeProto]:
    return [node("MatMul", ["x", "w"], ["q"]), node(name, inputs, ["y"], **more)]


Q = {"x": ["b", 10, 8]}
HEADS = {"x": ["b", 2, 10, 4], "k": ["b", 2, 6, 4], "v": ["b", 2, 6, 3]}
W8 = {"w": values(8, 8)}
QKV = {"w": values(8, 24), "bias": values(24)}
TABLE = {
    "a product with a turned side": (
        [node("FusedMatMul", ["x", "w"], ["y"], transB=1, **MS)], {"w": values(50, 70)}, {"x": ["b", 70]}, 20, 70 * 50,
    ),
    "a product with the other side turned": (
        [node("FusedMatMul", ["w", "x"], ["y"], transA=1, **MS)], {"w": values(7, 5)}, {"x": ["b", 7, 3]}, 20, 5 * 7 * 3,
    ),
    "a layer with its activation": (
        [node("FusedGemm", ["x", "w"], ["y"], activation="Relu", **MS)], {"w": values(70, 50)}, {"x": ["b", 70]}, 20,
        70 * 50,
    ),
    "a convolution with its activation": (
        [node("FusedConv", ["x", "w"], ["y"], activation="Relu", **MS)], {"w": values(6, 4, 3, 3)},
        {"x": ["b", 4, 8, 8]}, 20, 36 * 6 * 4 * 9,
    ),
    "a convolution at places of its own": (
        [node("DeformConv", ["x", "w", "o"], ["y"], kernel_shape=[3, 3])], {"w": values(3, 2, 3, 3)},
        {"x": ["b", 2, 6, 6], "o": ["b", 18, 4, 4]}, 22, 16 * 3 * 2 * 9,
    ),
    "attention": (
        projected("Attention", ["q", "q", "q"], q_num_heads=2, kv_num_heads=2), W8, Q, 23, 10 * 64 + 10 * 10 * (8 + 8),
    ),
    "attention by heads, to others": (
        [node("Attention", ["x", "k", "v"], ["y"])], {}, HEADS, 23, 2 * 10 * 6 * (4 + 3),
    ),
    "attention with its projections": (packed("Attention"), QKV, Q, 20, 10 * 8 * 24 + 10 * 10 * (8 + 8)),
    "attention with narrow values": (
        packed("Attention", qkv_hidden_sizes=[8, 8, 4]), {"w": values(8, 20), "bias": values(20)}, Q, 20,
        10 * 8 * 20 + 10 * 10 * (8 + 4),
    ),
    "attention of heads": (
        projected("MultiHeadAttention", ["q", "q", "q"], num_heads=2, **MS), W8, Q, 20, 10 * 64 + 10 * 10 * (8 + 8),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
def test_products_are_counted(tmp_path: Path, name: str) -> None:
    nodes, weights, shapes, opset, macs = TABLE[name]
    assert counted(stored(tmp_path, nodes, weights, shapes, opset)) == Work(macs, 0)


@pytest.mark.parametrize(
    "name",
    ["MatMulBnb4", "QOrderedMatMul", "MoE", "QMoE", "GroupQueryAttention", "LongformerAttention", "NhwcFusedConv",
     "MatMulOfTomorrow", "SomethingOfTomorrow"],
)  # fmt: skip
def test_what_is_not_counted_is_told(tmp_path: Path, name: str) -> None:
    nodes = [node("MatMul", ["x", "w"], ["h"]), node(name, ["h", "w"], ["y"], **MS)]
    assert counted(stored(tmp_path, nodes, W8, {"x": ["b", 8]})) == Work(64, 1)


@pytest.mark.parametrize("way", ["stored", "quantized", "turned"])
def test_an_operator_of_somebody_that_takes_weights_is_told(tmp_path: Path, way: str) -> None:
    weights = {"w": values(8, 8), "q": np.ones((8, 8), np.int8), "scale": np.float32(0.1) * np.ones((), np.float32)}
    moved = {
        "stored": [], "quantized": [node("DequantizeLinear", ["q", "scale"], ["v"])],
        "turned": [node("Transpose", ["w"], ["v"])],
    }[way]  # fmt: skip
    nodes = [*moved, node("Layer", ["x", "v" if moved else "w"], ["y"], **MS)]
    assert counted(stored(tmp_path, nodes, weights, {"x": ["b", 8]})) == Work(0, 1)


def test_what_multiplies_nothing_is_not_told(tmp_path: Path) -> None:
    nodes = [
        node("Add", ["x", "w"], ["a"]), node("BiasGelu", ["a", "row"], ["b"], **MS), node("Max", ["b", "w"], ["c"]),
        node("SkipLayerNormalization", ["c", "w", "row"], ["d"], **MS), node("MatMul", ["d", "w"], ["y"]),
    ]  # fmt: skip
    path = stored(tmp_path, nodes, W8 | {"row": values(8)}, {"x": [8, 8]})
    assert counted(path) == Work(8 * 8 * 8, 0)


def test_of_what_was_before_nobody_knows_how_long_it_is(tmp_path: Path) -> None:
    inputs = ["x", "k", "v", "", "before", "values"]
    nodes = [node("Attention", inputs, ["y", "keys", "kept"])]
    shapes = HEADS | {"before": ["b", 2, "past", 4], "values": ["b", 2, "past", 3]}
    assert counted(stored(tmp_path, nodes, {}, shapes, 23)) == Work(0, 1)


def test_all_operators_of_onnx_are_known_here() -> None:
    """Those that multiply by their names, and others by the list of them: a new one is told till it is looked at."""
    names = {each.name for each in onnx.defs.get_all_schemas() if each.domain == "" and each.since_version <= 26}
    found = {name for name in names if multiplies(node(name, ["x", "w"], ["y"]), {"w"})}
    assert found == {
        "Attention", "CausalConvWithState", "Conv", "ConvInteger", "ConvTranspose", "DeformConv", "Einsum", "GRU", "Gemm",
        "LSTM", "LinearAttention", "MatMul", "MatMulInteger", "QLinearConv", "QLinearMatMul", "RNN",
    } & names  # fmt: skip


def test_a_command_tells_what_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nodes = [node("MatMul", ["x", "w"], ["h"]), node("CDist", ["h", "w"], ["y"], metric="euclidean", **MS)]
    path = stored(tmp_path, nodes, W8, {"x": ["b", 8]})
    with pytest.raises(SystemExit):
        main(["inspect", str(path)])
    assert "MACs     64, without 1 layer in loops, or of sizes or operators not known" in capsys.readouterr().out
