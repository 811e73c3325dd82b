"""Which layers of a pruned network can be fitted, and to what: their own output, or a sum that it ends in.

A branch whose output is added to another value takes up what that value has lost: its last layer is fitted so that the
sum is as it was. Of two branches that both end in a layer, the one that reads more columns does, after the other.
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from compress.prune.layer_kinds import BATCH_NORM, PRUNABLE
from compress.prune.repair.walk import Walk

__all__ = ["PASSING", "Removed", "Site", "added", "carried_on", "norm_after", "sites_of"]

Removed = Mapping[tuple[str, str, int], frozenset[int]]

SUMS = {operator.add, operator.iadd, torch.add}
SUM_METHODS = {"add", "add_", "__add__", "__iadd__"}
PASSING = (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)


@dataclass(frozen=True)
class Site:
    """A layer to fit.

    Attributes:
        name: of the layer.
        node: its number in the graph.
        norm: the name of the batch normalization that alone reads it, if there is one.
        chain: numbers of the nodes from it to the sum.
        other: the number of what is added to it there; None where it stands for itself.
    """

    name: str
    node: int
    norm: str | None = None
    chain: tuple[int, ...] = ()
    other: int | None = None


def sites_of(walk: Walk, removed: Removed) -> tuple[list[Site], dict[str, str]]:
    """Layers behind what was removed, in the graph's order, and those that can't be fitted, with the reason."""
    graph = walk.graph
    calls = Counter(str(node.target) for node in walk.nodes if node.op == "call_module")
    behind = _behind(walk, {name for name, _, _ in removed})
    shared = _shared(graph)
    sites: list[Site] = []
    left: dict[str, str] = {}
    for node in walk.nodes:
        name = str(node.target)
        if node.op != "call_module" or node not in behind or not isinstance(graph.get_submodule(name), PRUNABLE):
            continue
        if calls[name] > 1:
            left[name] = "it is called several times"
        elif name in shared:
            left[name] = f"it shares its weights with {shared[name]}"
        else:
            sites.append(_site(walk, node))
    for name, side, _ in removed:
        if side == "in" and name not in calls and name not in left:
            outer = next((one for one in calls if name.startswith(f"{one}.")), None)
            left[name] = (
                "no step of the forward calls it" if outer is None else f"it is inside {outer}, which is one step"
            )
        elif side == "in" and not isinstance(graph.get_submodule(name), PRUNABLE):
            left[name] = f"{type(graph.get_submodule(name)).__name__} is no linear layer or convolution"
    return _one_for_each_sum(walk, sites), left


def carried_on(value: torch.Tensor, *_gone: Any) -> torch.Tensor:
    """A sum that has lost its other side; a function of its own, to be told from others."""
    return value


def norm_after(walk: Walk, node: fx.Node) -> str | None:
    """The batch normalization with statistics of its own that alone reads a node."""
    user = next(iter(node.users), None)
    if len(node.users) != 1 or user is None or user.op != "call_module":
        return None
    norm: Any = walk.graph.get_submodule(str(user.target))
    once = sum(str(one.target) == str(user.target) for one in walk.nodes) == 1
    return str(user.target) if isinstance(norm, BATCH_NORM) and norm.running_mean is not None and once else None


def _site(walk: Walk, node: fx.Node) -> Site:
    alone = Site(str(node.target), walk.number[node], norm_after(walk, node))
    chain: list[int] = []
    at, norms = node, 0
    while len(at.users) == 1:
        user = next(iter(at.users))
        other = added(user, at)
        if other is not None:
            if walk.depends(other, node):
                return alone
            return Site(alone.name, alone.node, alone.norm, tuple(chain), walk.number[other])
        if user.op != "call_module":
            return alone
        layer = walk.graph.get_submodule(str(user.target))
        norms += isinstance(layer, BATCH_NORM)
        if not isinstance(layer, PASSING) and not (at is node and str(user.target) == alone.norm):
            return alone
        chain.append(walk.number[user])
        at = user
    return alone


def added(node: fx.Node, one: fx.Node) -> fx.Node | None:
    """What a node adds to a value, if it is such a sum of two."""
    sums = (node.op == "call_function" and node.target in SUMS) or (
        node.op == "call_method" and node.target in SUM_METHODS
    )
    if not sums or node.kwargs or len(node.args) != 2 or node.args[0] is node.args[1]:
        return None
    other = node.args[1] if node.args[0] is one else node.args[0]
    return other if isinstance(other, fx.Node) else None


def _one_for_each_sum(walk: Walk, sites: list[Site]) -> list[Site]:
    """Of the sites that end in one sum, that with the most columns takes it; the others stand for themselves."""
    ends: dict[fx.Node, list[Site]] = defaultdict(list)
    for site in sites:
        if site.other is not None:
            last = walk.nodes[site.chain[-1] if site.chain else site.node]
            ends[next(iter(last.users))].append(site)
    keeping = {max(each, key=lambda site: (_columns(walk, site), site.node)).name for each in ends.values()}
    return [
        site if site.other is None or site.name in keeping else Site(site.name, site.node, site.norm) for site in sites
    ]


def _columns(walk: Walk, site: Site) -> int:
    weight: Any = walk.graph.get_submodule(site.name).weight
    return int(weight[0].numel())


def _behind(walk: Walk, names: set[str]) -> set[fx.Node]:
    """Nodes that lost channels, or are computed from such."""
    found: set[fx.Node] = set()
    for node in walk.nodes:
        target = str(node.target)
        lost = node.op == "call_module" and any(name == target or name.startswith(f"{target}.") for name in names)
        lost = lost or (node.op == "get_attr" and target in names) or node.target is carried_on
        if lost or any(one in found for one in node.all_input_nodes):
            found.add(node)
    return found


def _shared(module: nn.Module) -> dict[str, str]:
    """Layers whose weight is another's, too, with the other's name."""
    owners: dict[int, list[str]] = defaultdict(list)
    for name, layer in module.named_modules():
        for parameter in layer._parameters.values():
            if parameter is not None:
                owners[id(parameter)].append(name)
    return {
        name: next(other for other in names if other != name)
        for names in owners.values()
        if len(set(names)) > 1
        for name in names
    }
