"""Scores of figures that are no mean, as F1 is none: each is the figure and its sample's influence on it.

Their mean is the figure, and intervals of a mean are its intervals, as far as the errors were seen. Of a class of few
samples none may have been: then no score tells that there are any, and what such errors would move the figure by is
told beside the scores. Of errors of which none was seen as many may be as Wilson's interval of their share ends at.
"""

from __future__ import annotations

from typing import Any, Protocol, Self

import numpy as np
from scipy.special import ndtri

__all__ = ["SEEN", "Influences", "Outcomes", "outcomes_of", "unseen", "wilson"]

Array = np.ndarray[Any, Any]
SEEN = 5  # errors: fewer are hardly seen by a resampling


class Outcomes(Protocol):
    """What was right and wrong, by what few samples have."""

    @property
    def bias(self) -> float:
        """How far the figure is above that of very many samples, on average."""

    def fall(self, confidence: float, before: Any | None = None) -> float:
        """How far the figure may be lower, by errors of which few or none were seen.

        Args:
            confidence: above 0 and below 1, two-sided.
            before: outcomes of another model on the same samples, whose errors are no new ones.
        """

    def rise(self, confidence: float) -> float:
        """How far it may be higher, by right answers of which few or none were seen."""

    def spread(self, confidence: float, before: Any | None = None) -> tuple[float, float]:
        """How far below and above the figure, or what two are apart by, the ends are at least: by errors as counts."""


class Influences(np.ndarray[Any, Any]):
    """Scores [n] and their outcomes; what is computed of them is scores alone."""

    outcomes: Outcomes | None = None

    @classmethod
    def of(cls, scores: Array, outcomes: Outcomes) -> Self:
        """These scores with their outcomes."""
        found = np.asarray(scores, np.float64).view(cls)
        found.outcomes = outcomes
        return found


def outcomes_of(scores: Array) -> Outcomes | None:
    """What stands beside scores, where they are influences."""
    return scores.outcomes if isinstance(scores, Influences) else None


def unseen(counts: Array, of: Array, confidence: float) -> Array:
    """How many more there may be of what was seen so often among so many: by Wilson's interval, where it was seldom."""
    return np.asarray(np.where(counts < SEEN, wilson(counts, of, confidence)[1] - counts, 0.0))


def wilson(counts: Array, of: Array, confidence: float) -> tuple[Array, Array]:
    """Both ends of Wilson's intervals, as counts, of what was seen so often among so many; of none, 0."""
    squared = float(ndtri((1 + confidence) / 2)) ** 2
    share, many = counts / np.maximum(of, 1), np.maximum(of, 1) / squared
    apart = np.sqrt(share * (1 - share) / many + 0.25 / many**2)
    low, high = ((share + 0.5 / many + side * apart) / (1 + 1 / many) for side in (-1, 1))
    return np.asarray(low * of), np.asarray(high * of)
