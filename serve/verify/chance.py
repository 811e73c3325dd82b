"""What chance explains of two shares of right answers: the score intervals that `compress` reports its shares with."""

from __future__ import annotations

import math
from statistics import NormalDist

__all__ = ["CONFIDENCE", "difference"]

CONFIDENCE = 0.95
_Z = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)


def difference(share: float, count: int, expected: float, of: int | None) -> tuple[float, float]:
    """Interval of a share less the one expected, by Newcombe's hybrid score method (Statistics in Medicine, 1998).

    The two are taken for independent, so of the same samples, where less is left to chance, it is too wide.

    Args:
        share: seen in `count` samples.
        expected: seen in `of` others; None takes it for exact.
    """
    low, high = _wilson(share, count)
    if of is None:
        return low - expected, high - expected
    least, most = _wilson(expected, of)
    delta = share - expected
    return delta - math.hypot(share - low, most - expected), delta + math.hypot(high - share, expected - least)


def _wilson(share: float, count: int) -> tuple[float, float]:
    """Wilson's score interval of a share."""
    middle = (share + _Z**2 / (2 * count)) / (1 + _Z**2 / count)
    half = _Z / (1 + _Z**2 / count) * math.sqrt(share * (1 - share) / count + _Z**2 / (4 * count**2))
    return max(0.0, middle - half), min(1.0, middle + half)
