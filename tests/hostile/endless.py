"""ONNX files whose loops never end, each in another way."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

__all__ = ["ENDLESS", "loop"]

node = helper.make_node


def _tensor(name: str, kind: int = TensorProto.FLOAT, *shape: str | int) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, list(shape))


def _body(nodes: list[NodeProto], going: str, carried: str, *more: str) -> GraphProto:
    """A round: its number, whether to go on, and what is carried go in."""
    given = [
        _tensor("i", TensorProto.INT64),
        _tensor("c", TensorProto.BOOL),
        _tensor("v", TensorProto.FLOAT, "batch", 4),
    ]
    made = [_tensor(name, TensorProto.FLOAT, "batch", 4) for name in (carried, *more)]
    return helper.make_graph(nodes, "body", given, [_tensor(going, TensorProto.BOOL), *made])


_SAME = [node("Identity", ["c"], ["go"]), node("Identity", ["v"], ["w"])]


def loop(body: GraphProto | None = None, trips: int | None = None, more: int = 0) -> ModelProto:
    """y = x + what a loop gives.

    Args:
        body: of the loop; None for one that hands on what it is given.
        trips: at most; None is without a bound.
        more: outputs that collect something of every round.
    """
    outputs = ["z", *(f"all_{at}" for at in range(more))]
    nodes = [
        node("Loop", ["" if trips is None else "n", "yes", "x"], outputs, body=body or _body(_SAME, "go", "w")),
        node("Add", ["x", "z"], ["y"]),
    ]
    weights = [onnx.numpy_helper.from_array(np.array(True), "yes")]
    weights += [] if trips is None else [onnx.numpy_helper.from_array(np.array(trips), "n")]
    x, y = (_tensor(name, TensorProto.FLOAT, "batch", 4) for name in "xy")
    graph = helper.make_graph(nodes, "graph", [x], [y], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def _in_a_branch() -> ModelProto:
    made = loop()
    inner = helper.make_graph([made.graph.node[0]], "branch", [], [_tensor("z", TensorProto.FLOAT, "batch", 4)])
    given = node("If", ["yes"], ["z"], then_branch=inner, else_branch=inner)
    made.graph.node[0].CopyFrom(given)
    return made


def _in_a_function() -> ModelProto:
    made = loop()
    opsets = [helper.make_opsetid("", 20)]
    made.functions.append(helper.make_function("own", "Go", ["yes", "x"], ["z"], [made.graph.node[0]], opsets))
    made.graph.node[0].CopyFrom(node("Go", ["yes", "x"], ["z"], domain="own"))
    made.opset_import.append(helper.make_opsetid("own", 1))
    return made


def _by_reference() -> ModelProto:
    """The loop's body is what the function is called with; its name says that nothing is repeated."""
    made = _in_a_function()
    inner = made.functions[0].node[0].attribute[0]
    call = node("If", ["yes", "x"], ["z"], domain="own", then_branch=inner.g)
    inner.ClearField("g")
    inner.ref_attr_name = "then_branch"
    made.functions[0].name = "If"
    made.functions[0].attribute.append("then_branch")
    made.graph.node[0].CopyFrom(call)
    return made


ENDLESS: dict[str, Callable[[], ModelProto]] = {
    "without_a_trip_count": loop,
    "of_2_to_the_63_rounds": lambda: loop(trips=2**63 - 1),
    "without_nodes": lambda: loop(_body([], "c", "v")),  # ONNX Runtime looks for a stop before each node
    "that_collects": lambda: loop(_body([*_SAME, node("Identity", ["v"], ["k"])], "go", "w", "k"), more=1),
    "in_a_branch": _in_a_branch,
    "in_a_function": _in_a_function,
    "by_reference": _by_reference,
}
