"""Weights that two layers share are stored once: an embedding and the output head that reads it transposed."""

from __future__ import annotations

import hashlib

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from compress.formats.onnx.scope import captured, drop, drop_unused

__all__ = ["LEAST", "apart", "digest", "share"]

LEAST = 1024  # elements; below, a node for it outweighs what is saved


def share(model: ModelProto, *, integers: bool = True) -> int:
    """Store equal weights once, in place; how many went.

    Of two that are each other's transpose, the one that a Gather reads is stored (its rows lie together), and a
    Transpose gives the other, which ONNX Runtime computes when it loads the file.

    Args:
        model: any.
        integers: whether 8-bit weights may be another's transpose. TensorRT wants those of a DequantizeLinear stored.
    """
    graph = model.graph
    inside = {name for node in graph.node for name in captured(node)}
    outputs = {value.name for value in graph.output}
    fed = {value.name for value in graph.input}  # a caller may give another value
    large = [t for t in graph.initializer if int(np.prod(t.dims)) >= LEAST and t.name not in fed]
    first: dict[str, str] = {}
    same: dict[str, str] = {}
    for tensor in large:
        kept = first.setdefault(digest(tensor), tensor.name)
        if kept != tensor.name and tensor.name not in inside and tensor.name not in outputs:
            same[tensor.name] = kept
    for node in graph.node:
        node.input[:] = [same.get(name, name) for name in node.input]
    gone = len(same)
    left = [t for t in large if t.name not in same and t.name not in outputs]
    if not integers:
        left = [t for t in left if t.data_type not in (TensorProto.INT8, TensorProto.UINT8)]
    gone += _share_transposed(graph, left, first)
    drop_unused(graph)
    return gone


def _share_transposed(graph: GraphProto, tensors: list[TensorProto], first: dict[str, str]) -> int:
    gathered = {node.input[0] for node in graph.node if node.op_type == "Gather"}
    made: list[NodeProto] = []
    dropped: set[str] = set()
    for tensor in sorted(tensors, key=lambda t: t.name in gathered):  # what is gathered is looked at last, and stays
        if len(tensor.dims) != 2 or tensor.name in gathered:
            continue
        other = first.get(digest(numpy_helper.from_array(np.ascontiguousarray(numpy_helper.to_array(tensor).T))))
        if other is None or other in dropped or other == tensor.name:
            continue
        dropped.add(tensor.name)
        made.append(helper.make_node("Transpose", [other], [tensor.name], name=f"{tensor.name}_tied", perm=[1, 0]))
    nodes = list(graph.node)
    del graph.node[:]
    graph.node.extend([*made, *nodes])
    drop(graph.initializer, dropped)
    return len(dropped)


def digest(tensor: TensorProto) -> str:
    """Equal for tensors of the same type, shape and values."""
    values = numpy_helper.to_array(tensor)
    return hashlib.sha256(f"{tensor.data_type} {list(tensor.dims)} ".encode() + values.tobytes()).hexdigest()


def apart(model: ModelProto) -> None:
    """Undo `share` of transposes, in place: each layer reads a weight of its own again, for what rewrites weights."""
    graph = model.graph
    weights = {tensor.name: tensor for tensor in graph.initializer}
    kept: list[NodeProto] = []
    for node in graph.node:
        if node.op_type == "Transpose" and node.input[0] in weights:
            order = next((list(a.ints) for a in node.attribute if a.name == "perm"), None)
            values = numpy_helper.to_array(weights[node.input[0]]).transpose(order)
            graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(values), node.output[0]))
        else:
            kept.append(node)
    del graph.node[:]
    graph.node.extend(kept)
    drop_unused(graph)
