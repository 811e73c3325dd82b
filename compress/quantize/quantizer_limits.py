"""What ONNX Runtime's quantizer, or what it fuses its nodes to, does badly: what stays in float, or has one scale."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, numpy_helper

from compress.formats.onnx.scope import captured

__all__ = ["kept_activations", "no_matrices", "odd", "one_scale", "spread_out"]

NORMS = ("BatchNormalization", "InstanceNormalization", "LayerNormalization")


def odd(model: ModelProto) -> list[str]:
    """Nodes that ONNX Runtime's quantizer does badly.

    It fails on weights without elements, and on a bias that differs from row to row: a Gemm's, or that of a
    normalization over several axes. It gives a Softmax the range from 0 to 1: of 1,000 shares, most would be 0. So
    would they where one stands between 8-bit numbers of any scale, as ONNX Runtime fuses it: what reads a Softmax stays
    in float, too.
    """
    graph = model.graph
    shapes = {tensor.name: tensor.dims for tensor in graph.initializer}
    shares = {node.output[0] for node in graph.node if node.op_type == "Softmax"}
    return [
        node.name
        for node in graph.node
        if node.op_type == "Softmax"
        or shares & set(node.input)
        or any(0 in shapes.get(name, ()) for name in node.input)
        or (node.op_type == "Gemm" and len(shapes.get([*node.input, "", "", ""][2], [0])) != 1)
        or spread_out(node)
        or (node.op_type in NORMS and len(shapes.get(node.input[1], [0])) != 1)
    ]


def no_matrices(graph: onnx.GraphProto) -> list[str]:
    """MatMuls by a weight that is a vector or a stack of matrices, which ONNX Runtime does not run dynamically."""
    dims = {tensor.name: len(tensor.dims) for tensor in graph.initializer}
    return [node.name for node in graph.node if node.op_type == "MatMul" and dims.get(node.input[1], 2) != 2]


def one_scale(node: NodeProto, dims: int) -> bool:
    """Whether a node's weight, its input 1 of so many dimensions, has one scale for all of its output channels.

    A transposed convolution's in groups has no axis of its own for a channel of the output: ONNX Runtime's quantizer
    gives it a scale for each channel of a group, and fails on the bias, which has one for each channel of all groups.
    Of a stack of matrices, ONNX Runtime's QLinearMatMul and MatMulIntegerToFloat take no scale for each channel.
    """
    if node.op_type == "ConvTranspose":
        return any(attribute.name == "group" and attribute.i > 1 for attribute in node.attribute)
    return node.op_type == "MatMul" and dims > 2


def spread_out(node: NodeProto) -> bool:
    """Whether it is a mean of places that are apart, which the QLinearAveragePool that it is fused to can't be."""
    return node.op_type == "AveragePool" and any(attribute.name == "dilations" for attribute in node.attribute)


def kept_activations(model: ModelProto) -> list[str]:
    """Relu and Clip that the quantizer must not draw into the range of what they take.

    It would give their input the range of their output though somebody else reads that input; and a Clip's bounds
    would be lost where 0 is not between them, as an 8-bit range always holds 0.
    """
    graph = model.graph
    values = {t.name: numpy_helper.to_array(t) for t in graph.initializer if int(np.prod(t.dims)) == 1}
    shown = {value.name for value in graph.output} | {name for node in graph.node for name in captured(node)}

    def bounded(node: NodeProto) -> bool:
        bounds = [values.get(name) if name else np.float32(0) for name in [*node.input[1:], "", ""][:2]]
        return all(bound is not None for bound in bounds) and bool(bounds[0] <= 0 <= bounds[1])  # type: ignore[operator]

    return [
        node.name
        for node in graph.node
        if (node.op_type in ("Clip", "Relu") and node.input[0] in shown)
        or (node.op_type == "Clip" and not bounded(node))
    ]
