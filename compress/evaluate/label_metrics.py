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
]

Array = np.ndarray[Any, Any]
COUNTS = 256  # of most frequent labels that are tried, where there are more
ROUNDS = 4  # in which labels go and come
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
    """What a good choice of labels gets that is given for every sample: the best known one.

    The most frequent labels are taken, 0, 1 or more of them, by the samples that have them and by the share of those of
    which it is known; then labels go and come one by one, as long as that helps.

    Args:
        there: 1 for each label [n, k] that a sample has, 0 for each that it has not; others are not known.
    """
    known, there = _known(there), there == 1
    best, chosen = 0.0, np.zeros(there.shape[1], bool)
    for often in (there.sum(0), there.sum(0) / np.maximum(known.sum(0), 1)):
        order = np.argsort(-often, kind="stable")
        for count in np.unique(np.linspace(0, there.shape[1], min(there.shape[1], COUNTS) + 1).astype(np.int64)):
            given = np.zeros(there.shape[1], bool)
            given[order[:count]] = True
            if (found := float(_f1(given & known, there).mean())) > best:
                best, chosen = found, given
    both, sizes = (chosen & there).sum(1), (chosen & known).sum(1) + there.sum(1)
    for _ in range(ROUNDS):
        before = best
        for label in range(min(there.shape[1], COUNTS)):
            sign = -1 if chosen[label] else 1
            more, larger = both + sign * there[:, label], sizes + sign * known[:, label]
            found = float(np.where(larger == 0, 1.0, 2 * more / np.maximum(larger, 1)).mean())
            if found > best:
                best, both, sizes = found, more, larger
                chosen[label] = not chosen[label]
        if best == before:
            break
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

    A sample counts for a label by the share that it is of those which are known of the sample, as in the metric.

    Args:
        there: see `constant_f1`.
    """
    known, there = _known(there), there == 1
    weights = known / np.maximum(known.sum(axis=1, keepdims=True), 1)
    given = 2 * (weights * there).sum(axis=0) > weights.sum(axis=0)
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


def r2_of(spread: Array) -> Scorer:
    """Each sample's part [n] of the coefficient of determination, which is their mean: 1 - squared error / variance.

    Of several numbers it is the mean over them, as scikit-learn's `r2_score` gives it, without those that never change.

    Args:
        spread: of the labels, see `compress.evaluate.label_moments.Moments.spread`.
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
