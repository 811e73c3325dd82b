"""What a model is judged by: a score for each sample, whose mean over the samples is the metric."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from compress.compare import cosine_similarity
from compress.errors import RecipeError
from compress.model import Arrays

__all__ = ["METRICS", "Metric", "find_metric"]

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Metric:
    """A task metric.

    Attributes:
        name: "top1", "top5", "agreement", "cosine", "mse", or `package.module:function`.
        per_sample: scores [n] from a batch's outputs, the original model's outputs, and the labels (or None).
        higher_is_better: whether a fall is a loss.
        needs_labels: whether it means nothing without labels.
        scale: what a difference is multiplied by to be a drop: 100 for shares, so that a drop is in points.
    """

    name: str
    per_sample: Callable[[Arrays, Arrays, Array | None], Array]
    higher_is_better: bool = True
    needs_labels: bool = False
    scale: float = 100.0

    def drop(self, before: float, after: float) -> float:
        """How much worse `after` is, in points for shares; below 0 when it is better."""
        return self.scale * (before - after if self.higher_is_better else after - before)


def _top(k: int) -> Callable[[Arrays, Arrays, Array | None], Array]:
    def per_sample(outputs: Arrays, expected: Arrays, labels: Array | None) -> Array:  # noqa: ARG001
        logits = next(iter(outputs.values()))
        best = np.argpartition(-logits, min(k, logits.shape[1]) - 1, axis=1)[:, :k]
        return np.asarray((best == np.asarray(labels)[:, None]).any(1), np.float64)

    return per_sample


def _agreement(outputs: Arrays, expected: Arrays, labels: Array | None) -> Array:  # noqa: ARG001
    first = next(iter(expected))
    return np.asarray(outputs[first].argmax(1) == expected[first].argmax(1), np.float64)


def _cosine(outputs: Arrays, expected: Arrays, labels: Array | None) -> Array:  # noqa: ARG001
    return np.asarray(np.mean([cosine_similarity(outputs[name], expected[name]) for name in expected], axis=0))


def _mse(outputs: Arrays, expected: Arrays, labels: Array | None) -> Array:  # noqa: ARG001
    errors = [np.square(outputs[name].astype(np.float64) - want) for name, want in expected.items()]
    return np.asarray(np.mean([error.reshape(len(error), -1).mean(1) for error in errors], axis=0))


METRICS = {
    metric.name: metric
    for metric in (
        Metric("top1", _top(1), needs_labels=True),
        Metric("top5", _top(5), needs_labels=True),
        Metric("agreement", _agreement),
        Metric("cosine", _cosine),
        Metric("mse", _mse, higher_is_better=False, scale=1.0),
    )
}


def find_metric(name: str | None, *, labelled: bool, classifies: bool) -> Metric:
    """The metric of that name, or the one that fits the data: top1 with labels, else agreement, else cosine.

    Args:
        name: one of METRICS, or None.
        labelled: whether the data has labels.
        classifies: whether the first output is logits [n, classes].

    Raises:
        RecipeError: an unknown name, or a metric that the data can't serve.
    """
    if name is None:
        name = ("top1" if labelled else "agreement") if classifies else "cosine"
    if name not in METRICS:
        raise RecipeError(
            f"there is no metric {name!r}", why="known are " + ", ".join(METRICS), mend="name one of these"
        )
    metric = METRICS[name]
    if metric.needs_labels and not labelled:
        raise RecipeError(
            f"can't judge by {name}",
            why="the evaluation data has no labels",
            mend="add an array `label` to it, or judge by --metric agreement or cosine",
        )
    return metric
