"""The same samples through several models: how far each is from the reference, and how well each does the task."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from compress.artifact import TensorSpec
from compress.data.dataset import Dataset
from compress.evaluate.intervals import CONFIDENCE
from compress.evaluate.metrics import BY_LABELS, METRICS, Metric, cosine_similarity, not_finite
from compress.evaluate.output_choice import OutputContent, content_of, named_so, rebuilds
from compress.evaluate.scoring import Answers, ForEach, Scores
from compress.evaluate.vectors import comparable
from compress.model import Arrays
from compress.model.apart import by_scale
from compress.runtime.backends import Backend

__all__ = ["Comparison", "batch_difference", "compare", "cosine_similarity", "max_abs_error"]

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Comparison:
    """Figures over all samples; None where the data or the outputs don't allow one.

    Attributes:
        samples: how many.
        value: of the metric; NaN or infinite where the model's answers, or the user's metric, are.
        scores: the metric of each sample [n], or None where it is no mean of these.
        accuracy: share whose label has the largest logit, 0 to 1; of class scores only.
        agreement: share with the reference's top-1 answer, 0 to 1; of class scores only.
        cosine_similarity: mean over samples and outputs, against the reference.
        max_abs_error: the largest over all outputs, against the reference.
        not_numbers: samples whose judged outputs hold NaN; they have the worst score.
        not_finite: samples for which any output holds NaN or infinity.
        doubts: of the reference: why a difference to it would mean nothing, in sentences.
        constant: of the reference: points that the best answer that is always the same loses, see `Metric.constant`.
    """

    samples: int
    value: float
    scores: np.ndarray[Any, Any] | None
    accuracy: float | None
    agreement: float | None
    cosine_similarity: float
    max_abs_error: float
    not_numbers: int = 0
    not_finite: int = 0
    doubts: tuple[str, ...] = ()
    constant: float | None = None


def max_abs_error(a: Arrays, b: Arrays) -> float:
    """The largest absolute difference over all outputs of a's names.

    It is infinite where there is NaN, where infinities differ, and where an output is missing or of another shape.
    """
    worst = 0.0
    for name, left in a.items():
        if name not in b or np.shape(left) != np.shape(b[name]):
            return float("inf")
        x, y = comparable(np.asarray(left), np.asarray(b[name]))
        with np.errstate(invalid="ignore"):
            difference = np.where(x == y, 0.0, np.abs(x - y))
        if difference.size:
            worst = max(worst, float(np.nan_to_num(difference, nan=np.inf, posinf=np.inf).max()))
    return worst


def batch_difference(model: Backend, inputs: Arrays, *, alone: int | None = None) -> float:
    """How far a sample's answer depends on what else is in its batch: 0 for a model that takes each by itself.

    Args:
        model: that takes any number of samples.
        inputs: some samples.
        alone: how many of them, from the first, are run by themselves; by default all.

    Returns:
        The largest absolute difference between the outputs for all samples at once and for one alone, as a share of
        the largest output, or, of values far above the rest, such as a mask's fills, of the value itself; infinite
        where outputs are no numbers.
    """
    together = model.infer(inputs)
    count = len(next(iter(inputs.values())))
    count = count if alone is None else min(alone, count)
    rest = {name: by_scale(values)[0] for name, values in together.items()}
    finite = (np.abs(values[rest[name] & np.isfinite(values)]) for name, values in together.items())
    largest = max((float(values.max(initial=0)) for values in finite), default=0.0) or 1.0
    scales = {name: np.where(rest[name], largest, np.abs(values)) for name, values in together.items()}
    worst = 0.0
    for at in range(count):
        one = slice(at, at + 1)
        single = model.infer({name: values[one] for name, values in inputs.items()})
        expected = {name: values[one] / scales[name][one] for name, values in together.items()}
        got = {name: values / scales[name][one] for name, values in single.items()}
        worst = max(worst, max_abs_error(got, expected))
    return worst


class _Tally:
    """What is kept of one model: a score for each sample and figure."""

    def __init__(self, metrics: Mapping[str, Metric]) -> None:
        self.scores = {name: Scores(metric) for name, metric in metrics.items()}
        self.worst, self.not_finite = 0.0, 0

    def add(self, outputs: Arrays, expected: Arrays, labels: np.ndarray[Any, Any] | None) -> None:
        for scores in self.scores.values():
            scores.add(outputs, expected, labels)
        self.worst = max(self.worst, max_abs_error(expected, outputs))
        self.not_finite += not_finite(outputs)


def compare(
    reference: str,
    models: Mapping[str, Backend],
    data: Dataset,
    metric: Metric = METRICS["cosine"],
    *,
    batch: int | None = None,
    confidence: float = CONFIDENCE,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> dict[str, Comparison]:
    """Run every model on every batch; memory holds one batch at a time, and a number for each sample.

    Args:
        reference: the name in `models` that the others are compared with.
        models: by name; accuracy and agreement look at the output that the metric judges, or at the first, and are
            given where this is class scores.
        data: with labels for accuracy.
        metric: what the models are judged by; a function of all outputs has these kept in memory.
        batch: samples at a time; by default what fits their size.
        confidence: for telling the reference from chance.
        progress: called with samples done and in all.

    Raises:
        RecipeError: the user's metric fails.
    """
    metric = metric.on(data)
    for_each = ForEach(models[reference], data)
    done, size = 0, batch or for_each.batch
    tallies: dict[str, _Tally] = {}
    answers = Answers(metric)
    for inputs, labels in data.batches(size):
        expected = for_each(models[reference].infer(inputs), inputs)
        tallies = tallies or {name: _Tally(_wanted(inputs, expected, data, metric)) for name in models}
        answers.add(expected, labels)
        for name, model in models.items():
            outputs = expected if name == reference else for_each(model.infer(inputs), inputs)
            tallies[name].add(outputs, expected, labels)
        done += len(next(iter(inputs.values())))
        progress(done, len(data))
    found = {name: _comparison(tally, len(data), len(data) // metric.together) for name, tally in tallies.items()}
    first = found[reference]
    doubts = answers.doubts(first.scores, confidence, first.value)
    constant = metric.loss(first.value, answers.constant)
    return found | {reference: dataclasses.replace(first, doubts=doubts, constant=constant)}


def _wanted(inputs: Arrays, expected: Arrays, data: Dataset, metric: Metric) -> dict[str, Metric]:
    """What this batch allows to be scored: the metric, and what else is told of every model."""
    judged = metric.output or next(iter(expected))
    found = {"metric": metric, "cosine": METRICS["cosine"]}
    if _class_scores(judged, expected[judged], inputs, data, metric):
        found |= {"agreement": METRICS["agreement"].of(judged)}
        if data.labels is not None and data.labels.ndim == 1 and data.labels.dtype.kind in "iu":
            found |= {"top1": METRICS["top1"].of(judged)}
    return found


def _class_scores(name: str, scores: Array, inputs: Arrays, data: Dataset, metric: Metric) -> bool:
    """Whether the largest of an output's values is an answer.

    It is where the metric says so. One that looks at labels otherwise says that it is not; beside others, the output's
    name has to say it, or labels of as many classes.
    """
    if scores.ndim != 2 or scores.shape[1] < 2 or scores.dtype.kind != "f":
        return False
    if metric.classifies or metric.name in BY_LABELS:
        return metric.classifies
    if content_of(TensorSpec(name, scores.dtype.name, ("batch", scores.shape[1])), scores) is not OutputContent.CLASSES:
        return False
    if named_so(name):
        return True
    labels = data.labels if isinstance(data.labels, np.ndarray) else None  # others are made when asked for
    if labels is None or labels.ndim != 1 or labels.dtype.kind not in "iu":
        return False
    alike = rebuilds(scores.shape, [given.shape for given in inputs.values() if given.dtype.kind == "f"])
    return not alike and int(labels.max(initial=-1)) + 1 == scores.shape[1]


def _comparison(tally: _Tally, samples: int, scores: int) -> Comparison:
    judged = tally.scores["metric"].result()
    means = {name: float(found.result().mean()) for name, found in tally.scores.items() if name != "metric"}
    return Comparison(
        samples=samples,
        value=float(judged.mean()),
        scores=judged if judged.shape == (scores,) else None,
        accuracy=means.get("top1"),
        agreement=means.get("agreement"),
        cosine_similarity=means["cosine"],
        max_abs_error=tally.worst,
        not_numbers=tally.scores["metric"].not_numbers,
        not_finite=tally.not_finite,
    )
