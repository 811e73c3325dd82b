"""How far two arrays are apart, by the scale of what differs: one huge value hides nothing beside it."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["apart_by_scale", "without_fills"]

Array = np.ndarray[Any, Any]
FILL, GAP = 1e8, 1e4  # a mask's -1e9 among scores: so large, and nothing for so far below


def apart_by_scale(expected: Array, got: Array) -> float:
    """The largest difference, as a share of the value expected or of the median of what differs, whichever is larger.

    What is the same in both, such as the constant of a mask or a column that the change does not reach, says nothing of
    the scale of the rest. Infinite where there is no finite value to compare, or one has what the other has not.
    """
    if expected.shape != got.shape:
        return np.inf
    if not expected.size:
        return 0.0
    there = np.isfinite(expected)
    if not there.any() or not np.array_equal(np.isfinite(got), there):
        return np.inf
    want, have = (values[there].astype(np.float64, copy=False) for values in (expected, got))
    differences = np.abs(have - want)
    moved = differences > 0
    if not moved.any():
        return 0.0
    sizes = np.abs(want[moved])
    return float((differences[moved] / np.maximum(sizes, max(float(np.median(sizes)), 1e-12))).max())


def without_fills(expected: Array, got: Array) -> tuple[Array, Array]:
    """Both with 0 where a mask's fill is expected and given; where only one has it, both stay as they are."""
    size = np.abs(expected)
    fill = (size >= FILL) & np.isfinite(size)
    if not fill.any() or GAP * float(size[~fill].max(initial=0)) > float(size[fill].min()):
        return expected, got
    given = (np.abs(got) >= FILL) & np.isfinite(got)
    same = fill & given & (np.sign(expected) == np.sign(got))
    return np.where(same, 0.0, expected), np.where(same, 0.0, got)
