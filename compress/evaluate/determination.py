"""The coefficient of determination with what chance there is in the spread of the labels, too.

R² is one less a ratio of means, of squared errors e over squared distances v of the labels from their mean. Each
sample is given it and the sample's influence on it, R² + ((1 - R²) v - e) / mean(v), so that the scores' mean is R²,
and intervals of a mean are its intervals, as `compress.evaluate.tag_metrics` has it. 1 - e / mean(v) has the same mean,
and an interval that takes the spread for known, which is as much drawn as the errors are.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from compress.model import Arrays

__all__ = ["Determination"]

Array = np.ndarray[Any, Any]
ROUNDING = 1e-12  # of the spread of all labels; numbers that spread less among the samples that are judged never change


class Determination:
    """R² of the samples that are judged, a mean over the numbers that change. It serves as `Accumulator`.

    Args:
        spread: of all labels, see `compress.evaluate.label_metrics.spread_of`. It is the unit that is counted in, and
            stands for that of a number that never changes among the samples that are judged.
        output: that is judged; None is the first.
    """

    def __init__(self, spread: Array, output: str | None = None) -> None:
        self._output, self._told = output, np.isfinite(spread)
        self._units = np.sqrt(spread[self._told])
        self._centre: Array | None = None
        # Of each sample, by number: the squared error, and the label and its square; means over a map's places.
        self._errors, self._labels, self._squares = list[Array](), list[Array](), list[Array]()

    def update(self, outputs: Arrays, labels: Array | None) -> None:
        """Take a batch."""
        values = next(iter(outputs.values())) if self._output is None else outputs[self._output]
        values = values.reshape(len(values), -1).astype(np.float64)
        wanted = np.asarray(labels, np.float64).reshape(len(values), -1)
        together = len(self._told) == 1  # one number, or one spread for all places of a map
        if not together:
            values, wanted = values[:, self._told], wanted[:, self._told]
        if self._centre is None:  # what is far from 0 has no square to be exact with
            self._centre = np.asarray(wanted.mean() if together else wanted.mean(axis=0))
        apart = (wanted - self._centre) / self._units
        squares = np.square(apart)
        with np.errstate(over="ignore", invalid="ignore"):
            errors = np.square((values - wanted) / self._units)
        if together:
            errors, apart, squares = (each.mean(axis=1, keepdims=True) for each in (errors, apart, squares))
        self._errors.append(np.where(np.isnan(errors), np.inf, errors))
        self._labels.append(apart)
        if together:
            self._squares.append(squares)

    def compute(self) -> Array:
        """Scores [n], 1 in the mean at most; of a sample that has no numbers -inf."""
        errors, labels = np.concatenate(self._errors), np.concatenate(self._labels)
        squares = np.concatenate(self._squares) if self._squares else np.square(labels)
        mean = labels.mean(axis=0)
        around = np.maximum(squares - 2 * mean * labels + mean * mean, 0.0)
        spread = around.mean(axis=0)
        changes = spread > ROUNDING
        scale = np.where(changes, spread, 1.0)
        with np.errstate(over="ignore"):
            shares = errors / scale
            whole = np.where(np.isfinite(errors).all(axis=1), shares.mean(axis=1), np.inf)
        if not np.isfinite(whole).all():
            return 1 - whole
        # By the share of errors, which is what 1 - R² is; what never changes is no part of it.
        influence = shares.mean(axis=0) * (around / scale - 1) * changes
        return np.asarray(1 - whole + influence.mean(axis=1))
