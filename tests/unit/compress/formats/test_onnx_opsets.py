"""A graph in another opset: asked of ONNX's converter once for what is alike, and refused where that has no form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from compress.formats.onnx.scope import opset_of
from compress.formats.onnx_layers import opsets
from compress.formats.onnx_layers.opsets import in_opset
from compress.formats.onnx_layers.values import NotTakenBackError

node = helper.make_node
X = np.linspace(-1, 1, 24, dtype=np.float32).reshape(2, 3, 4)
SCALE: dict[str, Any] = {"scale": np.float32(0.1), "zero": np.int8(0)}


def model(nodes: Sequence[NodeProto], opset: int, weights: Mapping[str, Any] | None = None, *, given: int = TensorProto.FLOAT,
          made: int = TensorProto.FLOAT) -> ModelProto:  # fmt: skip
    """Of "x", which gives "y"."""
    stored = [numpy_helper.from_array(np.asarray(values), name) for name, values in (weights or {}).items()]
    ends = [
        helper.make_tensor_value_info("x", given, [2, 3, 4]),
        helper.make_tensor_value_info("y", made, [None, None, None]),
    ]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], stored)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def answers(made: ModelProto) -> Any:
    return ort.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, {"x": X})[0]


def means(count: int, *axes: int, **said: Any) -> list[NodeProto]:
    """One on the other."""
    return [
        node("ReduceMean", [f"m{at}" if at else "x"], [f"m{at + 1}" if at + 1 < count else "y"], name=f"mean{at}",
             axes=[axes[at % len(axes)]], **said) for at in range(count)
    ]  # fmt: skip


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Calls of ONNX's converter, by the nodes that it was given."""
    found: list[int] = []
    convert = onnx.version_converter.convert_version

    def seen(given: ModelProto, opset: int) -> ModelProto:
        found.append(len(given.graph.node))
        return convert(given, opset)

    monkeypatch.setattr(onnx.version_converter, "convert_version", seen)
    opsets._by_converter.cache_clear()
    return found


def test_what_is_alike_is_converted_once(asked: list[int]) -> None:
    given = model(means(200, 0, 2, keepdims=1), 17)
    made = in_opset(given, 20)
    assert opset_of(made) == 20
    assert len(asked) <= 6  # by axis, and by the shapes that come in
    onnx.checker.check_model(made, full_check=True)
    assert [each.name for each in made.graph.node if each.op_type == "ReduceMean"] == [f"mean{at}" for at in range(200)]
    np.testing.assert_allclose(answers(made), answers(given), rtol=1e-6)


def test_what_is_alike_keeps_tensors_of_its_own() -> None:
    weights = {"one": np.array([1, 2]), "other": np.array([2, 1])}
    nodes = [
        node("Split", ["x", "one"], ["a", "b"], axis=1), node("Split", ["x", "other"], ["c", "d"], axis=1),
        node("Split", ["b"], ["e", "f"], axis=1), node("Split", ["c"], ["g", "h"], axis=1),
        node("Concat", ["h", "a", "e", "g", "d", "f"], ["y"], axis=1),
    ]  # fmt: skip
    given = model(nodes, 17, weights)
    np.testing.assert_array_equal(answers(in_opset(given, 20)), answers(given))


def test_more_different_nodes_than_can_be_asked_about_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opsets, "MOST_FORMS", 2)
    with pytest.raises(NotTakenBackError, match="over 2 different nodes of it are others in opset 20"):
        in_opset(model(means(6, 0, 1, 2), 17), 20)


def test_onnxs_own_domain_by_its_other_name_is_converted() -> None:
    given = model(means(3, 0, 2), 17)
    expected = answers(given)
    for each in given.graph.node:
        each.domain = "ai.onnx"
    made = in_opset(given, 20)
    onnx.checker.check_model(made)
    np.testing.assert_allclose(answers(made), expected, rtol=1e-6)


def quantized(**said: int) -> ModelProto:
    return model([node("QuantizeLinear", ["x", "scale", "zero"], ["y"], **said)], 23, SCALE, made=TensorProto.INT8)


def test_an_attribute_that_says_what_holds_anyway_is_left_out() -> None:
    made = in_opset(quantized(precision=0), 20)
    assert not [each.name for each in made.graph.node[0].attribute if each.name == "precision"]
    onnx.checker.check_model(made)


@pytest.mark.parametrize(("given", "why"), [
    (quantized(precision=TensorProto.FLOAT16), "has no QuantizeLinear with 'precision', as opset 23 has it"),
    (model([node("DequantizeLinear", ["x", "scale"], ["y"], output_dtype=TensorProto.FLOAT16)], 23, SCALE,
           given=TensorProto.INT8, made=TensorProto.FLOAT16), "has no DequantizeLinear with 'output_dtype', as opset 23 has it"),
])  # fmt: skip
def test_an_attribute_that_is_not_there_is_refused_by_name(given: ModelProto, why: str) -> None:
    with pytest.raises(NotTakenBackError, match=why):
        in_opset(given, 20)
