"""Whether two models give the same answers: each output by its own scale."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from compress.evaluate.metrics import cosine_similarity
from compress.model.apart import share_of_largest, without_fills

__all__ = ["Difference", "difference", "differences"]

Array = np.ndarray[Any, Any]

TOLERANCE = 1e-3
NOTHING = 1e-6  # what may be left of an output that should be 0 throughout
NEGLIGIBLE = 1e-4  # a sample whose values are all this small beside another's is rounding
# Two units in the last place of 1: what ONNX Runtime's Sigmoid is off by, however small its values are, as those of a
# detector are that finds nothing.
LOGISTIC = 2.4e-7
TIES = 1e-3  # share of whole numbers that may differ: a class that is chosen by a hair


@dataclass(frozen=True)
class Difference:
    """Between two models' values of one output.

    Attributes:
        max_abs_error: the largest absolute difference.
        relative_error: of whole numbers and booleans the share that differs; else the largest difference over the
            largest value expected, at most so much for values of either scale (see `share_of_largest`).
        cosine_similarity: the least over the samples, those that are nearly 0 throughout apart; of whole numbers the
            share that is the same.
        allowed: of the relative error, and for the cosine below 1.
        allowed_abs: the absolute error that fits whatever the scale.
    """

    max_abs_error: float
    relative_error: float
    cosine_similarity: float
    allowed: float
    allowed_abs: float = 0.0

    @property
    def fits(self) -> bool:
        by_scale = self.relative_error <= self.allowed and self.cosine_similarity >= 1 - self.allowed
        return by_scale or self.max_abs_error <= self.allowed_abs

    def __str__(self) -> str:
        return (
            f"off by {self.relative_error:.3g} of its scale, {self.max_abs_error:.3g} in all; the cosine similarity is "
            f"{self.cosine_similarity:.6f} (allowed: {self.allowed:g})"
        )


def differences(
    expected: Mapping[str, Array],
    got: Mapping[str, Array],
    tolerance: float = TOLERANCE,
    logistic: Collection[str] = (),
) -> dict[str, Difference]:
    """`difference` of each output, by the names of those that are expected; `got` is in the same order.

    Args:
        logistic: outputs that a Sigmoid makes, whose scale is 1 whatever their values are.
    """
    found = {
        name: difference(values, other, tolerance)
        for (name, values), other in zip(expected.items(), got.values(), strict=True)
    }
    return {name: replace(each, allowed_abs=LOGISTIC) if name in logistic else each for name, each in found.items()}


def difference(expected: Array, got: Array, tolerance: float = TOLERANCE) -> Difference:
    """How far an output is from what is expected, by the output's own scale.

    Args:
        expected: of any shape; the first dimension is the sample. Whole numbers and booleans are to be the same but for
            near ties.
        got: of another shape, it differs without bound.
        tolerance: of the difference, as a share of the largest value expected.
    """
    if expected.shape != got.shape:
        return Difference(np.inf, np.inf, 0.0, tolerance)
    if not expected.size:
        return Difference(0.0, 0.0, 1.0, tolerance)
    whole = expected.dtype.kind not in "fc"
    with np.errstate(invalid="ignore", over="ignore"):
        x, y = (values.astype(np.float64) for values in (expected, got))
        # Infinite values and NaN are the same only as themselves.
        apart = np.where((x == y) | (np.isnan(x) & np.isnan(y)), 0.0, np.abs(x - y))
    apart = np.nan_to_num(apart, nan=np.inf, posinf=np.inf)
    worst = float(apart.max())
    if whole:
        share = float(np.count_nonzero(apart)) / apart.size
        return Difference(worst, share, 1.0 - share, TIES)
    known = np.isfinite(x)
    if not np.isfinite(worst) or not known.any():  # what gives no number on either side proves nothing
        return Difference(np.inf, np.inf, 0.0, tolerance)
    x, y = np.where(known, x, 0.0), np.where(known, y, 0.0)
    filled = without_fills(x, y, alone=True)
    if not filled[0].any():
        left = float(np.abs(filled[1] - filled[0]).max())
        return Difference(
            worst, share_of_largest(x, y) if left <= NOTHING else np.inf, float(left <= NOTHING), tolerance
        )
    return Difference(worst, share_of_largest(x, y), _cosine(*filled), tolerance)


def _cosine(x: Array, y: Array) -> float:
    x, y = (values.reshape(len(values) if values.ndim else 1, -1) for values in (x, y))
    norms = np.linalg.norm(x, axis=1)
    told = norms > NEGLIGIBLE * norms.max()
    return float(cosine_similarity(x[told], y[told]).min())
