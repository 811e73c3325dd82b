"""A compressed graph with some of its layers as in the original."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, numpy_helper

from compress.jobs.few_bits_back import few_bits_back, has_few_bits
from compress.quantize.put_back import Mixed, UnmatchedError

__all__ = ["in_few_bits", "variants_of"]

OTHER = 0.2  # of their size, that weights in 8 bits are away from the original's: rounding alone is 0.01 to 0.05
LINKS = ("QuantizeLinear", "DequantizeLinear")
Build = Callable[[tuple[str, ...]], ModelProto]


def variants_of(
    before: ModelProto, after: ModelProto, unmatched: dict[str, str]
) -> tuple[dict[str, Build], dict[str, str]]:
    """By layer, what builds the compressed graph with some layers as in the original."""
    kinds = {node.name: node.op_type for node in before.graph.node}
    if has_few_bits(after) and (few := few_bits_back(before, after)):
        return dict(few), kinds
    if any(node.op_type in LINKS for node in after.graph.node):
        if not {node.name for node in after.graph.node} & set(kinds):
            unmatched["layers"] = f"{_why_none(before, after)}: none can be put back"
            return {}, kinds
        signed = {
            t.data_type for t in after.graph.initializer for n in after.graph.node
            if n.op_type == "QuantizeLinear" and len(n.input) > 2 and t.name == n.input[2]
        }  # fmt: skip
        try:
            mixed = Mixed(before, after, rounds_outputs=TensorProto.INT8 not in signed)
        except UnmatchedError as err:
            unmatched["layers"] = f"{err}, as in a smoothed file: none can be put back by itself"
            return {}, kinds
        for name, off in _other_weights(before, after).items():
            unmatched[name] = f"its weights are not the original's in 8 bits (off by {off:.0%}): smoothed, or trained"
        return dict.fromkeys((name for name in mixed.units if name not in unmatched), mixed.model), kinds
    built = _weights_back(before, after, unmatched)
    if not {node.name for node in after.graph.node} & set(kinds):
        unmatched["layers"] = f"{_why_none(before, after)}: none can be put back"
    return built, kinds


def in_few_bits(model: ModelProto) -> bool:
    """Whether some of it is in 8 or 4 bits."""
    return has_few_bits(model) or any(node.op_type in LINKS for node in model.graph.node)


def _why_none(before: ModelProto, after: ModelProto) -> str:
    """Why no layer of the one is a layer of the other."""
    elements = [
        sum(int(np.prod(tensor.dims)) for tensor in model.graph.initializer if len(tensor.dims) > 1)
        for model in (before, after)
    ]
    if elements[1] < elements[0]:
        return "it is pruned: its layers are narrower than the original's, and made anew with names of their own"
    return "no node has the name of one of the original's"


def _other_weights(before: ModelProto, after: ModelProto) -> dict[str, float]:
    """Layers whose restored weights differ from the original's by more than rounding does: by name, by how much."""
    was, now = _weights(before), _weights(after)
    there = {node.name: node for node in after.graph.node}
    restored = {node.output[0]: node for node in after.graph.node if node.op_type == "DequantizeLinear"}
    found: dict[str, float] = {}
    for node in before.graph.node:
        for its, mine in zip(node.input, there[node.name].input if node.name in there else (), strict=False):
            link = restored.get(mine)
            if link is None or its not in was or link.input[0] not in now or was[its].ndim < 2:
                continue
            axis = next((each.i for each in link.attribute if each.name == "axis"), 1)
            values = _dequantized([now[name] for name in link.input if name], axis)
            if values.shape == was[its].shape:
                off = float(np.linalg.norm(values - was[its]) / (np.linalg.norm(was[its]) or 1.0))
                if off > OTHER:
                    found[node.name] = off
    return found


def _weights(model: ModelProto) -> dict[str, np.ndarray[Any, Any]]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


def _dequantized(given: list[np.ndarray[Any, Any]], axis: int) -> np.ndarray[Any, Any]:
    levels, scale, *zero = (each.astype(np.float64) for each in given)
    shape = [-1 if at == axis % levels.ndim else 1 for at in range(levels.ndim)] if scale.size > 1 else [1]
    made: np.ndarray[Any, Any] = (levels - (zero[0].reshape(shape) if zero else 0.0)) * scale.reshape(shape)
    return made


def _weights_back(before: ModelProto, after: ModelProto, unmatched: dict[str, str]) -> dict[str, Build]:
    """For float files: layers whose weights are others now."""
    was, now = _weights(before), _weights(after)
    old = {node.name: node for node in before.graph.node}
    changed: dict[str, dict[str, np.ndarray[Any, Any]]] = {}
    for node in after.graph.node:
        if node.name not in old or old[node.name].op_type != node.op_type:
            continue
        for mine, its in zip(node.input, old[node.name].input, strict=False):
            if mine in now and its in was:
                if now[mine].shape != was[its].shape:
                    unmatched[node.name] = f"its weights are {list(now[mine].shape)}, {list(was[its].shape)} before"
                elif not np.array_equal(now[mine], was[its]):
                    changed.setdefault(node.name, {})[mine] = was[its]

    def build(names: tuple[str, ...]) -> ModelProto:
        made = ModelProto()
        made.CopyFrom(after)
        values = {name: array for layer in names for name, array in changed[layer].items()}
        for tensor in made.graph.initializer:
            if tensor.name in values:
                tensor.CopyFrom(numpy_helper.from_array(values[tensor.name], tensor.name))
        return made

    return dict.fromkeys((name for name in changed if name not in unmatched), build)
