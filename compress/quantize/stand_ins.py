"""Large weights that ONNX Runtime's dynamic quantizer never sees: it holds several copies of a whole model.

A row of zeros, or a column, stands for each, as only the number of output channels goes into the graph. What the
quantizer would have made of the weight is made here, of one at a time, bit by bit as it does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper
from onnxruntime.quantization.quant_utils import compute_data_quant_params, quantize_nparray

from compress.formats.onnx.outline import LARGE, bytes_of
from compress.formats.onnx.scope import inner_names
from compress.onnx_export.file import without

__all__ = ["StandIns"]

TINY = np.finfo(np.float32).tiny
ROWS = 4096  # of a table that are rounded at a time

Array = np.ndarray[Any, Any]


class StandIns:
    """The large weights of a model that layers or lookups alone read, from the quantizer's view.

    Attributes:
        shown: a copy of the model without their values, for the quantizer.
    """

    def __init__(self, model: ModelProto, left: Collection[str]) -> None:
        """Of a float32 model, which is left as it is; `left` are the names of nodes that stay in float."""
        self._weights = {tensor.name: tensor for tensor in model.graph.initializer}
        self._nodes = dict(_readers(model.graph, left, self._weights))
        self.shown = without(model, "graph")
        self.shown.graph.CopyFrom(without(model.graph, "initializer"))
        for tensor in model.graph.initializer:
            reader = self._nodes.get(tensor.name)
            self.shown.graph.initializer.append(tensor if reader is None else _stand_in(tensor, reader))

    def put_back(self, quantized: ModelProto, names: Mapping[str, str], *, reduce_range: bool) -> None:
        """Give the quantized model its weights, in place.

        Args:
            quantized: what the quantizer made of `shown`.
            names: what each tensor was called for it.
            reduce_range: 7-bit weights, as it was told.
        """
        there = {tensor.name: tensor for tensor in quantized.graph.initializer}
        for name, node in self._nodes.items():
            alias, weight = names[name], self._weights[name]
            if alias in there:  # it was left in float
                there[alias].CopyFrom(weight)
                there[alias].name = alias
            if f"{alias}_quantized" not in there:
                continue
            values = numpy_helper.to_array(weight)
            made = _table(values) if node.op_type == "Gather" else _layer(_as_multiplied(node, values), reduce_range)
            for suffix, array in zip(("quantized", "scale", "zero_point"), made, strict=True):
                tensor = there[f"{alias}_{suffix}"]
                if suffix == "quantized":
                    tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
                else:
                    tensor.CopyFrom(helper.make_tensor(tensor.name, tensor.data_type, array.shape, array.ravel()))


def _readers(
    graph: GraphProto, left: Collection[str], weights: Mapping[str, TensorProto]
) -> Iterator[tuple[str, NodeProto]]:
    """Each weight that can have a stand-in, with a node that reads it."""
    users: dict[str, list[tuple[NodeProto, int]]] = defaultdict(list)
    for node in graph.node:
        for at, name in enumerate(node.input):
            users[name].append((node, at))
    fixed = inner_names(graph) | {value.name for value in (*graph.input, *graph.output)}
    for name, tensor in weights.items():
        read = users[name]
        if not read or name in fixed or tensor.data_type != TensorProto.FLOAT or bytes_of(tensor) <= LARGE:
            continue
        if len(tensor.dims) != 2 or not all(_takes(node, at, len(read)) and node.name not in left for node, at in read):
            continue
        if np.isfinite(numpy_helper.to_array(tensor)).all():
            yield name, read[0][0]


def _takes(node: NodeProto, at: int, users: int) -> bool:
    """Whether the quantizer needs no more of a weight than its other dimension."""
    told = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    if node.op_type == "MatMul":
        return at == 1
    if node.op_type == "Gemm":  # cut into a MatMul and an Add; a weight that is turned for it must be its own
        plain = told.get("alpha", 1.0) == 1 and told.get("beta", 1.0) == 1 and not told.get("transA")
        return at == 1 and users == 1 and plain
    return node.op_type == "Gather" and at == 0 and not told.get("axis") and users == 1


def _stand_in(tensor: TensorProto, reader: NodeProto) -> TensorProto:
    turned = _turned(reader)
    dims = [tensor.dims[0], 1] if turned else [1, tensor.dims[1]]
    return numpy_helper.from_array(np.zeros(dims, np.float32), tensor.name)


def _turned(node: NodeProto) -> bool:
    return node.op_type == "Gemm" and any(a.name == "transB" and a.i for a in node.attribute)


def _as_multiplied(node: NodeProto, values: Array) -> Array:
    return values.T if _turned(node) else values


def _layer(values: Array, reduce_range: bool) -> tuple[Array, Array, Array]:
    """int8 [inputs, outputs], scales [outputs], zero-points [outputs] of float32 [inputs, outputs]: symmetric."""
    most = np.maximum(np.abs(np.minimum(values.min(axis=0), 0)), np.abs(np.maximum(values.max(axis=0), 0)))
    exact = 2 * most.astype(np.float64) / (128 if reduce_range else 254)
    scale = np.where(exact < TINY, 1.0, exact).astype(np.float32)
    whole = np.empty(values.shape, np.int8)
    for begin in range(0, len(values), ROWS):
        part = slice(begin, begin + ROWS)
        whole[part] = np.clip(np.rint(values[part] / scale), -128, 127)
    return whole, scale, np.zeros(scale.shape, np.int8)


def _table(values: Array) -> tuple[Array, Array, Array]:
    """uint8 [rows, size], its scale [] and zero-point [] of float32 [rows, size]: from the least to the most."""
    ends = np.array([values.min(), values.max()], np.float32)
    zero, scale = compute_data_quant_params(ends, TensorProto.UINT8, symmetric=False)
    whole = np.empty(values.shape, np.uint8)
    for begin in range(0, len(values), ROWS):
        part = slice(begin, begin + ROWS)
        whole[part] = quantize_nparray(TensorProto.UINT8, values[part], scale, zero)
    return whole, scale.reshape(()), zero.reshape(())
