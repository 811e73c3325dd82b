"""Scores against labels that are more than a class for each sample: several at once, or one for each place of a map."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = [
    "IntersectionOverUnion",
    "binary_accuracy_of",
    "constant_accuracy",
    "constant_f1",
    "f1_of",
    "pixel_accuracy_of",
    "r2_of",
    "spread_of",
]

Array = np.ndarray[Any, Any]
COUNTS = 256  # of most frequent labels that are tried, where there are more
Scorer = Callable[[dict[str, Array], dict[str, Array], Array | None], Array]


def f1_of(threshold: float) -> Scorer:
    """The F1 score of each sample's set of labels, [n]; 1 where there are none and none are given.

    A label that is neither 0 nor 1 is not known, and counts for nothing.

    Their mean is scikit-learn's average="samples" (with zero_division=1), of which an interval can be told; not the
    mean over labels (macro), nor the F1 of all answers together (micro).

    Args:
        threshold: of an output, above which a label is given: 0 for logits, 0.5 for probabilities.
    """

    def per_sample(outputs: dict[str, Array], _expected: dict[str, Array], labels: Array | None) -> Array:
        values = next(iter(outputs.values()))
        wanted = np.asarray(labels).reshape(len(values), -1)
        scores = _f1((values > threshold).reshape(len(values), -1) & _known(wanted), wanted == 1)
        return np.where(np.isnan(values.reshape(len(values), -1)).any(axis=1), 0.0, scores)

    return per_sample


def _known(labels: Array) -> Array:
    """Which labels are 0 or 1."""
    return np.asarray((labels == 0) | (labels == 1))


def _f1(given: Array, there: Array) -> Array:
    both, sizes = (given & there).sum(1), given.sum(1) + there.sum(1)
    return np.asarray(np.where(sizes == 0, 1.0, 2 * both / np.maximum(sizes, 1)))


def constant_f1(there: Array) -> float:
    """What the best of the most frequent labels, 0, 1 or more of them, get when they are given for every sample.

    Args:
        there: 1 for each label [n, k] that a sample has, 0 for each that it has not; others are not known.
    """
    known, there = _known(there), there == 1
    order = np.argsort(-there.sum(0), kind="stable")
    best = 0.0
    for count in np.unique(np.linspace(0, there.shape[1], min(there.shape[1], COUNTS) + 1).astype(np.int64)):
        given = np.zeros(there.shape[1], bool)
        given[order[:count]] = True
        best = max(best, float(_f1(given & known, there).mean()))
    return best


def binary_accuracy_of(threshold: float) -> Scorer:
    """The share of each sample's known labels [n] that are right, given or not; 0 where an output is no number.

    A label that is neither 0 nor 1 is not known, and counts for nothing; of a sample without one that is: 1.

    Args:
        threshold: of an output, above which a label is given: 0 for logits, 0.5 for probabilities.
    """

    def per_sample(outputs: dict[str, Array], _expected: dict[str, Array], labels: Array | None) -> Array:
        values = next(iter(outputs.values()))
        values = values.reshape(len(values), -1)
        wanted = np.asarray(labels).reshape(len(values), -1)
        right = _right((values > threshold) == (wanted == 1), _known(wanted))
        return np.where(np.isnan(values).any(axis=1), 0.0, right)

    return per_sample


def _right(right: Array, known: Array) -> Array:
    """The share [n] of the labels [n, k] that are known which are right; 1 where none is."""
    counts = known.sum(axis=1)
    return np.asarray(np.where(counts == 0, 1.0, (right & known).sum(axis=1) / np.maximum(counts, 1)))


def constant_accuracy(there: Array) -> float:
    """The share of labels that is right where each is always given that most samples have, and else never.

    Args:
        there: see `constant_f1`.
    """
    known, there = _known(there), there == 1
    given = 2 * there.sum(axis=0) > known.sum(axis=0)
    return float(_right(given == there, known).mean())


def pixel_accuracy_of(axis: int) -> Scorer:
    """The share of each sample's places [n] whose largest logit is that of the label.

    A place counts if its label is a class; of a sample without one, nothing is known: 1. Places of which the logits are
    no numbers, or all the same, are wrong.

    Args:
        axis: of the classes, in the output.
    """

    def per_sample(outputs: dict[str, Array], _expected: dict[str, Array], labels: Array | None) -> Array:
        right, there = _places(next(iter(outputs.values())), np.asarray(labels), axis)
        counts = there.reshape(len(there), -1).sum(1)
        share = (right & there).reshape(len(there), -1).sum(1) / np.maximum(counts, 1)
        return np.asarray(np.where(counts == 0, 1.0, share))

    return per_sample


def _places(values: Array, labels: Array, axis: int) -> tuple[Array, Array]:
    """Where the answer is the label, and where the label is a class."""
    there = (labels >= 0) & (labels < values.shape[axis])
    logits = np.moveaxis(values, axis, -1)
    return (logits.argmax(-1) == labels) & _prefers(logits), there


def _prefers(logits: Array) -> Array:
    """Where there is an answer: all logits, along the last axis, are numbers, and not all the same."""
    return np.asarray(~np.isnan(logits).any(-1) & (logits != logits[..., :1]).any(-1))


def spread_of(labels: Array) -> Array | None:
    """The variance of numbers [n, …] over the samples; None where they are all the same.

    Returns:
        float64 [k] for k numbers to a sample, NaN for one that never changes; of a map or a sequence, [1] over all of
        its places.
    """
    values = np.asarray(labels, np.float64)
    values = values.reshape(len(values), -1) if values.ndim <= 2 else values.reshape(-1, 1)
    found = np.where(np.ptp(values, axis=0) > 0, values.var(axis=0), np.nan)
    return found if np.isfinite(found).any() else None


def r2_of(spread: Array) -> Scorer:
    """Each sample's part [n] of the coefficient of determination, which is their mean: 1 - squared error / variance.

    Of several numbers it is the mean over them, as scikit-learn's `r2_score` gives it, without those that never change.

    Args:
        spread: of the labels, see `spread_of`.
    """
    told = np.isfinite(spread)

    def per_sample(outputs: dict[str, Array], _expected: dict[str, Array], labels: Array | None) -> Array:
        values = next(iter(outputs.values())).astype(np.float64)
        with np.errstate(over="ignore", invalid="ignore"):
            wanted = np.asarray(labels, np.float64).reshape(len(values), -1)
            squares = np.square(values.reshape(len(values), -1) - wanted)
            shares = squares[:, told] / spread[told] if len(spread) > 1 else squares / spread
            scores = 1 - shares.mean(1)
        return np.asarray(np.where(np.isnan(scores), -np.inf, scores))

    return per_sample


class IntersectionOverUnion:
    """Mean over the classes that there are of places right over places that are, or are taken for, of the class.

    Places of which the logits are no numbers, or all the same, are taken for no class.

    Args:
        axis: of the classes, in the output.
        output: that is judged; None is the first.
    """

    def __init__(self, axis: int, output: str | None = None) -> None:
        self._axis, self._output = axis, output
        self._counts: Array | None = None

    def update(self, outputs: dict[str, Array], labels: Array | None) -> None:
        """Take a batch."""
        values = next(iter(outputs.values())) if self._output is None else outputs[self._output]
        ids, classes = np.asarray(labels), values.shape[self._axis]
        if self._counts is None:
            self._counts = np.zeros((classes, classes + 1), np.int64)  # the last for places without an answer
        there = (ids >= 0) & (ids < classes)
        logits = np.moveaxis(values, self._axis, -1)
        given = np.where(_prefers(logits), logits.argmax(-1), classes)
        pairs = ids[there].astype(np.int64) * (classes + 1) + given[there]
        self._counts += np.bincount(pairs, minlength=self._counts.size).reshape(self._counts.shape)

    def compute(self) -> float:
        """0 to 1."""
        if self._counts is None:
            return float("nan")
        given = self._counts[:, :-1]
        right = np.diag(given)
        union = given.sum(0) + self._counts.sum(1) - right
        return float((right[union > 0] / union[union > 0]).mean()) if (union > 0).any() else float("nan")
