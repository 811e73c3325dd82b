"""Metrics that a user brings: a function of outputs and labels, or an object that is updated batch after batch."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from compress.errors import RecipeError
from compress.evaluate.intervals import Bounds
from compress.model import Arrays
from compress.options.user_code import user_code

__all__ = ["Accumulator", "UsersMetric", "users_metric"]

Array = np.ndarray[Any, Any]


class Accumulator(Protocol):
    """What sees batch after batch, and gives one figure."""

    def update(self, outputs: Arrays, labels: Array | None) -> None:
        """Take a batch."""

    def compute(self) -> Any:
        """The figure for all of them."""


@dataclass(frozen=True)
class UsersMetric:
    """What was found under a user's name.

    Attributes:
        per_sample, over_all, higher_is_better, scale, bounds: as `compress.evaluate.metrics.Metric` has them.
        updated: makes a fresh object that is updated with batches of this output (None: the first).
    """

    per_sample: Callable[[Arrays, Arrays, Array | None], Array] | None
    over_all: Callable[[Arrays, Array | None], Array] | None
    updated: Callable[[str | None], Accumulator] | None
    higher_is_better: bool
    scale: float
    bounds: Bounds | None


def users_metric(source: str) -> UsersMetric:
    """Import a user's metric.

    A function is given all outputs by name and all labels at once, or, where it has an attribute `per_sample` that is
    true, those of a batch, so that nothing is kept; attributes `higher_is_better` (by default true), `scale` (100: a
    share) and `bounds` (of a share, 0 and 1) say what its figures mean. A torchmetrics object is updated with batches
    of one output; its `higher_is_better` must be known, and one that goes from 0 to 1 is a share.

    Args:
        source: `package.module:name`.

    Raises:
        RecipeError: there is no such thing, or it can't be a metric.
    """
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
    if higher not in (True, False):
        raise RecipeError(
            f"can't use the metric {source}",
            why=f"its higher_is_better is {higher!r}: nobody knows which way a drop goes",
            mend="set higher_is_better to True or False on it",
        )
    if hasattr(found, "update") and hasattr(found, "compute"):
        scale = float(getattr(found, "scale", 100.0 if _is_share(found) else 1.0))
        return UsersMetric(None, None, lambda output: _Updated(found, output), bool(higher), scale, None)
    scale = float(getattr(found, "scale", 100.0))
    bounds = _bounds(source, getattr(found, "bounds", (0.0, 1.0) if scale == 100 else None))
    one, whole = None, None
    if getattr(found, "per_sample", False):
        one = lambda outputs, _expected, labels: np.asarray(found(outputs, labels), np.float64)  # noqa: E731
    else:
        whole = lambda outputs, labels: np.asarray(found(outputs, labels), np.float64)  # noqa: E731
    return UsersMetric(one, whole, None, bool(higher), scale, bounds)


def _bounds(source: str, given: Any) -> Bounds | None:
    if given is None:
        return None
    with contextlib.suppress(TypeError, ValueError):
        low, high = map(float, given)
        if low < high:
            return low, high
    raise RecipeError(
        f"can't use the metric {source}",
        why=f"its bounds are {given!r}: no smallest and largest score",
        mend="set bounds to a pair such as (0, 1), or to None",
    )


def _is_share(metric: Any) -> bool:
    """Whether its figure goes from 0 to 1; torchmetrics names the ends for its plots."""
    return (getattr(metric, "plot_lower_bound", 0.0), getattr(metric, "plot_upper_bound", 1.0)) == (0.0, 1.0)


class _Updated:
    """A torchmetrics object of its own, so that one model's batches don't count for the next."""

    def __init__(self, metric: Any, output: str | None) -> None:
        self._metric = copy.deepcopy(metric)
        self._metric.reset()
        self._output = output

    def update(self, outputs: Arrays, labels: Array | None) -> None:
        import torch

        values = next(iter(outputs.values())) if self._output is None else outputs[self._output]
        self._metric.update(torch.from_numpy(values), torch.from_numpy(np.asarray(labels)))

    def compute(self) -> Any:
        return np.asarray(self._metric.compute(), np.float64)
