"""Outputs that are chances: what a sigmoid or a softmax gives, as it is or times a constant, such as 100."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import onnx
from onnx import NodeProto, TensorProto, numpy_helper

from compress.formats.onnx.domains import STANDARD

__all__ = ["chances_of"]

BOUNDED = {"Sigmoid", "HardSigmoid", "Softmax"}
# What moves values, takes some of them, or joins some.
MOVING = {
    "Cast", "Concat", "Flatten", "Gather", "Identity", "Reshape", "Slice", "Split", "Squeeze", "Transpose", "Unsqueeze",
}  # fmt: skip
NUMBERS = {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE}
MOST = 2.0**128  # that float32 holds


def chances_of(path: Path) -> dict[str, float]:
    """By output of an ONNX file that is chances, what a chance of 1 is there.

    Args:
        path: a float file, whose nodes are in order.
    """
    graph = onnx.load(path, load_external_data=False).graph
    numbers = {tensor.name: _number(tensor) for tensor in graph.initializer if _is_number(tensor)}
    scales: dict[str, float] = {}
    for node in graph.node:
        if node.domain not in STANDARD:
            continue
        if node.op_type == "Constant":
            given = node.attribute[0]
            if given.name == "value" and _is_number(given.t):
                numbers[node.output[0]] = _number(given.t)
        elif (scale := _scale(node, scales, numbers)) is not None:
            scales |= dict.fromkeys(node.output, scale)
    found = {value.name: scales.get(value.name, 0.0) for value in graph.output}
    return {name: scale for name, scale in found.items() if 0 < scale < MOST}


def _is_number(tensor: TensorProto) -> bool:
    inside = tensor.data_location != TensorProto.EXTERNAL
    return inside and tensor.data_type in NUMBERS and all(dim == 1 for dim in tensor.dims)


def _number(tensor: TensorProto) -> float:
    return float(numpy_helper.to_array(tensor).reshape(()))


def _scale(node: NodeProto, scales: Mapping[str, float], numbers: Mapping[str, float]) -> float | None:
    """What a chance of 1 is behind a node; None where it gives none."""
    if node.op_type in BOUNDED:
        return 1.0
    if node.op_type in MOVING:
        given = {scales.get(each) for each in (node.input if node.op_type == "Concat" else node.input[:1])}
        return given.pop() if len(given) == 1 else None
    if node.op_type not in ("Mul", "Div"):
        return None
    one, other = node.input
    if node.op_type == "Mul" and one in numbers:
        one, other = other, one
    scale, by = scales.get(one), numbers.get(other)
    if scale is None or not by:
        return None
    return scale * by if node.op_type == "Mul" else scale / by
