"""What an ONNX file's functions make where they are called is bounded before anything writes them out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from compress.errors import StageError
from compress.formats.onnx.counted import counted
from compress.formats.onnx.read import read_onnx
from compress.vetting import onnx_calls, onnx_functions
from compress.vetting.onnx_functions import MAX_DEPTH
from compress.vetting.onnx_wire import ForeignOperatorError, OnnxFileError, vet_onnx_bytes

OPSETS = [helper.make_opsetid("", 20), helper.make_opsetid("my", 1)]
node = helper.make_node


def call(name: str, given: str, made: str, overload: str = "", **said: Any) -> NodeProto:
    return node(name, [given], [made], domain="my", overload=overload, **said)


def function(
    name: str, nodes: Sequence[NodeProto], *attributes: str, overload: str = "", **defaults: Any
) -> FunctionProto:
    told = [helper.make_attribute(key, value) for key, value in defaults.items()]
    return helper.make_function("my", name, ["x"], ["y"], nodes, OPSETS, attributes, told, overload=overload)


def model(nodes: Sequence[NodeProto], *functions: FunctionProto) -> ModelProto:
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [None, 4]) for name in "xy"]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:])
    return helper.make_model(graph, functions=functions, opset_imports=OPSETS, ir_version=10)


def row(names: Sequence[str], **said: Any) -> list[NodeProto]:
    """Calls, each of what the one before it gives."""
    tensors = ["x", *(f"t{at}" for at in range(1, len(names))), "y"]
    return [call(name, *tensors[at : at + 2], **said) for at, name in enumerate(names)]


def taking(made: NodeProto, attribute: str, own: str, kind: int) -> NodeProto:
    """A node that takes one of its attributes from the function around it."""
    made.attribute.append(AttributeProto(name=attribute, ref_attr_name=own, type=kind))
    return made


def vetted(made: ModelProto, folder: Path = Path()) -> None:
    vet_onnx_bytes(made.SerializeToString(), folder)


@pytest.mark.parametrize("order", ["leaf first", "root first", "mixed"])
def test_functions_are_as_deep_as_they_are_in_whatever_order_they_stand(order: str) -> None:
    """Leaf first, each was known when its caller came: 3,000 of them end ONNX Runtime."""
    for depth in (MAX_DEPTH, MAX_DEPTH + 1):
        chain = [function("f0", [node("Neg", ["x"], ["y"])])]
        chain += [function(f"f{at}", row([f"f{at - 1}"])) for at in range(1, depth)]
        stand = {"leaf first": chain, "root first": chain[::-1], "mixed": [*chain[::2], *chain[1::2]]}[order]
        made = model(row([f"f{depth - 1}"]), *stand)
        if depth <= MAX_DEPTH:
            vetted(made)
            continue
        with pytest.raises(OnnxFileError, match="too deeply"):
            vetted(made)


VALUES = numpy_helper.from_array(np.ones(500, np.float32))
KINDS = {"value": AttributeProto.TENSOR}


def constant(**value: Any) -> list[NodeProto]:
    """Of a tensor, what is added to the input."""
    return [
        node("Constant", [], ["c"], **value),
        node("ReduceSum", ["c"], ["s"], keepdims=0),
        node("Add", ["x", "s"], ["y"]),
    ]


def sparse() -> dict[str, Any]:
    values, places = numpy_helper.from_array(np.ones(1, np.float32)), numpy_helper.from_array(np.zeros(1, np.int64))
    return {"sparse_value": helper.make_sparse_tensor(values, places, [500])}


TAKING = [*(taking(node("Constant", [], [f"c{at}"]), "value", "v", AttributeProto.TENSOR) for at in range(20)),
          node("Sum", ["x", *(f"c{at}" for at in range(20))], ["y"])]  # fmt: skip
READING = [node("Sum", ["x"] * 50, ["y"])]
LONG = "long" * 100
GROWING: dict[str, ModelProto] = {
    "a tensor": model(row(["f1"] * 3), function("f0", constant(value=VALUES)), function("f1", row(["f0"] * 9))),
    "a sparse tensor": model(row(["f1"] * 3), function("f0", constant(**sparse())), function("f1", row(["f0"] * 9))),
    "a tensor that a call gives": model(row(["f"], v=VALUES), function("f", TAKING, "v")),
    "a tensor that is a default": model(row(["f"]), function("f", TAKING, v=VALUES)),
    "a tensor that is passed on": model(
        row(["g"], w=VALUES), function("f", TAKING, "v"),
        function("g", [taking(each, "v", "w", AttributeProto.TENSOR) for each in row(["f"] * 3)], "w"),
    ),
    "a default that nothing takes": model(row(["f"] * 9), function("f", [node("Neg", ["x"], ["y"])], v=VALUES)),
    "a name": model([node("Neg", ["x"], [LONG]), call("f", LONG, "y")], function("f", READING)),
    "names of functions in functions": model(
        [node("Neg", ["x"], [LONG]), call("g", LONG, "y")], function("f", READING), function("g", row(["f"] * 9)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", GROWING)
def test_no_file_grows_by_more_bytes_than_are_counted(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A megabyte made a gigabyte, and so on without end: nodes were counted alone."""
    given = GROWING[case]
    vetted(given)
    size = given.ByteSize()
    made = ModelProto.FromString(given.SerializeToString())
    grown = counted(made, values=True).ByteSize() - size
    assert grown > 2 * size or "default" in case
    monkeypatch.setattr(onnx_functions, "MAX_GROWN", max(grown, size) - 1)
    with pytest.raises(OnnxFileError, match="where they are called"):
        vetted(given)


def test_tensors_beside_a_file_count_where_functions_hold_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = TensorProto(data_type=TensorProto.FLOAT, dims=[500], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="w.bin")
    (tmp_path / "w.bin").write_bytes(bytes(2000))
    made = model(row(["f"] * 9), function("f", constant(value=tensor)))
    vetted(made, tmp_path)
    monkeypatch.setattr(onnx_functions, "MAX_GROWN", 12_000)
    with pytest.raises(OnnxFileError, match="where they are called"):
        vetted(made, tmp_path)


def test_a_function_of_any_size_that_is_called_once_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_functions, "MAX_GROWN", 300)
    vetted(model(row(["f"]), function("f", constant(value=VALUES))))


def body(made: NodeProto) -> GraphProto:
    return helper.make_graph([made], "b", [], [helper.make_tensor_value_info(made.output[0], TensorProto.FLOAT, None)])


def choosing(*branches: str, other: str) -> list[NodeProto]:
    """What takes graphs from the function around it."""
    made = node("If", ["c"], ["y"])
    for branch in branches:
        taking(made, branch, "b", AttributeProto.GRAPH)
    if len(branches) < 2:
        made.attribute.append(helper.make_attribute("else_branch", body(node("Neg", ["x"], [other]))))
    return [node("Constant", [], ["c"], value=helper.make_tensor("c", TensorProto.BOOL, [], [True])), made]


BRANCH = body(node("Abs", ["x"], ["t"]))
ONCE, TWICE = choosing("then_branch", other="e"), choosing("then_branch", "else_branch", other="")


def passing(times: int) -> list[NodeProto]:
    return [taking(each, "b", "own", AttributeProto.GRAPH) for each in row(["f"] * times)]


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("case", ["given", "a default", "passed on"])
def test_a_graph_that_a_function_is_given_stands_in_one_place(case: str, twice: bool) -> None:
    """Each of them in another one doubled what they make."""
    nodes = TWICE if twice else ONCE
    made = {
        "given": model(row(["f"], b=BRANCH), function("f", nodes, "b")),
        "a default": model(row(["f"]), function("f", nodes, b=BRANCH)),
        "passed on": model(row(["g"], own=BRANCH), function("f", ONCE, "b"), function("g", passing(1 + twice), "own")),
    }[case]
    if twice:
        with pytest.raises(OnnxFileError, match="more than once"):
            vetted(made)
    else:
        vetted(made)


def test_a_number_may_be_taken_often_beside_a_graph() -> None:
    leaks = [taking(node("LeakyRelu", ["x"], [name]), "alpha", "b", AttributeProto.FLOAT) for name in "zy"]
    vetted(
        model(
            [call("f", "x", "t", b=BRANCH), call("g", "t", "y", b=0.5)],
            function("f", ONCE, "b"),
            function("g", leaks, "b"),
        )
    )


NEG, ABS = [node("Neg", ["x"], ["y"])], [node("Abs", ["x"], ["y"])]


@pytest.mark.parametrize("first", [True, False])
def test_overloads_are_functions_of_their_own(first: bool) -> None:
    """In whichever order they stand."""
    both = [function("f", NEG, overload="one"), function("f", ABS)]
    nodes = [call("f", "x", "t", "one"), call("f", "t", "y")]
    vetted(model(nodes, *both[:: 1 if first else -1]))
    with pytest.raises(ForeignOperatorError, match=r"'f' \(overload 'two'\)"):
        vetted(model([call("f", "x", "y", "two")], *both))


@pytest.mark.parametrize("overload", [None, "", "one"])
def test_two_functions_of_one_name_and_overload_are_refused(overload: str | None) -> None:
    again = function("f", ABS, overload=overload or "")
    if overload is None:
        again.ClearField("overload")
    with pytest.raises(OnnxFileError, match="two functions named 'f'"):
        vetted(model(row(["f"]), function("f", NEG, overload=overload or ""), again))


def test_each_overload_makes_its_own_nodes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """They were summed for each call: 2,000 of them were four millions."""
    monkeypatch.setattr(onnx_functions, "MAX_INLINED", 100)
    tensors = ["x", *(f"t{at}" for at in range(1, 40)), "y"]
    nodes = [call("f", tensors[at], tensors[at + 1], f"v{at}") for at in range(40)]
    vetted(model(nodes, *(function("f", NEG, overload=f"v{at}") for at in range(40))))


def test_as_many_functions_pass_as_onnx_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_calls, "MAX_FUNCTIONS", 3)
    given = [function(f"f{at}", NEG) for at in range(4)]
    vetted(model(row(["f0"]), *given[:3]))
    with pytest.raises(OnnxFileError, match="more than 3 functions"):
        vetted(model(row(["f0"]), *given))


GELU = [node("QuickGelu", ["x"], ["y"], domain="com.microsoft")]


def test_a_domain_that_the_caller_does_not_import_is_refused() -> None:
    """As ONNX Runtime does; of those that it knows itself, a graph need not import one."""
    lacking, having = function("f", GELU), function("f", GELU)
    having.opset_import.add(domain="com.microsoft", version=1)
    vetted(model(row(["f"]), having))
    vetted(model(GELU))
    with pytest.raises(OnnxFileError, match=r"function 'f' calls 'QuickGelu' of 'com.microsoft', which it imports no"):
        vetted(model(row(["f"]), lacking))
    vet_onnx_bytes(model(row(["f"]), lacking).SerializeToString(), Path(), runs=False)
    made = model(row(["f"]), having)
    del made.opset_import[1]
    with pytest.raises(OnnxFileError, match="it calls 'f' of 'my', which it imports no"):
        vetted(made)


def test_what_functions_make_too_much_of_is_refused_in_three_lines(tmp_path: Path) -> None:
    onnx.save(model(row(["f"]), function("f", row(["f"]))), tmp_path / "m.onnx")
    with pytest.raises(StageError) as err:
        read_onnx(tmp_path / "m.onnx")
    assert "calls itself" in err.value.why
    assert "without functions" in err.value.mend
