"""Which branches of a network can go: those that a sum adds back to what they were computed from.

Only the graph is read: a branch is what is computed from a value and ends in a sum that carries this value on. So basic
blocks, bottlenecks, inverted residuals, attention and feed-forward, before their normalization or behind it, are one
case. Without the branch the sum is its other side.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves

from compress.prune.blocks.without_blocks import unread_inputs
from compress.prune.layer_kinds import PRUNABLE
from compress.prune.repair.sites import PASSING, added
from compress.prune.repair.walk import Walk

__all__ = ["Block", "blocks_of", "shapes_of"]

NO_SHORTCUT = "both sides of its sum have layers of their own: neither is a shortcut"
OTHER_SHAPE = "it has another shape than what it is added to"
READ_ELSEWHERE = "what it computes is read elsewhere, too"
IN_PLACE = "it changes in place what others read"
ONLY_READER = "nothing else reads the input {}"


Shapes = Mapping[int, tuple[Any, ...]]


@dataclass(frozen=True)
class Block:
    """A branch that can go.

    Attributes:
        name: what its layers' names have in common, with the first and the last where that is another's name, too.
        end: number of the sum, in the graph.
        shortcut: number of what the sum is without it.
        inside: numbers of the nodes between what it is computed from and the sum.
    """

    name: str
    end: int
    shortcut: int
    inside: frozenset[int]


def blocks_of(walk: Walk, shapes: Shapes) -> tuple[list[Block], dict[str, str]]:
    """The branches of a graph in its order, and those that can't go, by name, with the reason.

    Args:
        walk: over the graph.
        shapes: by `shapes_of`.
    """
    found: list[tuple[Block, str]] = []
    for node in walk.nodes:
        for branch in node.all_input_nodes:
            shortcut = added(node, branch)
            if shortcut is None:
                continue
            inside = _inside(walk, branch, shortcut, shapes)
            if _layers(walk, inside, nn.Module):
                block = Block("", walk.number[node], walk.number[shortcut], inside)
                found.append((block, _kept_by(walk, block, branch, shapes)))
    ends = {block.end for block, _ in found}
    found += [  # named, since blocks are what is looked for there
        (Block("", number, -1, inside), NO_SHORTCUT)
        for number, node in enumerate(walk.nodes)
        if number not in ends and (inside := _two_sided(walk, node))
    ]
    names = _names(walk, [block for block, _ in found])
    named = [Block(names[at], block.end, block.shortcut, block.inside) for at, (block, _) in enumerate(found)]
    can = [block for block, (_, why) in zip(named, found, strict=True) if not why]
    return can, {block.name: why for block, (_, why) in zip(named, found, strict=True) if why}


def _inside(walk: Walk, branch: fx.Node, shortcut: fx.Node, told: Shapes) -> frozenset[int]:
    """Numbers of the nodes from behind what the branch is computed from to the sum; none if it is no branch.

    It is computed from the last value that the sum carries on without it. Sizes that are read of a value say nothing.
    """
    for start in sorted(_carried(walk, shortcut), key=lambda node: -walk.number[node]):
        behind = _behind(walk, start, told)
        if start is branch or branch not in behind:
            continue
        found: set[int] = set()
        stack = [branch]
        while stack:
            one = stack.pop()
            if one is not start and one in behind and walk.number[one] not in found:
                found.add(walk.number[one])
                stack += one.all_input_nodes
        return frozenset(found)
    return frozenset()


def _behind(walk: Walk, start: fx.Node, told: Shapes) -> set[fx.Node]:
    """A node, and those that are computed from its values."""
    found = {start}
    for number in range(walk.number[start] + 1, len(walk.nodes)):
        node = walk.nodes[number]
        if number in told and any(each in found for each in node.all_input_nodes):
            found.add(node)
    return found


def _carried(walk: Walk, node: fx.Node) -> set[fx.Node]:
    """A value, and those that it is the sum of."""
    found: set[fx.Node] = set()
    stack = [node]
    while stack:
        one = stack.pop()
        if one in found:
            continue
        found.add(one)
        passes = one.op == "call_module" and isinstance(walk.graph.get_submodule(str(one.target)), PASSING)
        if passes or any(added(one, each) is not None for each in one.all_input_nodes):
            stack += one.all_input_nodes
    return found


def _layers(walk: Walk, inside: Iterable[int], kind: Any) -> list[str]:
    """Layers with weights, and weights that stand alone, among nodes and what these alone are given, in their order."""
    found: list[str] = []
    for number in sorted(inside):
        node = walk.nodes[number]
        for each in (*(one for one in node.all_input_nodes if one.op == "get_attr"), node):
            name = str(each.target)
            if each.op == "get_attr" and kind is nn.Module and name not in found:
                found.append(name)
            elif each.op == "call_module" and isinstance(layer := walk.graph.get_submodule(name), kind):
                found += [name] if any(True for _ in layer.parameters()) else []
    return found


def _kept_by(walk: Walk, block: Block, branch: fx.Node, shapes: Shapes) -> str:
    """Why a branch can't go; empty where nothing is known against it."""
    sides = [shapes.get(number) for number in (block.end, block.shortcut, walk.number[branch])]
    if not sides[0] or sides.count(sides[0]) != len(sides):
        return OTHER_SHAPE
    nodes = [walk.nodes[number] for number in sorted(block.inside)]
    readers = {walk.number[user] for node in nodes for user in node.users}
    if not readers <= block.inside | {block.end}:
        return READ_ELSEWHERE
    for node in nodes:
        given = node.all_input_nodes
        if given and walk.in_place(node) and walk.number[given[0]] not in block.inside:
            return IN_PLACE
    unread = unread_inputs(walk.graph, {block.end: block.shortcut})
    return ONLY_READER.format(unread[0]) if unread else ""


def _two_sided(walk: Walk, node: fx.Node) -> frozenset[int]:
    """Of a sum of two values that layers compute from one, the nodes of its longer side; none if it is no such sum."""
    sides = [each for each in node.all_input_nodes if added(node, each) is not None]
    if len(sides) != 2:
        return frozenset()
    above = [_above(each) for each in sides]
    common = {each for each in above[0] & above[1] if each.op not in ("get_attr", "placeholder")}
    own = [frozenset(walk.number[each] for each in one - above[1 - at]) for at, one in enumerate(above)]
    if not common or not all(_layers(walk, one, PRUNABLE) for one in own):
        return frozenset()
    return max(own, key=lambda one: len(_layers(walk, one, PRUNABLE)))


def _above(node: fx.Node) -> set[fx.Node]:
    found: set[fx.Node] = set()
    stack = [node]
    while stack:
        one = stack.pop()
        if one not in found:
            found.add(one)
            stack += one.all_input_nodes
    return found


def _names(walk: Walk, blocks: Sequence[Block]) -> list[str]:
    layers = [_layers(walk, block.inside, nn.Module) for block in blocks]
    short = [_common(names) for names in layers]
    times = Counter(short)
    full = [
        name if name and times[name] == 1 else f"{name} ({_from_to(names, name)})" if name else _from_to(names, name)
        for name, names in zip(short, layers, strict=True)
    ]
    again = Counter(full)  # layers that are called several times
    return [name if again[name] == 1 else f"{name} #{full[: at + 1].count(name)}" for at, name in enumerate(full)]


def _common(names: Sequence[str]) -> str:
    parts = [name.split(".") for name in names]
    shared = []
    for words in zip(*parts, strict=False):
        if len(set(words)) > 1:
            break
        shared.append(words[0])
    return ".".join(shared)


def _from_to(names: Sequence[str], prefix: str) -> str:
    short = [name.removeprefix(f"{prefix}.") if prefix else name for name in (names[0], names[-1])]
    return " to ".join(dict.fromkeys(short))


def shapes_of(walk: Walk, inputs: Sequence[torch.Tensor]) -> Shapes:
    """Of each node that gives a tensor its dtype and shape, of those that give several nothing, by number."""
    found: dict[int, tuple[Any, ...]] = {}
    values = walk.begin([tensor.clone() for tensor in inputs])
    for at, number in enumerate(walk.order):
        walk.advance(values, at, at + 1)
        value = values.get(number)
        if isinstance(value, torch.Tensor):
            found[number] = (value.dtype, *value.shape)
        elif any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(value)):
            found[number] = ()
    return found
