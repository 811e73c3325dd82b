"""What nodes in float take from beside 8-bit layers: the tensor as it was before it was rounded for those.

ONNX Runtime's quantizer gives all takers of a tensor what is restored from 8 bits, those too that it was told to leave
in float.
"""

from __future__ import annotations

from collections.abc import Collection

from onnx import GraphProto, ModelProto, NodeProto

from compress.formats.onnx.scope import drop_dead
from compress.quantize.half.index_arithmetic import MOVING
from compress.quantize.put_back import ROUNDED

__all__ = ["take_unrounded", "ways"]


def ways(graph: GraphProto, kept: Collection[str]) -> set[str]:
    """Names of the nodes that only move values, between a tensor that is exact and a node that stays in float.

    The quantizer would round such a node's result once more.

    Args:
        graph: float; its nodes in order.
        kept: names of nodes that stay in float.
    """
    makers = {name: node for node in graph.node for name in node.output}
    known = {*makers, *(value.name for value in graph.input)}
    exact: dict[str, bool] = {}
    for node in graph.node:
        if node.name in kept:
            is_exact = True
        elif node.op_type in MOVING:
            is_exact = any(exact.get(given, True) for given in node.input if given in known)
        else:
            is_exact = node.op_type not in ROUNDED
        exact |= dict.fromkeys(node.output, is_exact)
    found: set[str] = set()
    waiting = [node for node in graph.node if node.name in kept]
    while waiting:
        for name in waiting.pop().input:
            maker = makers.get(name)
            if maker is None or maker.op_type not in MOVING or not exact[name]:
                continue
            if maker.name not in kept and maker.name not in found:
                found.add(maker.name)
                waiting.append(maker)
    return found


def take_unrounded(before: ModelProto, after: ModelProto, kept: Collection[str]) -> None:
    """Give nodes that stay in float what was rounded for others as it was, in place.

    What an 8-bit layer gives stays as it is: its kernel has nothing else.

    Args:
        before: the float graph.
        after: the quantized one, whose nodes have the names that they have there.
        kept: names of the nodes.
    """
    graph = after.graph
    was = {node.name: node for node in before.graph.node}
    first = {name: node.name for node in before.graph.node for name in node.output}
    makers = {name: node for node in graph.node for name in node.output}

    def raw(name: str) -> str | None:
        """The tensor that is rounded and restored to another."""
        restored = makers.get(name)
        if restored is None or restored.op_type != "DequantizeLinear":
            return None
        rounded = makers.get(restored.input[0])
        return rounded.input[0] if rounded is not None and rounded.op_type == "QuantizeLinear" else None

    def eight(node: NodeProto) -> bool:
        return node.op_type in ROUNDED and node.name not in kept and any(raw(name) for name in node.input)

    changed = False
    for node in graph.node:
        if node.name not in kept or node.name not in was:
            continue
        for at, (given, name) in enumerate(zip(was[node.name].input, node.input, strict=False)):
            tensor = raw(name)
            if tensor is None:
                continue
            maker = makers.get(tensor)
            # Another maker than in the float graph stands for an activation that was drawn into its range.
            if maker is None or (first.get(given) == maker.name and not eight(maker)):
                node.input[at] = tensor
                changed = True
    if changed:
        drop_dead(graph)
