"""Layers that stay in float between 8-bit ones are kept from ONNX Runtime, which would round their weights itself.

Its optimizer WeightBiasQuantization (since 1.21) gives each Conv, ConvTranspose and Gemm with float weights that reads
what a DequantizeLinear gives 8-bit weights, with one scale for all channels, and then computes the layer in INT8:
whatever was left in float to keep the accuracy. It can be turned off where a session is made, but not by the file, and
whoever opens that next does not know. So such a layer reads through a Sum of one tensor, which changes nothing, costs
one copy, and is no DequantizeLinear. So does a mean that stays in float as it is fused to one that can't be it.
"""

from __future__ import annotations

from collections.abc import Callable

from onnx import GraphProto, ModelProto, NodeProto, helper

from compress.formats.onnx.scope import fresh, names_in
from compress.quantize.quantizer_limits import spread_out

__all__ = ["shield", "unshield"]

LAYERS = ("Conv", "ConvTranspose", "Gemm")
# What ONNX Runtime moves a DequantizeLinear behind, on its way to the layer.
CARRIERS = (
    "Expand", "Flatten", "Identity", "MaxPool", "Reshape", "Slice", "Squeeze", "Tile", "Transpose", "Unsqueeze",
)  # fmt: skip
SUFFIX = "_in_float"


def shield(model: ModelProto) -> int:
    """Put a Sum of one tensor before each float layer or mean that reads what was restored from 8 bits, in place.

    Returns:
        How many.
    """
    graph = model.graph
    makers = {name: node for node in graph.node for name in node.output}
    taken = names_in(graph)
    made: list[tuple[NodeProto, NodeProto]] = []
    for node in graph.node:
        layer = node.op_type in LAYERS and not _restored(node.input[1], makers.get)
        if (layer or spread_out(node)) and _restored(node.input[0], makers.get):
            name = fresh(f"{node.input[0]}{SUFFIX}", taken)
            taken.add(name)
            made.append((node, helper.make_node("Sum", [node.input[0]], [name], name)))
    if made:
        before = {id(node): through for node, through in made}
        nodes: list[NodeProto] = []
        for node in graph.node:
            if (through := before.get(id(node))) is not None:
                nodes.append(through)
            nodes.append(node)
        for node, through in made:
            node.input[0] = through.output[0]
        _replace(graph, nodes)
    return len(made)


def unshield(model: ModelProto) -> None:
    """Take away what `shield` has put there, in place."""
    graph = model.graph
    through = {
        node.output[0]: node.input[0]
        for node in graph.node
        if node.op_type == "Sum" and len(node.input) == 1 and SUFFIX in node.output[0]
    }
    if not through:
        return
    nodes = [node for node in graph.node if node.output[0] not in through]
    for node in nodes:
        node.input[:] = [through.get(name, name) for name in node.input]
    _replace(graph, nodes)


def _restored(name: str, maker: Callable[[str], NodeProto | None]) -> bool:
    node = maker(name)
    while node is not None and node.op_type in CARRIERS and node.input:
        node = maker(node.input[0])
    return node is not None and node.op_type == "DequantizeLinear"


def _replace(graph: GraphProto, nodes: list[NodeProto]) -> None:
    copies = [NodeProto() for _ in nodes]
    for copy, node in zip(copies, nodes, strict=True):
        copy.CopyFrom(node)
    del graph.node[:]
    graph.node.extend(copies)
