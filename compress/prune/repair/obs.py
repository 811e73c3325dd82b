"""Which channels others can stand in for: block OBS, by backward elimination.

Hassibi and Stork, Second Order Derivatives for Network Pruning: Optimal Brain Surgeon, 1993, section 2, on the squared
error of a layer's outputs (as Kurtic et al., ZipLM, 2023, section 3.1, does for whole structures): what it costs a
channel's consumers that it goes, once they have made the best of those that stay. A channel is a block of their
columns, one for each tap of the kernel.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import fx, nn

from compress.prune.follow_channels import ChannelGroup
from compress.prune.layer_kinds import PRUNABLE
from compress.prune.repair.columns import fits, groups_of, taps_of, weights_of
from compress.prune.repair.moments import Moments
from compress.prune.repair.rows import rows_of
from compress.prune.repair.samples import Samples
from compress.prune.repair.walk import Shelf, Walk, traced
from compress.stage import Progress

__all__ = ["Elimination", "eliminations"]

RIDGE = 1e-3  # as the repair's
AT_ONCE = 128  # steps that a group's elimination has at least


@dataclass(frozen=True)
class Elimination:
    """The units of a group in the order in which they go.

    Attributes:
        order: of units, the first to go first.
        errors: by how many have gone, from 1, what consumers lose, as a share of their outputs' spread; or what the
            network's outputs lose by it, where that was asked for.
        macs: multiply-accumulates that go with a unit, where units are to be weighed by them; else 0.
    """

    order: tuple[int, ...]
    errors: tuple[float, ...]
    macs: float = 0.0

    def scores(self) -> torch.Tensor:
        """float32 [units], large for those that go last."""
        found = torch.empty(len(self.order))
        found[torch.tensor(self.order)] = torch.arange(len(self.order), dtype=torch.float32)
        return found

    def share(self, error: float) -> float:
        """Of the units, those that may go for no more than an error."""
        return sum(one <= error for one in self.errors) / len(self.errors)

    @cached_property
    def prices(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Of each unit, in the order, what it costs by multiply-accumulate, on the errors' convex hull, so rising."""
        corners = [(0, 0.0)]
        for gone, error in enumerate(self.errors, 1):
            while len(corners) > 1:
                (one, low), (other, high) = corners[-2:]
                if (high - low) * (gone - other) < (error - high) * (other - one):
                    break
                corners.pop()
            corners.append((gone, error))
        steps = [(b - a, (high - low) / (b - a)) for (a, low), (b, high) in itertools.pairwise(corners)]
        return np.concatenate([np.full(count, slope) for count, slope in steps]) / self.macs


@dataclass
class _Consumer:
    """Of one group of a layer: the inverse of x'x, its weights, each unit's columns [units, block], outputs' spread."""

    inverse: torch.Tensor
    weights: torch.Tensor
    columns: torch.Tensor
    energy: float

    def costs(self, units: torch.Tensor) -> torch.Tensor:
        """What each unit's going adds to the squared error, [units]."""
        at = self.columns[units]
        blocks = self.inverse[at[:, :, None], at[:, None, :]]
        weights = self.weights[:, at].permute(1, 2, 0)  # [units, block, outputs]
        costs: torch.Tensor = (weights * torch.linalg.solve(blocks, weights)).sum((1, 2))
        return costs / self.energy

    def remove(self, units: torch.Tensor) -> None:
        """Let the others make up for these."""
        at = self.columns[units].flatten()
        rows = self.inverse[at]
        solved = torch.linalg.solve(rows[:, at], rows)
        self.weights -= self.weights[:, at] @ solved
        self.inverse -= rows.T @ solved
        # What has gone is read by nobody; a number on the diagonal keeps blocks solvable.
        self.inverse[at], self.inverse[:, at], self.weights[:, at] = 0.0, 0.0, 0.0
        self.inverse[at, at] = 1.0


def eliminations(
    module: nn.Module,
    groups: Sequence[ChannelGroup],
    samples: Samples,
    folder: Path,
    progress: Progress,
    felt: Mapping[str, torch.Tensor] | None = None,
) -> tuple[dict[str, Elimination], dict[str, str]]:
    """Of each group, in which order its units go; and the groups of which that can't be told, with the reason.

    Args:
        module: with all its channels, in eval mode.
        groups: that can lose channels.
        samples: to tell by.
        folder: for values that memory has no room for.
        progress: is told of samples.
        felt: by layer, what a squared error of each channel that it gives costs; None for what it is of their spread.

    Raises:
        StageError: the forward can't be followed.
    """
    walk = Walk(traced(module, len(samples.specs)))
    called: dict[str, list[fx.Node]] = {}
    for node in walk.nodes:
        if node.op == "call_module":
            called.setdefault(str(node.target), []).append(node)
    readers: dict[str, list[tuple[str, np.ndarray[Any, Any], np.ndarray[Any, Any]]]] = {}
    left: dict[str, str] = {}
    for group in groups:
        readers[group.root] = [
            (place.name, index, unit)
            for place, (index, unit) in group.places.items()
            if place.side == "in" and isinstance(walk.graph.get_submodule(place.name), PRUNABLE)
            and len(called.get(place.name, ())) == 1
        ]  # fmt: skip
        if not readers[group.root]:
            left[group.root] = "no linear layer or convolution that is one step of the forward reads it"
    wanted = {name for reading in readers.values() for name, _, _ in reading}
    stops = sorted((walk.place[walk.number[called[name][0]]], name) for name in wanted)
    found: dict[str, Elimination] = {}
    grams: dict[str, Moments] = {}
    last = {root: max((at for at, name in stops if name in {each[0] for each in reading}), default=-1)
            for root, reading in readers.items()}  # fmt: skip
    shelf, start, total = Shelf(folder), 0, max(1, len(stops) * samples.count)
    for number, (stop, name) in enumerate(stops):
        layer, node = walk.graph.get_submodule(name), called[name][0]
        moments, done = Moments(), 0
        for batch, index in enumerate(samples.batches):
            (values,) = shelf.take(batch) if number else samples.begin(batch, (walk,))
            walk.advance(values, start, stop)
            given = values[walk.number[node.all_input_nodes[0]]]
            if isinstance(given, torch.Tensor) and fits(layer, given):
                x, t = rows_of(name, layer, given, walk.run(node, values).detach(), samples, batch)
                moments.add(x, t[..., :0])
            shelf.put(batch, (values,))
            done += len(index)
            progress(number * samples.count + done, total, f"what {name} reads")
        start = stop
        if moments.rows:
            grams[name] = moments
        for group in groups:
            if last[group.root] == stop:
                consumers = [
                    one
                    for reader, at, unit in readers[group.root]
                    if reader in grams
                    for one in _consumers(
                        walk.graph.get_submodule(reader),
                        grams[reader],
                        at,
                        unit,
                        group.units,
                        None if felt is None else felt[reader],
                    )
                ]
                if consumers:
                    found[group.root] = _eliminated(consumers, group.units)
                else:
                    left[group.root] = "what reads it never varies, or reads unequal parts of its channels"
        for name in [one for one in grams if not any(last[root] > stop for root in _reading(readers, one))]:
            del grams[name]
    return found, left


def _reading(readers: Mapping[str, Sequence[tuple[str, Any, Any]]], name: str) -> list[str]:
    """Groups that a layer reads."""
    return [root for root, reading in readers.items() if any(each[0] == name for each in reading)]


def _consumers(
    layer: Any,
    moments: Moments,
    index: np.ndarray[Any, Any],
    unit: np.ndarray[Any, Any],
    units: int,
    felt: torch.Tensor | None,
) -> list[_Consumer]:
    """Each group of a layer by itself; none where units have unequal parts of it."""
    xx, _ = moments.centred(intercept=True)
    weights = weights_of(layer)
    parts, taps = groups_of(layer), taps_of(layer)
    width = xx.shape[1] // taps
    found: list[_Consumer] = []
    for part in range(parts):
        here = index // width == part
        blocks = [index[here & (unit == one)] % width for one in range(units)]
        size = float(xx[part].diagonal().mean())
        energy = float(((weights[part] @ xx[part]) * weights[part]).sum())
        if len({len(block) for block in blocks}) > 1 or not len(blocks[0]) or size <= 0 or energy <= 0:
            continue
        channels = torch.from_numpy(np.stack(blocks))
        columns = (channels[:, :, None] * taps + torch.arange(taps)).flatten(1)
        inverse = torch.linalg.inv(xx[part] + RIDGE * size * torch.eye(xx.shape[1]).double())
        found.append(_Consumer(inverse, weights[part].clone(), columns, energy))
        if felt is not None:
            found[-1].weights *= felt.view(parts, -1)[part].sqrt()[:, None]
            found[-1].energy = float(moments.rows)
    if felt is None:
        for one in found:
            one.energy *= len(found)
    return found


def _eliminated(consumers: Sequence[_Consumer], units: int) -> Elimination:
    """All units but one, the cheapest first; those of wide groups a few at a time."""
    left = torch.arange(units)
    order: list[int] = []
    errors: list[float] = []
    once = max(1, units // AT_ONCE)
    while len(left):
        costs = torch.stack([one.costs(left) for one in consumers]).sum(0)
        cheapest = costs.argsort()[:once]
        for at in cheapest.tolist():
            errors.append((errors[-1] if errors else 0.0) + max(0.0, float(costs[at])))
        gone = left[cheapest]
        order += gone.tolist()
        for one in consumers:
            one.remove(gone)
        left = left[~torch.isin(left, gone)]
    return Elimination(tuple(order), tuple(errors))
