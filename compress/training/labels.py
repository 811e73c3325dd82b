"""Whether labels fit what a model gives."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from compress.artifact import TensorSpec
from compress.data_sources import Fetched
from compress.errors import DatasetError

__all__ = ["are_classes", "refuse_labels"]


def are_classes(labels: Any, output: TensorSpec) -> bool:
    """Whether labels are class ids [n], and the output has one logit for each class."""
    return _classes(output) > 1 and labels.ndim == 1 and labels.dtype.kind in "iu"


def _classes(output: TensorSpec) -> int:
    return output.shape[1] if len(output.shape) == 2 and isinstance(output.shape[1], int) else 0


def refuse_labels(labels: Any, output: TensorSpec, source: str, *, taught: bool) -> None:
    """Look at labels before they are trained on.

    Args:
        labels: [n, …]; those that are made when asked for are looked at by shape and dtype alone.
        output: the model's first.
        source: of the data.
        taught: by an original, beside which labels that are no class ids don't count.

    Raises:
        DatasetError: labels that can't be trained on.
    """
    what = f"can't train on the labels in {source}"
    mend = "give class ids from 0 as integers [n], or values in the output's shape"
    if labels.dtype.kind not in "biuf" or not labels.dtype.isnative:
        raise DatasetError(what, why=f"they are {labels.dtype}", mend=mend)
    if are_classes(labels, output):
        if isinstance(labels, Fetched):
            return
        values = np.asarray(labels[:])
        low, high, most = int(values.min()), int(values.max()), _classes(output) - 1
        if low < 0 or high > most:
            why = f"they go from {low} to {high}, the classes of {output.name!r} from 0 to {most}"
            raise DatasetError(what, why=why, mend=mend)
    elif not taught and all(isinstance(size, int) for size in output.shape[1:]):
        wanted, found = (math.prod(int(size) for size in shape[1:]) for shape in (output.shape, labels.shape))
        if wanted != found:
            why = f"they are {labels.dtype} {list(labels.shape[1:])} for each sample, the output {output.name!r} is "
            raise DatasetError(what, why=f"{why}{output.dtype} {list(output.shape[1:])}", mend=mend)
