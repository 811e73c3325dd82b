"""How far two arrays are apart, by the scale of what differs: one huge value hides nothing beside it."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["by_scale", "fills_of", "share_of_largest", "share_of_own_size", "without_fills"]

Array = np.ndarray[Any, Any]

# What is far above the rest: so large whatever it is, or a fill, the same value again and again. A network that
# computed both from one another would not resolve the rest beside it.
HUGE, GAP = 1e8, 1e4
LEAST, REPEATED_GAP = 1e4, 1e3
GIVEN = 0.5  # of a fill: what is as large is one, too, as -1e9 is in BF16
# What repeats may be codes or years, looked up: a mask has one fill, or two or three where masks add up, below 0 or so
# large that it can be nothing else. In INT8 and BF16 a fill is as near; FP16 has no larger one than its last number.
FILLS, NEAR, LAST_HALF = 3, 0.01, 65504.0

# A few values may outweigh all others, such as boxes in pixels among probabilities: where some are larger than the
# median by FAR, the others have a scale of their own, as far down as a float32 network resolves.
FAR, RESOLVED = 1e2, 1e-2
COLUMN = 8  # values that tell of the scale of a column, such as that of a score among coordinates


def by_scale(expected: Array) -> tuple[Array, ...]:
    """Which values are to be judged by one scale, as masks: all of them, or the rest and what is far above it.

    Far above are a mask's -1e9 or -3.4e38 among scores, and a column of populations beside one of shares.

    Args:
        expected: of any shape; NaN and infinities are no scale, and stand with the rest.
    """
    far, _ = _far(expected)
    return (~far, far) if far.any() else (~far,)


def fills_of(expected: Array) -> Array:
    """Which values say "nothing", as a mask's -1e9 does: far above the rest, and the same again and again."""
    far, again = _far(expected)
    return far if again else np.zeros_like(far)


def _far(expected: Array) -> tuple[Array, bool]:
    """Which values are far above the rest, and whether these repeat: at most half as many different ones as values."""
    size = np.abs(np.where(np.isfinite(expected), expected, 0).astype(np.float64))
    if float(size.max(initial=0)) < LEAST:
        return np.zeros(size.shape, np.bool_), False
    values, counts = np.unique(size, return_counts=True)
    for at in np.flatnonzero(values[1:] >= np.maximum(LEAST, REPEATED_GAP * values[:-1])) + 1:
        again = bool(2 * (len(values) - at) <= counts[at:].sum())
        huge = bool(values[at] >= max(HUGE, GAP * values[at - 1]))
        # Of values that begin at 0, as behind a ReLU, it is 0 that is special.
        if (again and huge) or (values[at - 1] > 0 and (again or huge)):
            return np.asarray(size >= values[at]), again
    return np.zeros(size.shape, np.bool_), False


def share_of_largest(expected: Array, got: Array) -> float:
    """The largest difference, as a share of the largest value expected.

    Values far below that, and columns (along the second and the last axis) of small values, count by their own largest.
    A tolerance of it is absolute for values of one scale, which sums that cancel need. What is far above the rest, as a
    mask's fills are, counts by itself. NaN in `expected` does not count. Where 0 is expected throughout, it is the
    largest difference itself.

    Args:
        expected: of any shape.
        got: of the same shape; not finite where it should be, or another infinity, it differs without bound.
    """
    there, endless = np.isfinite(expected), np.isinf(expected)
    if not np.array_equal(expected[endless], got[endless]):
        return np.inf
    want, have = (values[there].astype(np.float64, copy=False) for values in (expected, got))
    if not want.size:
        return 0.0
    if not np.isfinite(have).all():
        return np.inf
    differences, size = np.abs(have - want), np.abs(want)
    rest, *far = by_scale(want)
    share = max((float((differences[at] / size[at]).max()) for at in far), default=0.0)
    differences, size = differences[rest], size[rest]
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
    the scale of the rest; nor does what is far above it. Infinite where there is no finite value to compare, or one has
    what the other has not.
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
    share = 0.0
    for part in by_scale(want):
        moved = part & (differences > 0)
        if moved.any():
            sizes = np.abs(want[moved])
            least = max(float(np.median(sizes)), 1e-12)
            share = max(share, float((differences[moved] / np.maximum(sizes, least)).max()))
    return share


def without_fills(expected: Array, got: Array, *, alone: bool = False) -> tuple[Array, Array]:
    """Both with 0 where a mask's fill is expected and given; where only one has it, both stay as they are.

    Args:
        expected: of any shape.
        got: of the same.
        alone: whether what is far above the rest is one, too, where it does not repeat, as a single fill does not, nor
            do populations in a column: for a figure that a second one stands beside which looks at all values.
    """
    far, again = _far(expected)
    if not far.any() or not (again or alone):
        return expected, got
    values = np.unique(expected[far])
    if not alone and (len(values) > FILLS or bool(((values > 0) & (values < HUGE)).any())):
        return expected, got
    alike = np.isfinite(got) & (np.sign(expected) == np.sign(got))
    if alone:
        same = np.abs(got) >= min(HUGE, GIVEN * float(np.abs(values).min()))
    else:
        wide, other = expected.astype(np.float64), got.astype(np.float64)
        none = np.where(wide < 0, LAST_HALF, HUGE)
        with np.errstate(invalid="ignore", over="ignore"):
            near = np.abs(other - wide) <= NEAR * np.abs(wide)
        same = near | ((np.abs(wide) >= none) & (np.abs(other) >= none))
    same = far & alike & same
    return np.where(same, 0, expected), np.where(same, 0, got)
