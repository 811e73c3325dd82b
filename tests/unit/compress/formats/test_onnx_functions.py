"""Functions of an ONNX file are written out as ONNX Runtime calls them; ONNX's own domain gets one name."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import AttributeProto, FunctionProto, ModelProto, NodeProto, TensorProto, helper

from compress.errors import StageError
from compress.formats.onnx import functions as module
from compress.formats.onnx.counted import counted
from compress.formats.onnx.domains import all_nodes, named_once
from compress.formats.onnx.functions import written_out
from compress.formats.onnx.load import load_onnx
from compress.formats.onnx.newest import newest
from compress.formats.onnx.scope import Taken, fresh, opset_of
from compress.onnx_export.from_file import plain
from compress.vetting.onnx_wire import vet_onnx_bytes

node = helper.make_node
X = np.array([[-8.0, 4.0]], np.float32)
IMPORTS = [helper.make_opsetid("", 20), helper.make_opsetid("my", 1), helper.make_opsetid("com.microsoft", 1)]


def call(kind: str, given: str, made: str, *, passes: tuple[str, str] | None = None, overload: str = "", domain: str = "my",
         **said: float) -> NodeProto:  # fmt: skip
    """A node that gives one of its attributes the value of one of the function around it."""
    found = node(kind, [given], [made], domain=domain, **said)
    found.overload = overload
    if passes:
        found.attribute.append(AttributeProto(name=passes[0], ref_attr_name=passes[1], type=AttributeProto.FLOAT))
    return found


def leaky(given: str, made: str, slope: str) -> NodeProto:
    return call("LeakyRelu", given, made, passes=("alpha", slope), domain="")


def function(
    name: str, nodes: Sequence[NodeProto], *attributes: str, overload: str = "", domain: str = "my", opset: int = 20,
    **defaults: float,
) -> FunctionProto:  # fmt: skip
    """Of "i", which gives "o"."""
    told = [helper.make_attribute(name, value) for name, value in defaults.items()]
    versions = [*IMPORTS[1:], helper.make_opsetid("", opset)]
    found = helper.make_function(domain, name, ["i"], ["o"], nodes, versions, attributes, told)
    found.overload = overload
    return found


def model(nodes: Sequence[NodeProto], functions: Sequence[FunctionProto], opset: int = 20) -> ModelProto:
    """Of "x", which gives "y"."""
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [None, 2]) for name in "xy"]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:])
    versions = [*IMPORTS[1:], helper.make_opsetid("", opset)]
    return helper.make_model(graph, opset_imports=versions, ir_version=10, functions=functions)


def answers(made: ModelProto) -> Any:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    return ort.InferenceSession(made.SerializeToString(), options, ["CPUExecutionProvider"]).run(None, {"x": X})[0]


def in_branch(then: NodeProto, other: NodeProto) -> list[NodeProto]:
    graphs = [
        helper.make_graph(
            [each], each.output[0], [], [helper.make_tensor_value_info(each.output[0], TensorProto.FLOAT, None)]
        )
        for each in (then, other)
    ]
    return [
        node("ReduceMax", ["i"], ["most"], keepdims=0), node("Constant", [], ["one"], value_float=1.0),
        node("Greater", ["most", "one"], ["is"]), node("If", ["is"], ["o"], then_branch=graphs[0], else_branch=graphs[1]),
    ]  # fmt: skip


LEAKS = function("Leaks", [leaky("i", "o", "slope")], slope=0.25)
PASSES = function("Passes", [call("Leaks", "i", "o", passes=("slope", "outer"))], "outer")
CASES: dict[str, tuple[list[NodeProto], list[FunctionProto], list[float]]] = {
    "a default": ([call("Leaks", "x", "y")], [LEAKS], [-2, 4]),
    "a value in its place": ([call("Leaks", "x", "y", slope=0.5)], [LEAKS], [-4, 4]),
    "overloads with defaults of their own": (
        [call("Leaks", "x", "m", overload="one"), call("Leaks", "m", "y", overload="two")],
        [function("Leaks", [leaky("i", "o", "slope")], overload=name, slope=slope) for name, slope in (("one", 0.5), ("two", 0.25))],
        [-1, 4],
    ),
    "an overload with a default beside one without": (
        [call("Leaks", "x", "m", overload="one", slope=0.5), call("Leaks", "m", "y")],
        [function("Leaks", [leaky("i", "o", "slope")], "slope", overload="one"), LEAKS],
        [-1, 4],
    ),
    "what a call leaves out is not passed on": ([call("Passes", "x", "y")], [LEAKS, PASSES], [-2, 4]),
    "what a call says is passed on": ([call("Passes", "x", "y", outer=0.5)], [LEAKS, PASSES], [-4, 4]),
    "one call says it, and another does not": (
        [call("Passes", "x", "m", outer=0.5), call("Passes", "m", "y")], [LEAKS, PASSES], [-1, 4],
    ),
    "left out two functions further out": (
        [call("Outer", "x", "y")],
        [LEAKS, PASSES, function("Outer", [call("Passes", "i", "o", passes=("outer", "outermost"))], "outermost")],
        [-2, 4],
    ),
    "left out before a function with a default": (
        [call("Outer", "x", "y")],
        [LEAKS, function("Passes", [call("Leaks", "i", "o", passes=("slope", "outer"))], outer=0.5),
         function("Outer", [call("Passes", "i", "o", passes=("outer", "outermost"))], "outermost")],
        [-4, 4],
    ),
    "left out in a branch": (
        [call("Branching", "x", "y")],
        [LEAKS, function("Branching", in_branch(call("Leaks", "i", "t", passes=("slope", "outer")), node("Neg", ["i"], ["e"])), "outer")],
        [-2, 4],
    ),
    "an operator's own default": ([call("Plain", "x", "y")], [LEAKS, function("Plain", [leaky("i", "o", "slope")], "slope")], [-0.08, 4]),
    "the name of an operator": ([call("Relu", "x", "y", domain="")], [function("Relu", [node("Neg", ["i"], ["o"])], domain="")], [0, 4]),
    "the name of an operator, called by a function": (
        [call("Calls", "x", "y")],
        [function("Relu", [node("Neg", ["i"], ["o"])], domain="ai.onnx"), function("Calls", [node("Relu", ["i"], ["o"])])],
        [0, 4],
    ),
    "the name of an operator of ONNX Runtime": (
        [call("QuickGelu", "x", "y", domain="com.microsoft", alpha=100.0)],
        [function("QuickGelu", [node("Neg", ["i"], ["o"])], domain="com.microsoft")],
        [0, 4],
    ),
    "a new name in a domain of ONNX Runtime": (
        [call("Mine", "x", "y", domain="com.microsoft")],
        [function("Mine", [node("Neg", ["i"], ["o"])], domain="com.microsoft")],
        [8, -4],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_functions_are_written_out_as_they_are_called(case: str) -> None:
    nodes, functions, expected = CASES[case]
    given = model(nodes, functions)
    vet_onnx_bytes(given.SerializeToString(), Path())
    np.testing.assert_allclose(answers(given), [expected], rtol=1e-6)
    made = written_out(given)
    assert not made.functions
    np.testing.assert_allclose(answers(made), [expected], rtol=1e-6)


def softmax(opset: int) -> FunctionProto:
    """Which is another one from opset 13 on, of a tensor with three dimensions."""
    shape = node("Constant", [], ["s"], value=helper.make_tensor("s", TensorProto.INT64, [3], [1, 2, 1]))
    nodes = [shape, node("Reshape", ["i", "s"], ["r"]), node("Softmax", ["r"], ["p"]), node("Flatten", ["p"], ["o"])]
    return function("Soft", nodes, opset=opset)


@pytest.mark.parametrize(("models", "functions"), [(11, 13), (13, 11), (20, 18), (18, 20), (20, 11), (None, 11)])
def test_functions_run_in_the_versions_of_operators_that_the_model_imports(models: int | None, functions: int) -> None:
    """They stayed calls where theirs were others, and their work and weights were none. A model of no version has the newest."""
    given = model([call("Soft", "x", "y")], [softmax(functions)], models or 20)
    if models is None:
        del given.opset_import[-1]
    expected = answers(given)
    np.testing.assert_allclose(expected, [[0, 1]] if models == 11 else [[1, 1]], atol=1e-4)
    made = counted(given, values=True)
    assert not made.functions
    assert "Softmax" in {each.op_type for each in made.graph.node}
    assert opset_of(made) == (models or newest(""))
    np.testing.assert_array_equal(answers(made), expected)


def test_a_model_imports_what_its_functions_alone_did() -> None:
    gelu = function("Mine", [node("QuickGelu", ["i"], ["o"], domain="com.microsoft", alpha=100.0)])
    given = model([call("Mine", "x", "y")], [gelu])
    del given.opset_import[1]
    made = written_out(given)
    onnx.checker.check_model(made)
    assert {each.domain for each in made.opset_import} == {"", "my", "com.microsoft"}


def test_a_model_of_another_domain_alone_is_read(tmp_path: Path) -> None:
    scaler = node("Scaler", ["x"], ["y"], domain="ai.onnx.ml", offset=[1.0], scale=[2.0])
    given = model([scaler], [])
    del given.opset_import[:]
    given.opset_import.add(domain="ai.onnx.ml", version=1)
    onnx.save(given, tmp_path / "m.onnx")
    found = load_onnx(tmp_path / "m.onnx")
    plain(given, found.signature, found.path)
    assert {each.domain: each.version for each in given.opset_import} == {"ai.onnx.ml": 1, "": newest("")}


def test_the_newest_version_of_onnxs_own_operators_is_the_last_that_runs() -> None:
    last = newest("")
    assert last is not None
    answers(model([node("Neg", ["x"], ["y"])], [], last))
    with pytest.raises(Exception, match="till opset"):
        answers(model([node("Neg", ["x"], ["y"])], [], last + 1))
    assert newest("my") is None


def test_copies_of_a_function_are_counted_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each began at 2 again: 20,000 of them took a minute. There are as many as onnx reads."""
    attributes = [f"a{at}" for at in range(12)]
    tensors = ["x", *(f"t{at}" for at in range(1, 220)), "y"]
    nodes = [call("Leaks", *ends) for ends in itertools.pairwise(tensors)]
    for each, said in zip(nodes, itertools.combinations(attributes, 3), strict=True):
        each.attribute.extend(helper.make_attribute(name, 0.5) for name in said)
    given = model(nodes, [function("Leaks", [leaky("i", "o", "slope")], *attributes, slope=0.25)])
    asked = 0

    class Counting(Taken):
        def __contains__(self, name: object) -> bool:
            nonlocal asked
            asked += 1
            return super().__contains__(name)

    monkeypatch.setattr(module, "Taken", Counting)
    assert len(written_out(ModelProto.FromString(given.SerializeToString())).graph.node) == 220
    assert asked < 1000
    monkeypatch.setattr(module, "MAX_FUNCTIONS", 219)
    with pytest.raises(StageError, match="can't write out the functions"):
        written_out(given)


def test_what_is_named_alike_gets_numbers_in_turn() -> None:
    taken = Taken(["a", "a_3"])
    found = []
    for _ in range(3):
        found.append(fresh("a", taken))
        taken.add(found[-1])
    assert found == ["a_2", "a_4", "a_5"]
    assert fresh("a", taken) == fresh("a", taken) == fresh("a", set(taken)) == "a_6"
    assert fresh("b", taken) == "b"


@pytest.mark.parametrize(("imports", "opset"), [
    ([("", 20)], 20), ([("ai.onnx", 20)], 20), ([("", 17), ("ai.onnx", 20)], 20), ([("ai.onnx", 17), ("", 20)], 20),
    ([("", 20), ("ai.onnx", 17)], 17),
])  # fmt: skip
def test_onnxs_own_domain_gets_one_name_and_the_opset_of_the_last(imports: list[tuple[str, int]], opset: int) -> None:
    mean = node("ReduceMean", ["x", "last"], ["y"]) if opset > 17 else node("ReduceMean", ["x"], ["y"], axes=[1])
    mean.domain = "ai.onnx"
    given = model([node("Constant", [], ["last"], value_ints=[1]), mean], [])
    del given.opset_import[:]
    given.opset_import.extend(helper.make_opsetid(*each) for each in imports)
    expected = answers(given)
    named_once(given)
    assert {each.domain for each in all_nodes(given)} == {""}
    assert [(each.domain, each.version) for each in given.opset_import] == [("", opset)]
    onnx.checker.check_model(given)
    np.testing.assert_array_equal(answers(given), expected)
