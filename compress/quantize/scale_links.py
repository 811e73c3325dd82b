"""Places in an ONNX graph where a channel can be scaled down by its producer and up by its consumers, for nothing.

A link's channels lie on one axis from its producer to its consumers: 1 where convolutions are, the last for Gemm,
MatMul and LayerNormalization. What would move them to another (a Transpose, most reshapes) ends it, even where sizes
fit.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
from onnx import NodeProto, helper

from compress.formats.onnx.scope import fresh, names_in
from compress.quantize.graph import Array, Graph, attribute

__all__ = ["Link", "divide_producer", "find_links", "find_scalings", "multiply_consumers"]

# f(s·x) = s·f(x) for s > 0, channel by channel.
HOMOGENEOUS = ("Relu", "LeakyRelu", "PRelu", "Identity")
POOLS = ("MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool")  # so, too, but over every axis from 2


@dataclass
class Link:
    """A producer, what its channels pass through, and the layers that take them.

    Attributes:
        producer: a layer or a LayerNormalization; of a scaling, whatever makes the tensor.
        channels: how many it makes.
        axis: that they are on, the same from the producer to the consumers; from 1.
        consumers: layers; nothing else sees the channels.
        clips: Clip nodes [0, bound] on the way, by the name of their output, with their bound.
        scaling: the producer can't take the scale in, or its output goes elsewhere, too: a Mul is put in front of the
            consumers, one more to compute.
    """

    producer: NodeProto
    channels: int
    axis: int
    consumers: list[NodeProto] = field(default_factory=list)
    clips: dict[str, float] = field(default_factory=dict)
    scaling: bool = False

    @property
    def convolves(self) -> bool:
        """Whether a convolution takes the channels: on axis 1, not on the last."""
        return any(node.op_type == "Conv" for node in self.consumers)


def find_links(graph: Graph) -> list[Link]:
    """All links, in the order of the graph; a chain stops at an Add, a Concat, an output and a curved function."""
    found: list[Link] = []
    for node in graph.model.graph.node:
        start, channels = _made(graph, node)
        axis = 1 if node.op_type == "Conv" else _last(graph, start)
        link = Link(node, channels, axis)
        if start and axis >= 1 and _follow(graph, start, link) and link.consumers:
            found.append(link)
    return found


def find_scalings(graph: Graph, linked: Collection[Link]) -> list[Link]:
    """Tensors inside the graph that a Gemm or MatMul takes and no link evens out: a Mul can.

    Behind a residual, a GELU or a product of attention no layer can take a scale in.
    """
    free = {node.input[0] for link in linked for node in link.consumers}
    found: list[Link] = []
    for node in graph.model.graph.node:
        for name in node.output:
            axis = _last(graph, name)
            takers = [taker for taker in graph.consumers.get(name, []) if _takes(graph, taker, name, axis)]
            if axis < 1 or not takers or name in free or graph.split(takers[0]).shape[2] < 2:
                continue
            if all(taker.op_type != "Conv" for taker in takers):
                found.append(Link(node, graph.split(takers[0]).shape[2], axis, takers, scaling=True))
    return found


def _last(graph: Graph, tensor: str) -> int:
    """The last axis; -1 where the rank is not known."""
    return len(graph.shapes.get(tensor, [])) - 1


def _made(graph: Graph, node: NodeProto) -> tuple[str, int]:
    """The tensor whose channels a node's own parameters scale, and how many they are; "" where there is none."""
    if graph.is_layer(node):
        weight = graph.split(node)
        return _start(graph, node) or "", weight.shape[0] * weight.shape[1]
    if node.op_type != "LayerNormalization" or not all(name in graph.weights for name in node.input[1:3]):
        return "", 0
    parameters = {graph.weights[name].shape for name in node.input[1:3]}
    over_last = attribute(node, "axis", -1) in (-1, _last(graph, node.output[0])) and not any(node.output[1:])
    if not over_last or len(parameters) != 1 or len(shape := parameters.pop()) != 1:
        return "", 0
    return str(node.output[0]), int(shape[0])


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
    return axis == (1 if taker.op_type == "Conv" else _last(graph, tensor))


def _taken(graph: Graph, taker: NodeProto) -> int:
    """How many channels a layer takes."""
    weight = graph.split(taker)
    return int(weight.shape[0] * weight.shape[2])


def _follow(graph: Graph, tensor: str, link: Link) -> bool:
    """Whether everything downstream, as far as the next layers, lets the channels be scaled."""
    if tensor in graph.outputs:
        return False
    for taker in graph.consumers.get(tensor, []):
        if _takes(graph, taker, tensor, link.axis) and _taken(graph, taker) == link.channels:
            link.consumers.append(taker)
            continue
        if taker.input[0] != tensor or list(taker.input).count(tensor) != 1:
            return False
        bound = _bound(graph, taker)
        if bound is not None:
            link.clips[taker.output[0]] = bound
        elif not _keeps_channels(graph, taker, link.axis):
            return False
        if not _follow(graph, taker.output[0], link):
            return False
    return True


def _bound(graph: Graph, node: NodeProto) -> float | None:
    """The upper bound of a Clip from 0, as in ReLU6."""
    if node.op_type != "Clip" or len(node.input) != 3:
        return None
    low, high = (graph.weights.get(name) for name in node.input[1:3])
    return float(high) if low is not None and high is not None and float(low) == 0 and float(high) > 0 else None


def _keeps_channels(graph: Graph, node: NodeProto, axis: int) -> bool:
    """Whether each channel comes out where it went in, and scaled as it was."""
    if node.op_type in HOMOGENEOUS:
        return True
    if node.op_type in POOLS:
        return axis == 1 and len([name for name in node.output if name]) == 1
    before, after = graph.shapes.get(node.input[0], []), graph.shapes.get(node.output[0], [])
    if node.op_type == "ReduceMean":
        axes = graph.weights.get(node.input[1]) if len(node.input) > 1 else attribute(node, "axes", None)
        if axes is None or not np.size(axes) or not before:  # over none, or over all
            return False
        return all(int(a) % len(before) > axis for a in np.ravel(axes))
    if node.op_type in ("Flatten", "Reshape", "Squeeze"):
        return axis == 1 and len(after) == 2 and after[1] == before[1] > 0 and all(dim == 1 for dim in before[2:])
    return False


def divide_producer(graph: Graph, link: Link, scale: Array) -> None:
    """Make the producer's channels smaller by a scale [channels]."""
    node = link.producer
    if link.scaling:
        _scaled(graph, link, 1 / scale)
        return
    if node.op_type == "LayerNormalization":
        for index in range(1, len(node.input)):
            graph.set(node, index, graph.weights[node.input[index]] / scale)
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


def _scaled(graph: Graph, link: Link, factor: Array) -> None:
    """Multiply what the consumers take by a factor [channels]; they alone see it."""
    old = link.consumers[0].input[0]
    taken = names_in(graph.model.graph) | set(graph.weights)
    new, by = fresh(f"{old}_scaled", taken), fresh(f"{old}_factor", taken)
    nodes = graph.model.graph.node
    place = next(index for index, other in enumerate(nodes) if old in other.output) + 1
    nodes.insert(place, helper.make_node("Mul", [old, by], [new], name=new))
    graph.weights[by] = factor.astype(np.float32)
    graph.consumers[by] = [nodes[place]]
    graph.consumers[old] = [*(node for node in graph.consumers[old] if node not in link.consumers), nodes[place]]
    graph.consumers[new] = list(link.consumers)
    for taker in link.consumers:
        taker.input[0] = new
    known = (*graph.model.graph.value_info, *graph.model.graph.output)
    info = next((value for value in known if value.name == old), None)
    if info is not None:
        made = graph.model.graph.value_info.add()
        made.CopyFrom(info)
        made.name = new
