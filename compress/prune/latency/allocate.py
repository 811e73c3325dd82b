"""How many units each group loses, so that the errors add up to the least that a time allows.

A knapsack, as of Shen et al., Structural Pruning via Latency-Saliency Knapsack, NeurIPS 2022 (HALP, arXiv 2110.10811),
section 3, with the times from tables and the errors from block OBS as in Kurtic et al., ZipLM, 2023 (arXiv 2302.04089),
section 3. A layer's time depends on two groups, what it reads and what it gives, so that neither greedy choice nor
dynamic programming holds: a price of time is bisected, and at each price one group after the other takes its best
count until none changes (a Lagrange multiplier, by coordinate descent). Exchanges between two groups then use up what
the price leaves over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from compress.prune.latency.layers import Layer
from compress.prune.latency.tables import Array, Table

__all__ = ["Curve", "Gone", "Predicted", "allocated", "error_of"]

SWEEPS, PRICES, EXCHANGES = 12, 40, 8
WIDEST = 1e6  # prices from this share of the mean one to so many times it

Gone = Mapping[str, int]
"""How many units have gone, by the group's root."""


@dataclass(frozen=True)
class Curve:
    """What a group may lose, and what that costs.

    Attributes:
        root: of the group.
        gone: numbers of units, rising from 0.
        errors: float64, of each.
    """

    root: str
    gone: np.ndarray[tuple[int], np.dtype[np.int64]]
    errors: Array


class Predicted:
    """What the layers take together, by tables.

    Args:
        layers: of a network.
        tables: by the key of their shapes.
    """

    def __init__(self, layers: Sequence[Layer], tables: Mapping[str, Table]) -> None:
        self._layers = [(layer, tables[layer.shape.key]) for layer in layers]
        self._of: dict[str, list[tuple[Layer, Table]]] = {}
        for pair in self._layers:
            for root in {**pair[0].reads, **pair[0].gives}:
                self._of.setdefault(root, []).append(pair)

    def total(self, gone: Gone) -> float:
        """Milliseconds of all layers."""
        return float(sum(_time(pair, gone) for pair in self._layers))

    def along(self, gone: Gone, root: str, counts: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Array:
        """Milliseconds of the layers that a group is part of, for each number of its units that have gone."""
        found = np.zeros(len(counts))
        for pair in self._of.get(root, ()):
            found += _time(pair, {**gone, root: counts})
        return found


def allocated(
    curves: Sequence[Curve], predicted: Predicted, budget: float, starts: Sequence[Gone] = ()
) -> dict[str, int] | None:
    """The least error found within a time; None where no choice is.

    Args:
        curves: of each group.
        predicted: what a choice takes.
        budget: milliseconds; what is found never takes more.
        starts: choices that are known: of those within the time, none has a smaller error than what is found.
    """
    none = {curve.root: 0 for curve in curves}
    most = {curve.root: int(curve.gone[-1]) for curve in curves}
    if predicted.total(most) > budget:
        return None
    found: list[dict[str, int]] = [most, none, *map(dict, starts)]
    low = sum(float(curve.errors[-1]) for curve in curves) / max(predicted.total(none), 1e-12) / WIDEST
    high = max(low, 1e-30) * WIDEST**2
    for _ in range(PRICES):
        price = (max(low, 1e-30) * high) ** 0.5
        tried = [_descended(curves, predicted, price, start) for start in (none, most)]
        found += tried
        if min(map(predicted.total, tried)) > budget:
            low = price
        else:
            high = price
    within = [each for each in found if predicted.total(each) <= budget]
    best = min(within, key=lambda each: (error_of(curves, each), predicted.total(each)))
    return _exchanged(curves, predicted, budget, best)


def error_of(curves: Sequence[Curve], gone: Gone) -> float:
    """The errors of all groups, summed."""
    return float(sum(curve.errors[_at(curve, gone)] for curve in curves))


def _descended(curves: Sequence[Curve], predicted: Predicted, price: float, start: Gone) -> dict[str, int]:
    """Where no group by itself would lower error + price · time any more."""
    gone = dict(start)
    for _ in range(SWEEPS):
        before = dict(gone)
        for curve in curves:
            costs = curve.errors + price * predicted.along(gone, curve.root, curve.gone)
            gone[curve.root] = int(curve.gone[costs.argmin()])
        if gone == before:
            break
    return gone


def _exchanged(curves: Sequence[Curve], predicted: Predicted, budget: float, start: Gone) -> dict[str, int]:
    """Where no group can get units back, and none for a step or two of another's, within the time."""
    gone = dict(start)
    for _ in range(EXCHANGES):
        before = dict(gone)
        for curve in curves:
            back = {**gone, curve.root: _fewest(curve, predicted, budget - predicted.total(gone), gone)}
            gone = back if predicted.total(back) <= budget else gone
        for giving in curves:
            for step in (1, 2):
                now = _at(giving, gone)
                if now + step >= len(giving.gone):
                    continue
                moved = {**gone, giving.root: int(giving.gone[now + step])}
                spare = budget - predicted.total(moved)
                others = (
                    {**moved, curve.root: _fewest(curve, predicted, spare, moved)}
                    for curve in curves
                    if curve is not giving
                )
                best = min(others, key=lambda each: error_of(curves, each), default=moved)
                if error_of(curves, best) < error_of(curves, gone) and predicted.total(best) <= budget:
                    gone = best
        if gone == before:
            break
    return gone


def _fewest(curve: Curve, predicted: Predicted, spare: float, gone: Gone) -> int:
    """As few units of one group as the time to spare allows; as many as have gone, where that is none."""
    at = _at(curve, gone)
    times = predicted.along(gone, curve.root, curve.gone[: at + 1])
    fits = np.flatnonzero(times - times[-1] <= spare)
    return int(curve.gone[fits[0] if len(fits) else at])


def _at(curve: Curve, gone: Gone) -> int:
    return int(np.searchsorted(curve.gone, gone[curve.root]))


def _time(pair: tuple[Layer, Table], gone: Mapping[str, int | np.ndarray[tuple[int], np.dtype[np.int64]]]) -> Array:
    layer, table = pair

    def left(whole: int, units: Mapping[str, float]) -> Array:
        return np.asarray(whole - sum(each * gone.get(root, 0) for root, each in units.items()), np.float64)

    return layer.calls * table.at(left(layer.shape.inputs, layer.reads), left(layer.shape.outputs, layer.gives))
