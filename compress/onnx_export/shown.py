"""Rows of attention of which a mask that is known, such as a table of positions, hides none: nothing chooses there."""

from __future__ import annotations

from collections.abc import Sequence

from onnx import GraphProto, TensorProto, numpy_helper

from compress.formats.onnx.domains import STANDARD
from compress.formats.onnx.scope import bodies, drop, drop_unused, rename

__all__ = ["without_choices"]


def without_choices(graph: GraphProto) -> int:
    """Take out, in place, each Where that gives its last input throughout; how many there were.

    Args:
        graph: folded, with shapes; its nodes are in order. Its bodies are not looked into.
    """
    outputs = {value.name for value in graph.output}
    fed = {value.name for value in graph.input}
    tables = {tensor.name: tensor for tensor in graph.initializer if tensor.name not in fed}
    shapes = {
        value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim]  # 0 where it varies
        for value in (*graph.value_info, *graph.input)
        if value.type.tensor_type.HasField("shape")
    }
    same: dict[str, str] = {}
    for node in graph.node:
        if node.op_type != "Where" or node.domain not in STANDARD or node.output[0] in outputs:
            continue
        chooses, other, given = (same.get(name, name) for name in node.input)
        if chooses in tables and other in tables and given in shapes and _fits(tables[other].dims, shapes[given]):
            table = tables[chooses]
            fits = table.data_type == TensorProto.BOOL and _fits(table.dims, shapes[given])
            if fits and not numpy_helper.to_array(table).any():
                same[node.output[0]] = given
    if not same:
        return 0
    kept = [node for node in graph.node if node.output[0] not in same]
    del graph.node[:]
    graph.node.extend(kept)
    for node in graph.node:
        node.input[:] = [same.get(name, name) for name in node.input]
        for body in bodies(node):
            rename(body, same)
    drop(graph.value_info, same)
    drop_unused(graph)
    return len(same)


def _fits(small: Sequence[int], large: Sequence[int]) -> bool:
    """Whether a shape, spread to another, leaves it as it is."""
    return len(small) <= len(large) and all(
        one == 1 or one == other > 0 for one, other in zip(reversed(small), reversed(large), strict=False)
    )
