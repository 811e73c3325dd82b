"""Figures of one class to a sample that are no mean of right and wrong: macro F1, and Matthews' correlation.

Each sample is given the figure and its influence on it, so that the scores' mean is the figure, and intervals of a mean
are its intervals, as `compress.evaluate.tag_metrics` has it.

Source: scikit-learn, `f1_score(average="macro", zero_division=0)` and `matthews_corrcoef`; the latter of more than two
classes is Gorodkin's, Comparing two K-category assignments by a K-category correlation coefficient, 2004.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from compress.console.wording import counted
from compress.evaluate.chance import GUESSES, no_better
from compress.evaluate.class_outcomes import F1Outcomes, MccOutcomes
from compress.evaluate.constant import prefers
from compress.evaluate.influences import Influences
from compress.model import Arrays

__all__ = ["FIGURES", "ClassFigure", "f1_macro_scores", "mcc_scores"]

Array = np.ndarray[Any, Any]


def f1_macro_scores(given: Array, there: Array, classes: int) -> Array:
    """Scores [n] whose mean is the mean F1 of the classes that any sample has, or is given.

    Args:
        given: int64 [n], the class that is given; `classes` where there is none.
        there: int64 [n], the label, a class.
        classes: how many there are.
    """
    sizes = np.bincount(given, minlength=classes + 1)[:classes] + np.bincount(there, minlength=classes)
    found = sizes > 0
    each = np.where(found, 1 / np.maximum(sizes, 1), 0.0)
    f1 = 2 * np.bincount(there[given == there], minlength=classes) * each
    share = np.append(f1 * each, 0.0)  # of a class that is none, nothing
    influence = 2 * (given == there) * each[there] - share[given] - share[there]
    scores = f1[found].mean() + len(given) / found.sum() * influence
    return Influences.of(scores, F1Outcomes(given, there, classes))


def mcc_scores(given: Array, there: Array, classes: int) -> Array:
    """Scores [n] whose mean is Matthews' correlation; zeros where the answer or the label is always the same.

    Args:
        given, there, classes: see `f1_macro_scores`.
    """
    p, t = (np.bincount(each, minlength=classes + 1) / len(given) for each in (given, there))
    right = given == there
    both, first, second = right.mean() - p @ t, 1 - p @ p, 1 - t @ t
    if min(first, second) <= 1 / len(given) ** 2:  # the least of one that varies is more
        return np.zeros(len(given))
    value = both / np.sqrt(first * second)
    moved = right - right.mean() - (t[given] + p[there] - 2 * p @ t)
    spread = (p[given] - p @ p) / first + (t[there] - t @ t) / second
    scores = value + moved / np.sqrt(first * second) + value * spread
    return Influences.of(scores, MccOutcomes(given, there, classes))


def _f1_of_guesses(there: Array, classes: int) -> float:
    """The most that the macro F1 is for whoever looks at nothing.

    Of classes with the shares p that are given with the shares q, it is the mean of 2pq/(p + q), which is greatest for
    q = p: more than for whoever always gives the most frequent one.
    """
    return float(1 / np.count_nonzero(np.bincount(there, minlength=classes)))


Figure = tuple[Callable[[Array, Array, int], Array], Callable[[Array, int], float]]
FIGURES: Mapping[str, Figure] = {"f1_macro": (f1_macro_scores, _f1_of_guesses), "mcc": (mcc_scores, lambda *_: 0.0)}


class ClassFigure:
    """One of `FIGURES`, of all samples. It serves as `Accumulator` and as `compress.evaluate.chance.Chance`.

    An answer of logits that are no numbers, or all the same, is none; so is a sample whose label is no class.

    Args:
        name: of `FIGURES`.
        output: that is judged, [n, classes]; None is the first.
    """

    def __init__(self, name: str, output: str | None = None) -> None:
        self._name, self._output = name, output
        self._given, self._there = list[Array](), list[Array]()
        self._classes = self._outside = 0

    def update(self, outputs: Arrays, labels: Array | None) -> None:
        """Take a batch."""
        logits = next(iter(outputs.values())) if self._output is None else outputs[self._output]
        self._classes = logits.shape[1]
        wanted = np.asarray(labels).astype(np.int64)
        outside = (wanted < 0) | (wanted >= self._classes)
        self._outside += int(outside.sum())
        self._given.append(np.where(prefers(logits) & ~outside, logits.argmax(axis=1), self._classes))
        self._there.append(np.where(outside, 0, wanted))

    def compute(self) -> Array:
        """Scores [n]."""
        scores, _ = FIGURES[self._name]
        return scores(np.concatenate(self._given), np.concatenate(self._there), self._classes)

    def add(self, outputs: Arrays, labels: Array | None) -> None:
        """Take a batch: see `compress.evaluate.chance.Chance`."""
        if labels is not None:
            self.update(outputs, labels)

    def doubt(self, low: float | None, told: str) -> str | None:
        """See `compress.evaluate.chance.Chance`."""
        if self._outside:
            of = counted(sum(map(len, self._there)), "labels")
            return f"{self._outside:,} of {of} are no class of the model: its classes go from 0 to {self._classes - 1}."
        return no_better(low, self.rate(), told, f"{GUESSES} has {self.rate():.1%}")

    def rate(self) -> float:
        """See `compress.evaluate.chance.Chance`."""
        _, of_guesses = FIGURES[self._name]
        return of_guesses(np.concatenate(self._there), self._classes) if self._there else 0.0
