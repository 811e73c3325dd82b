"""Spearman's correlation of the similarity of two embeddings with what people say of it, as a score for each pair.

The scores' mean is the correlation, and each is off it by the pair's influence on it, so that intervals of a mean are
intervals of the correlation: Croux & Dehon, Influence functions of the Spearman and Kendall correlation measures,
Statistical Methods & Applications 19, 2010, section 3.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from compress.evaluate.vectors import cosine_similarity

__all__ = ["rank_scores", "similarity_scores"]

Array = np.ndarray[Any, Any]
DECIMALS = 6  # of a cosine


def similarity_scores(output: str) -> Callable[[dict[str, Array], Array | None], Array]:
    """What judges an output [2 n, width], of which each two rows are a pair, by labels [2 n]: scores [n].

    Cosines count to the sixth decimal: those of equal texts are 1 but for float32's rounding, and others of one pair
    that comes again are the same but for it, and which of them is above the other says nothing.
    """

    def over_all(outputs: dict[str, Array], labels: Array | None) -> Array:
        vectors = outputs[output]
        cosines = np.round(cosine_similarity(vectors[::2], vectors[1::2]), DECIMALS)
        return rank_scores(cosines, np.asarray(labels)[::2])

    return over_all


def rank_scores(x: Array, y: Array) -> Array:
    """Scores [n] whose mean is Spearman's correlation of x [n] and y [n]; zeros where one of them never changes."""
    (u, above_u), (v, above_v) = _ranks(x), _ranks(y)
    spread = float(u.std() * v.std())
    if not spread:
        return np.zeros(len(u))
    correlation = float(((u - u.mean()) * (v - v.mean())).mean()) / spread
    # A pair counts by where it stands, and by moving the ranks of those above it; with ties, the variances move, too.
    both, first, second = u * v + above_u(v) + above_v(u), u * u + 2 * above_u(u), v * v + 2 * above_v(v)
    variances = (first - first.mean()) / u.var() + (second - second.mean()) / v.var()
    return np.asarray(correlation + (both - both.mean()) / spread - correlation / 2 * variances)


def _ranks(values: Array) -> tuple[Array, Callable[[Array], Array]]:
    """Ranks from 0 to 1, of equal values their mean; and what sums others above each, as a mean over all [n]."""
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - counts / 2) / len(values)

    def above(others: Array) -> Array:
        sums = np.bincount(places, others)
        return np.asarray((others.sum() - np.cumsum(sums) + sums / 2)[places] / len(values))

    return ranks[places], above
