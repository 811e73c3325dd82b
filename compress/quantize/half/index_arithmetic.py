"""Float nodes that reckon with positions, counts and sizes: whole numbers, which fewer bits would round.

FP16 holds whole numbers up to 2,048, BF16 up to 256: position 257 would become 256. 8 bits of a range of 5,000 are
steps of 20.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, numpy_helper

__all__ = ["IndexArithmetic", "index_arithmetic", "kept_from_int8"]

# 8-bit numbers and bool are exact in every type: they are pixels, masks or weights.
INTEGERS = (
    TensorProto.INT16, TensorProto.UINT16, TensorProto.INT32, TensorProto.UINT32, TensorProto.INT64, TensorProto.UINT64,
)  # fmt: skip
ONE_BY_ONE = (
    "Abs", "Add", "Ceil", "Clip", "Div", "Exp", "Floor", "Log", "Max", "Min", "Mod", "Mul", "Neg", "Pow", "Reciprocal",
    "Relu", "Round", "Sign", "Sqrt", "Sub", "Sum", "Where",
)  # fmt: skip
PERIODIC = ("Cos", "Sin", "Sigmoid", "Tanh")  # what they give is small
MOVING = (
    "Cast", "Concat", "Expand", "Flatten", "Gather", "Identity", "Pad", "Reshape", "Slice", "Split", "Squeeze", "Tile",
    "Transpose", "Unsqueeze",
)  # fmt: skip
COUNTING = ("CumSum", "Range", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceSum")
PRODUCTS = ("Einsum", "Gemm", "MatMul")
PHASES = ("Cos", "Sin")  # of a large argument they give what its last digits say
COMPARING = ("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual")
LOGICAL = ("And", "Not", "Or", "Xor")
KINDS = (*ONE_BY_ONE, *PERIODIC, *MOVING, *COUNTING, *COMPARING)
LARGE = 1e4
INT8_WHOLE = 256  # levels of 8 bits


@dataclass(frozen=True)
class IndexArithmetic:
    """What was found.

    Attributes:
        nodes: names of nodes that reckon with positions.
        large: names of tensors that they give and that may be too large for FP16.
    """

    nodes: set[str] = field(default_factory=set)
    large: set[str] = field(default_factory=set)


def index_arithmetic(model: onnx.ModelProto, largest_whole: int) -> IndexArithmetic:
    """Find the nodes between a source of whole numbers and the first that mixes them with data.

    Sources: a Cast from integers of 16 bits and more, a Range, and stored whole numbers or halves (a folded arange, a
    grid of anchors) beyond what the type holds exactly. On the way: arithmetic one by one, moves, sums, comparisons,
    products of one column with one row, and products that a sine or cosine is taken of. Also what leads from data to a
    Cast to integers.

    Args:
        model: float32; node names are unique.
        largest_whole: up to which the type holds all whole numbers.
    """
    return _index_arithmetic(model, largest_whole, *_typed(model))


def _index_arithmetic(
    model: onnx.ModelProto, largest_whole: int, kinds: Mapping[str, int], shapes: Mapping[str, list[int]]
) -> IndexArithmetic:
    constants = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer if t.data_type == TensorProto.FLOAT}
    whole = {name for name, stored in constants.items() if _counts(stored, largest_whole)}
    found = IndexArithmetic()
    positions: set[str] = set()
    periodic: set[str] = set()  # those of them that a sine or the like has made small
    turning = _before_phases(model.graph)
    for node in model.graph.node:
        floats = [name for name in node.input if kinds.get(name) == TensorProto.FLOAT]
        taken = [name for name in floats if name not in constants]
        source = _makes_whole(node, kinds) or bool(whole & set(floats) and node.op_type in KINDS)
        angles = node.op_type in PRODUCTS and not periodic & set(taken) and turning.issuperset(node.output)
        kind = node.op_type in KINDS or angles or _outer(node, shapes)
        goes_on = bool(taken) and set(taken) <= positions and kind
        if not source and not goes_on:
            continue
        found.nodes.add(node.name)
        if node.op_type in PERIODIC or periodic & set(taken):
            periodic.update(node.output)
        positions |= {name for name in node.output if kinds.get(name) == TensorProto.FLOAT}
        if node.op_type not in PERIODIC and (
            found.large & set(taken) or any(_reach(constants[name]) > LARGE for name in floats if name in constants)
        ):
            found.large.update(node.output)
    found.nodes.update(_before_integers(model.graph, kinds))
    return found


def kept_from_int8(model: onnx.ModelProto) -> set[str]:
    """Names of the nodes that 8 bits must not round.

    They are what reckons with positions, a sine's or cosine's argument, and what is compared where the answer decides:
    an argument's range, or a bound's, says nothing of how exact it has to be. What no layer has rounded needs no such
    rule (see `unrounded`): this is for the arithmetic behind layers.

    Args:
        model: float32; node names are unique.
    """
    turning = _before_phases(model.graph)
    arguments = {
        node.name for node in model.graph.node if node.op_type in ONE_BY_ONE and turning.intersection(node.output)
    }
    kinds, shapes = _typed(model)
    compared = _back(_decisive(model.graph, kinds), model.graph, kinds)
    return _index_arithmetic(model, INT8_WHOLE, kinds, shapes).nodes | arguments | compared


def _typed(model: onnx.ModelProto) -> tuple[dict[str, int], dict[str, list[int]]]:
    """By tensor its type, and its sizes as far as they are known, else 0."""
    inferred = _inferred(model)
    values = (*inferred.value_info, *inferred.input, *inferred.output)
    kinds = {value.name: value.type.tensor_type.elem_type for value in values}
    shapes = {value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in values}
    kinds |= {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    shapes |= {tensor.name: list(tensor.dims) for tensor in model.graph.initializer}
    return kinds, shapes


def _inferred(model: onnx.ModelProto) -> onnx.GraphProto:
    """The graph with its shapes; itself where they are there, as a copy holds all weights again."""
    graph = model.graph
    known = {value.name for value in (*graph.value_info, *graph.output)}
    if all(name in known for node in graph.node for name in node.output if name):
        return graph
    return onnx.shape_inference.infer_shapes(model).graph


def _before_phases(graph: onnx.GraphProto) -> set[str]:
    """Tensors that a sine or cosine is taken of, as they are or after arithmetic one by one."""
    found: set[str] = set()
    for node in reversed(graph.node):
        if node.op_type in PHASES or (node.op_type in (*ONE_BY_ONE, *MOVING) and found.intersection(node.output)):
            found.update(node.input)
    return found


def _makes_whole(node: NodeProto, kinds: Mapping[str, int]) -> bool:
    if not node.output or kinds.get(node.output[0]) != TensorProto.FLOAT:
        return False
    return node.op_type == "Range" or (node.op_type == "Cast" and kinds.get(node.input[0]) in INTEGERS)


def _counts(stored: np.ndarray[Any, Any], largest: int) -> bool:
    """Whether stored numbers are whole, or half, and go beyond what the type holds."""
    if stored.size < 2 or not np.isfinite(stored).all() or not largest < _reach(stored) < 2**24:
        return False
    return bool((np.rint(2 * stored) == 2 * stored).all() and np.unique(stored).size > 2)


def _reach(stored: np.ndarray[Any, Any]) -> float:
    """The largest finite size: an infinity stays one in every type."""
    return float(np.abs(stored[np.isfinite(stored)]).max(initial=0))


def _outer(node: NodeProto, shapes: Mapping[str, list[int]]) -> bool:
    """A product of columns with rows, which adds nothing up: positions times frequencies."""
    left = shapes.get(node.input[0]) or [0] if node.op_type == "MatMul" else [0]
    right = shapes.get(node.input[1], []) if node.op_type == "MatMul" else []
    return bool(left[-1] == 1 or (len(right) >= 2 and right[-2] == 1))


def _before_integers(graph: onnx.GraphProto, kinds: Mapping[str, int]) -> set[str]:
    """What leads to a Cast from float to integers, back to where something else than arithmetic gives it."""
    casts = [
        node
        for node in graph.node
        if node.op_type == "Cast"
        and kinds.get(node.input[0]) == TensorProto.FLOAT
        and kinds[node.output[0]] in INTEGERS
    ]
    return _back(casts, graph, kinds)


def _decisive(graph: onnx.GraphProto, kinds: Mapping[str, int]) -> list[NodeProto]:
    """Comparisons of float numbers whose answer becomes a number (an index, a class, a 0 or 1), is an output, or
    chooses between tensors that are made of other data.

    Where it chooses between two of the same data, as in a leaky ReLU, what is rounded at the bound is small.
    """
    makers = {name: node for node in graph.node for name in node.output}
    stored = {tensor.name for tensor in graph.initializer}
    # Bool tensors that become numbers.
    numbers = {value.name for value in graph.output if kinds.get(value.name) == TensorProto.BOOL}
    chosen: dict[str, list[frozenset[str]]] = {}  # what comes into the branches that a bool tensor chooses between
    found: list[NodeProto] = []
    for node in reversed(graph.node):
        if node.op_type == "Cast":
            becomes = kinds.get(node.input[0]) == TensorProto.BOOL
        elif node.op_type == "Where":  # between whole numbers, or constants: a number made of the answer
            becomes = kinds.get(node.output[0]) in INTEGERS or stored.issuperset(node.input[1:])
            if not becomes:
                chosen.setdefault(node.input[0], []).append(_within_reach(node.input[1:], makers))
        else:
            becomes = node.op_type == "NonZero"
        if becomes:
            numbers.add(node.input[0])
        branches = [each for name in node.output for each in chosen.get(name, ())]
        if not branches and not numbers.intersection(node.output):
            continue
        if node.op_type in (*LOGICAL, *MOVING, "Where"):
            answers = [name for name in node.input if kinds.get(name) == TensorProto.BOOL]
            numbers.update(answers if numbers.intersection(node.output) else ())
            for name in answers:
                chosen.setdefault(name, []).extend(branches)
        elif node.op_type in COMPARING and kinds.get(node.input[0]) == TensorProto.FLOAT:
            compared = _within_reach(node.input, makers) - stored
            if numbers.intersection(node.output) or not all(compared & each for each in branches):
                found.append(node)
    return found


def _within_reach(names: Iterable[str], makers: Mapping[str, NodeProto]) -> frozenset[str]:
    """Tensors, and those that they are made of by arithmetic, back to what layers give."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        maker = makers.get(name)
        if maker is not None and maker.op_type in (*ONE_BY_ONE, *PERIODIC, *MOVING):
            waiting += maker.input
    return frozenset(found)


def _back(ends: list[NodeProto], graph: onnx.GraphProto, kinds: Mapping[str, int]) -> set[str]:
    """Names of nodes and of the arithmetic that leads to them."""
    makers = {name: node for node in graph.node for name in node.output}
    waiting = list(ends)
    found: set[str] = set()
    while waiting:
        node = waiting.pop()
        if node.name in found:
            continue
        found.add(node.name)
        made = [makers[name] for name in node.input if name in makers and kinds.get(name) == TensorProto.FLOAT]
        waiting += [maker for maker in made if maker.op_type in (*ONE_BY_ONE, *MOVING, *COUNTING)]
    return found
