"""What a model is judged by: a score for each sample whose mean is the metric, or one figure for all of them."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from compress.artifact import Signature
from compress.dataset import Dataset
from compress.errors import RecipeError
from compress.model import Arrays
from compress.user_code import user_code

__all__ = ["METRICS", "Metric", "cosine_similarity", "find_metric"]

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Metric:
    """A task metric; one of `per_sample` and `over_all` is given.

    Attributes:
        name: "top1", "top5", "agreement", "cosine", "mse", or `package.module:name`.
        per_sample: scores [n] from a batch's outputs, the original model's outputs, and the labels (or None).
        over_all: from all outputs and all labels at once: scores [n], or one figure [] where the metric is no mean of
            scores (mAP).
        higher_is_better: whether a fall is a loss.
        needs_labels: whether it means nothing without labels.
        scale: what a difference is multiplied by to be a drop: 100 for shares, so that a drop is in points.
    """

    name: str
    per_sample: Callable[[Arrays, Arrays, Array | None], Array] | None = None
    over_all: Callable[[Arrays, Array | None], Array] | None = None
    higher_is_better: bool = True
    needs_labels: bool = False
    scale: float = 100.0

    @property
    def points(self) -> float:
        """What turns `after - before` into a drop: below 0 where higher is better."""
        return -self.scale if self.higher_is_better else self.scale

    def drop(self, before: float, after: float) -> float:
        """How much worse `after` is, in points for shares; below 0 when it is better."""
        return self.points * (after - before) + 0.0  # never -0


def cosine_similarity(a: Array, b: Array) -> Array:
    """Per sample (first dimension), in float64; two zero vectors are alike (1), one zero vector is not (0)."""
    x, y = (np.asarray(v, np.float64).reshape(len(v), -1) for v in (a, b))
    norms = np.linalg.norm(x, axis=1) * np.linalg.norm(y, axis=1)
    both_zero = ~x.any(axis=1) & ~y.any(axis=1)
    return np.where(both_zero, 1.0, (x * y).sum(axis=1) / np.where(norms == 0, 1.0, norms))


def _top(k: int) -> Callable[[Arrays, Arrays, Array | None], Array]:
    def per_sample(outputs: Arrays, expected: Arrays, labels: Array | None) -> Array:  # noqa: ARG001
        logits = next(iter(outputs.values()))
        best = np.argsort(-logits, axis=1, kind="stable")[:, :k]
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


def find_metric(name: str | None, data: Dataset, signature: Signature) -> Metric:
    """The metric of that name, or the one that fits: top1 with labels, else agreement, else cosine.

    Args:
        name: one of METRICS; `package.module:name` of a function (outputs, labels) → scores [n] or one float, or of a
            torchmetrics object (or a class of these); or None.
        data: what is judged on.
        signature: of the model; a first output [batch, classes] makes it a classifier.

    Raises:
        RecipeError: an unknown name, or a metric that the data or the model can't serve.
    """
    labelled = data.labels is not None and data.labels.ndim == 1 and data.labels.dtype.kind in "iu"
    shape = signature.outputs[0].shape
    classifies = len(shape) == 2 and isinstance(shape[1], int) and shape[1] > 1
    if name is None:
        name = ("top1" if labelled else "agreement") if classifies else "cosine"
    if re.fullmatch(r"[\w.]+:\w+", name):
        return _users(name)
    if name not in METRICS:
        why = f"known are {', '.join(METRICS)}"
        raise RecipeError(f"there is no metric {name!r}", why=why, mend="name one of these, or package.module:function")
    metric = METRICS[name]
    if metric.needs_labels and not labelled:
        raise RecipeError(
            f"can't judge by {name}",
            why="the evaluation data has no labels that are one class for each sample",
            mend="add an array `label` [n] of integers to it, or judge by --metric agreement or cosine",
        )
    if name in ("top1", "top5", "agreement") and not classifies:
        raise RecipeError(
            f"can't judge by {name}",
            why=f"the model's first output is {signature.outputs[0]}, not one logit for each class",
            mend="judge by --metric cosine or mse, or by a function of your own: package.module:function",
        )
    return metric


def _users(source: str) -> Metric:
    """A user's function or torchmetrics object, with its own `higher_is_better` and `scale` where it has them."""
    mend = "name a function (outputs, labels) or a torchmetrics object; run from the folder that holds its module"
    try:
        with user_code(source) as found:
            if isinstance(found, type):
                found = found()
    except Exception as err:  # the user's module: anything may come out of it
        raise RecipeError(f"can't find the metric {source}", why=f"{type(err).__name__}: {err}", mend=mend) from err
    if not callable(found):
        raise RecipeError(f"can't use the metric {source}", why=f"it is a {type(found).__name__}", mend=mend)
    higher = getattr(found, "higher_is_better", True)
    scale = float(getattr(found, "scale", 100.0))
    over_all = _torchmetric(found) if hasattr(found, "update") and hasattr(found, "compute") else _function(found)
    return Metric(source, over_all=over_all, higher_is_better=higher is not False, scale=scale)


def _function(function: Callable[..., Any]) -> Callable[[Arrays, Array | None], Array]:
    return lambda outputs, labels: np.asarray(function(outputs, labels), np.float64)


def _torchmetric(metric: Any) -> Callable[[Arrays, Array | None], Array]:
    import torch

    def over_all(outputs: Arrays, labels: Array | None) -> Array:
        fresh = copy.deepcopy(metric)
        fresh.reset()
        fresh.update(torch.from_numpy(next(iter(outputs.values()))), torch.from_numpy(np.asarray(labels)))
        return np.asarray(fresh.compute(), np.float64)

    return over_all
