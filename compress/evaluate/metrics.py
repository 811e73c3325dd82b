"""What a model is judged by: a score for each sample whose mean is the metric, or one figure for all of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from compress.data.dataset import Dataset
from compress.errors import StageError
from compress.evaluate.chance import Chance, OfNumbers, OfPlaces, OfSets, OfSimilarities
from compress.evaluate.constant import Constant, OfAnswers, OfDirections, OfMeans, prefers
from compress.evaluate.intervals import Bounds
from compress.evaluate.label_metrics import (
    IntersectionOverUnion,
    binary_accuracy_of,
    constant_accuracy,
    f1_of,
    pixel_accuracy_of,
    r2_of,
)
from compress.evaluate.users_metric import Accumulator
from compress.evaluate.vectors import comparable, cosine_similarity, rows
from compress.model import Arrays
from compress.model.apart import without_fills

__all__ = [
    "BATCH",
    "BY_LABELS",
    "CLASSES",
    "METRICS",
    "PLACES",
    "SETS",
    "TAGS",
    "Metric",
    "cosine_similarity",
    "not_finite",
    "refuse_other_shapes",
    "without_nan",
]

Array = np.ndarray[Any, Any]
BATCH = 64
ROUNDING = 1e-6  # of a mean over samples that is had in two ways
SETS, PLACES, TAGS = ("binary_accuracy", "f1_samples"), ("pixel_accuracy", "miou"), ("f1_entities", "f1_tokens")
CLASSES = ("f1_macro", "mcc")  # of one class to a sample, no mean of right and wrong
BY_LABELS = (*SETS, *PLACES, *TAGS, "r2")


@dataclass(frozen=True)
class Metric:
    """A task metric; one of `per_sample`, `over_all` and `accumulated` is given; both first and last of r2, see `on`.

    Attributes:
        name: "top1", "top5", "f1_macro", "mcc", "binary_accuracy", "f1_samples", "pixel_accuracy", "miou",
            "f1_entities", "f1_tokens", "r2", "spearman", "agreement", "cosine", "mse", or `package.module:name`.
        per_sample: scores [n] from a batch's outputs, the original model's outputs, and the labels (or None).
        over_all: from all outputs and all labels at once: scores [n], or one figure [] where the metric is no mean of
            scores (mAP).
        accumulated: makes what is given batch after batch and computes at the end: scores [n] whose mean is the
            figure, or one figure. A `per_sample` beside it is for those who look at the mean alone: a training.
        higher_is_better: whether a fall is a loss.
        needs_labels: whether it means nothing without labels.
        compares: whether it looks at the original's outputs.
        scale: what a difference is multiplied by to be a drop: 100 for shares, so that a drop is in points.
        bounds: of a score, where it has some.
        output: the one that is judged; None is all of them.
        code: hash of the user's, if it is one of theirs.
        chance: makes what tells an original from one that knows nothing, beside classes, where that is known otherwise.
        constant: makes what tells, beside the original's outputs, how good an answer that is always the same can be.
        labels: of a sample, for those that are each there or not.
        threshold: of an output, above which such a label is given.
        together: samples, one after another, that have one score; 2 of pairs.
        fitted: gives the metric for some samples, where it has to know all of their labels before it sees the first.
    """

    name: str
    per_sample: Callable[[Arrays, Arrays, Array | None], Array] | None = None
    over_all: Callable[[Arrays, Array | None], Array] | None = None
    accumulated: Callable[[], Accumulator] | None = None
    higher_is_better: bool = True
    needs_labels: bool = False
    compares: bool = False
    scale: float = 100.0
    bounds: Bounds | None = None
    output: str | None = None
    code: str = ""
    chance: Callable[[], Chance] | None = None
    constant: Callable[[], Constant] | None = None
    labels: int = 1
    threshold: float | None = None
    together: int = 1
    fitted: Callable[[Metric, Dataset], Metric] | None = None

    @property
    def identity(self) -> Mapping[str, str | None]:
        """What decides its figures: results are kept under this."""
        above = {} if self.threshold is None else {"threshold": f"{self.threshold:g}"}
        return {"metric": self.name, "output": self.output, "code": self.code, **above}

    @property
    def points(self) -> float:
        """What turns `after - before` into a drop: below 0 where higher is better."""
        return -self.scale if self.higher_is_better else self.scale

    @property
    def counted(self) -> bool:
        """Whether a score is 0 or 1: an answer that is right or wrong."""
        right_or_wrong = self.classifies and self.name not in CLASSES
        return right_or_wrong or (self.name == "binary_accuracy" and self.labels == 1)

    @property
    def classifies(self) -> bool:
        """Whether an answer is one of several classes."""
        return self.name in ("top1", "top5", *CLASSES, "agreement")

    @property
    def worst(self) -> float:
        """What a score that is no number counts as."""
        if self.bounds is not None:
            return self.bounds[0] if self.higher_is_better else self.bounds[1]
        return -np.inf if self.higher_is_better else np.inf

    def drop(self, before: float, after: float) -> float:
        """How much worse `after` is, in points for shares; below 0 when it is better."""
        return self.points * (after - before) + 0.0  # never -0

    def loss(self, before: float, constant: float | None) -> float | None:
        """The drop to the best answer that is always the same, less rounding; None where none is known."""
        points = math.nan if constant is None else (1 - ROUNDING) * self.drop(before, constant)
        return points if math.isfinite(points) else None

    def of(self, output: str | None) -> Self:
        """The metric of this output alone."""
        return self if output is None else dataclasses.replace(self, output=output)

    def on(self, data: Dataset) -> Metric:
        """The metric for all of these samples and no others."""
        return self if self.fitted is None else self.fitted(self, data)

    def judged(self, outputs: Arrays) -> Arrays:
        """The outputs that it looks at."""
        return outputs if self.output is None or not outputs else {self.output: outputs[self.output]}


def refuse_other_shapes(expected: Arrays, outputs: Arrays, what: str, of: str) -> None:
    """Refuse outputs of other shapes: one value would be held against many, as numpy stretches arrays to each other.

    Args:
        expected: outputs by name.
        outputs: of the other model, by the same names.
        what: gave them, for the error.
        of: gave what is expected.

    Raises:
        StageError: one is missing, or of another shape.
    """
    for name, values in expected.items():
        here = list(np.shape(outputs[name])) if name in outputs else None
        if here != list(np.shape(values)):
            given = "does not give it" if here is None else f"gives {here}"
            raise StageError(
                f"can't compare the output {name!r} of {what}",
                why=f"for the same inputs it {given}, and {of} {list(np.shape(values))}",
                mend="compare models whose outputs are of one shape: give the original that it was made of",
            )


def without_nan(outputs: Arrays) -> Array:
    """Which samples [n] have only numbers, or texts, in every output; infinite ones are for masks."""
    found = [
        ~np.isnan(values.reshape(len(values), -1)).any(axis=1)
        if values.dtype.kind in "fc"
        else np.full(len(values), True)
        for values in outputs.values()
    ]
    return np.asarray(np.logical_and.reduce(found))


def not_finite(outputs: Arrays) -> int:
    """How many samples have NaN or infinity in an output: as vectors, no other is like them, not even themselves."""
    found = [
        np.asarray(~np.isfinite(rows(values)).all(axis=1)) for values in outputs.values() if values.dtype.kind in "fc"
    ]
    lengths = {each.size for each in found}
    return int(np.logical_or.reduce(found).sum()) if len(lengths) == 1 else sum(int(each.sum()) for each in found)


def _first(outputs: Arrays) -> Array:
    return next(iter(outputs.values()))


def _top(k: int) -> Callable[[Arrays, Arrays, Array | None], Array]:
    def per_sample(outputs: Arrays, expected: Arrays, labels: Array | None) -> Array:  # noqa: ARG001
        logits = _first(outputs)
        best = np.argsort(-logits, axis=1, kind="stable")[:, :k]
        return np.asarray((best == np.asarray(labels)[:, None]).any(1) & prefers(logits), np.float64)

    return per_sample


def _agreement(outputs: Arrays, expected: Arrays, labels: Array | None) -> Array:  # noqa: ARG001
    name = next(iter(expected))
    mine, theirs = outputs[name], expected[name]
    if theirs.dtype.kind != "f":  # the answers themselves
        return np.asarray((mine == theirs).reshape(len(theirs), -1).all(axis=1), np.float64)
    return np.asarray((mine.argmax(1) == theirs.argmax(1)) & prefers(mine) & prefers(theirs), np.float64)


def _cosine(outputs: Arrays, expected: Arrays, labels: Array | None) -> Array:  # noqa: ARG001
    return np.asarray(np.mean([cosine_similarity(expected[name], outputs[name]) for name in expected], axis=0))


def _mse(outputs: Arrays, expected: Arrays, labels: Array | None) -> Array:  # noqa: ARG001
    with np.errstate(invalid="ignore", over="ignore"):
        pairs = [without_fills(*comparable(want, outputs[name])) for name, want in expected.items()]
        errors = [np.square(given - want) for want, given in pairs]
        means = np.mean([error.reshape(len(error), -1).mean(1) for error in errors], axis=0)
    return np.asarray(np.where(np.isfinite(means), means, np.inf))


METRICS = {
    metric.name: metric
    for metric in (
        Metric("top1", _top(1), needs_labels=True, bounds=(0.0, 1.0)),
        Metric("top5", _top(5), needs_labels=True, bounds=(0.0, 1.0)),
        *(
            Metric(name, needs_labels=True, bounds=bounds)
            for name, bounds in (("f1_macro", (0.0, 1.0)), ("mcc", (-1.0, 1.0)))
        ),
        Metric(
            "binary_accuracy",
            binary_accuracy_of(0.0),
            needs_labels=True,
            bounds=(0.0, 1.0),
            chance=lambda: OfSets(constant_accuracy),
        ),
        Metric("f1_samples", f1_of(0.0), needs_labels=True, bounds=(0.0, 1.0), chance=OfSets),
        Metric(
            "pixel_accuracy", pixel_accuracy_of(1), needs_labels=True, bounds=(0.0, 1.0), chance=lambda: OfPlaces(1)
        ),
        Metric(
            "miou",
            accumulated=lambda: IntersectionOverUnion(1),
            needs_labels=True,
            chance=lambda: OfPlaces(1, of_classes=True),
        ),
        Metric("f1_entities", needs_labels=True, bounds=(0.0, 1.0)),
        Metric("f1_tokens", needs_labels=True, bounds=(0.0, 1.0)),
        Metric(
            "r2",
            r2_of(np.ones(1)),
            needs_labels=True,
            chance=OfNumbers,
        ),
        Metric("spearman", needs_labels=True, bounds=(-1.0, 1.0), chance=OfSimilarities, together=2),
        Metric("agreement", _agreement, compares=True, bounds=(0.0, 1.0), constant=OfAnswers),
        Metric("cosine", _cosine, compares=True, bounds=(-1.0, 1.0), constant=OfDirections),
        Metric("mse", _mse, higher_is_better=False, compares=True, scale=1.0, constant=OfMeans),
    )
}
