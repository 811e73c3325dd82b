"""What whoever knows nothing of a sample gets: an original has to be better, or its drop means nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from compress.evaluate.label_metrics import constant_f1
from compress.model import Arrays

__all__ = [
    "GUESSES", "Chance", "OfNumbers", "OfPlaces", "OfSets", "OfShuffled", "OfSimilarities", "no_better",
]  # fmt: skip

Array = np.ndarray[Any, Any]
SHUFFLES = 20  # of which none may do as well as the labels themselves: one in 21 by chance
KEPT, KEPT_BYTES = 512, 64 << 20
ALWAYS = "whoever always gives the most frequent labels"
GUESSES = "whoever guesses labels by how frequent they are"
"""The best that looks at nothing, of a mean over classes."""


class Chance(Protocol):
    """Sees the original's answers and the labels, batch after batch."""

    def add(self, outputs: Arrays, labels: Array | None) -> None:
        """Take a batch."""

    def doubt(self, low: float | None, told: str) -> str | None:
        """Why the metric means nothing, in a sentence, or None.

        Args:
            low: lower end of the original's own interval, or its figure itself where that has none.
            told: the metric's value and interval, in words.
        """

    def rate(self) -> float | None:
        """The metric of the best answer that is always the same, or of the best guess; None where nobody knows one."""


class OfSets:
    """Labels that are there or not, several to a sample: the best that is always the same.

    Args:
        constant: the metric of the best such answer: of labels [n, k], 1 or 0 for each that is known.
    """

    def __init__(self, constant: Callable[[Array], float] = constant_f1) -> None:
        self._constant = constant
        self._there: list[Array] = []

    def add(self, outputs: Arrays, labels: Array | None) -> None:  # noqa: ARG002
        """Take a batch."""
        if labels is not None:
            values = np.asarray(labels).reshape(len(labels), -1)
            known = (values == 0) | (values == 1)
            self._there.append(np.where(known, values, -1).astype(np.int8))

    def doubt(self, low: float | None, told: str) -> str | None:
        """See `Chance`."""
        return no_better(low, self.rate(), told, f"{ALWAYS} has {self.rate():.1%}")

    def rate(self) -> float:
        """See `Chance`."""
        return self._constant(np.concatenate(self._there)) if self._there else 0.0


class OfNumbers:
    """Numbers, judged by r2: the mean label has 0; but of a number that never changes it is right, and has all.

    Args:
        constant: the share of the numbers that count and never change among the samples that are judged.
    """

    whoever = "whoever always gives the mean label has 0"

    def __init__(self, constant: float = 0.0) -> None:
        self._constant = constant
        if constant:
            self.whoever = f"whoever always gives the mean label has {constant:.1%}, by numbers that never change in it"

    def add(self, outputs: Arrays, labels: Array | None) -> None:
        """Take a batch."""

    def doubt(self, low: float | None, told: str) -> str | None:
        """See `Chance`."""
        return no_better(low, self._constant, told, self.whoever)

    def rate(self) -> float:
        """See `Chance`."""
        return self._constant


class OfSimilarities(OfNumbers):
    """Similarities of pairs, judged by how their ranks go with the scores': without a relation, that is 0."""

    whoever = "similarities that have nothing to do with the scores have 0"


class OfPlaces:
    """A class for each place: the one that most places have, or of a mean over classes the best guess of all.

    Args:
        axis: of the classes, in the output.
        unsure: why the classes may be elsewhere, a sentence, or "".
        of_classes: whether the metric is a mean over the classes that there are.
    """

    def __init__(self, axis: int, unsure: str = "", *, of_classes: bool = False) -> None:
        self._axis, self._unsure, self._of_classes = axis, unsure, of_classes
        self._places = self._shares = np.zeros(0)  # by class: how many places, and the sum of its share of each sample
        self._samples = 0

    def add(self, outputs: Arrays, labels: Array | None) -> None:
        """Take a batch."""
        classes = next(iter(outputs.values())).shape[self._axis]
        if not len(self._places):
            self._places, self._shares = np.zeros(classes), np.zeros(classes)
        if labels is None:
            return
        ids = np.asarray(labels).reshape(len(labels), -1)
        samples, _ = inside = np.nonzero((ids >= 0) & (ids < classes))
        flat = samples * classes + ids[inside].astype(np.int64)
        counts = np.bincount(flat, minlength=len(ids) * classes).reshape(len(ids), classes)
        known = counts.sum(axis=1, keepdims=True)
        self._samples += len(ids)
        self._places = self._places + counts.sum(axis=0)
        # As the metric has it: a sample of which nothing is known counts as right.
        self._shares = self._shares + np.where(known == 0, 1.0, counts / np.maximum(known, 1)).sum(axis=0)

    def doubt(self, low: float | None, told: str) -> str | None:
        """See `Chance`."""
        if not self._places.any():
            return f"No place's label is a class of the model: its classes go from 0 to {len(self._places) - 1}."
        whoever = GUESSES if self._of_classes else ALWAYS
        return self._unsure or no_better(low, self.rate(), told, f"{whoever} has {self.rate():.1%}")

    def rate(self) -> float:
        """See `Chance`."""
        if not self._places.any():
            return 0.0
        if self._of_classes:
            return _iou_of_guesses(self._places)
        return float(self._shares.max() / self._samples)


def no_better(low: float | None, rate: float, told: str, whoever: str) -> str | None:
    """What to say of an original whose metric is not above what chance has; None where it is, or nobody knows.

    Args:
        low: lower end of its interval.
        rate: what chance has.
        told: the metric's value and interval, in words.
        whoever: has that rate, in words.
    """
    if low is None or low > rate:
        return None
    return f"The original is no better than chance on the evaluation data: {told}, and {whoever}."


def _iou_of_guesses(counts: Array) -> float:
    """The most that the mean of the classes' intersections over unions is for whoever looks at nothing.

    Of classes with the shares p that are given with the shares q, it is the mean of pq/(p + q - pq), which is greatest
    for q that go with p/(1 - p).

    Args:
        counts: places [classes].
    """
    there = counts[counts > 0] / counts.sum()
    if len(there) == 1:
        return 1.0
    given = there / (1 - there)
    given /= given.sum()
    return float(np.mean(there * given / (there + given - there * given)))


class OfShuffled:
    """A metric of the user's own: it has to be better with the labels than with those of other samples.

    A permutation test on the first samples. A metric that looks at no labels can't be told so, and is not doubted.

    Args:
        judge: the metric, from outputs and labels of some samples.
        higher_is_better: of its figures.
    """

    def __init__(self, judge: Callable[[Arrays, Array], float], *, higher_is_better: bool) -> None:
        self._judge, self._sign = judge, 1 if higher_is_better else -1
        self._outputs: list[Arrays] = []
        self._labels: list[Array] = []
        self._room = KEPT_BYTES
        self._samples = 0

    def add(self, outputs: Arrays, labels: Array | None) -> None:
        """Take a batch."""
        size = sum(values.nbytes for values in outputs.values())
        if labels is None or self._samples >= KEPT or size > self._room:
            return
        self._room -= size
        self._samples += len(labels)
        self._outputs.append(outputs)
        self._labels.append(np.asarray(labels))

    def doubt(self, low: float | None, told: str) -> str | None:  # noqa: ARG002
        """See `Chance`."""
        if not self._labels:
            return None
        outputs = {name: np.concatenate([batch[name] for batch in self._outputs]) for name in self._outputs[0]}
        labels = np.concatenate(self._labels)
        random = np.random.default_rng(0)
        orders = [np.arange(len(labels)), *(random.permutation(len(labels)) for _ in range(SHUFFLES))]
        # One that leaves all labels as they are, as with few samples or few labels that differ, tells nothing.
        orders = [orders[0], *(order for order in orders[1:] if (labels[order] != labels).any())]
        if len(orders) == 1:
            return None
        try:
            value, *shuffled = (self._sign * self._judge(outputs, labels[order]) for order in orders)
        except Exception:  # the user's function, on other batches than it was made for; where it counts, it is told
            return None
        if all(other == value for other in shuffled) or value > max(shuffled):
            return None
        return (
            f"The metric is no better with the labels of the evaluation data ({self._sign * value:.4g}) than with the "
            f"same labels shuffled ({self._sign * max(shuffled):.4g}): it says nothing of the original."
        )

    def rate(self) -> None:
        """See `Chance`."""
