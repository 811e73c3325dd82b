"""The same samples through several models: how far each is from the reference, and how well each does the task."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from compress.backends import Backend
from compress.dataset import Dataset
from compress.errors import RecipeError
from compress.metrics import METRICS, Metric, cosine_similarity
from compress.model import Arrays

__all__ = ["Comparison", "batch_difference", "compare", "cosine_similarity", "max_abs_error"]


@dataclass(frozen=True)
class Comparison:
    """Figures over all samples; None where the data or the outputs don't allow one.

    Attributes:
        samples: how many.
        value: of the metric.
        scores: the metric of each sample [n], or None where it is no mean of these.
        accuracy: share whose label has the largest logit, 0 to 1.
        agreement: share with the reference's top-1 answer, 0 to 1.
        cosine_similarity: mean over samples and outputs, against the reference.
        max_abs_error: the largest over all outputs, against the reference.
    """

    samples: int
    value: float
    scores: np.ndarray[Any, Any] | None
    accuracy: float | None
    agreement: float | None
    cosine_similarity: float
    max_abs_error: float


def max_abs_error(a: Arrays, b: Arrays) -> float:
    """The largest absolute difference over all outputs of a's names; NaN on one side only is infinite."""
    worst = 0.0
    for name, x in a.items():
        difference = np.abs(np.asarray(x, np.float64) - np.asarray(b[name], np.float64))
        if difference.size:
            worst = max(worst, float(np.nan_to_num(difference, nan=np.inf).max()))
    return worst


def batch_difference(model: Backend, inputs: Arrays) -> float:
    """How far a sample's answer depends on what else is in its batch: 0 for a model that takes each by itself.

    Args:
        model: that takes any number of samples.
        inputs: some samples.

    Returns:
        The largest absolute difference between the outputs for all samples at once and for each alone, as a share of
        the largest output.
    """
    together = model.infer(inputs)
    count = len(next(iter(inputs.values())))
    largest = max((float(np.abs(values).max(initial=0)) for values in together.values()), default=0.0)
    worst = 0.0
    for at in range(count):
        alone = model.infer({name: values[at : at + 1] for name, values in inputs.items()})
        worst = max(worst, max_abs_error(alone, {name: values[at : at + 1] for name, values in together.items()}))
    return worst / largest if largest else worst


@dataclass
class _Tally:
    """What is kept of one model: scores, and whole outputs only where the metric needs them all at once."""

    scores: dict[str, list[np.ndarray[Any, Any]]] = field(default_factory=dict)
    outputs: dict[str, list[np.ndarray[Any, Any]]] = field(default_factory=dict)
    worst: float = 0.0


def compare(
    reference: str,
    models: Mapping[str, Backend],
    data: Dataset,
    metric: Metric = METRICS["cosine"],
    *,
    batch: int = 64,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> dict[str, Comparison]:
    """Run every model on every batch; memory holds one batch at a time, and a number for each sample.

    Args:
        reference: the name in `models` that the others are compared with.
        models: by name; the first output [n, classes] is the one that accuracy and agreement look at.
        data: with labels for accuracy.
        metric: what the models are judged by; one that is no mean of scores has all outputs kept in memory.
        batch: samples at a time.
        progress: called with samples done and in all.

    Raises:
        RecipeError: the user's metric fails.
    """
    tallies = {name: _Tally() for name in models}
    done = 0
    for inputs, labels in data.batches(batch):
        outputs = {name: model.infer(inputs) for name, model in models.items()}
        expected = outputs[reference]
        wanted = _wanted(expected, labels, metric)
        for name, tally in tallies.items():
            for kind in wanted:
                scores = METRICS[kind].per_sample if kind in METRICS else metric.per_sample
                assert scores is not None  # noqa: S101  all of METRICS have it
                tally.scores.setdefault(kind, []).append(scores(outputs[name], expected, labels))
            if metric.over_all is not None:
                for output, array in outputs[name].items():
                    tally.outputs.setdefault(output, []).append(array)
            tally.worst = max(tally.worst, max_abs_error(expected, outputs[name]))
        done += len(next(iter(inputs.values())))
        progress(done, len(data))
    return {name: _comparison(tally, metric, data) for name, tally in tallies.items()}


def _wanted(expected: Arrays, labels: np.ndarray[Any, Any] | None, metric: Metric) -> set[str]:
    """Names of the scores that this batch allows."""
    first = expected[next(iter(expected))]
    found = {"cosine"} | ({metric.name} if metric.per_sample is not None else set())
    if first.ndim == 2 and first.shape[1] > 1:
        found |= {"agreement"}
        if labels is not None and labels.ndim == 1 and labels.dtype.kind in "iu":
            found |= {"top1"}
    return found


def _comparison(tally: _Tally, metric: Metric, data: Dataset) -> Comparison:
    scores = {name: np.concatenate(parts) for name, parts in tally.scores.items()}
    means = {name: float(values.mean()) for name, values in scores.items()}
    if metric.over_all is None:
        judged: np.ndarray[Any, Any] = scores[metric.name]
    else:
        try:
            judged = metric.over_all({name: np.concatenate(p) for name, p in tally.outputs.items()}, data.labels)
        except Exception as err:  # the user's function: anything may come out of it
            why = f"{type(err).__name__}: {err}"
            mend = "it is given (outputs by name, labels), each with the samples first"
            raise RecipeError(f"the metric {metric.name} fails", why=why, mend=mend) from err
    return Comparison(
        samples=len(data),
        value=float(judged.mean()),
        scores=judged if judged.shape == (len(data),) else None,
        accuracy=means.get("top1"),
        agreement=means.get("agreement"),
        cosine_similarity=means["cosine"],
        max_abs_error=tally.worst,
    )
