"""Which layers to keep in float: chosen on some samples, recommended where others prove that it mends the outputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import stdtrit

from compress.evaluate.intervals import CONFIDENCE, Interval, difference_interval

__all__ = ["Errors", "Gone", "exclusions", "gone", "mends"]

WORTH = 0.02  # of the outputs' error, that a layer has to take with it to stand among the exclusions
MOST = 5  # exclusions

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Errors:
    """Squared error of the outputs by sample: of those that choose, and of those that prove."""

    choosing: Array
    proving: Array

    @property
    def all(self) -> Array:
        """Both."""
        return np.concatenate([self.choosing, self.proving])


@dataclass(frozen=True)
class Gone:
    """A share of the outputs' error that goes, with its interval; an end that the samples don't tell is None."""

    share: float
    low: float | None
    high: float | None
    samples: int


def gone(before: Array, after: Array) -> Gone:
    """The share of the error that goes, paired by sample.

    Few samples have most of a squared error: of those a bootstrap alone sees too little, and ends at Student's t where
    that is further out.
    """
    whole = float(before.mean()) if before.size else 0.0
    if not whole:
        return Gone(0.0, None, None, len(before))
    found: Interval = difference_interval(before, after).times(1 / whole)
    reach = 0.0
    if len(before) > 1:
        quantile = float(stdtrit(len(before) - 1, (1 + CONFIDENCE) / 2))
        reach = quantile * float((before - after).std(ddof=1)) / math.sqrt(len(before)) / whole
    ends = min(found.low, found.value - reach), min(1.0, max(found.high, found.value + reach))  # no error is below 0
    low, high = (end if math.isfinite(end) else None for end in ends)
    return Gone(found.value, low, high, len(before))


def exclusions(
    layers: Mapping[str, Errors], whole: Errors, together: Callable[[tuple[str, ...]], Errors]
) -> tuple[tuple[str, ...], Gone | None, Errors | None]:
    """The beginning of the ranking beyond which no more error goes, by the samples that choose.

    Args:
        layers: errors with each alone in float.
        whole: errors with none.
        together: errors with some.

    Returns:
        The layers; the share that they take on the samples that prove, and their errors. None where there are none.
    """
    mean = float(whole.choosing.mean()) if whole.choosing.size else 0.0
    if not mean:
        return (), None, None
    shares = {name: 1 - float(errors.choosing.mean()) / mean for name, errors in layers.items()}
    ranked = [name for name in sorted(shares, key=lambda name: -shares[name]) if shares[name] >= WORTH][:MOST]
    best: tuple[float, int, Errors | None] = (0.0, 0, None)
    for count in range(1, len(ranked) + 1):
        errors = layers[ranked[0]] if count == 1 else together(tuple(ranked[:count]))
        share = 1 - float(errors.choosing.mean()) / mean
        if share >= best[0] + WORTH:
            best = share, count, errors
    _, count, found = best
    if found is None:
        return (), None, None
    return tuple(ranked[:count]), gone(whole.proving, found.proving), found


def mends(found: Gone) -> bool:
    """Whether it is worth it, and no chance."""
    return found.low is not None and found.low > 0 and found.share >= WORTH
