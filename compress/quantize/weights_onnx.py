"""Weight-only INT8: the file shrinks to a quarter, the arithmetic stays in float."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from compress.formats.onnx.scope import drop_unused, fresh, names_in

__all__ = ["RECURRENT", "both_worth", "channel_axis", "look_up", "quantize_weights", "rounded", "stored_rows"]

LEAST = 1024  # elements; below, scales and nodes outweigh what is saved
RECURRENT = ("LSTM", "GRU", "RNN")
KINDS = ("Conv", "ConvTranspose", "Gather", "Gemm", "MatMul", *RECURRENT)


def channel_axis(node: onnx.NodeProto, dims: int) -> int | None:
    """The axis of output channels in a node's weight (its input 1; for Gather, input 0), or None if it has none."""
    if node.op_type == "Conv":
        return 0
    if node.op_type in RECURRENT:
        return 1  # [directions, gates and hidden units, inputs]
    if node.op_type == "ConvTranspose":
        return 1
    if node.op_type == "Gemm":
        return 0 if any(a.name == "transB" and a.i for a in node.attribute) else 1
    if node.op_type == "MatMul":
        return dims - 1 if dims >= 2 else None
    return None


def quantize_weights(model: onnx.ModelProto, exclude: Collection[str] = (), kinds: Collection[str] = KINDS) -> int:
    """Turn large weights into signed 8-bit ones in place, symmetric, with a scale for each output channel.

    A matrix or a kernel is restored by DequantizeLinear right before its layer; of an embedding, only the rows that
    are looked up.

    Args:
        model: float32, its nodes named.
        exclude: names of nodes whose weights stay.
        kinds: of nodes whose weights are taken.

    Returns:
        How many weights became 8-bit.
    """
    graph = model.graph
    # An input's default may be replaced by the caller: it is no weight.
    weights = {t.name: t for t in graph.initializer if t.name not in {value.name for value in graph.input}}
    taken = names_in(graph)
    made: dict[tuple[str, int], str] = {}
    tables: dict[str, tuple[str, str]] = {}
    nodes: list[onnx.NodeProto] = []
    done: set[str] = set()
    for node in graph.node:
        rows: list[onnx.NodeProto] = []
        wanted = node.op_type in kinds and node.name not in exclude
        if node.op_type in RECURRENT:
            wanted = wanted and both_worth(node, weights)
        for at in _weight_inputs(node) if wanted else ():
            tensor = weights.get(node.input[at]) if len(node.input) > at else None
            if tensor is None or not worth(tensor):
                continue
            if node.op_type == "Gather":
                if _axis_of(node) == 0 and len(tensor.dims) == 2:
                    if tensor.name not in tables:
                        tables[tensor.name] = stored_rows(graph, tensor, taken)
                    rows = look_up(graph, node, *tables[tensor.name])
                    done.add(tensor.name)
                continue
            axis = channel_axis(node, len(tensor.dims))
            if axis is not None:
                if (tensor.name, axis) not in made:
                    made[tensor.name, axis] = _store(graph, tensor, axis, taken)
                    nodes.append(_restore(made[tensor.name, axis], axis))
                done.add(tensor.name)
                node.input[at] = made[tensor.name, axis]
        nodes += rows or [node]
    del graph.node[:]
    graph.node.extend(nodes)
    drop_unused(graph)
    return len(done)


def both_worth(node: onnx.NodeProto, weights: Mapping[str, onnx.TensorProto]) -> bool:
    """Whether both matrices of a recurrent layer are in the file and large enough."""
    return all(name in weights and worth(weights[name]) for name in node.input[1:3])


def _weight_inputs(node: onnx.NodeProto) -> tuple[int, ...]:
    if node.op_type in RECURRENT:
        return (1, 2)
    return (0,) if node.op_type == "Gather" else (1,)


def _restore(restored: str, axis: int) -> onnx.NodeProto:
    given = [f"{restored}_int8", f"{restored}_scale"]
    return helper.make_node("DequantizeLinear", given, [restored], name=f"{restored}_restore", axis=axis)


def worth(tensor: onnx.TensorProto) -> bool:
    """Whether a weight is float32, finite, and large enough for 8 bits to pay."""
    if tensor.data_type != onnx.TensorProto.FLOAT or int(np.prod(tensor.dims)) < LEAST:
        return False
    return bool(np.isfinite(numpy_helper.to_array(tensor)).all())


def _axis_of(node: onnx.NodeProto) -> int:
    return next((int(a.i) for a in node.attribute if a.name == "axis"), 0)


def rounded(values: np.ndarray[Any, Any], axis: int | None) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """8-bit values and the scale [channels] of each channel along the axis; without an axis one scale [] for all."""
    others = tuple(index for index in range(values.ndim) if index != axis)
    scale = np.maximum(np.abs(values).max(axis=others, keepdims=True) / 127, np.float32(1e-12)).astype(np.float32)
    return np.clip(np.rint(values / scale), -127, 127).astype(np.int8), scale.reshape(() if axis is None else -1)


def _store(graph: onnx.GraphProto, tensor: onnx.TensorProto, axis: int, taken: set[str]) -> str:
    """Add 8-bit values and scales as initializers; gives the name for what they restore to."""
    restored = fresh(f"{tensor.name}_axis{axis}", taken)
    values, scale = rounded(numpy_helper.to_array(tensor), axis)
    graph.initializer.append(numpy_helper.from_array(values, f"{restored}_int8"))
    graph.initializer.append(numpy_helper.from_array(scale, f"{restored}_scale"))
    taken |= {restored, f"{restored}_int8", f"{restored}_scale"}
    return restored


def stored_rows(graph: onnx.GraphProto, tensor: onnx.TensorProto, taken: set[str]) -> tuple[str, str]:
    """Add a table's 8-bit rows and their scales [rows, 1] as initializers; their names."""
    names = fresh(f"{tensor.name}_rows_int8", taken), fresh(f"{tensor.name}_rows_scale", taken)
    values, scale = rounded(numpy_helper.to_array(tensor), 0)
    graph.initializer.append(numpy_helper.from_array(values, names[0]))
    graph.initializer.append(numpy_helper.from_array(scale.reshape(-1, 1), names[1]))
    taken |= set(names)
    return names


def look_up(graph: onnx.GraphProto, node: onnx.NodeProto, values: str, scales: str) -> list[onnx.NodeProto]:
    """A Gather of 8-bit rows [rows, size] and their scales [rows, 1], multiplied, in place of one of float rows."""
    taken = names_in(graph)
    output, base = node.output[0], node.name or node.output[0]
    rows, scale, wide = (fresh(f"{output}_{part}", taken) for part in ("int8", "scale", "float"))
    return [
        helper.make_node("Gather", [values, node.input[1]], [rows], name=f"{base}_rows", axis=0),
        helper.make_node("Gather", [scales, node.input[1]], [scale], name=f"{base}_scales", axis=0),
        helper.make_node("Cast", [rows], [wide], name=f"{base}_cast", to=onnx.TensorProto.FLOAT),
        helper.make_node("Mul", [wide, scale], [output], name=base),
    ]
