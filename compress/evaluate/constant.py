"""What the best answer that is always the same has by a metric that looks at the original's outputs.

The counterpart of what `compress.evaluate.chance` has by labels: a network that looks at nothing is such an answer, so
that a model which is no better has kept nothing. The best is known from sums over the samples;
outputs are not kept.
"""

from __future__ import annotations

from collections import Counter
from hashlib import blake2b
from typing import Any, Protocol

import numpy as np

from compress.evaluate.vectors import rows, scaled
from compress.model import Arrays
from compress.model.apart import without_fills

__all__ = ["Constant", "OfAnswers", "OfDirections", "OfMeans", "prefers"]

Array = np.ndarray[Any, Any]


class Constant(Protocol):
    """Sees the original's judged outputs, batch after batch."""

    def add(self, outputs: Arrays) -> None:
        """Take a batch, samples first."""

    def score(self) -> float | None:
        """The metric of the best answer; None where no one answer fits all samples, as outputs of several sizes."""


def prefers(logits: Array) -> Array:
    """Which samples [n] have an answer: all logits [n, k] are numbers, and not all the same."""
    return np.asarray(~np.isnan(logits).any(axis=1) & (logits != logits[:, :1]).any(axis=1))


class OfAnswers:
    """Agreement: the answer that most samples have, a class or whole numbers."""

    def __init__(self) -> None:
        self._answers: Counter[bytes | int] = Counter()
        self._samples = 0

    def add(self, outputs: Arrays) -> None:
        """See `Constant`."""
        values = next(iter(outputs.values()))
        self._samples += len(values)
        if values.dtype.kind == "f":
            self._answers.update(values.argmax(1)[prefers(values)].tolist())
        else:
            told = (row.tobytes() if row.dtype.kind in "iub" else repr(row.tolist()).encode() for row in values)
            self._answers.update(blake2b(each).digest() for each in told)

    def score(self) -> float | None:
        """See `Constant`."""
        return max(self._answers.values(), default=0) / self._samples if self._samples else None


class _Sums:
    """By output, sums over the samples; none that fit where outputs of several sizes are added."""

    def __init__(self) -> None:
        self.of: dict[str, list[Array]] = {}
        self.samples = 0
        self.fits = True

    def add(self, name: str, *sums: Array) -> None:
        known = self.of.setdefault(name, [np.zeros_like(each) for each in sums])
        self.fits = self.fits and all(a.shape == b.shape for a, b in zip(known, sums, strict=True))
        if self.fits:
            self.of[name] = [a + b for a, b in zip(known, sums, strict=True)]


class OfDirections:
    """Cosine: the mean of the outputs' directions, whose length is the mean cosine to them.

    The lower one of the cosine of all values and of that of what a mask leaves counts, so that no answer is better than
    the best by either.
    """

    def __init__(self) -> None:
        self._sums = _Sums()

    def add(self, outputs: Arrays) -> None:
        """See `Constant`."""
        self._sums.samples += len(next(iter(outputs.values())))
        for name, values in outputs.items():
            vectors = rows(np.asarray(values, np.float64))
            finite = np.asarray(np.isfinite(vectors).all(axis=1))
            rest, _ = without_fills(vectors, vectors, alone=True)
            whole, left = (_directions(np.where(finite[:, None], each, 0.0)) for each in (vectors, rest))
            still = np.array([finite.sum() - whole.any(axis=1).sum(), len(finite) - finite.sum()], np.float64)
            self._sums.add(name, whole.sum(axis=0), left.sum(axis=0), still)

    def score(self) -> float | None:
        """See `Constant`."""
        samples = self._sums.samples
        if not samples or not self._sums.fits:
            return None
        best = []
        for whole, left, (zeros, endless) in self._sums.of.values():
            cosines = min(float(np.linalg.norm(whole)), float(np.linalg.norm(left)))
            best.append((max(cosines, float(zeros)) - float(endless)) / samples)
        return float(np.mean(best))


def _directions(vectors: Array) -> Array:
    vectors = scaled(vectors)
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.asarray(vectors / np.where(norms == 0, 1.0, norms))


class OfMeans:
    """Mean squared error: the mean output, whose error is the outputs' variance."""

    def __init__(self) -> None:
        self._sums = _Sums()
        self._first: dict[str, Array] = {}

    def add(self, outputs: Arrays) -> None:
        """See `Constant`."""
        self._sums.samples += len(next(iter(outputs.values())))
        for name, values in outputs.items():
            vectors = rows(np.asarray(values, np.float64))
            vectors, _ = without_fills(vectors, vectors)  # which the metric has as 0 where an answer has them, too
            first = self._first.setdefault(name, vectors[:1].copy())  # what all share cancels before it is squared
            if vectors.shape[1] != first.shape[1]:
                self._sums.fits = False
                continue
            with np.errstate(invalid="ignore", over="ignore"):
                beside = vectors - first
                self._sums.add(name, beside.sum(axis=0), np.square(beside).sum(axis=0))

    def score(self) -> float | None:
        """See `Constant`."""
        samples = self._sums.samples
        if not samples or not self._sums.fits:
            return None
        with np.errstate(invalid="ignore", over="ignore"):
            variances = [
                float((squares / samples - np.square(total / samples)).mean())
                for total, squares in self._sums.of.values()
            ]
        found = float(np.mean(variances))
        return max(found, 0.0) if np.isfinite(found) else None
