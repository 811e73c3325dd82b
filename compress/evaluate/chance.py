"""What whoever knows nothing of a sample gets: an original has to be better, or its drop means nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from compress.evaluate.label_metrics import constant_f1
from compress.model import Arrays

__all__ = ["Chance", "OfNumbers", "OfPlaces", "OfSets", "OfShuffled", "OfSimilarities"]

Array = np.ndarray[Any, Any]
SHUFFLES = 20  # of which none may do as well as the labels themselves: one in 21 by chance
KEPT, KEPT_BYTES = 512, 64 << 20


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
        """The metric of the best answer that is always the same; None where nobody knows one."""


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
        return _doubt(low, told, self.rate())

    def rate(self) -> float:
        """See `Chance`."""
        return self._constant(np.concatenate(self._there)) if self._there else 0.0


class OfNumbers:
    """Numbers, judged by r2: the mean label has 0."""

    whoever = "whoever always gives the mean label has 0"

    def add(self, outputs: Arrays, labels: Array | None) -> None:
        """Take a batch."""

    def doubt(self, low: float | None, told: str) -> str | None:
        """See `Chance`."""
        if low is None or low > 0:
            return None
        return f"The original is no better than chance on the evaluation data: {told}, and {self.whoever}."

    def rate(self) -> float:
        """See `Chance`."""
        return 0.0


class OfSimilarities(OfNumbers):
    """Similarities of pairs, judged by how their ranks go with the scores': without a relation, that is 0."""

    whoever = "similarities that have nothing to do with the scores have 0"


class OfPlaces:
    """A class for each place: the one that most places have.

    Args:
        axis: of the classes, in the output.
        unsure: why the classes may be elsewhere, a sentence, or "".
        of_classes: whether the metric is a mean over the classes that there are, of which one answer hits one.
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
        return self._unsure or _doubt(low, told, self.rate())

    def rate(self) -> float:
        """See `Chance`."""
        if not self._places.any():
            return 0.0
        if self._of_classes:  # of the one class, right over right and wrong, too
            return float(self._places.max() / self._places.sum() / np.count_nonzero(self._places))
        return float(self._shares.max() / self._samples)


def _doubt(low: float | None, told: str, rate: float) -> str | None:
    if low is None or low > rate:
        return None
    return (
        f"The original is no better than chance on the evaluation data: {told}, and whoever always gives the most "
        f"frequent labels has {rate:.1%}."
    )


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
