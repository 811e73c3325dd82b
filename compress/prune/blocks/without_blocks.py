"""A graph without some of its branches; with them, but silent; and in the steps of the whole, for the repair."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn

from compress.errors import StageError
from compress.prune.repair.sites import added, carried_on

__all__ = ["Ends", "in_the_same_steps", "silenced", "unread_inputs", "without"]

Ends = Mapping[int, int]
"""Of each branch, the number of its sum, and of what the sum is without it."""


def without(graph: fx.GraphModule, ends: Ends) -> fx.GraphModule:
    """The network without these branches and all that they alone read; its layers are those of the graph.

    Raises:
        StageError: it has no such sums.
    """
    own, nodes = _copied(graph)
    for end, shortcut in ends.items():
        if max(end, shortcut) >= len(nodes) or nodes[shortcut] not in nodes[end].all_input_nodes:
            raise StageError(
                "can't follow what this model computes", why="its forward takes other steps", mend="start the run anew"
            )
    dead = _dead(graph, ends)
    for end in ends:
        nodes[end].replace_all_uses_with(nodes[_left(end, ends)])
    for number in sorted(dead, reverse=True):
        if nodes[number].op != "placeholder":
            own.erase_node(nodes[number])
    return fx.GraphModule(graph, own).eval()


def silenced(graph: fx.GraphModule, ends: Ends) -> fx.GraphModule:
    """The whole network, in which these branches add zeros; its layers are those of the graph."""
    own, nodes = _copied(graph)
    for end, shortcut in ends.items():
        branch = added(nodes[end], nodes[shortcut])
        assert branch is not None  # noqa: S101  it is a sum of two
        with own.inserting_before(nodes[end]):
            nodes[end].replace_input_with(branch, own.call_function(torch.zeros_like, (branch,)))
    return fx.GraphModule(graph, own).eval()


def unread_inputs(graph: fx.GraphModule, ends: Ends) -> list[str]:
    """Inputs that only these branches read: without them, an exported file would not take them."""
    dead = _dead(graph, ends)
    nodes = list(graph.graph.nodes)
    return [str(nodes[at].target) for at in sorted(dead) if nodes[at].op == "placeholder"]


def in_the_same_steps(graph: fx.GraphModule, ends: Ends, pruned: nn.Module) -> fx.GraphModule:
    """What `without` gives, but node by node as the whole, so that the two can be walked together.

    Args:
        graph: the whole.
        ends: of the branches.
        pruned: what `without` gave, or a copy of it: whose layers are run.
    """
    own, nodes = _copied(graph)
    for number in _dead(graph, ends):
        node = nodes[number]
        if node.op == "placeholder":
            continue
        carries = number in ends
        given = nodes[ends[number]] if carries else None
        # What it was computed from stays with it: the order of the steps hangs on that.
        args = (given, *(each for each in node.all_input_nodes if each is not given)) if carries else ()
        node.op, node.target = "call_function", carried_on if carries else _nothing
        node.args, node.kwargs = args or tuple(node.all_input_nodes), {}
    return fx.GraphModule(pruned, own).eval()


def _nothing(*_given: Any) -> None:
    """What a step of a branch gives that is no longer there."""


def _left(end: int, ends: Ends) -> int:
    """What a sum is without its branch, which may be such a sum itself."""
    while end in ends:
        end = ends[end]
    return end


def _dead(graph: fx.GraphModule, ends: Ends) -> set[int]:
    """Numbers of the nodes that nothing reads any more: the sums, and what only branches read."""
    every = list(graph.graph.nodes)
    number = {node: at for at, node in enumerate(every)}
    dead = set(ends)
    for at in range(len(every) - 1, -1, -1):
        readers = [number[user] for user in every[at].users]
        # A sum that lost its branch still carries the other side on.
        if readers and all(one in dead and ends.get(one) != at for one in readers):
            dead.add(at)
    return dead


def _copied(graph: fx.GraphModule) -> tuple[fx.Graph, list[fx.Node]]:
    own = copy.deepcopy(graph.graph)
    return own, list(own.nodes)
