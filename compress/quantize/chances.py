"""Outputs that are chances: what a sigmoid or a softmax gives, as it is or times a constant, such as 100."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import onnx
from onnx import NodeProto, numpy_helper

__all__ = ["chances_of"]

BOUNDED = {"Sigmoid", "HardSigmoid", "Softmax"}
# What moves values, takes some of them, or joins some.
MOVING = {
    "Cast", "Concat", "Flatten", "Gather", "Identity", "Reshape", "Slice", "Split", "Squeeze", "Transpose", "Unsqueeze",
}  # fmt: skip
MOST = 64  # nodes between


def chances_of(path: Path) -> dict[str, float]:
    """By output of an ONNX file that is chances, what a chance of 1 is there.

    Args:
        path: a float file.
    """
    graph = onnx.load(path, load_external_data=False).graph
    makers = {name: node for node in graph.node for name in node.output}
    numbers = {t.name: float(numpy_helper.to_array(t).reshape(())) for t in graph.initializer if _is_number(t)}
    for node in graph.node:
        if node.op_type == "Constant" and node.attribute[0].name == "value" and _is_number(node.attribute[0].t):
            numbers[node.output[0]] = float(numpy_helper.to_array(node.attribute[0].t).reshape(()))
    found = {value.name: _scale(value.name, makers, numbers, MOST) for value in graph.output}
    return {name: scale for name, scale in found.items() if scale is not None and scale > 0}


def _is_number(tensor: onnx.TensorProto) -> bool:
    return tensor.data_location != onnx.TensorProto.EXTERNAL and all(dim == 1 for dim in tensor.dims)


def _scale(name: str, makers: Mapping[str, NodeProto], numbers: Mapping[str, float], left: int) -> float | None:
    node = makers.get(name)
    if node is None or not left:
        return None
    if node.op_type in BOUNDED:
        return 1.0
    if node.op_type in MOVING:
        given = node.input if node.op_type == "Concat" else node.input[:1]
        scales = {_scale(each, makers, numbers, left - 1) for each in given}
        return scales.pop() if len(scales) == 1 else None
    if node.op_type not in ("Mul", "Div"):
        return None
    one, other = node.input
    if node.op_type == "Mul" and one in numbers:
        one, other = other, one
    by = numbers.get(other)
    scale = _scale(one, makers, numbers, left - 1) if by else None
    if scale is None or by is None:
        return None
    return scale * by if node.op_type == "Mul" else scale / by
