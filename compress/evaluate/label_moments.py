"""Mean and variance of labels that are numbers, some of them at a time: they are often mapped, and a copy is large."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from weakref import ref

import numpy as np

from compress.data.dataset import Dataset
from compress.data.sources import Fetched

__all__ = ["KnownMoments", "Moments", "in_blocks", "moments_of"]

Array = np.ndarray[Any, Any]
ELEMENTS = 1 << 18  # of labels that are looked at together
BATCH = 256  # samples that are made together


@dataclass(frozen=True)
class Moments:
    """Of k numbers to a sample, over the samples; of a map or a sequence, of all of its places as one number.

    Attributes:
        samples: how many.
        mean, variance: float64 [k]; not finite where labels are not, or are too large to be squared.
        changes: bool [k]: whether it is not the same everywhere.
    """

    samples: int
    mean: Array
    variance: Array
    changes: Array

    @property
    def spread(self) -> Array | None:
        """The variance, NaN for a number that never changes, or spreads too far to say; None where all do."""
        told = self.changes & (self.variance > 0) & np.isfinite(self.variance)
        return np.where(told, self.variance, np.nan) if told.any() else None


class KnownMoments:
    """Those of datasets that have labels, as long as these live: they are counted once, and keep no dataset.

    Args:
        data: the first.
        moments: of its labels.
    """

    def __init__(self, data: Dataset, moments: Moments) -> None:
        self._known = [(ref(data), moments)]

    def of(self, data: Dataset) -> Moments:
        """Of this dataset's labels; of a torch Dataset every sample is made for them."""
        self._known = [(held, moments) for held, moments in self._known if held() is not None]
        found = next((moments for held, moments in self._known if held() is data), None)
        if found is None:
            found = moments_of(_labels_of(data))
            self._known.append((ref(data), found))
        return found


def _numbers(labels: Array) -> Array:
    """Labels [n, …] as float64 [n, k], those of maps and sequences as [n · places, 1]."""
    values = np.asarray(labels, np.float64)
    return values.reshape(len(values), -1) if values.ndim <= 2 else values.reshape(-1, 1)


def _labels_of(data: Dataset) -> Iterator[Array]:
    """The labels of data that has some, in their order; of a torch Dataset by making its samples once."""
    if isinstance(data.labels, Fetched):
        yield from (np.asarray(labels) for _, labels in data.batches(BATCH))
    else:
        yield from in_blocks(data.labels)


def moments_of(blocks: Iterable[Array]) -> Moments:
    """Of labels that come block after block.

    They are taken from the first sample on: far from 0 the rounding of a mean alone would look like a variance.

    Source: Chan, Golub & LeVeque, Algorithms for Computing the Sample Variance, The American Statistician 37, 1983.

    Args:
        blocks: [n, …] each, with one sample at least in all.
    """
    samples = count = 0
    first = mean = scatter = changes = np.zeros(0)
    for block in blocks:
        values = _numbers(block)
        if not count:
            first, scatter = values[0].copy(), np.zeros(values.shape[1])
            mean, changes = np.zeros(values.shape[1]), np.zeros(values.shape[1], np.bool_)
        changes = changes | (values != first).any(axis=0)
        more = len(values)
        with np.errstate(over="ignore", invalid="ignore"):
            apart = values - first
            here = apart.mean(axis=0)
            step, share = here - mean, more / (count + more)
            mean = mean + share * step
            scatter = scatter + np.square(apart - here).sum(axis=0) + count * share * np.square(step)
        count, samples = count + more, samples + len(block)
    return Moments(samples, first + mean, scatter / count, changes)


def in_blocks(labels: Any) -> Iterator[Array]:
    """Labels [n, …], some samples at a time."""
    rows = max(1, ELEMENTS // max(1, int(np.prod(labels.shape[1:]))))
    for start in range(0, len(labels), rows):
        yield np.asarray(labels[start : start + rows])
