"""R², which has to know all labels before it sees the first answer: how far they spread, and which numbers change."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from compress.console.wording import counted
from compress.data.class_labels import read_labels
from compress.data.dataset import Dataset
from compress.errors import RecipeError
from compress.evaluate.chance import OfNumbers
from compress.evaluate.determination import Determination, changing
from compress.evaluate.label_metrics import r2_of
from compress.evaluate.label_moments import KnownMoments, Moments, in_blocks, moments_of
from compress.evaluate.metrics import METRICS, Metric

__all__ = ["of_numbers"]

Array = np.ndarray[Any, Any]


def of_numbers(data: Dataset, output: str) -> Metric | None:
    """R² of an output for labels that are numbers; None where these are not finite, or never change.

    Args:
        data: that is judged on; what else is, is held to how far its labels spread.
        output: that is judged.
    """
    labels = read_labels(data)
    if not np.isfinite(labels).all():
        return None
    moments = moments_of(in_blocks(labels))
    spread = moments.spread
    if spread is None:
        return None
    told = ",".join(f"{value:.9g}" for value in spread[:8])  # other labels give other scores

    of_data = KnownMoments(data, moments)

    def fitted(metric: Metric, judged: Dataset) -> Metric:
        known = of_data.of(judged)
        _refuse_numbers(known, spread, judged)
        constant = 1 - float(changing(spread, known).mean())
        return dataclasses.replace(
            metric, accumulated=lambda: Determination(spread, known, output), chance=lambda: OfNumbers(constant)
        )

    code = f"influence;{told}"
    metric = dataclasses.replace(METRICS["r2"], per_sample=r2_of(spread), output=output, code=code, fitted=fitted)
    return metric.on(data)


def _refuse_numbers(judged: Moments, spread: Array, data: Dataset) -> None:
    """Refuse labels that R² can't be counted of.

    Args:
        judged: of their numbers.
        spread: of the numbers of all labels.
        data: that they are in.

    Raises:
        RecipeError: they are of another width, or not finite.
    """
    if len(judged.mean) != len(spread):
        raise RecipeError(
            f"can't judge by r2 on {data.source}",
            why=f"its labels are {counted(len(judged.mean), 'numbers')} to a sample, those of the evaluation data "
            f"{len(spread)}",
            mend=f"give it labels of {counted(len(spread), 'numbers')} to a sample",
        )
    told = np.isfinite(spread)
    if not np.isfinite(judged.variance[told]).all():
        raise RecipeError(
            f"can't judge by r2 on {data.source}",
            why="among its labels are NaN, infinite values, or numbers too large to be squared",
            mend="find where they come from, or drop those samples",
        )
