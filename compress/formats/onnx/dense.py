"""Sparse tensors of an ONNX graph as dense ones: ONNX Runtime unpacks them, and then can't write them down again."""

from __future__ import annotations

from math import prod

import numpy as np
from onnx import ModelProto, SparseTensorProto, TensorProto, helper, numpy_helper

from compress.formats.onnx.scope import inner_bodies

__all__ = ["written_dense"]


def written_dense(model: ModelProto, *, values: bool = True) -> int:
    """Write each sparse initializer, and what a Constant gives, as a dense tensor, in place; how many there were.

    Args:
        model: vetted, its weights inside, without functions.
        values: whether those are wanted; else the tensors have a type and dimensions alone.
    """
    dense = _dense if values else _described
    count = 0
    for graph in (model.graph, *inner_bodies(model.graph)):
        count += len(graph.sparse_initializer)
        graph.initializer.extend(dense(tensor, tensor.values.name) for tensor in graph.sparse_initializer)
        graph.ClearField("sparse_initializer")
        for node in graph.node:
            for at, attribute in enumerate(node.attribute if node.op_type == "Constant" else ()):
                if attribute.name == "sparse_value":
                    made = helper.make_attribute("value", dense(attribute.sparse_tensor, node.output[0]))
                    node.attribute[at].CopyFrom(made)
                    count += 1
    return count


def _described(tensor: SparseTensorProto, name: str) -> TensorProto:
    return TensorProto(name=name, data_type=tensor.values.data_type, dims=tensor.dims)


def _dense(tensor: SparseTensorProto, name: str) -> TensorProto:
    values, places = numpy_helper.to_array(tensor.values), numpy_helper.to_array(tensor.indices)
    made = np.zeros(prod(tensor.dims), values.dtype)
    if places.ndim == 2:  # a place for each dimension, else one among all elements
        places = np.ravel_multi_index(tuple(places.T), tuple(tensor.dims)) if len(tensor.dims) else places[:, 0]
    made[places] = values
    return numpy_helper.from_array(made.reshape(tuple(tensor.dims)), name)
