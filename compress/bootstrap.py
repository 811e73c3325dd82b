"""Confidence intervals by resampling the evaluation samples.

Efron & Tibshirani, An Introduction to the Bootstrap, 1993, chapter 13 (percentile intervals).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Interval", "mean_interval"]

RESAMPLES = 1000
CHUNK = 4_000_000  # indices in memory at a time


@dataclass(frozen=True)
class Interval:
    """A mean with its 95% confidence interval."""

    value: float
    low: float
    high: float

    def times(self, factor: float) -> Interval:
        """In another unit; a negative factor turns the ends round."""
        low, high = sorted((self.low * factor + 0.0, self.high * factor + 0.0))  # never -0
        return Interval(self.value * factor + 0.0, low, high)


def mean_interval(scores: np.ndarray[Any, Any], *, seed: int = 0) -> Interval:
    """The mean of scores [n] and the middle 95% of the means of samples drawn from them with replacement.

    For a difference of two models, give the differences sample by sample: pairing takes out what makes a sample hard
    for both.
    """
    values = np.asarray(scores, np.float64)
    rng = np.random.default_rng(seed)
    rows = max(1, CHUNK // len(values))
    means = np.concatenate(
        [
            values[rng.integers(0, len(values), (min(rows, RESAMPLES - start), len(values)))].mean(1)
            for start in range(0, RESAMPLES, rows)
        ]
    )
    low, high = np.percentile(means, (2.5, 97.5))
    return Interval(float(values.mean()), float(low), float(high))
