"""What stands in labels, all of them: a block at a time, so that no more than a block is in memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from compress.data.sources import Fetched
from compress.data.spread import spread_over

__all__ = ["IGNORED", "LabelValues", "blocks", "values_of"]

Array = np.ndarray[Any, Any]
IGNORED = (255, -1, -100)  # what is labelled so by usage is not known
MANY = 32  # values beside 0 and 1: numbers, not classes
BLOCK = 1 << 22  # values in memory at a time
MADE = 64  # samples that are looked at where each is made when it is asked for: batches are looked at as they come


@dataclass(frozen=True)
class LabelValues:
    """What labels hold.

    Attributes:
        zeros, ones: whether there are some.
        others: the other values, in order; empty where there are many.
        many: whether there are more others than that.
        nan: whether some are no numbers.
        one_hot: whether each row of several is 0 but for one 1.
        shares: whether each row of several is 0 or more and sums to 1.
        whole: whether they are integers by their type.
    """

    zeros: bool
    ones: bool
    others: tuple[float, ...]
    many: bool
    nan: bool
    one_hot: bool
    shares: bool
    whole: bool

    @property
    def binary(self) -> bool:
        """Whether all are 0 or 1."""
        return not (self.others or self.many or self.nan)

    def unknown(self, *, bounded: bool) -> tuple[float, ...] | None:
        """The values that mean "not known", where all others are 0 or 1; None where some are other numbers.

        Labels of -1 and 1 alone are two classes, or numbers to hit. A float of -1 is a number, but not for an output
        that can't be below 0.

        Args:
            bounded: whether the output gives 0 to 1.
        """
        usual = set(IGNORED) if self.whole or bounded else set(IGNORED) - {-1}
        if self.many or not (self.zeros or self.ones) or not set(self.others) <= usual or self.picture:
            return None
        if self.others == (-1,) and not self.zeros:
            return None
        return (*self.others, *((math.nan,) if self.nan else ()))

    @property
    def picture(self) -> bool:
        """Whether they are 0 and 255, as a mask in a file of a picture has them."""
        return self.others == (255,) and self.zeros and not self.ones

    @property
    def classes(self) -> bool:
        """Whether they are few whole numbers, of which some is neither 0, 1 nor a usual one for "not known"."""
        return self.whole and not self.many and not set(self.others) <= set(IGNORED)


def blocks(labels: Any, rows: Array | None = None) -> Iterator[tuple[int, Array]]:
    """Labels [n, …], or these rows of them, a block at a time, each with the place of its first."""
    step = max(1, BLOCK // max(1, math.prod(labels.shape[1:])))
    for start in range(0, len(labels if rows is None else rows), step):
        part = slice(start, start + step)
        yield start, np.asarray(labels[part if rows is None else rows[part]])


def values_of(labels: Any) -> LabelValues:
    """Look at labels [n, …] of numbers; of those that are made when asked for, at some that are spread over them."""
    rows = None
    if isinstance(labels, Fetched):
        rows = spread_over(len(labels), MADE)
    zeros = ones = nan = many = False
    several = labels.ndim == 2 and labels.shape[1] > 1
    one_hot, shares = several, several and labels.dtype.kind == "f"
    others: set[float] = set()
    for _, values in blocks(labels, rows):
        zero, one = values == 0, values == 1
        zeros, ones = zeros or bool(zero.any()), ones or bool(one.any())
        rest = values[~(zero | one)]
        missing = np.isnan(rest) if rest.dtype.kind == "f" else np.zeros(len(rest), np.bool_)
        nan = nan or bool(missing.any())
        if len(rest) and not many:
            others |= set(np.unique(rest[~missing])[: MANY + 1].tolist())
            many = len(others) > MANY
        one_hot = one_hot and not len(rest) and bool((values.sum(axis=1) == 1).all())
        shares = shares and bool((values >= 0).all() and np.allclose(values.sum(axis=1), 1.0, atol=1e-3))
        if many and not shares:
            break
    found = () if many else tuple(sorted(others))
    return LabelValues(zeros, ones, found, many, nan, one_hot, shares, labels.dtype.kind in "iub")
