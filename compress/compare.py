"""The same samples through several models: how far each is from the reference, and how well each does the task."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from compress.backends import Backend
from compress.dataset import Dataset
from compress.model import Arrays

__all__ = ["Comparison", "compare", "cosine_similarity", "max_abs_error"]


@dataclass(frozen=True)
class Comparison:
    """Figures over all samples; None where the data or the outputs don't allow one.

    Attributes:
        samples: how many.
        accuracy: share whose label has the largest logit, 0 to 1.
        agreement: share with the reference's top-1 answer, 0 to 1.
        cosine_similarity: mean over samples and outputs, against the reference.
        max_abs_error: the largest over all outputs, against the reference.
    """

    samples: int
    accuracy: float | None
    agreement: float | None
    cosine_similarity: float
    max_abs_error: float


def cosine_similarity(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Per sample (first dimension), in float64; two zero vectors are alike (1), one zero vector is not (0)."""
    x, y = (np.asarray(v, np.float64).reshape(len(v), -1) for v in (a, b))
    norms = np.linalg.norm(x, axis=1) * np.linalg.norm(y, axis=1)
    both_zero = ~x.any(axis=1) & ~y.any(axis=1)
    return np.where(both_zero, 1.0, (x * y).sum(axis=1) / np.where(norms == 0, 1.0, norms))


def max_abs_error(a: Arrays, b: Arrays) -> float:
    """The largest absolute difference over all outputs of a's names; NaN on one side only is infinite."""
    worst = 0.0
    for name, x in a.items():
        difference = np.abs(np.asarray(x, np.float64) - np.asarray(b[name], np.float64))
        if difference.size:
            worst = max(worst, float(np.nan_to_num(difference, nan=np.inf).max()))
    return worst


@dataclass
class _Tally:
    samples: int = 0
    right: int = 0
    agreeing: int = 0
    cosine: float = 0.0
    worst: float = 0.0
    classifies: bool = field(default=True)


def compare(
    reference: str,
    models: Mapping[str, Backend],
    data: Dataset,
    *,
    batch: int = 64,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> dict[str, Comparison]:
    """Run every model on every batch; memory holds one batch at a time.

    Args:
        reference: the name in `models` that the others are compared with.
        models: by name; the first output [n, classes] is the one that accuracy and agreement look at.
        data: with labels for accuracy.
        batch: samples at a time.
        progress: called with samples done and in all.
    """
    tallies = {name: _Tally() for name in models}
    for inputs, labels in data.batches(batch):
        outputs = {name: model.infer(inputs) for name, model in models.items()}
        expected = outputs[reference]
        for name, tally in tallies.items():
            _add(tally, outputs[name], expected, labels)
        progress(tallies[reference].samples, len(data))
    labelled = data.labels is not None and data.labels.ndim == 1 and data.labels.dtype.kind in "iu"
    return {
        name: Comparison(
            samples=t.samples,
            accuracy=t.right / t.samples if t.classifies and labelled else None,
            agreement=t.agreeing / t.samples if t.classifies else None,
            cosine_similarity=t.cosine / t.samples,
            max_abs_error=t.worst,
        )
        for name, t in tallies.items()
    }


def _add(tally: _Tally, got: Arrays, expected: Arrays, labels: np.ndarray[Any, Any] | None) -> None:
    first = next(iter(expected))
    tally.samples += len(expected[first])
    tally.cosine += float(np.mean([cosine_similarity(got[name], expected[name]) for name in expected], axis=0).sum())
    tally.worst = max(tally.worst, max_abs_error(expected, got))
    if expected[first].ndim != 2 or expected[first].shape[1] < 2:
        tally.classifies = False
        return
    answer = got[first].argmax(1)
    tally.agreeing += int((answer == expected[first].argmax(1)).sum())
    if labels is not None and labels.ndim == 1:
        tally.right += int((answer == labels).sum())
