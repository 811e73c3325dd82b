"""Who reads a tensor of an ONNX graph, the bodies of If, Loop and Scan included, which read from around them."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from onnx import GraphProto, ModelProto, NodeProto

from compress.formats.onnx.newest import newest

__all__ = [
    "Taken",
    "bodies",
    "captured",
    "drop",
    "drop_dead",
    "drop_unused",
    "fill_gaps",
    "fresh",
    "in_order",
    "inner_bodies",
    "inner_names",
    "inner_nodes",
    "made_by",
    "name_nodes",
    "names_in",
    "opset_of",
    "read",
    "rename",
    "sort",
]

_MOVES = ("Identity", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Slice")


class Taken(set[str]):
    """Names that are taken, of which `fresh` does not count the same ones again and again.

    Attributes:
        next: by name, the first number that may be free.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        super().__init__(names)
        self.next: dict[str, int] = {}


def bodies(node: NodeProto) -> list[GraphProto]:
    """The graphs that a node holds: branches of an If, the body of a Loop or a Scan."""
    found = [attribute.g for attribute in node.attribute if attribute.HasField("g")]
    return found + [graph for attribute in node.attribute for graph in attribute.graphs]


def made_by(kind: str, graph: GraphProto) -> set[str]:
    """Outputs that an operator of that kind makes, or that are moved from what one made."""
    makers = {name: node for node in graph.node for name in node.output}
    found = set()
    for value in graph.output:
        node = makers.get(value.name)
        while node is not None and node.op_type in _MOVES:
            node = makers.get(node.input[0])
        if node is not None and node.op_type == kind:
            found.add(value.name)
    return found


def inner_bodies(graph: GraphProto) -> Iterator[GraphProto]:
    """All bodies in a graph, at any depth."""
    for node in graph.node:
        for body in bodies(node):
            yield body
            yield from inner_bodies(body)


def inner_nodes(graph: GraphProto) -> Iterator[NodeProto]:
    """All nodes of the bodies in a graph, at any depth; not its own."""
    for body in inner_bodies(graph):
        yield from body.node


def captured(node: NodeProto) -> set[str]:
    """What the bodies of a node read from around it.

    A body reads by name: such a tensor must keep its name, its type and its place before the node.
    """
    found: set[str] = set()
    for body in bodies(node):
        inside = {value.name for value in body.input} | {tensor.name for tensor in body.initializer}
        inside |= {tensor.values.name for tensor in body.sparse_initializer}
        inside |= {name for inner in body.node for name in inner.output}
        wanted = {name for inner in body.node for name in (*inner.input, *captured(inner))}
        found |= (wanted | {value.name for value in body.output}) - inside
    return found - {""}


def read(graph: GraphProto) -> set[str]:
    """Names of everything that is read: by nodes, by their bodies, and as outputs of the graph."""
    names = {name for node in graph.node for name in (*node.input, *captured(node))}
    return (names | {value.name for value in graph.output}) - {""}


def drop_unused(graph: GraphProto) -> None:
    """Drop, in place, initializers that nothing reads, and inputs that were there for their sake (IR 3)."""
    dropped = {tensor.name for tensor in graph.initializer} - read(graph)
    drop(graph.initializer, dropped)
    drop(graph.input, dropped)


def drop(items: Any, names: Collection[str]) -> None:
    """Take what is called so out of a repeated field of messages, in place; the others are not copied."""
    for at in reversed(range(len(items))):
        if items[at].name in names:
            del items[at]


def drop_dead(graph: GraphProto) -> None:
    """Drop, in place, nodes and initializers that no output comes from."""
    makers = {name: node for node in graph.node for name in node.output if name}
    waiting = [value.name for value in graph.output]
    wanted: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name not in wanted:
            wanted.add(name)
            maker = makers.get(name)
            waiting += [] if maker is None else [*maker.input, *captured(maker)]
    kept = [node for node in graph.node if wanted & set(node.output)]
    del graph.node[:]
    graph.node.extend(kept)
    drop_unused(graph)


def in_order(graph: GraphProto) -> list[NodeProto]:
    """The nodes, each behind those that it and its bodies read from; else in the order that they have.

    Raises:
        ValueError: they go in a circle, or two of them make one tensor.
    """
    maker: dict[str, int] = {}
    for at, node in enumerate(graph.node):
        for name in filter(None, node.output):
            if name in maker:
                raise ValueError(f"two of its nodes make {name!r}")
            maker[name] = at
    before = [{maker[name] for name in {*node.input, *captured(node)} if name in maker} for node in graph.node]
    after: dict[int, list[int]] = {}
    for at, needed in enumerate(before):
        for other in needed:
            after.setdefault(other, []).append(at)
    left = [len(needed) for needed in before]
    ready = [at for at, count in enumerate(left) if not count]  # a heap, as it is sorted
    order: list[NodeProto] = []
    while ready:
        at = heapq.heappop(ready)
        order.append(graph.node[at])
        for other in after.get(at, ()):
            left[other] -= 1
            if not left[other]:
                heapq.heappush(ready, other)
    if len(order) < len(graph.node):
        stuck = next(node for node, count in zip(graph.node, left, strict=True) if count)
        raise ValueError(f"its nodes take from each other in a circle, at {stuck.name or stuck.op_type}")
    return order


def sort(graph: GraphProto) -> None:
    """Put nodes in order, in place.

    Raises:
        ValueError: as for `in_order`.
    """
    ordered = in_order(graph)
    del graph.node[:]
    graph.node.extend(ordered)


def name_nodes(model: ModelProto) -> None:
    """Give each node of the graph a name of its own, in place; one that has such a name keeps it.

    What stays in float is told by name: two nodes of one name would go together.
    """
    taken = Taken()
    for node in model.graph.node:
        if not node.name or node.name in taken:
            node.name = fresh(node.name or f"{node.op_type}_{next(iter(filter(None, node.output)), '')}", taken)
        taken.add(node.name)


def fill_gaps(graph: GraphProto) -> None:
    """Name outputs that are left out before one that is not, and take left-out inputs and outputs off the end, in
    place, in bodies, too.

    What reads a node by places, ONNX Runtime's quantizer first, takes an empty name for a tensor.
    """
    taken = names_in(graph)
    for node in (*graph.node, *inner_nodes(graph)):
        for names in (node.input, node.output):
            while names and not names[-1]:
                del names[-1]
        for at, name in enumerate(node.output):
            if not name:
                node.output[at] = fresh(f"{node.name or node.op_type}_output{at}", taken)
                taken.add(node.output[at])


def names_in(graph: GraphProto) -> Taken:
    """All names of tensors, those in bodies included."""
    nodes = [*graph.node, *inner_nodes(graph)]
    found = {name for node in nodes for name in (*node.input, *node.output)}
    values = (*graph.input, *graph.output, *graph.initializer, *graph.value_info)  # types may outlive their tensors
    return Taken((found | {value.name for value in values}) - {""})


def inner_names(graph: GraphProto) -> set[str]:
    """Names of what bodies make for themselves."""
    inner = list(inner_bodies(graph))
    made = {name for body in inner for node in body.node for name in node.output}
    return (made | {value.name for body in inner for value in (*body.input, *body.initializer)}) - {""}


def rename(graph: GraphProto, names: Mapping[str, str]) -> None:
    """Give tensors other names, in place, in bodies, too; a name that the mapping lacks stays."""
    for value in (*graph.input, *graph.output, *graph.value_info, *graph.initializer):
        value.name = names.get(value.name, value.name)
    for node in graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
        for body in bodies(node):
            rename(body, names)


def fresh(name: str, taken: Collection[str]) -> str:
    """The name, or the first of name_2, name_3… that is not taken."""
    counted = taken.next if isinstance(taken, Taken) else {}
    number, made = counted.get(name, 2), name
    while made in taken:
        made, number = f"{name}_{number}", number + 1
    if made != name:
        counted[name] = number - 1  # free as long as nobody takes it
    return made


def opset_of(model: ModelProto) -> int:
    """The version of ONNX's own operators that a model is written in; of one that does not say, that it runs in."""
    told = [entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")]
    return int(max(told) if told else newest("") or 0)
