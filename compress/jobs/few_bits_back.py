"""A graph with 4-bit weights, some of its layers as in the original: whole nodes, by name."""

from __future__ import annotations

from collections.abc import Callable

from onnx import ModelProto, NodeProto

from compress.formats.onnx.scope import drop_dead, fresh, names_in, sort
from compress.quantize.precision import FOUR_BIT

__all__ = ["few_bits_back", "has_few_bits"]


def has_few_bits(model: ModelProto) -> bool:
    """Whether layers or tables of it have 4-bit weights."""
    return any(node.op_type in FOUR_BIT for node in model.graph.node)


def few_bits_back(before: ModelProto, after: ModelProto) -> dict[str, Callable[[tuple[str, ...]], ModelProto]]:
    """By layer or table in 4 or 8 bits, what builds the graph with some of them in float.

    Args:
        before: float32.
        after: made of it, with the names of its nodes and tensors.
    """
    old = {node.name: node for node in before.graph.node}
    weights = {tensor.name: tensor for tensor in before.graph.initializer}
    restored = {node.output[0] for node in after.graph.node if node.op_type == "DequantizeLinear"}
    changed = [
        node.name
        for node in after.graph.node
        if node.name in old
        and set(old[node.name].input) & set(weights)
        and (node.op_type in FOUR_BIT or node.op_type != old[node.name].op_type or restored & set(node.input))
    ]

    def build(names: tuple[str, ...]) -> ModelProto:
        made = ModelProto()
        made.CopyFrom(after)
        graph = made.graph
        back = [old[name] for name in names]
        given = {name for node in back for name in node.output}
        rest = [node for node in graph.node if not given & set(node.output) and node.name not in names]
        taken = names_in(graph)
        new: dict[str, str] = {}
        for node in back:
            own = NodeProto()
            own.CopyFrom(node)
            for at, name in enumerate(own.input):
                if name in weights and name not in new:
                    new[name] = fresh(f"{name}_float", taken)
                    taken.add(new[name])
                    tensor = graph.initializer.add()
                    tensor.CopyFrom(weights[name])
                    tensor.name = new[name]
                own.input[at] = new.get(name, name)
            rest.append(own)
        del graph.node[:]
        graph.node.extend(rest)
        drop_dead(graph)
        sort(graph)
        return made

    return dict.fromkeys(changed, build)
