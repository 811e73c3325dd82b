"""Places in an ONNX graph where a channel can be scaled down by its producer and up by its consumers, for nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from onnx import NodeProto

from compress.quantize.graph import Array, Graph, attribute

__all__ = ["Link", "divide_producer", "find_links", "multiply_consumers"]

# f(s·x) = s·f(x) for s > 0, channel by channel.
HOMOGENEOUS = ("Relu", "LeakyRelu", "PRelu", "Identity", "MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool")


@dataclass
class Link:
    """A producer, what its channels pass through, and the layers that take them.

    Attributes:
        producer: a layer or a LayerNormalization.
        channels: how many it makes.
        consumers: layers; nothing else sees the channels.
        clips: Clip nodes [0, bound] on the way, by the name of their output, with their bound.
        copy: the producer's output goes elsewhere, too: a LayerNormalization of their own is made for the consumers.
    """

    producer: NodeProto
    channels: int
    consumers: list[NodeProto] = field(default_factory=list)
    clips: dict[str, float] = field(default_factory=dict)
    copy: bool = False


def find_links(graph: Graph) -> list[Link]:
    """All links, in the order of the graph; a chain stops at an Add, a Concat, an output and a curved function."""
    found: list[Link] = []
    for node in graph.model.graph.node:
        link: Link | None = None
        if graph.is_layer(node):
            weight = graph.split(node)
            link = Link(node, weight.shape[0] * weight.shape[1])
            start = _start(graph, node)
        elif node.op_type == "LayerNormalization" and all(name in graph.weights for name in node.input[1:3]):
            rank = len(graph.shapes.get(node.output[0], []))
            if attribute(node, "axis", -1) in (-1, rank - 1) and not any(node.output[1:]):
                link, start = Link(node, graph.weights[node.input[1]].size), node.output[0]
        if link is None or start is None:
            continue
        axis = 1 if node.op_type == "Conv" else len(graph.shapes.get(start, [])) - 1
        if axis < 1:
            continue
        if _follow(graph, start, axis, link) and link.consumers:
            found.append(link)
        elif node.op_type == "LayerNormalization":
            takers = [taker for taker in graph.consumers.get(start, []) if _takes(graph, taker, start, axis)]
            if takers:
                found.append(Link(node, link.channels, takers, copy=True))
    return found


def _start(graph: Graph, node: NodeProto) -> str | None:
    """The tensor that a layer gives, its bias included; None where a bias can't be scaled with it."""
    if graph.bias(node) is not None:
        place = graph.bias_of(node)
        assert place is not None  # noqa: S101  there is a bias
        return str(place[0].output[0])
    return str(node.output[0]) if node.op_type == "MatMul" else None


def _takes(graph: Graph, taker: NodeProto, tensor: str, axis: int) -> bool:
    if not graph.is_layer(taker) or list(taker.input).count(tensor) != 1 or taker.input[0] != tensor:
        return False
    return axis == (1 if taker.op_type == "Conv" else len(graph.shapes.get(tensor, [])) - 1)


def _follow(graph: Graph, tensor: str, axis: int, link: Link) -> bool:
    """Whether everything downstream, as far as the next layers, lets the channels be scaled."""
    if tensor in graph.outputs:
        return False
    for taker in graph.consumers.get(tensor, []):
        if _takes(graph, taker, tensor, axis):
            link.consumers.append(taker)
            continue
        if taker.input[0] != tensor or list(taker.input).count(tensor) != 1:
            return False
        bound = _bound(graph, taker)
        if bound is not None:
            link.clips[taker.output[0]] = bound
        elif not _keeps_channels(graph, taker, axis):
            return False
        if not _follow(graph, taker.output[0], axis, link):
            return False
    return True


def _bound(graph: Graph, node: NodeProto) -> float | None:
    """The upper bound of a Clip from 0, as in ReLU6."""
    if node.op_type != "Clip" or len(node.input) != 3:
        return None
    low, high = (graph.weights.get(name) for name in node.input[1:3])
    return float(high) if low is not None and high is not None and float(low) == 0 and float(high) > 0 else None


def _keeps_channels(graph: Graph, node: NodeProto, axis: int) -> bool:
    if node.op_type in HOMOGENEOUS:
        return len([name for name in node.output if name]) == 1
    before, after = graph.shapes.get(node.input[0], []), graph.shapes.get(node.output[0], [])
    if node.op_type == "ReduceMean":
        axes = graph.weights.get(node.input[1]) if len(node.input) > 1 else attribute(node, "axes", None)
        if axes is None or not before:
            return False
        return all(int(a) % len(before) > axis for a in np.ravel(axes))
    if node.op_type in ("Flatten", "Reshape", "Squeeze"):
        return axis == 1 and len(after) == 2 and after[1] == before[1] > 0 and all(dim == 1 for dim in before[2:])
    return False


def divide_producer(graph: Graph, link: Link, scale: Array) -> None:
    """Make the producer's channels smaller by a scale [channels]."""
    node = link.producer
    if node.op_type == "LayerNormalization":
        target = _copied(graph, link) if link.copy else node
        for index in range(1, len(target.input)):
            graph.set(target, index, graph.weights[target.input[index]] / scale)
        return
    weight = graph.split(node)
    bias = graph.bias(node)
    graph.join(node, weight / scale.reshape(*weight.shape[:2], 1, 1))
    if bias is not None and bias.any():
        graph.set_bias(node, bias / scale)


def multiply_consumers(graph: Graph, link: Link, scale: Array) -> None:
    """Make the consumers' weights larger by the scale [channels] of their inputs."""
    for node in link.consumers:
        weight = graph.split(node)
        graph.join(node, weight * scale.reshape(weight.shape[0], 1, weight.shape[2], 1))


def _copied(graph: Graph, link: Link) -> NodeProto:
    """A LayerNormalization beside the producer, that the consumers alone take from."""
    node, old = NodeProto(), link.producer.output[0]
    node.CopyFrom(link.producer)
    node.name, new = f"{link.producer.name or old}_scaled", f"{old}_scaled"
    node.output[0] = new
    nodes = graph.model.graph.node
    nodes.insert(next(index for index, other in enumerate(nodes) if old in other.output) + 1, node)
    node = next(other for other in nodes if new in other.output)
    for name in node.input:
        graph.consumers[name].append(node)
    for taker in link.consumers:
        taker.input[0] = new
    graph.consumers[new] = list(link.consumers)
    info = next((value for value in graph.model.graph.value_info if value.name == old), None)
    if info is not None:
        made = graph.model.graph.value_info.add()
        made.CopyFrom(info)
        made.name = new
    return node
