"""Weight-only INT8: the file shrinks to a quarter, the arithmetic stays in float."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

__all__ = ["channel_axis", "quantize_weights", "rounded"]

LEAST = 1024  # elements; below, scales and nodes outweigh what is saved


def channel_axis(node: onnx.NodeProto, dims: int) -> int | None:
    """The axis of output channels in a node's weight (its input 1; for Gather, input 0), or None if it has none."""
    if node.op_type == "Conv":
        return 0
    if node.op_type == "ConvTranspose":
        return 1
    if node.op_type == "Gemm":
        return 0 if any(a.name == "transB" and a.i for a in node.attribute) else 1
    if node.op_type == "MatMul":
        return dims - 1 if dims >= 2 else None
    return None


def quantize_weights(source: Path, target: Path, exclude: Collection[str] = ()) -> int:
    """Write a copy whose large weights are signed 8-bit, symmetric, with a scale for each output channel.

    A matrix or a kernel is restored by DequantizeLinear right before its layer; of an embedding, only the rows that
    are looked up.

    Args:
        source: float32.
        target: is written.
        exclude: names of nodes whose weights stay.

    Returns:
        How many weights became 8-bit.
    """
    model = onnx.load(source)
    graph = model.graph
    weights = {tensor.name: tensor for tensor in graph.initializer}
    made: dict[tuple[str, int], str] = {}
    nodes: list[onnx.NodeProto] = []
    done: set[str] = set()
    for node in graph.node:
        at = 0 if node.op_type == "Gather" else 1
        name = node.input[at] if len(node.input) > at else ""
        tensor = weights.get(name)
        if tensor is not None and node.name not in exclude and _worth(tensor):
            if node.op_type == "Gather" and _axis_of(node) == 0 and len(tensor.dims) == 2:
                nodes += _rows(graph, node, tensor)
                done.add(name)
                continue
            axis = channel_axis(node, len(tensor.dims))
            if axis is not None:
                if (name, axis) not in made:
                    made[name, axis] = _store(graph, tensor, axis)
                    restored = made[name, axis]
                    nodes.append(
                        helper.make_node(
                            "DequantizeLinear", [f"{restored}_int8", f"{restored}_scale"], [restored],
                            name=f"{restored}_restore", axis=axis,
                        )
                    )  # fmt: skip
                node.input[at] = made[name, axis]
                done.add(name)
        nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)
    used = {name for node in graph.node for name in node.input} | {output.name for output in graph.output}
    kept = [tensor for tensor in graph.initializer if tensor.name in used]
    del graph.initializer[:]
    graph.initializer.extend(kept)
    onnx.save(model, target)
    return len(done)


def _worth(tensor: onnx.TensorProto) -> bool:
    return tensor.data_type == onnx.TensorProto.FLOAT and int(np.prod(tensor.dims)) >= LEAST


def _axis_of(node: onnx.NodeProto) -> int:
    return next((int(a.i) for a in node.attribute if a.name == "axis"), 0)


def rounded(values: np.ndarray[Any, Any], axis: int | None) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """8-bit values and the scale [channels] of each channel along the axis; without an axis one scale [] for all."""
    others = tuple(index for index in range(values.ndim) if index != axis)
    scale = np.maximum(np.abs(values).max(axis=others, keepdims=True) / 127, np.float32(1e-12)).astype(np.float32)
    return np.clip(np.rint(values / scale), -127, 127).astype(np.int8), scale.reshape(() if axis is None else -1)


def _store(graph: onnx.GraphProto, tensor: onnx.TensorProto, axis: int) -> str:
    """Add 8-bit values and scales as initializers; gives the name for what they restore to."""
    restored = f"{tensor.name}_axis{axis}"
    values, scale = rounded(numpy_helper.to_array(tensor), axis)
    graph.initializer.append(numpy_helper.from_array(values, f"{restored}_int8"))
    graph.initializer.append(numpy_helper.from_array(scale, f"{restored}_scale"))
    return restored


def _rows(graph: onnx.GraphProto, node: onnx.NodeProto, tensor: onnx.TensorProto) -> list[onnx.NodeProto]:
    """Look up 8-bit rows and their scales, and multiply."""
    stored = f"{tensor.name}_rows"
    if all(existing.name != f"{stored}_int8" for existing in graph.initializer):
        values, scale = rounded(numpy_helper.to_array(tensor), 0)
        graph.initializer.append(numpy_helper.from_array(values, f"{stored}_int8"))
        graph.initializer.append(numpy_helper.from_array(scale.reshape(-1, 1), f"{stored}_scale"))
    output, base = node.output[0], node.name or node.output[0]
    return [
        helper.make_node("Gather", [f"{stored}_int8", node.input[1]], [f"{output}_int8"], name=f"{base}_rows", axis=0),
        helper.make_node(
            "Gather", [f"{stored}_scale", node.input[1]], [f"{output}_scale"], name=f"{base}_scales", axis=0
        ),
        helper.make_node(
            "Cast", [f"{output}_int8"], [f"{output}_float"], name=f"{base}_cast", to=onnx.TensorProto.FLOAT
        ),
        helper.make_node("Mul", [f"{output}_float", f"{output}_scale"], [output], name=base),
    ]
