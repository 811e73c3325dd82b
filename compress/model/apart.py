"""How far two arrays are apart, by the scale of what differs: one huge value hides nothing beside it."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["share_of_largest", "share_of_own_size", "without_fills"]

Array = np.ndarray[Any, Any]
FILL, GAP = 1e8, 1e4  # a mask's -1e9 among scores: so large, and nothing for so far below

# A few values may outweigh all others, such as boxes in pixels among probabilities: where some are larger than the
# median by FAR, the others have a scale of their own, as far down as a float32 network resolves.
FAR, RESOLVED = 1e2, 1e-2
COLUMN = 8  # values that tell of the scale of a column, such as that of a score among coordinates


def share_of_largest(expected: Array, got: Array) -> float:
    """The largest difference, as a share of the largest value expected.

    Values far below that, and columns (along the second and the last axis) of small values, count by their own largest.
    A tolerance of it is absolute for values of one scale, which sums that cancel need. A mask's fills count by
    themselves, and what is not finite in `expected` does not count. Where 0 is expected throughout, it is the largest
    difference itself.

    Args:
        expected: of any shape.
        got: of the same shape; not finite where it should be, it differs without bound.
    """
    there = np.isfinite(expected)
    want, have = (values[there].astype(np.float64, copy=False) for values in (expected, got))
    if not want.size:
        return 0.0
    if not np.isfinite(have).all():
        return np.inf
    differences, size = np.abs(have - want), np.abs(want)
    share = 0.0
    fill = size >= FILL
    if fill.any() and GAP * float(size[~fill].max(initial=0)) <= float(size[fill].min()):
        share = float((differences[fill] / size[fill]).max())
        differences, size = differences[~fill], size[~fill]
    largest = float(size.max(initial=0))
    if largest == 0:
        return max(share, float(differences.max(initial=0)))
    share = max(share, float(differences.max()) / largest)
    median = float(np.median(size[size > 0]))
    if largest > FAR * median:
        near = size <= FAR * median
        share = max(share, float(differences[near].max()) / max(float(size[near].max()), RESOLVED * largest))
    return max(share, _by_column(expected, got, largest))


def _by_column(expected: Array, got: Array, largest: float) -> float:
    """The largest difference as a share of the largest value of its column, fills and the like left out."""
    share = 0.0
    for axis in {1, expected.ndim - 1} if expected.ndim > 1 else ():
        if expected.size < COLUMN * expected.shape[axis]:
            continue
        want, have = (
            np.moveaxis(values, axis, 0).reshape(expected.shape[axis], -1).astype(np.float64)
            for values in (expected, got)
        )
        told = np.isfinite(want) & (np.abs(want) <= largest)
        sizes = np.where(told, np.abs(want), 0.0).max(1)
        apart = np.abs(np.where(told, have, 0.0) - np.where(told, want, 0.0)).max(1)
        share = max(share, float((apart / np.maximum(sizes, RESOLVED * largest)).max()))
    return share


def share_of_own_size(expected: Array, got: Array) -> float:
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
