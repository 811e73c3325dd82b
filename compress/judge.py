"""How much worse a model is than its original: one answer of the original for many models that are tried."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from compress.backends import Backend
from compress.bootstrap import mean_interval
from compress.dataset import Dataset
from compress.errors import RecipeError
from compress.metrics import Metric
from compress.model import Arrays

__all__ = ["Drop", "Judge", "spread"]

BATCH = 64


@dataclass(frozen=True)
class Drop:
    """What a model loses.

    Attributes:
        before, after: the metric of the original and of the model.
        points: the loss, in points for shares; below 0 for a gain.
        low, high: its 95% confidence interval, paired by sample; None where the metric is no mean of scores.
    """

    before: float
    after: float
    points: float
    low: float | None
    high: float | None


def spread(data: Dataset, count: int) -> Dataset:
    """At most so many samples, evenly over the data."""
    index = np.unique(np.linspace(0, len(data) - 1, min(count, len(data))).astype(np.int64))
    inputs, labels = data.take(index)
    return dataclasses.replace(data, inputs=inputs, labels=labels, starts=(), fetcher=None)


class Judge:
    """Compares models with an original, whose outputs it keeps.

    Args:
        original: is run once.
        data: to judge on.
        metric: what is judged by.
    """

    def __init__(self, original: Backend, data: Dataset, metric: Metric) -> None:
        self._data, self._metric = data, metric
        self._expected = [original.infer(inputs) for inputs, _ in data.batches(BATCH)]
        self._original = self._scores(self._expected)

    @classmethod
    def of_part(cls, original: Backend, data: Dataset, metric: Metric, count: int) -> Self:
        """A judge on so many samples, spread over the data."""
        return cls(original, spread(data, count), metric)

    def __len__(self) -> int:
        return len(self._data)

    @property
    def original(self) -> float:
        """The metric of the original."""
        return float(self._original.mean())

    def drop(self, model: Backend) -> Drop:
        """What the model loses against the original."""
        scores = self._scores([model.infer(inputs) for inputs, _ in self._data.batches(BATCH)])
        before, after = self.original, float(scores.mean())
        low = high = None
        if scores.shape == (len(self._data),):
            interval = mean_interval(scores - self._original).times(self._metric.points)
            low, high = interval.low, interval.high
        return Drop(before, after, self._metric.drop(before, after), low, high)

    def squared_error(self, model: Backend) -> float:
        """Mean over samples of the squared difference to the original's outputs, each output in its own scale."""
        total = 0.0
        for (inputs, _), expected in zip(self._data.batches(BATCH), self._expected, strict=True):
            outputs = model.infer(inputs)
            for name, want in expected.items():
                scale = float(np.square(want.astype(np.float64)).mean()) or 1.0
                total += float(np.square(outputs[name].astype(np.float64) - want).mean()) / scale * len(want)
        return total / len(self._data)

    def _scores(self, outputs: list[Arrays]) -> np.ndarray[Any, Any]:
        """Scores [n], or one figure [] where the metric is no mean of scores."""
        if self._metric.per_sample is not None:
            labels = (labels for _, labels in self._data.batches(BATCH))
            batches = zip(outputs, self._expected, labels, strict=True)
            return np.concatenate([self._metric.per_sample(*batch) for batch in batches])
        assert self._metric.over_all is not None  # noqa: S101  a metric has one of the two
        together = {name: np.concatenate([batch[name] for batch in outputs]) for name in outputs[0]}
        try:
            return self._metric.over_all(together, self._data.labels)
        except Exception as err:  # the user's function: anything may come out of it
            why = f"{type(err).__name__}: {err}"
            mend = "it is given (outputs by name, labels), each with the samples first"
            raise RecipeError(f"the metric {self._metric.name} fails", why=why, mend=mend) from err
