"""Sizes written into a graph that say how many heads there are, left to be told from what is left of them.

`view(n, t, 12, 32)` becomes `view(n, t, -1, 32)`, and the `reshape(n, t, 384)` behind it `reshape(n, t, -1)`, which
give the same with 12 heads, and run with fewer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from compress.prune.heads.spans import RESHAPES, Block, Span, called
from compress.prune.repair.walk import Walk

__all__ = ["Edit", "edits_of", "free"]

# A node's number, the axis of it along which heads lie, whether another size of it has to be told for that; and of a
# split, into how many parts, of an unflattening, which axis.
Edit = tuple[int, int, int | None, int]


def edits_of(span: Span, blocks: Sequence[Block], walk: Walk, values: Mapping[fx.Node, Any]) -> list[Edit]:
    """What has to change in the span so that blocks can go; what can't be changed is left to the proof to refuse.

    Args:
        span: of the graph.
        blocks: its heads.
        walk: of the graph.
        values: of its sources, and of what it reads from elsewhere, for some inputs.
    """
    leaves = {node: tensor.requires_grad_() for node, tensor in span.drawn(values).items()}
    with torch.enable_grad():
        held = leaves | span.run(walk, values, leaves)
    asked = [held[span.between[-1]][..., block.columns].square().sum() for block in blocks[:2]]
    edits: list[Edit] = []
    for node in span.between:
        kind = called(node)
        if kind not in (*RESHAPES, "expand", "split"):
            continue
        given: torch.Tensor = held[node.all_input_nodes[0]]
        seen: torch.Tensor = given if kind == "split" else held[node]
        axes = _axes(asked, seen)
        if len(axes) != 1:
            continue
        (axis,) = axes
        if kind == "split":
            size = node.args[1] if len(node.args) > 1 else None
            at = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", 0)
            if isinstance(size, int) and at in (axis, axis - given.ndim) and given.shape[axis] % size == 0:
                edits.append((walk.number[node], axis, None, given.shape[axis] // size))
        elif kind != "expand" or given.shape[axis - seen.ndim] == seen.shape[axis]:
            start = _start(node, given) if kind == "unflatten" else 0
            told = _told(node, axis, given, seen, start)
            if told != -1:
                edits.append((walk.number[node], axis, told, start))
    return edits


def free(graph: fx.GraphModule, edits: Sequence[Edit]) -> fx.GraphModule:
    """A graph with the same layers and these sizes free."""
    copied: dict[fx.Node, fx.Node] = {}
    made = fx.Graph()
    result = made.graph_copy(graph.graph, copied)
    if not any(node.op == "output" for node in made.nodes):
        made.output(result)
    for number, node in enumerate(graph.graph.nodes):
        for at, axis, told, parts in edits:
            if at == number:
                _free(made, copied[node], axis, told, parts)
    freed = fx.GraphModule(graph, made)
    made.lint()
    return freed.eval()


def _free(graph: fx.Graph, node: fx.Node, axis: int, told: int | None, parts: int) -> None:
    if called(node) == "split":
        with graph.inserting_before(node):
            chunks = graph.call_method("chunk", (node.args[0], parts, axis))
        node.replace_all_uses_with(chunks)
        graph.erase_node(node)
        return
    first = 1 if called(node) != "unflatten" else 2
    listed = len(node.args) == first + 1 and isinstance(node.args[first], tuple | list)
    sizes: list[Any] = list(node.args[first] if listed else node.args[first:])  # type: ignore[arg-type]
    sizes[axis - parts] = -1
    if told is not None:
        with graph.inserting_before(node):
            sizes[told] = graph.call_method("size", (node.args[0], told))
    node.args = (*node.args[:first], tuple(sizes)) if listed else (*node.args[:first], *sizes)


def _told(node: fx.Node, axis: int, given: torch.Tensor, seen: torch.Tensor, start: int) -> int | None:
    """Which other size is -1 and has to be told, None if there is none; -1 where that can't be."""
    if called(node) == "unflatten":
        sizes = node.args[2] if len(node.args) == 3 else ()
        free_to = isinstance(sizes, tuple | list) and 0 <= start <= axis < start + len(sizes)
        return None if free_to and all(one != -1 or start + at == axis for at, one in enumerate(sizes)) else -1  # type: ignore[arg-type]
    listed = len(node.args) == 2 and isinstance(node.args[1], tuple | list)
    every: Any = node.args[1] if listed else node.args[1:]
    if node.kwargs or len(every) != seen.ndim:
        return -1
    if called(node) == "expand":
        return None
    other = next((at for at, one in enumerate(every) if at != axis and one == -1), None)
    if other is None:
        return None
    return other if other < axis and given.shape[: other + 1] == seen.shape[: other + 1] else -1


def _start(node: fx.Node, given: torch.Tensor) -> int:
    """The axis that is unflattened, from the front; one that is not written down is none."""
    at = node.args[1] if len(node.args) > 1 else None
    return at % given.ndim if isinstance(at, int) else given.ndim


def _axes(asked: Sequence[torch.Tensor], seen: torch.Tensor) -> list[int]:
    """Along which axes two blocks come from unlike places of a value."""
    places = []
    for one in asked:
        (grad,) = torch.autograd.grad(one, [seen], retain_graph=True, allow_unused=True)
        if grad is None:
            return []
        others = [[other for other in range(seen.ndim) if other != axis] for axis in range(seen.ndim)]
        places.append([(grad != 0).any(dim=other) if other else grad != 0 for other in map(tuple, others)])
    return [axis for axis in range(seen.ndim) if not torch.equal(places[0][axis], places[1][axis])]
