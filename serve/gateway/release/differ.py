"""For which items two tensors of the same output are not the same answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from serve.gateway.oip.tensors import Tensor
from serve.rollout.agree import Agree

__all__ = ["differing", "has_rows", "in_blocks"]

Array = np.ndarray[Any, Any]
BLOCK = 64 * 1024


def differing(a: Tensor, b: Tensor, items: int, agree: Agree, *, batched: bool, classes: bool) -> Array:
    """For each item, whether the tensors differ by the output's rule; a request of no batch is one item.

    Args:
        a, b: the candidate's and the baseline's, of one datatype.
        items: of the request.
        agree: the rule.
        batched: whether the first dimension is the batch.
        classes: whether these BYTES are classes of scores that the client asked for, b"score:index[:label]", the best
            of a row first: judged as the scores would be, by what stands at each rank.
    """
    everything = np.ones(items, dtype=bool)
    if batched and a.shape[:1] != b.shape[:1]:
        return everything
    x, y = a.data, b.data
    kind = agree.kind
    if kind == "overlap":
        return _apart(_indices(x) if classes else x, _indices(y) if classes else y, items, agree.overlap)
    if kind == "first":
        x, y = _first(x, items), _first(y, items)
    if x.shape != y.shape:
        return everything
    if x.size == 0:
        return ~everything
    if classes and kind in ("argmax", "first"):
        x, y = (_indices(_first(each, items)) for each in (x, y))
    if classes and kind == "close":
        x, y = _scores(x), _scores(y)
    if kind == "close":
        return _any(_far(x, y, agree.atol, agree.rtol), items)
    if kind == "argmax" and not classes:
        return _other_place(x, y, items)
    return _any(_unequal(x, y), items)


def _unequal(x: Array, y: Array) -> Array:
    other = np.asarray(x != y, dtype=bool)
    return other & ~(np.isnan(x) & np.isnan(y)) if x.dtype.kind == "f" else other


def _far(x: Array, y: Array, atol: float, rtol: float) -> Array:
    """NaN is near NaN only, an infinity near itself only."""
    found = np.empty(x.size, dtype=bool)
    at = 0
    for a, b in in_blocks(x, y):
        finite = np.isfinite(a) & np.isfinite(b)
        with np.errstate(invalid="ignore", over="ignore"):
            near = finite & (np.abs(a - b) <= atol + rtol * np.abs(b))
        found[at : at + a.size] = ~near & _unequal(a, b)
        at += a.size
    return found.reshape(x.shape)


def _other_place(x: Array, y: Array, items: int) -> Array:
    """Where the largest of a row stands elsewhere, or one is not a number; a number that stands alone is not judged."""
    strange = (np.isfinite(x) != np.isfinite(y)) | (np.isnan(x) != np.isnan(y)) if x.dtype.kind == "f" else x != x
    wrong = _any(strange, items)
    if has_rows(x, items):
        wrong = wrong | _any(_largest(x) != _largest(y), items)
    return wrong


def has_rows(x: Array, items: int) -> bool:
    """Whether there are rows of scores, of which one is the largest: the axis of the batch is none."""
    return x.ndim > (1 if items > 1 else 0) and x.shape[-1] > 1


def _largest(x: Array) -> Array:
    """Where the largest number along the last axis stands; NaN is none, though np.argmax would take it."""
    if x.dtype.kind == "f" and (none := np.isnan(x)).any():
        x = np.where(none, x.dtype.type(-np.inf), x)
    return np.asarray(np.argmax(x, axis=-1))


def in_blocks(x: Array, y: Array) -> Iterator[tuple[Array, Array]]:
    """Numbers of the same places, flat, as float64: of a long answer they would be eight times as long at once."""
    x, y = x.reshape(-1), y.reshape(-1)
    for at in range(0, x.size, BLOCK):
        block = slice(at, at + BLOCK)
        yield x[block].astype(np.float64), y[block].astype(np.float64)


def _first(x: Array, items: int) -> Array:
    """The first value along the last axis, which is none of the batch's."""
    return x[..., :1] if x.ndim > (1 if items > 1 else 0) else x


def _apart(x: Array, y: Array, items: int, overlap: float) -> Array:
    """For each item, whether the two sets of its values have too little in common."""
    found = np.zeros(items, dtype=bool)
    rows = zip(x.reshape(items, -1), y.reshape(items, -1), strict=True)
    for item, row in enumerate(rows):
        mine, theirs = (set(each.tolist()) for each in row)
        larger = max(len(mine), len(theirs))
        found[item] = larger > 0 and len(mine & theirs) < overlap * larger
    return found


def _indices(texts: Array) -> Array:
    found = np.empty(texts.size, dtype=object)
    found[:] = [bytes(text).partition(b":")[2] for text in texts.flat]
    return found.reshape(texts.shape)


def _scores(texts: Array) -> Array:
    return np.array([float(bytes(text).partition(b":")[0]) for text in texts.flat]).reshape(texts.shape)


def _any(different: Array | np.bool_, items: int) -> Array:
    each = np.asarray(different, dtype=bool)
    if items == 1:
        return np.array([each.any()])
    return np.asarray(each.reshape(items, -1).any(axis=1))
