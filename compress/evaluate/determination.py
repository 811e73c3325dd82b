"""The coefficient of determination with what chance there is in the spread of the labels, too.

R² is one less a ratio of means, of squared errors e over squared distances v of the labels from their mean. Each
sample is given it and the sample's influence on it, R² + ((1 - R²) v - e) / mean(v), so that the scores' mean is R²,
and intervals of a mean are its intervals, as `compress.evaluate.tag_metrics` has it. 1 - e / mean(v) has the same mean,
and an interval that takes the spread for known, which is as much drawn as the errors are.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from compress.evaluate.label_moments import Moments
from compress.model import Arrays

__all__ = ["Determination", "changing"]

Array = np.ndarray[Any, Any]
ROUNDING = 1e-12  # of the spread of all labels; numbers that spread less among the samples that are judged never change


def changing(spread: Array, judged: Moments) -> Array:
    """Which numbers [k], of those that change in all labels, do among the samples that are judged.

    Args:
        spread: of all labels, see `compress.evaluate.label_moments.Moments.spread`.
        judged: of those of the samples that are judged.
    """
    told = np.isfinite(spread)
    return np.asarray(judged.changes[told] & (judged.variance[told] > ROUNDING * spread[told]))


class Determination:
    """R² of the samples that are judged, a mean over the numbers that change. It serves as `Accumulator`.

    What is kept is two numbers for each sample; where a sample has several, which are no map, one of them and the
    labels as they are given, which are no copy where the data holds or maps them.

    Args:
        spread: of all labels, see `compress.evaluate.label_moments.Moments.spread`; stands for that of a number that
            never changes among the samples that are judged.
        judged: of the labels of the samples that are judged: only with these known can each error be counted as it
            comes.
        output: that is judged; None is the first.
    """

    def __init__(self, spread: Array, judged: Moments, output: str | None = None) -> None:
        self._output, self._told = output, np.isfinite(spread)
        self._together = len(spread) == 1  # one number, or one spread for all places of a map
        self._changes = changing(spread, judged)
        self._mean, self._samples = judged.mean[self._told], judged.samples
        self._unit = np.sqrt(np.where(self._changes, judged.variance[self._told], spread[self._told]))
        self._lost = np.zeros(len(self._mean))  # by number, the sum of the samples' shares
        # Of each sample: the mean of its shares, and the squared distance from the mean, or the labels that tell it.
        self._shares, self._around = list[Array](), list[Array]()

    def update(self, outputs: Arrays, labels: Array | None) -> None:
        """Take a batch."""
        values = next(iter(outputs.values())) if self._output is None else outputs[self._output]
        given = np.asarray(labels)
        wanted = self._numbers(given)
        with np.errstate(over="ignore", invalid="ignore"):
            shares = self._squares(self._numbers(values) - wanted)
        shares = np.where(np.isnan(shares), np.inf, shares)
        self._lost += shares.sum(axis=0)
        self._shares.append(shares.mean(axis=1))
        self._around.append(self._squares(wanted - self._mean) if self._together else given)

    def compute(self) -> Array:
        """Scores [n], 1 in the mean at most; of a sample that has no numbers -inf."""
        whole = np.concatenate(self._shares)
        assert len(whole) == self._samples  # noqa: S101  as `Metric.on` was told
        if not np.isfinite(whole).all():
            return 1 - whole
        # By the share of errors, which is what 1 - R² is; what never changes is no part of it.
        lost = self._changes * self._lost / len(whole)
        influence = [((self._distances(each) - 1) * lost).mean(axis=1) for each in self._around]
        return np.asarray(1 - whole + np.concatenate(influence))

    def _numbers(self, values: Array) -> Array:
        """Those that are told, float64 [n, k]; all places of a map."""
        found = values.reshape(len(values), -1).astype(np.float64)
        return found if self._together else found[:, self._told]

    def _squares(self, apart: Array) -> Array:
        """Squares [n, k] as shares of the spread; of a map their mean over all places, [n, 1]."""
        found = np.square(apart / self._unit)
        return found.mean(axis=1, keepdims=True) if self._together else found

    def _distances(self, kept: Array) -> Array:
        return kept if self._together else self._squares(self._numbers(kept) - self._mean)
