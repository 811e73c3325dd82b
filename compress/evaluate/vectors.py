"""Outputs as vectors, one to a sample, and how alike two of these are."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from compress.model.apart import without_fills

__all__ = ["comparable", "cosine_similarity", "rows", "scaled"]

Array = np.ndarray[Any, Any]


def comparable(expected: Array, got: Array) -> tuple[Array, Array]:
    """Both in float64: complex numbers as their parts [..., 2]; of texts, which are the same or not, 1 and whether."""
    if any(values.dtype.kind not in "fiubc" for values in (expected, got)):
        return np.ones(np.shape(expected)), np.asarray(expected == got, np.float64)
    if any(values.dtype.kind == "c" for values in (expected, got)):
        expected, got = (np.stack([values.real, values.imag], axis=-1) for values in (expected, got))
    return np.asarray(expected, np.float64), np.asarray(got, np.float64)


def cosine_similarity(expected: Array, got: Array) -> Array:
    """Per sample (first dimension), in float64.

    What is far above the rest in what is expected, as a mask's fill is, hides nothing beside it: the lower of the
    cosine of all values and that of the rest counts. Two zero vectors are alike (1), one zero vector is not (0);
    vectors with NaN or infinity in them are as unlike as vectors can be (-1).
    """
    x, y = map(rows, comparable(expected, got))
    rest = without_fills(x, y, alone=True)
    found = _cosine_of(x, y)
    return found if rest[0] is x else np.minimum(found, _cosine_of(*rest))


def _cosine_of(x: Array, y: Array) -> Array:
    finite = np.asarray(np.isfinite(x).all(axis=1) & np.isfinite(y).all(axis=1))
    x, y = (scaled(np.where(finite[:, None], v, 0.0)) for v in (x, y))
    norms = np.linalg.norm(x, axis=1) * np.linalg.norm(y, axis=1)
    both_zero = ~x.any(axis=1) & ~y.any(axis=1)
    found = np.where(both_zero, 1.0, (x * y).sum(axis=1) / np.where(norms == 0, 1.0, norms))
    return np.asarray(np.where(finite, found, -1.0))


def rows(values: Array) -> Array:
    """A vector for each sample; a number without dimensions is one sample, and there may be none."""
    return values.reshape(len(values), math.prod(values.shape[1:])) if values.ndim else values.reshape(1, 1)


def scaled(vectors: Array) -> Array:
    """With 1 as the largest element, so that no square overflows or vanishes."""
    largest = np.abs(vectors).max(axis=1, keepdims=True, initial=0.0)
    return np.asarray(vectors / np.where(largest == 0, 1.0, largest))
