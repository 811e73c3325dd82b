"""What would end ONNX Runtime is refused: an input that an operator needs, left out by a node or by a function's call."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from onnx import FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from compress.vetting import onnx_absent
from compress.vetting.onnx_absent import Gaps, absent_in
from compress.vetting.onnx_functions import Function
from compress.vetting.onnx_wire import OnnxFileError, vet_onnx_bytes

OPSETS = [helper.make_opsetid("", 20), helper.make_opsetid("mine", 1)]


def norm(*inputs: str, output: str = "y") -> NodeProto:
    return helper.make_node("LayerNormalization", inputs, [output])


def call(name: str, *inputs: str, outputs: Sequence[str] = ("y",), overload: str = "") -> NodeProto:
    return helper.make_node(name, inputs, outputs, domain="mine", overload=overload)


def function(
    name: str, inputs: Sequence[str], nodes: Sequence[NodeProto], outputs: Sequence[str] = ("y",), overload: str = ""
) -> FunctionProto:
    return helper.make_function("mine", name, inputs, outputs, nodes, OPSETS, overload=overload)


def branch(node: NodeProto) -> GraphProto:
    return helper.make_graph([node], "branch", [], [helper.make_tensor_value_info(node.output[0], 1, None)])


def model(nodes: Sequence[NodeProto], *functions: FunctionProto) -> ModelProto:
    graph = helper.make_graph(
        nodes, "graph", [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.ones(4, np.float32), name) for name in ("scale", "bias")]
        + [numpy_helper.from_array(np.array(True), "yes")],
    )  # fmt: skip
    return helper.make_model(graph, functions=functions, opset_imports=OPSETS, ir_version=10)


def two(name: str) -> GraphProto:
    nodes = [helper.make_node(kind, ["x"], [f"{name}{kind}"]) for kind in ("Neg", "Exp")]
    outputs = [helper.make_tensor_value_info(node.output[0], TensorProto.FLOAT, None) for node in nodes]
    return helper.make_graph(nodes, "branch", [], outputs)


NORM = function("Norm", ["x", "s", "b"], [norm("x", "s", "b")])
OUTER = function("Outer", ["x", "s", "q"], [call("Norm", "x", "s", "q")])
IF = [
    helper.make_node("If", ["c"], ["y"], then_branch=branch(norm("x", "s", "b", output="t")),
                     else_branch=branch(norm("x", "s", "b", output="e")))
]  # fmt: skip
ENDS: dict[str, ModelProto] = {
    "an empty name": model([norm("x", "scale", "")]),
    "a call with fewer inputs": model([call("Norm", "x", "scale")], NORM),
    "a call with an empty name": model([call("Norm", "x", "scale", "")], NORM),
    "a call in a function": model([call("Outer", "x", "scale", "bias")], NORM, function("Outer", ["x", "s", "q"], [call("Norm", "x", "s")])),
    "what a function was not given, on to another": model([call("Outer", "x", "scale")], NORM, OUTER),
    "functions that stand before what they call": model([call("Outer", "x", "scale")], OUTER, NORM),
    "one call of several": model([call("Norm", "x", "scale", "bias", outputs=["z"]), call("Norm", "z", "scale")], NORM),
    "one use of a function in two others": model(
        [call("Outer", "x", "scale", "bias", outputs=["z"]), call("Other", "z", "scale")], NORM, OUTER,
        function("Other", ["x", "s"], [call("Norm", "x", "s")]),
    ),
    "a call in a branch": model([helper.make_node("If", ["yes"], ["y"], then_branch=branch(call("Norm", "x", "scale", outputs=["t"])),
                                                  else_branch=branch(call("Norm", "x", "scale", outputs=["e"])))], NORM),
    "a branch in a function": model([call("Norm", "x", "scale", "", "yes")], function("Norm", ["x", "s", "b", "c"], IF)),
    "an overload": model([call("Norm", "x", "scale", overload="v")], function("Norm", ["x", "s", "b"], [norm("x", "s", "b")], overload="v")),
    "the greatest of several": model([helper.make_node("Max", ["x", ""], ["y"])]),
    "the sum of what a function gets": model([call("Add", "x")], function("Add", ["x", "o"], [helper.make_node("Sum", ["x", "o"], ["y"])])),
    "a product by indices": model([helper.make_node("Einsum", ["x", ""], ["y"], equation="ab,ab->ab")]),
    "an axis of a transform": model([helper.make_node("DFT", ["x", "", ""], ["y"])]),
    "an output of a Split": model([helper.make_node("Split", ["x"], ["", "y"], axis=1, num_outputs=2)]),
    "an output of an If": model([helper.make_node("If", ["yes"], ["", "y"], then_branch=two("t"), else_branch=two("e"))]),
}  # fmt: skip


@pytest.mark.parametrize("case", ENDS)
def test_an_input_that_onnx_runtime_takes_for_granted_is_not_left_out(case: str) -> None:
    with pytest.raises(OnnxFileError, match="ends ONNX Runtime"):
        vet_onnx_bytes(ENDS[case].SerializeToString(), Path())


SPLIT = function("Halves", ["x"], [helper.make_node("Split", ["x"], ["a", "b"], axis=1, num_outputs=2)], ["a", "b"])
RUNS: dict[str, ModelProto] = {
    "all inputs": model([call("Norm", "x", "scale", "bias")], NORM),
    "through two functions": model([call("Outer", "x", "scale", "bias")], NORM, OUTER),
    "no bias at all": model([norm("x", "scale")]),
    "a function without one": model([call("Norm", "x", "scale")], function("Norm", ["x", "s"], [norm("x", "s")])),
    "an input that only others need": model(
        [call("Clip", "x", "scale", "bias")],
        function("Clip", ["x", "s", "b", "low"], [norm("x", "s", "b", output="z"), helper.make_node("Clip", ["z", "low"], ["y"])]),
    ),
    # Of a function's Split, it makes a name for what a call leaves out.
    "an output that a call leaves out": model([call("Halves", "x", outputs=["", "y"])], SPLIT),
    "a function that nothing calls": model([norm("x", "scale")], NORM, function("Outer", ["x", "s"], [call("Norm", "x", "s")])),
}  # fmt: skip


@pytest.mark.parametrize("case", RUNS)
def test_what_runs_passes(case: str) -> None:
    data = RUNS[case].SerializeToString()
    vet_onnx_bytes(data, Path())
    session = ort.InferenceSession(data, providers=["CPUExecutionProvider"])
    assert session.run(None, {"x": np.ones((2, 4), np.float32)})[0].shape[0] == 2


def test_each_place_of_a_function_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand calls of a function with a thousand inputs that are left out would be a million."""
    asked = 0
    one = onnx_absent.needs

    def counting(*given: object, **more: object) -> bool:
        nonlocal asked
        asked += 1
        return one(*given, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(onnx_absent, "needs", counting)
    names = [f"i{at}" for at in range(1000)]
    inner, outer = ("mine", "Inner", ""), ("mine", "Outer", "")
    functions = {
        inner: Function(names, [(("", "Concat", ""), names)]),
        outer: Function(names, [(inner, names[: 1000 - at]) for at in range(1000)]),
    }
    assert list(absent_in({outer: Gaps(0, set())}, functions)) == []
    assert asked < 1_000_000
