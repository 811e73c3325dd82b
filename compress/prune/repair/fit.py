"""Fit the layers of a pruned network, one after the other, to what the original's gave.

Each layer is regressed on what really comes into it, behind the layers that were fitted before, so that it takes up
what they could not: He et al., Channel Pruning for Accelerating Very Deep Neural Networks, ICCV 2017, sections 3.1 and
3.2 (there with residual branches, too); by Gram matrices as in GRAIL, arXiv 2602.23795.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from compress.errors import StageError
from compress.prune.blocks.without_blocks import Ends, in_the_same_steps, without
from compress.prune.repair.columns import channel_axis, fits, put_weights, weights_of
from compress.prune.repair.moments import Moments, Solved, solved
from compress.prune.repair.rows import rows_of
from compress.prune.repair.samples import Samples
from compress.prune.repair.sites import Removed, Site, sites_of
from compress.prune.repair.walk import Shelf, Values, Walk, traced
from compress.stage import Progress

__all__ = ["Fitted", "fit_layers"]

HARDER = (1, 10, 100)  # times the ridge, until samples that had no part agree
LEAST_GAMMA = 1e-3  # below it a channel hardly reaches the sum, and what is added there is not divided by it
ALIKE = 1e-6  # share of a layer's spread: what is nearer is the same, for single precision


@dataclass
class Fitted:
    """What became of the layers.

    Attributes:
        layers: by name, the share of the outputs' spread that was lost before and after, on samples held out.
        left_alone: layers that were not fitted, with the reason.
        short: layers with fewer rows than columns, each with both.
        constant: layers of whose columns some never vary, with how many of how many.
    """

    layers: dict[str, list[float]] = field(default_factory=dict)
    left_alone: dict[str, str] = field(default_factory=dict)
    short: dict[str, tuple[int, int]] = field(default_factory=dict)
    constant: dict[str, tuple[int, int]] = field(default_factory=dict)


def fit_layers(
    original: nn.Module,
    pruned: nn.Module,
    removed: Removed,
    samples: Samples,
    folder: Path,
    progress: Progress,
    *,
    ridge: float = 1e-3,
    blocks: Ends | None = None,
) -> Fitted:
    """Fit a pruned network in place.

    Args:
        original: what it was pruned from, in eval mode.
        pruned: in eval mode.
        removed: channels of the original that went, by place.
        samples: to fit by, some of them held out.
        folder: for values that memory has no room for.
        progress: is told of batches.
        ridge: share of the mean of a Gram matrix' diagonal.
        blocks: that the original, a graph, lost.

    Raises:
        StageError: their forwards can't be followed.
    """
    inputs = len(samples.specs)
    graph, second = traced(original, inputs), Walk(traced(pruned, inputs))
    first = Walk(without(graph, blocks) if blocks else graph)
    if [(n.op, str(n.target)) for n in first.nodes] != [(n.op, str(n.target)) for n in second.nodes]:
        raise StageError(
            "can't follow what this model computes",
            why="its forward takes other steps without the channels that went",
            mend="give --no-repair, and train it instead",
        )
    if blocks:
        second = Walk(in_the_same_steps(graph, blocks, second.graph))
    sites, left = sites_of(second, removed)
    after = {site.node: site.other for site in sites if site.other is not None}
    first = Walk(graph, after)
    second = Walk(second.graph, after, first.order)
    sites.sort(key=lambda site: second.place[site.node])
    pair = _Pair(first, second, removed, samples, Shelf(folder))
    fitted = Fitted(left_alone=left)
    total = max(1, len(sites) * samples.count)
    for number, site in enumerate(sites):
        pair.reach(site, partial(_told, progress, site.name, number * samples.count, total))
        _fit(site, pair, fitted, ridge)
    return fitted


@dataclass
class _Pair:
    """Both networks, walked together with all batches.

    Attributes:
        fitting: of the layer at which they stand, the rows to fit by.
        judging: those that are held out.
        why: it can't be fitted.
    """

    original: Walk
    pruned: Walk
    removed: Removed
    samples: Samples
    shelf: Shelf
    at: int = -1
    fitting: Moments = field(default_factory=Moments)
    judging: Moments = field(default_factory=Moments)
    why: str = ""

    def reach(self, site: Site, tell: Callable[[int], None]) -> None:
        """Take all batches to a layer, and sum up its rows."""
        start, stop = max(self.at, 0), self.pruned.place[site.node]
        self.fitting, self.judging, self.why = Moments(), Moments(), ""
        done = 0
        walks = (self.original, self.pruned)
        for batch, index in enumerate(self.samples.batches):
            values = self.samples.begin(batch, walks) if self.at < 0 else self.shelf.take(batch)
            for walk, held in zip(walks, values, strict=True):
                walk.advance(held, start, stop)
            self._add(site, values, batch)
            self.shelf.put(batch, values)
            done += len(index)
            tell(done)
        self.at = stop

    @torch.no_grad()
    def _add(self, site: Site, values: Sequence[Values], batch: int) -> None:
        layer = self.pruned.graph.get_submodule(site.name)
        given = values[1][self.pruned.number[self.pruned.nodes[site.node].all_input_nodes[0]]]
        if not isinstance(given, torch.Tensor) or not fits(layer, given):
            self.why = "its input has no batch of samples"
            return
        x, t = rows_of(site.name, layer, given, self._target(site, layer, values), self.samples, batch)
        (self.judging if self.samples.held[batch] else self.fitting).add(x, t)

    def _target(self, site: Site, layer: nn.Module, values: Sequence[Values]) -> torch.Tensor:
        """What the layer is to give: as the original's, or what makes the sum behind it as the original's."""
        axis = channel_axis(layer)
        own: torch.Tensor = self.original.run(self.original.nodes[site.node], values[0])
        kept = _kept(own.shape[axis], self.removed.get((site.name, "out", 0), frozenset()))
        plain: torch.Tensor = own if kept is None else own.index_select(axis, kept)
        if site.other is None:
            return plain
        there, here = values[0][site.other], values[1][site.other]
        through = own
        for number in site.chain:
            through = self.original.graph.get_submodule(str(self.original.nodes[number].target))(through)
        if not isinstance(here, torch.Tensor) or there.shape != through.shape or here.shape != plain.shape:
            return plain
        total = through + there
        wanted = (total if kept is None else total.index_select(axis, kept)) - here
        if site.norm is None:
            behind: torch.Tensor = wanted
            return behind
        norm: Any = self.pruned.graph.get_submodule(site.norm)
        shape = (1, -1, *([1] * (wanted.ndim - 2)))
        gamma = torch.ones_like(norm.running_mean) if norm.weight is None else norm.weight
        shift = torch.zeros_like(norm.running_mean) if norm.bias is None else norm.bias
        reaches = gamma.abs() > LEAST_GAMMA
        scale = torch.where(reaches, (norm.running_var + norm.eps).sqrt() / torch.where(reaches, gamma, 1.0), 0.0)
        inside = (wanted - shift.view(shape)) * scale.view(shape) + norm.running_mean.view(shape)
        fitted: torch.Tensor = torch.where(reaches.view(shape), inside, plain)
        return fitted


def _fit(site: Site, pair: _Pair, fitted: Fitted, ridge: float) -> None:
    """Solve for the layer's weights and set them, where samples that were held out agree that it helps."""
    layer: Any = pair.pruned.graph.get_submodule(site.name)
    fitting, judging = pair.fitting, pair.judging
    if pair.why or not fitting.rows:
        fitted.left_alone[site.name] = pair.why or "no row of the calibration data reaches it"
        return
    if not (fitting.finite and judging.finite):
        fitted.left_alone[site.name] = "on the calibration data its values are not finite, or too large to be squared"
        return
    norm: Any = None if site.norm is None else pair.pruned.graph.get_submodule(site.norm)
    before = weights_of(layer)
    added = layer.bias.detach().double() if layer.bias is not None else torch.zeros(before.shape[:2].numel()).double()
    was = Solved(before, added.view(before.shape[:2]))
    judge = judging if judging.rows else fitting
    spread = max(judge.spread(), 1e-30)
    lost = judge.error(was.weights, was.bias) / spread
    if lost < ALIKE:
        return
    columns = before.shape[-1]
    if fitting.rows < columns:
        fitted.short[site.name] = (fitting.rows, columns)
    diagonal = fitting.centred(intercept=True)[0].diagonal(dim1=1, dim2=2)
    dead = int((diagonal <= 1e-12 * diagonal.max()).sum())
    if not bool((diagonal > 0).any()):
        fitted.left_alone[site.name] = "what it reads never varies on the calibration data"
        return
    if dead:
        fitted.constant[site.name] = (dead, diagonal.numel())
    intercept = layer.bias is not None or norm is not None
    for times in HARDER:
        found = solved(fitting, before, ridge * times, intercept=intercept)
        if found is None:
            continue
        left = max(0.0, judge.error(found.weights, found.bias)) / spread
        if left < lost and bool(torch.isfinite(found.weights).all()):
            break
    else:
        fitted.left_alone[site.name] = f"{pair.samples.judges} are no nearer with a fit"
        return
    put_weights(layer, found.weights)
    with torch.no_grad():
        if layer.bias is not None:
            layer.bias.copy_(found.bias.flatten())
        elif norm is not None:
            norm.running_mean.sub_(found.bias.flatten())
    fitted.layers[site.name] = [lost, left]


def _told(progress: Progress, name: str, before: int, total: int, done: int) -> None:
    progress(before + done, total, f"fitting {name}")


def _kept(width: int, gone: frozenset[int]) -> torch.Tensor | None:
    return torch.tensor([at for at in range(width) if at not in gone]) if gone else None
