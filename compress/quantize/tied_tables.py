"""An embedding whose layer was quantized: the same 8-bit numbers serve both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, numpy_helper

from compress.formats.onnx.scope import drop_dead, fresh
from compress.onnx_export.tied import LEAST, digest
from compress.quantize.weights_onnx import look_up

__all__ = ["Ties", "tables", "tie", "ties"]

LAYERS = ("Gemm", "MatMul")
Array = np.ndarray[Any, Any]
Ties = Mapping[str, TensorProto]
"""Tables by the names of the lookups that read them."""


def tables(model: ModelProto) -> list[NodeProto]:
    """Lookups of the rows of a float matrix that a layer multiplies by, too, as it is or transposed."""
    return [node for node, _ in _ties(model.graph)]


def ties(model: ModelProto) -> Ties:
    """The float tables that a layer multiplies by, too, copied, with their lookups."""
    found = {}
    for node, table in _ties(model.graph):
        found[node.name] = TensorProto()
        found[node.name].CopyFrom(table)
    return found


def _ties(graph: GraphProto) -> Iterator[tuple[NodeProto, TensorProto]]:
    weights = {t.name: t for t in graph.initializer if t.data_type == TensorProto.FLOAT and len(t.dims) == 2}
    layers = {node.input[1] for node in graph.node if node.op_type in LAYERS} & set(weights)
    multiplied = {digest(weights[name]) for name in layers}
    for node in graph.node:
        table = weights.get(node.input[0]) if node.op_type == "Gather" else None
        if table is None or int(np.prod(table.dims)) < LEAST or any(a.name == "axis" and a.i for a in node.attribute):
            continue
        turned = numpy_helper.from_array(np.ascontiguousarray(numpy_helper.to_array(table).T))
        if {digest(table), digest(turned)} & multiplied:
            yield node, table


def tie(model: ModelProto, tied: Ties) -> None:
    """Let each lookup of a tied table read the layer's 8-bit numbers, row by row, in place.

    Args:
        model: quantized from a float32 model; a table whose layer stayed in float stays, too.
        tied: of that, its layers with weights of their own.
    """
    graph = model.graph
    values = {t.name: t for t in graph.initializer}
    nodes = {node.name: node for node in graph.node}
    taken = set(values)
    for lookup, table in tied.items():
        node = nodes.get(lookup)
        stored = None if node is None else _stored(graph, values, numpy_helper.to_array(table))
        if node is None or node.op_type != "Gather" or stored is None:
            continue
        names = fresh(f"{table.name}_tied_int8", taken), fresh(f"{table.name}_tied_scale", taken)
        for name, array in zip(names, stored, strict=True):
            if name not in values:
                graph.initializer.append(numpy_helper.from_array(array, name))
        at = list(graph.node).index(node)
        made = look_up(graph, node, *names)
        rest = list(graph.node)
        del graph.node[:]
        graph.node.extend([*rest[:at], *made, *rest[at + 1 :]])
    drop_dead(graph)


def _stored(graph: GraphProto, values: Mapping[str, TensorProto], table: Array) -> tuple[Array, Array] | None:
    """8-bit rows [rows, size] and their scales [rows, 1] that stand for the table, if the file has them."""
    for node in graph.node:
        triple = _triple(node)
        if triple is None or any(name not in values for name in triple):
            continue
        whole, scale, zero = (numpy_helper.to_array(values[name]) for name in triple)
        if whole.dtype != np.int8 or whole.ndim != 2 or zero.any() or scale.shape != (len(table),):
            continue
        for rows in (whole, whole.T):
            restored = rows.astype(np.float32) * scale[:, None] if rows.shape == table.shape else None
            if restored is not None and (np.abs(restored - table) <= 0.51 * scale[:, None]).all():
                return np.ascontiguousarray(rows), scale.reshape(-1, 1)
    return None


def _triple(node: NodeProto) -> tuple[str, str, str] | None:
    """Names of 8-bit values, scale and zero-point: of a DequantizeLinear, or as a MatMulInteger's are called."""
    if node.op_type == "DequantizeLinear" and len(node.input) == 3:
        return node.input[0], node.input[1], node.input[2]
    if node.op_type == "MatMulInteger" and node.input[1].endswith("_quantized"):
        base = node.input[1].removesuffix("_quantized")
        return node.input[1], f"{base}_scale", f"{base}_zero_point"
    return None
