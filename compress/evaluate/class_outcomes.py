"""What errors that were not seen would do to figures of one class to a sample: macro F1, and Matthews' correlation.

Where a class has few samples, or few of the others could be taken for it, none of its errors may have been seen: that
is worked out for each class, with the other that such an error hits hardest, and the largest fall counts.

Where many classes have a few samples each, an influence tells too little of what an error does: of a class of one
sample that is missed the F1 is 0, and what is 0 has next to no slope. So errors are counted, too, over the classes that
they hit hardest, be it one, some or all of them, and the ends are no nearer than Wilson's of their share.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from compress.evaluate.influences import unseen, wilson

__all__ = ["F1Outcomes", "MccOutcomes"]

Array = np.ndarray[Any, Any]


class _Outcomes:
    """Of both figures.

    Args:
        given, there, classes: see `compress.evaluate.class_metrics.f1_macro_scores`.
    """

    def __init__(self, given: Array, there: Array, classes: int) -> None:
        self.given, self.there, self.classes = given, there, classes
        self.right = given == there
        self.taken, self.sizes = (self._counts(each) for each in (given, there))
        self.hits = self._counts(there[self.right])

    def _counts(self, which: Array) -> Array:
        return np.bincount(which, minlength=self.classes + 1)[: self.classes]

    def fall(self, confidence: float, before: _Outcomes | None = None) -> float:
        """See `compress.evaluate.influences.Outcomes`."""
        found = np.flatnonzero(self.taken + self.sizes)
        if len(found) < 2:
            return float(unseen(np.zeros(1), np.full(1, len(self.there)), confidence)[0]) / len(self.there)
        wrong = ~self.right if before is None else ~self.right & (self.given != before.given)
        lost = wrong if before is None else wrong & before.right
        missed = unseen(self._counts(self.there[lost]), self.sizes, confidence)[found]
        mistaken = unseen(self._counts(self.given[wrong]), len(self.there) - self.sizes, confidence)[found]
        of, to = self._slopes()
        # Taken for a class are samples of what is hit hardest, and of what has most: the former may have too few.
        others = (_least_but_itself(np.where(self.hits > 0, each, np.inf), found) for each in (of, -self.hits))
        falls = [
            self._fallen(missed, found, _least_but_itself(to, found)),
            *(self._fallen(mistaken, other, found) for other in others),
        ]
        return max(0.0, float(np.max(falls)))

    def _fallen(self, count: Array, label: Array, answer: Array) -> Array:
        return self.figure - self._moved(np.minimum(count, self.hits[label]), label, answer)

    def spread(self, confidence: float, before: _Outcomes | None = None) -> tuple[float, float]:
        """See `compress.evaluate.influences.Outcomes`: over the classes of which an error counts most."""
        of, to = self._slopes()
        harm = np.maximum(-(of + to), 0.0)
        there = np.flatnonzero(self.sizes)
        order = there[np.argsort(-harm[there], kind="stable")]
        wrong, gained = ~self.right, np.zeros_like(self.right)
        if before is not None:
            wrong, gained = wrong & before.right, self.right & ~before.right
        counts = self.sizes, self.hits, self._counts(self.there[wrong]), self._counts(self.there[gained])
        # Two classes at least: what one loses another is given, and one alone is what `fall` tells.
        sizes, hits, lost, more = (np.cumsum(each[order])[1:] for each in counts)
        if not len(sizes):
            return 0.0, 0.0
        (few, many), (least, most) = (wilson(each, sizes, confidence) for each in (lost, more))
        down = np.minimum(np.hypot(many - lost, more - least), hits)
        up = np.hypot(lost - few, 0.0 if before is None else most - more)
        return self._each(harm, self.hits, order, down), self._each(harm, self.sizes, order, up)

    @staticmethod
    def _each(harm: Array, weights: Array, order: Array, count: Array) -> float:
        """The most that so many errors come to, spread over the first two of the classes in order, or three, or …"""
        total, of = (np.cumsum(each[order])[1:] for each in (harm * weights, weights))
        return float(np.max(count * total / np.maximum(of, 1)))

    def rise(self, confidence: float) -> float:
        """See `compress.evaluate.influences.Outcomes`."""
        missed = self.sizes - self.hits
        more = np.minimum(unseen(self.hits, self.sizes, confidence), missed)
        of, to = self._slopes()
        wrong = ~self.right
        gains = np.bincount(self.there[wrong], -(of[self.there] + np.append(to, 0.0)[self.given])[wrong], self.classes)
        return max(0.0, float(np.max(more * gains / np.maximum(missed, 1))))

    @property
    def figure(self) -> float:
        """The figure itself."""
        raise NotImplementedError

    def _slopes(self) -> tuple[Array, Array]:
        """What the figure changes by if one right answer of a class gets wrong: [classes] by label, and by answer."""
        raise NotImplementedError

    def _moved(self, count: Array, label: Array, answer: Array) -> Array:
        """The figure if so many right answers of a label become another answer."""
        raise NotImplementedError


def _least_but_itself(values: Array, among: Array) -> Array:
    """For each of these classes, the other one that has the least value."""
    first, second = among[np.argsort(values[among], kind="stable")[:2]]
    return np.asarray(np.where(among == first, second, first))


class F1Outcomes(_Outcomes):
    """Of macro F1."""

    @functools.cached_property
    def _f1(self) -> Array:
        return np.asarray(2 * self.hits / np.maximum(self.taken + self.sizes, 1))

    @functools.cached_property
    def _found(self) -> int:
        return int(np.count_nonzero(self.taken + self.sizes))

    @functools.cached_property
    def figure(self) -> float:
        """The figure itself."""
        return float(self._f1.sum() / self._found)

    @functools.cached_property
    def bias(self) -> float:
        """By the jackknife: Efron & Tibshirani, An Introduction to the Bootstrap, 1993, section 10.5."""
        both, f1, count = self.taken + self.sizes, self._f1, len(self.there)
        if count < 2 or self._found < 2:
            return 0.0

        def without(hits: Array, size: Array) -> tuple[Array, Array]:
            """The F1 of a class, and whether it is still there."""
            return 2 * hits / np.maximum(size, 1), size > 0

        right, wrong = self.there[self.right], ~self.right
        total, gone = np.full(count, f1.sum()), np.zeros(count)
        left, there = without(self.hits[right] - 1, both[right] - 2)
        total[self.right] += left - f1[right]
        gone[self.right] += ~there
        answers = self.given < self.classes
        for which, where in ((self.there, wrong), (self.given, wrong & answers)):
            each = which[where]
            left, there = without(self.hits[each], both[each] - 1)
            total[where] += left - f1[each]
            gone[where] += ~there
        alone = total / np.maximum(self._found - gone, 1)
        return float((count - 1) * (alone.mean() - self.figure))

    def _slopes(self) -> tuple[Array, Array]:
        each = 1 / np.maximum(self.taken + self.sizes, 1) / self._found
        return (self._f1 - 2) * each, -self._f1 * each

    def _moved(self, count: Array, label: Array, answer: Array) -> Array:
        both = self.taken + self.sizes
        of = 2 * (self.hits[label] - count) / np.maximum(both[label] - count, 1)
        to = 2 * self.hits[answer] / np.maximum(both[answer] + count, 1)
        return np.asarray(self.figure + (of - self._f1[label] + to - self._f1[answer]) / self._found)


class MccOutcomes(_Outcomes):
    """Of Matthews' correlation."""

    bias = 0.0  # next to none

    @functools.cached_property
    def figure(self) -> float:
        """The figure itself."""
        return float(self._moved(np.zeros(1), np.zeros(1, np.int64), np.zeros(1, np.int64))[0])

    def _shares(self) -> tuple[Array, Array]:
        return self.taken / len(self.there), self.sizes / len(self.there)

    def _slopes(self) -> tuple[Array, Array]:
        p, t = self._shares()
        first, second = self._varied(p, t)
        root, count = np.sqrt(first * second), len(self.there)
        of = (t - 1) / root - self.figure * p / first
        to = -t / root + self.figure * p / first
        return of / count, to / count

    def _varied(self, p: Array, t: Array) -> tuple[float, float]:
        """How much the answers and the labels vary; those of one class alone a little, for what is divided by it."""
        least = 1 / len(self.there) ** 2
        return max(float(1 - self._nothing(p) - p @ p), least), max(float(1 - t @ t), least)

    def _nothing(self, p: Array) -> float:
        """The squared share of what is no answer, as a class of its own."""
        return float((1 - p.sum()) ** 2)

    def _moved(self, count: Array, label: Array, answer: Array) -> Array:
        p, t = self._shares()
        share, (first, second) = count / len(self.there), self._varied(p, t)
        apart = np.where(label == answer, 0.0, share)
        first = first + 2 * apart * (p[label] - p[answer]) - 2 * apart**2
        right = self.right.mean() - apart
        both = right - (p @ t - apart * (t[label] - t[answer]))
        return np.asarray(both / np.sqrt(np.maximum(first, 1 / len(self.there) ** 2) * second))
