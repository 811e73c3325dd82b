"""How much worse a model is than its original, and whether a budget allows it: the one place that decides."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from compress.data.dataset import Dataset
from compress.evaluate.intervals import CONFIDENCE, difference_interval, percent
from compress.evaluate.metrics import Metric, refuse_other_shapes
from compress.evaluate.scoring import Answers, ForEach, Scores
from compress.evaluate.vectors import comparable
from compress.model import Arrays
from compress.model.apart import by_scale
from compress.runtime.backends import Backend

__all__ = ["Budget", "Drop", "Judge", "spread"]

Pair = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]

KEPT_BYTES = 256 << 20  # of the original's outputs, beyond which it runs again for each model


@dataclass(frozen=True)
class Budget:
    """What a model may lose.

    Attributes:
        points: of the metric, at most.
        confidence: of the interval whose upper end has to keep it; None holds the estimate itself against it.
        constant: points that the best answer that is always the same loses on these samples: what loses as many keeps
            nothing.
    """

    points: float
    confidence: float | None = CONFIDENCE
    constant: float = math.inf

    def beside(self, constant: float | None) -> Self:
        """The same, where the best answer that is always the same loses so much; None where that is not known."""
        return dataclasses.replace(self, constant=math.inf if constant is None else constant)

    def counted(self, drop: float | None, high: float | None) -> float:
        """What is held against the limit: the interval's upper end, or the drop; infinite where nothing is kept."""
        return math.inf if self.lost_all(drop) else self._held(drop, high)

    def lost_all(self, drop: float | None) -> bool:
        """Whether the model is no better than the best answer that is always the same.

        By the estimate: no such answer is better on the very samples that the best was chosen on, however few.
        """
        return drop is not None and drop >= self.constant

    def _held(self, drop: float | None, high: float | None) -> float:
        held = drop if self.confidence is None else high
        if held is None or drop is None or math.isnan(held) or math.isnan(drop):
            return math.inf
        return max(held, drop)

    def keeps(self, drop: float | None, high: float | None) -> bool:
        """Whether a drop with this upper end is inside; one that was not measured is not."""
        return self.counted(drop, high) <= self.points

    def words(self, drop: float | None, high: float | None) -> str:
        """What is inside or beyond, for a message."""
        if drop is None:
            return "unknown"
        words = f"{drop:.4g} points"
        if self.confidence is not None and high is None:
            words += ", without an interval"
        elif self.confidence is not None:
            words += f", and may be {self._held(drop, high):.4g} at {percent(self.confidence)} confidence"
        if self.lost_all(drop):
            words += f", where an answer that looks at nothing loses {self.constant:.4g}"
        return words


@dataclass(frozen=True)
class Drop:
    """What a model loses.

    Attributes:
        before, after: the metric of the original and of the model.
        points: the loss, in points for shares; below 0 for a gain; infinite where the model's answers are no numbers.
        low, high: its confidence interval, paired by sample; None where the metric is no mean of scores, or the samples
            don't tell.
        counted: what a budget is held against; infinite where none counts as kept.
        scores: of the model, each sample's [n]; of a metric that is no mean, its one value [1].
    """

    before: float
    after: float
    points: float
    low: float | None
    high: float | None
    counted: float = math.inf
    scores: np.ndarray[Any, Any] = field(default_factory=lambda: np.empty(0), compare=False, repr=False)


def spread(data: Dataset, count: int) -> Dataset:
    """At most so many samples, evenly over the data."""
    return data.part(data.places(count))


class Judge:
    """Compares models with an original.

    Args:
        original: its outputs are kept, where the metric looks at them and they are few; otherwise it runs again beside
            each model.
        data: to judge on.
        metric: what is judged by.
        confidence: of the intervals; None takes estimates as they are for what a budget is held against.

    Attributes:
        doubts: why a drop would mean nothing, in sentences.
        constant: points that the best answer that is always the same loses; None where nobody knows one.
    """

    def __init__(
        self, original: Backend, data: Dataset, metric: Metric, *, confidence: float | None = CONFIDENCE
    ) -> None:
        metric = metric.on(data)
        self._data, self._metric, self._confidence = data, metric, confidence
        self._for_each = ForEach(original, data)
        self._size = self._for_each.batch
        self._reference = _Reference(original, self._for_each)
        answers, scores = Answers(metric), Scores(metric)
        for number, (inputs, labels) in enumerate(data.batches(self._size)):
            outputs = self._reference(number, inputs, keep=metric.compares)
            answers.add(outputs, labels)
            scores.add(outputs, outputs, labels)
        self._original = scores.result()
        single = self._original if self.gives_intervals else None
        self.doubts = answers.doubts(single, confidence or CONFIDENCE, self.original)
        self.constant = metric.loss(self.original, answers.constant)

    @classmethod
    def of_part(
        cls, original: Backend, data: Dataset, metric: Metric, count: int, confidence: float = CONFIDENCE
    ) -> Self:
        """A judge on so many samples, spread over the data."""
        return cls(original, spread(data, count), metric, confidence=confidence)

    def __len__(self) -> int:
        return len(self._data)

    @property
    def metric(self) -> Metric:
        """What is judged by."""
        return self._metric

    @property
    def original(self) -> float:
        """The metric of the original."""
        return float(self._original.mean())

    @property
    def gives_intervals(self) -> bool:
        """Whether the metric is a mean of scores."""
        return bool(self._original.shape == (len(self._data) // self._metric.together,))

    @property
    def unseen(self) -> float | None:
        """Points that may be lost where no sample shows a change; None where nobody knows."""
        return self._between(self._original, self._original)[1]

    def drop(self, model: Backend) -> Drop:
        """What the model loses against the original; with doubts in the evaluation, no budget counts as kept."""
        tally = Scores(self._metric)
        for number, (inputs, labels) in enumerate(self._data.batches(self._size)):
            expected = self._reference(number, inputs) if self._metric.compares else {}
            tally.add(self._for_each(model.infer(inputs), inputs), expected, labels)
        scores = tally.result()
        before, after = self.original, float(scores.mean())
        points = self._metric.drop(before, after)
        points = math.inf if math.isnan(points) else points
        low, high = self._between(scores, self._original)
        held = Budget(0.0, self._confidence).beside(self.constant)
        counted = math.inf if self.doubts else held.counted(points, high)
        return Drop(before, after, points, low, high, counted, scores)

    def loss_between(self, one: Drop, other: Drop) -> float | None:
        """What a model loses against another for sure: the interval's lower end, in points; None without intervals.

        Args:
            one, other: of both, by this judge.
        """
        return None if self.doubts else self._between(one.scores, other.scores)[0]

    def _between(self, scores: np.ndarray[Any, Any], first: np.ndarray[Any, Any]) -> tuple[float | None, float | None]:
        """The interval of what is lost, paired by sample, in points."""
        if not self.gives_intervals or scores.shape != first.shape or first.shape != self._original.shape:
            return None, None
        found = difference_interval(
            scores, first, confidence=self._confidence or CONFIDENCE, bounds=self._metric.bounds
        ).times(self._metric.points)
        low, high = (end if math.isfinite(end) else None for end in (found.low, found.high))
        return low, high

    def squared_error(self, model: Backend) -> float:
        """Mean over samples of the squared difference to the original's outputs, each output in its own scale.

        Values of an output that are far above the rest, as a mask's fills are, have a scale of their own, too. Outputs
        of integers, booleans and texts, such as numbers of classes, are left out where others are floats; where none
        is, they count by the share of their values that differ, whatever these are.
        """
        return float(self.squared_errors(model).mean())

    def squared_errors(self, model: Backend) -> np.ndarray[Any, Any]:
        """The same of each sample [n]; NaN or infinite where outputs are, and the original's are not.

        An output that has no row for each sample counts for all samples of its batch.
        """
        total, seen = np.zeros(len(self._data)), 0
        found: dict[tuple[str, int], tuple[np.ndarray[Any, Any], list[float]]] = {}
        for number, (inputs, _) in enumerate(self._data.batches(self._size)):
            samples = len(next(iter(inputs.values())))
            outputs = self._for_each(model.infer(inputs), inputs)
            expected = self._reference(number, inputs, keep=True)
            refuse_other_shapes(expected, outputs, "the model", "the original")
            floats = [name for name, given in expected.items() if given.dtype.kind in "fc"]
            for name in floats or expected:
                want, got = _in_numbers(expected[name], outputs[name])
                with np.errstate(invalid="ignore"):
                    squares = np.where((want == got) | (np.isnan(want) & np.isnan(got)), 0.0, np.square(got - want))
                finite = np.square(np.where(np.isfinite(want), want, 0.0))
                for part, at in enumerate(by_scale(want)):
                    errors, sizes = found.setdefault((name, part), (np.zeros_like(total), []))
                    errors[seen : seen + samples] = _by_sample(np.where(at, squares, 0.0), samples)
                    sizes += _by_sample(np.where(at, finite, 0.0), samples).tolist()
            seen += samples
        for errors, sizes in found.values():
            total += errors / (sum(sizes) / len(total) or 1.0)
        return total


def _in_numbers(expected: np.ndarray[Any, Any], got: np.ndarray[Any, Any]) -> Pair:
    """Both in float64, see `comparable`; of what is no float, 1 and whether it is the same."""
    if expected.dtype.kind in "fc":
        return comparable(expected, got)
    return np.ones(np.shape(expected)), np.asarray(expected == got, np.float64)


def _by_sample(values: np.ndarray[Any, Any], samples: int) -> np.ndarray[Any, Any]:
    """The mean of each sample's values [samples]."""
    if values.ndim == 0 or len(values) != samples:
        return np.full(samples, values.mean() if values.size else 0.0)
    return values.reshape(samples, -1).mean(axis=1) if values.size else np.zeros(samples)


class _Reference:
    """The original's outputs by batch, of which as many are kept as there is room for."""

    def __init__(self, original: Backend, for_each: ForEach) -> None:
        self._original, self._for_each = original, for_each
        self._kept: dict[int, Arrays] = {}
        self._room = KEPT_BYTES

    def __call__(self, number: int, inputs: Arrays, *, keep: bool = False) -> Arrays:
        if number in self._kept:
            return self._kept[number]
        outputs = self._for_each(self._original.infer(inputs), inputs)
        size = sum(array.nbytes for array in outputs.values())
        if keep and size <= self._room:
            self._room -= size
            self._kept[number] = outputs
        return outputs
