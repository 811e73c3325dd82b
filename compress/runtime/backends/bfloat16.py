"""BF16 where ONNX Runtime has no kernels for it: the same graph in float32, each value rounded to BF16."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

__all__ = ["emulated"]


def emulated(model: onnx.ModelProto) -> onnx.ModelProto:
    """A float32 model that answers as a BF16 one does on hardware that multiplies in BF16 and sums in float32.

    Weights are the BF16 ones, widened; what a BF16 node gives is rounded to BF16 (nearest, ties to even) and widened.
    It proves accuracy, and says nothing of speed.

    Args:
        model: with BF16 nodes inside and no BF16 inputs or outputs; it is left as it is.
    """
    kinds = _kinds(model)
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    graph = copy.graph
    for tensor in graph.initializer:
        _widen(tensor)
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        to_half = node.op_type == "Cast" and _cast_to(node) == TensorProto.BFLOAT16
        for attribute in node.attribute:
            if attribute.name == "value":
                _widen(attribute.t)
        nodes.append(node)
        for index, name in enumerate(node.output):
            if kinds.get(name) != TensorProto.BFLOAT16:
                continue
            rounded, wide = f"{name}_bf16", f"{name}_wide"
            node.output[index] = rounded if to_half else wide
            if not to_half:
                nodes.append(_cast(wide, rounded, TensorProto.BFLOAT16))
            nodes.append(_cast(rounded, name, TensorProto.FLOAT))
    del graph.node[:]
    graph.node.extend(nodes)
    del graph.value_info[:]
    return copy


def _kinds(model: onnx.ModelProto) -> dict[str, int]:
    inferred = onnx.shape_inference.infer_shapes(model).graph
    return {value.name: value.type.tensor_type.elem_type for value in inferred.value_info}


def _cast_to(node: onnx.NodeProto) -> int:
    kind: int = next(attribute.i for attribute in node.attribute if attribute.name == "to")
    return kind


def _cast(given: str, made: str, to: int) -> onnx.NodeProto:
    return helper.make_node("Cast", [given], [made], to=to)  # without a name: none can be there already


def _widen(tensor: onnx.TensorProto) -> None:
    """Turn BF16 weights into the float32 of the same values, in place."""
    if tensor.data_type == TensorProto.BFLOAT16:
        bits = np.frombuffer(tensor.raw_data, "<u2").astype(np.uint32) << 16
        tensor.CopyFrom(numpy_helper.from_array(bits.view(np.float32).reshape(tuple(tensor.dims)), tensor.name))
