"""Scores of a model, batch by batch: what is kept is a number for each sample, not its outputs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from compress.console.wording import counted
from compress.data.dataset import Dataset
from compress.errors import RecipeError
from compress.evaluate.intervals import Interval, mean_interval, percent, share_interval
from compress.evaluate.metrics import BATCH, METRICS, Metric, refuse_other_shapes, without_nan
from compress.model import Arrays
from compress.runtime.backends import Backend

__all__ = ["Answers", "ForEach", "Scores", "batch_for", "bytes_of", "rows_within"]

Array = np.ndarray[Any, Any]
ROUNDING = 1e-5  # beyond its bounds, that a score in single precision may be
BATCH_BYTES = 32 << 20  # of inputs and outputs; what is between them in a network is some times as much


def batch_for(model: Backend, data: Dataset) -> int:
    """How many samples go through a model at a time: at most 64, fewer where inputs and outputs are large."""
    return ForEach(model, data).batch


def bytes_of(*arrays: Arrays) -> int:
    """Of all arrays together."""
    return sum(values.nbytes for each in arrays for values in each.values())


def rows_within(sample_bytes: int, room: int = BATCH_BYTES) -> int:
    """How many samples, of so many bytes with their outputs, go through a model at a time: at most 64."""
    return int(np.clip(room // max(sample_bytes, 1), 1, BATCH))


class ForEach:
    """A model's outputs with one row for each sample, where they are not alike as they are.

    What counts for a whole batch (a loss, a constant) is that of each sample. Outputs that all have their samples in
    the same place stay as they are.

    Args:
        model: is run on the first sample, or the first call's: an axis as long as these are many, and of so many for
            many, counts samples.
        data: to judge on.

    Attributes:
        batch: see `batch_for`.
    """

    def __init__(self, model: Backend, data: Dataset) -> None:
        inputs = data.first(1)
        outputs = model.infer(inputs)
        self._first = len(next(iter(inputs.values())))
        self.batch = data.whole(rows_within(bytes_of(inputs, outputs) // self._first))
        self._one = {name: np.shape(values) for name, values in outputs.items()}
        self._axes: dict[str, int | None] | None = None

    def __call__(self, outputs: Arrays, inputs: Arrays) -> Arrays:
        """The outputs for these inputs: as they are, or [samples, …]."""
        samples = len(next(iter(inputs.values())))
        axes = self.axes(outputs, samples)
        if len({*axes.values()}) == 1 and all(np.ndim(values) for values in outputs.values()):
            return outputs
        return {name: _rows(values, axes[name], samples) for name, values in outputs.items()}

    def axes(self, outputs: Arrays, samples: int) -> dict[str, int | None]:
        """By output the axis that its samples are on; None where it has none.

        Args:
            outputs: for a batch; the first that is given tells.
            samples: of the batch.
        """
        if self._axes is None:
            self._axes = {name: self._axis(name, np.shape(values), samples) for name, values in outputs.items()}
        return {name: self._axes.get(name, 0) for name in outputs}

    def _axis(self, name: str, shape: tuple[int, ...], samples: int) -> int | None:
        sizes = zip(self._one.get(name, ()), shape, strict=False)
        return next((axis for axis, pair in enumerate(sizes) if pair == (self._first, samples)), None)


def _rows(values: Array, axis: int | None, samples: int) -> Array:
    if axis is None or axis >= np.ndim(values):
        return np.broadcast_to(values, (samples, *np.shape(values))).copy()
    return np.moveaxis(values, axis, 0)


class Scores:
    """A metric's scores of one model.

    Args:
        metric: one that is a function of all outputs has these kept in memory; see `Metric.on`.
    """

    def __init__(self, metric: Metric) -> None:
        self._metric = metric
        self._scores: list[Array] = []
        self._outputs: dict[str, list[Array]] = {}
        self._labels: list[Array] = []
        self._samples = 0
        self._running = None if metric.accumulated is None else metric.accumulated()
        self.not_numbers = 0

    def add(self, outputs: Arrays, expected: Arrays, labels: Array | None) -> None:
        """Take a batch.

        Args:
            outputs: of the model.
            expected: of the original.
            labels: or None.

        Raises:
            RecipeError: the user's metric fails.
            StageError: a metric that compares is given outputs of other shapes.
        """
        metric = self._metric
        if metric.compares:
            refuse_other_shapes(metric.judged(expected), outputs, "the model", "the original")
        count = len(next(iter(outputs.values())))
        self._samples += count
        numbers = without_nan(metric.judged(outputs))
        self.not_numbers += int((~numbers).sum())
        if self._running is not None:
            try:
                self._running.update(outputs, labels)
            except Exception as err:
                raise self._failed(err) from err
            return
        if metric.per_sample is not None:
            try:
                scores = np.asarray(metric.per_sample(metric.judged(outputs), metric.judged(expected), labels))
            except Exception as err:
                raise self._failed(err) from err
            if scores.shape != (count,):
                raise self._misshapen(scores)
            self._scores.append(self._bounded(scores))
            return
        for name, array in outputs.items():
            self._outputs.setdefault(name, []).append(array)
        if labels is not None:
            self._labels.append(labels)

    def result(self) -> Array:
        """Scores [n], or one figure [] where the metric is no mean of scores.

        Raises:
            RecipeError: the user's metric fails, or gives neither.
        """
        if self._scores:
            return np.concatenate(self._scores)
        try:
            if self._running is not None:
                found = np.asanyarray(self._running.compute(), np.float64)  # influences stay
            else:
                assert self._metric.over_all is not None  # noqa: S101  a metric has one of the three
                together = {name: np.concatenate(parts) for name, parts in self._outputs.items()}
                found = self._metric.over_all(together, np.concatenate(self._labels) if self._labels else None)
        except Exception as err:  # the user's function: anything may come out of it
            raise self._failed(err) from err
        if found.shape == (self._samples // self._metric.together,):
            return self._bounded(found)
        if found.size != 1:
            raise self._misshapen(found)
        return found.reshape(())

    def _bounded(self, scores: Array) -> Array:
        """The worst score for what is no number; intervals and points rest on the bounds that the metric states."""
        nan = np.isnan(scores)
        scores = np.where(nan, self._metric.worst, scores) if nan.any() else scores
        if self._metric.bounds is None or self._metric.name in METRICS:
            return scores
        low, high = self._metric.bounds
        outside = scores[(scores < low - ROUNDING) | (scores > high + ROUNDING)]
        if outside.size:
            raise RecipeError(
                f"can't judge by the metric {self._metric.name}",
                why=f"it gives {outside[0]:.6g}, and its scores are to lie between {low:g} and {high:g}",
                mend="where it is no share, set scale = 1 on the function, or bounds = (smallest, largest)",
            )
        return scores

    def _failed(self, err: Exception) -> RecipeError:
        return RecipeError(
            f"the metric {self._metric.name} fails",
            why=f"{type(err).__name__}: {err}",
            mend="it is given (outputs by name, labels), each with the samples first",
        )

    def _misshapen(self, found: Array) -> RecipeError:
        return RecipeError(
            f"can't judge by the metric {self._metric.name}",
            why=f"it gives an array {list(found.shape)} for {counted(self._samples, 'samples')}",
            mend="let it give one score for each sample, or one figure for all of them",
        )


class Answers:
    """What the original answers, as far as it tells whether the evaluation means anything.

    Args:
        metric: what is judged by.
    """

    def __init__(self, metric: Metric) -> None:
        self._metric = metric
        self._first: Arrays | None = None
        self._vary = False
        self._labels: Counter[int] = Counter()
        self._classes = 0
        self._outside = 0
        self._samples = 0
        self._chance = None if metric.chance is None else metric.chance()
        self._constant = None if metric.constant is None else metric.constant()

    @property
    def constant(self) -> float | None:
        """The metric of the best answer that is always the same; None where there is no one such."""
        if self._constant is not None:
            return self._constant.score()
        if self._chance is not None:
            return self._chance.rate()
        return self._most_frequent if self._labels else None

    @property
    def _most_frequent(self) -> float:
        """Share of the samples whose label is the most frequent one, or one of five where as many guesses count."""
        return sum(count for _, count in self._labels.most_common(self._guesses)) / self._samples

    @property
    def _guesses(self) -> int:
        return 5 if self._metric.name == "top5" else 1

    def add(self, outputs: Arrays, labels: Array | None) -> None:
        """Take a batch of the original's outputs."""
        judged = self._metric.judged(outputs)
        self._samples += len(next(iter(judged.values())))
        if self._first is None:
            self._first = {name: values[:1].copy() for name, values in judged.items()}
        self._vary = self._vary or any(bool((values != self._first[name]).any()) for name, values in judged.items())
        if self._chance is not None:
            self._chance.add(judged, labels)
        if self._constant is not None:
            self._constant.add(judged)
        if not self._metric.classifies:
            return
        scores = next(iter(judged.values()))
        if scores.ndim == 2 and scores.dtype.kind == "f":
            self._classes = scores.shape[1]
        if self._metric.needs_labels and labels is not None:
            self._labels.update(labels.tolist())
            self._outside += int(((labels < 0) | (labels >= self._classes)).sum())

    def doubts(self, scores: Array | None, confidence: float, figure: float | None = None) -> tuple[str, ...]:
        """Why a drop on these samples would mean nothing, in a sentence each; none is as it should be.

        An original has to be better than whoever always gives the most frequent answers (the no-information rate:
        Kuhn, Building Predictive Models in R Using the caret Package, 2008, section 6).

        Args:
            scores: of the original [n], or None where the metric is no mean of these.
            confidence: of the interval whose lower end has to be above that rate.
            figure: the metric itself, held against the rate where there are no scores.
        """
        if self._samples < 2:
            return ("One evaluation sample says nothing of a model: give a hundred or more.",)
        if not self._vary:
            return (f"The original gives the same answer for all {counted(self._samples, 'evaluation samples')}.",)
        if self._chance is not None:
            held = None if scores is None else mean_interval(scores, confidence=confidence, bounds=self._metric.bounds)
            told = self._told(held, confidence)
            if held is None and figure is not None:
                told = f"its {self._metric.name} is {figure:.1%}"
            found = self._chance.doubt(figure if held is None else held.low, told)
            return () if found is None else (found,)
        if self._outside:
            found = f"{self._outside} of {counted(self._samples, 'labels')} are no class of the model"
            ends = f"they go from {min(self._labels)} to {max(self._labels)}, its classes from 0 to {self._classes - 1}"
            return (f"{found}: {ends}.",)
        if scores is None or not self._metric.classifies:
            return ()
        held = share_interval(round(float(scores.sum())), self._samples, confidence)
        if not self._metric.needs_labels:
            same = self.constant or 0.0
            if held.low > max(same, 1 / self._classes if self._classes else 0.0):
                return ()
            of = counted(self._samples, "evaluation samples")
            one = f"The original gives one and the same answer for {same:.1%} of the {of}"
            return (f"{one}: a model that always gives it would agree as well.",)
        guesses, chance = self._guesses, self._most_frequent
        if not self._labels or held.low > max(chance, min(1.0, guesses / max(self._classes, 1))):
            return ()
        value = self._told(held, confidence)
        rate = f"whoever always gives the most frequent label{'s' if guesses > 1 else ''} has {chance:.1%}"
        return (f"The original is no better than chance on the evaluation data: {value}, and {rate}.",)

    def _told(self, held: Interval | None, confidence: float) -> str:
        if held is None:
            return ""
        name = self._metric.name
        return f"its {name} is {held.value:.1%}, at least {held.low:.1%} at {percent(confidence)} confidence"
