"""Do two models give the same answer to a request?"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np

from serve.gateway.oip.protocol import InferResponse
from serve.gateway.oip.tensors import Tensor
from serve.gateway.upstream.metadata import ModelMetadata

__all__ = ["Agreement", "agreement", "unlike"]


@dataclass(frozen=True)
class Agreement:
    """How alike two answers are.

    Attributes:
        items: of the request.
        disagreed: items for which an output is another.
        difference: mean absolute difference of all numbers.
        largest: the largest of them.
    """

    items: int
    disagreed: int
    difference: float
    largest: float


def agreement(
    candidate: InferResponse,
    baseline: InferResponse,
    *,
    batched: bool,
    tolerance: float | None,
    texts: Collection[str] | None = None,
) -> Agreement:
    """Compare two answers, item by item.

    Whole numbers, booleans and BYTES must be equal. Floating-point numbers must differ by at most `tolerance`; without
    one, the largest along the last axis must stand at the same place (the class), and a number that stands alone is not
    judged. NaN is like NaN only. Outputs that one of the two does not give, or in another shape, are others.

    Where a client asked for classes of scores (`classification`), Triton writes them as BYTES, the best first, as
    b"score:index[:label]". They are judged as the scores would be: by the best class, or, with `tolerance`, by the
    score at each rank.

    Args:
        batched: whether the first dimension of each output is the batch.
        tolerance: absolute.
        texts: names of the models' outputs that are BYTES by themselves; None for all that come so.
    """
    theirs = {tensor.name: tensor for tensor in baseline.outputs}
    mine = {tensor.name: tensor for tensor in candidate.outputs}
    sizes = {tensor.shape[0] for tensor in theirs.values() if batched and tensor.shape}
    items = sizes.pop() if len(sizes) == 1 else 1
    others = np.zeros(max(items, 1), dtype=bool)
    total, count, largest = 0.0, 0, 0.0
    for name in theirs.keys() | mine.keys():
        a, b = mine.get(name), theirs.get(name)
        if a is None or b is None or a.shape != b.shape or a.datatype != b.datatype:
            others[:] = True
            continue
        if a.data.size == 0:
            continue
        if a.datatype == "BYTES" and texts is not None and name not in texts:
            others |= _any(_other_classes(a.data, b.data, tolerance), len(others))
            continue
        others |= _others(a, b, len(others), tolerance)
        if a.data.dtype.kind != "O":
            with np.errstate(invalid="ignore"):
                difference = np.abs(a.data.astype(np.float64) - b.data.astype(np.float64))
            difference = difference[np.isfinite(difference)]
            total += float(difference.sum())
            count += difference.size
            largest = max(largest, float(difference.max(initial=0.0)))
    return Agreement(len(others), int(others.sum()), total / count if count else 0.0, largest)


def _others(a: Tensor, b: Tensor, items: int, tolerance: float | None) -> np.ndarray[Any, Any]:
    """For each item, whether the tensors differ; a shape of another batch is taken as one item."""
    x, y = a.data, b.data
    if x.dtype.kind != "f":
        return _any(x != y, items)
    strange = (np.isfinite(x) != np.isfinite(y)) | (np.isnan(x) != np.isnan(y))
    if tolerance is not None:
        with np.errstate(invalid="ignore"):
            return _any(strange | (np.abs(x.astype(np.float64) - y.astype(np.float64)) > tolerance), items)
    wrong = _any(strange, items)
    # The axis of the batch is no row of scores.
    if x.ndim > (1 if items > 1 else 0) and x.shape[-1] > 1:
        wrong = wrong | _any(np.argmax(x, axis=-1) != np.argmax(y, axis=-1), items)
    return wrong


def _other_classes(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any], tolerance: float | None) -> np.ndarray[Any, Any]:
    """Where two lists of classes differ; each b"score:index[:label]", the best of a row first."""
    if tolerance is None:
        a, b = a[..., :1], b[..., :1]
        part = 2
    else:
        part = 0
    x, y = (np.array([bytes(text).partition(b":")[part] for text in each.flat], dtype=object) for each in (a, b))
    if tolerance is None:
        return np.asarray(x != y).reshape(a.shape)
    scores, theirs = x.astype(np.float64), y.astype(np.float64)
    with np.errstate(invalid="ignore"):
        near = (scores == theirs) | (np.isnan(scores) & np.isnan(theirs)) | (np.abs(scores - theirs) <= tolerance)
    return np.asarray(~near).reshape(a.shape)


def _any(different: np.ndarray[Any, Any] | np.bool_, items: int) -> np.ndarray[Any, Any]:
    each = np.asarray(different, dtype=bool)
    if items == 1:
        return np.array([each.any()])
    found: np.ndarray[Any, Any] = each.reshape(items, -1).any(axis=1)
    return found


def unlike(candidate: ModelMetadata, baseline: ModelMetadata) -> str:
    """Why the candidate can't take the baseline's requests; "" where it can."""
    for kind in ("inputs", "outputs"):
        mine = {tensor.name: tensor for tensor in getattr(candidate, kind)}
        theirs = {tensor.name: tensor for tensor in getattr(baseline, kind)}
        if mine.keys() != theirs.keys():
            return f"its {kind} are {', '.join(sorted(mine))}, the baseline's {', '.join(sorted(theirs))}"
        for name, tensor in mine.items():
            other = theirs[name]
            fits = len(tensor.shape) == len(other.shape) and all(
                a == b or -1 in (a, b) for a, b in zip(tensor.shape, other.shape, strict=True)
            )
            if tensor.datatype != other.datatype or not fits:
                return f"it has {tensor}, the baseline {other}"
    return ""
