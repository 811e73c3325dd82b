"""Which tensors of an exported graph are rounded to 8 bits, how, and for whom: read off the quantizer's file.

Nothing here knows the quantizer's rules, so that what is trained can't differ from what is exported by a rule that was
written twice.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, numpy_helper

__all__ = ["ActivationPlan", "FloatGraph", "Scheme", "WeightPlan"]

Array = np.ndarray[Any, Any]
MOVED = "_QuantizeLinear_Input"  # ONNX Runtime's quantizer names so what an output of the graph is rounded from


@dataclass(frozen=True)
class ActivationPlan:
    """An activation that is rounded.

    Attributes:
        name: of the tensor in the float graph.
        scale, zero, low, high: of its levels.
        takers: outputs of the float graph's nodes that take it rounded; None where everything does.
        learnable: whether its range decides its scale.
        most: the highest value that the float graph allows it, where the node that clips it is taken away.
    """

    name: str
    scale: float
    zero: int
    low: int
    high: int
    takers: frozenset[str] | None
    learnable: bool
    most: float


@dataclass(frozen=True)
class WeightPlan:
    """A constant that is rounded.

    Attributes:
        taker: first output of the float graph's node that takes it.
        operator: of that node.
        values: in the float graph.
        axis: of the channels with a scale each, or None.
        low, high: its first and last level.
        symmetric: whether its zero-point is 0.
        given: the layer's input, for a bias of 32 bits, whose scale is that of the input times that of the weight.
    """

    taker: str
    operator: str
    values: Array
    axis: int | None
    low: int
    high: int
    symmetric: bool
    given: str | None = None


class FloatGraph:
    """The float graph, by the names of its tensors."""

    def __init__(self, path: Path) -> None:
        graph = onnx.load(path).graph
        self.inputs = [value.name for value in graph.input]
        self.outputs = [value.name for value in graph.output]
        self.makers = {name: node for node in graph.node for name in node.output}
        self.nodes = {_key(node): node for node in graph.node}
        self.constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
        self.takers: dict[str, list[NodeProto]] = {}
        for node in graph.node:
            for name in node.input:
                self.takers.setdefault(name, []).append(node)

    @property
    def tensors(self) -> set[str]:
        """Names of all that is computed or fed."""
        return {*self.inputs, *self.makers}


@dataclass(frozen=True)
class Scheme:
    """All that is rounded."""

    activations: tuple[ActivationPlan, ...]
    weights: tuple[WeightPlan, ...]

    @classmethod
    def read(cls, floats: FloatGraph, quantized: Path) -> Scheme:
        """Compare the two files of a quantization."""
        graph = onnx.load(quantized).graph
        return cls(tuple(_activations(floats, graph)), tuple(_weights(floats, graph)))


def _key(node: NodeProto) -> str:
    return node.name or str(node.output[0])


def _activations(floats: FloatGraph, graph: onnx.GraphProto) -> Iterator[ActivationPlan]:
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    outputs = {value.name for value in graph.output}
    takers: dict[str, list[NodeProto]] = {}
    for node in graph.node:
        for name in node.input:
            takers.setdefault(name, []).append(node)
    there = {_key(node) for node in graph.node}
    # What is looked up in a rounded table has the table's scale, and is rounded already.
    tables = {node.input[1] for node in graph.node if node.op_type == "DequantizeLinear" and node.input[0] in constants}
    for node in graph.node:
        if node.op_type != "QuantizeLinear" or node.input[0] in constants or node.input[1] in tables:
            continue
        given = node.input[0]
        name = given.removesuffix(MOVED) if given.removesuffix(MOVED) in floats.tensors else given
        scale, zero = constants[node.input[1]], constants[node.input[2]]
        limits = np.iinfo(zero.dtype)
        restored = [out for after in takers.get(node.output[0], ()) for out in after.output]
        inside = {_key(taker) for out in restored for taker in takers.get(out, ())}
        plain = [taker for taker in takers.get(given, ()) if taker is not node] or (given in outputs)
        maker = floats.makers.get(name)
        yield ActivationPlan(
            name,
            float(scale.item()),
            int(zero.item()),
            int(limits.min),
            int(limits.max),
            frozenset(str(floats.nodes[key].output[0]) for key in inside if key in floats.nodes) if plain else None,
            # The quantizer gives a Softmax the range 0 to 1, whatever it was told.
            learnable=maker is None or maker.op_type != "Softmax",
            most=_most(floats, maker) if maker is not None and _key(maker) not in there else math.inf,
        )


def _most(floats: FloatGraph, maker: NodeProto) -> float:
    if maker.op_type != "Clip" or len(maker.input) < 3 or maker.input[2] not in floats.constants:
        return math.inf
    return float(floats.constants[maker.input[2]])


def _weights(floats: FloatGraph, graph: onnx.GraphProto) -> Iterator[WeightPlan]:
    constants = {tensor.name: tensor for tensor in graph.initializer}
    restored = {node.output[0]: node for node in graph.node if node.op_type == "DequantizeLinear"}
    for node in graph.node:
        before = floats.nodes.get(_key(node))
        for at, name in enumerate(node.input):
            maker = restored.get(name)
            stored = None if maker is None else constants.get(maker.input[0])
            if before is None or maker is None or stored is None:
                continue
            values = floats.constants.get(before.input[at]) if len(before.input) > at else None
            if values is None or values.dtype.kind != "f" or values.size < 2:
                continue  # a single number is the end of its own range
            taker = str(before.output[0])
            if stored.data_type == TensorProto.INT32:
                limits = np.iinfo(np.int32)
                yield WeightPlan(
                    taker, before.op_type, values, 0, int(limits.min), int(limits.max), True, str(before.input[0])
                )
                continue
            scale = numpy_helper.to_array(constants[maker.input[1]])
            axis = None if scale.ndim == 0 else next((int(a.i) for a in maker.attribute if a.name == "axis"), 1)
            axis = None if axis is None else axis % values.ndim
            symmetric = stored.data_type == TensorProto.INT8
            low, high = _levels(values, scale, axis, symmetric=symmetric)
            yield WeightPlan(taker, before.op_type, values, axis, low, high, symmetric)


def _levels(values: Array, scale: Array, axis: int | None, *, symmetric: bool) -> tuple[int, int]:
    others = tuple(dim for dim in range(values.ndim) if dim != axis)
    low, high = np.minimum(values.min(others), 0.0), np.maximum(values.max(others), 0.0)
    width = np.maximum(-low, high) if symmetric else high - low
    whole = (width / scale)[width > 0]
    most = int(np.rint(np.max(whole))) if whole.size else 127
    return (-most, most) if symmetric else (0, most)
