"""Whether labels fit what a model gives."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from compress.artifact import TensorSpec
from compress.data.dataset import Dataset
from compress.data.made import Taught
from compress.data.sources import Fetched
from compress.errors import DatasetError
from compress.evaluate.output_kind import OutputForm, OutputKind, class_axes

__all__ = ["are_classes", "counts", "refuse_labels", "watched"]

ROWS = 65_536  # looked at at a time


def are_classes(labels: Any, output: TensorSpec) -> bool:
    """Whether labels are class ids [n], and the output has one logit for each class."""
    return _classes(output) > 1 and labels.ndim == 1 and labels.dtype.kind in "iu"


def counts(form: OutputForm, output: TensorSpec, labels: Any) -> bool:
    """Whether labels teach an output of this form, by shape and type."""
    sizes = [dim if isinstance(dim, int) else -1 for dim in output.shape]

    def same(want: list[int]) -> bool:
        have = [-1, *labels.shape[1:]]
        return len(want) == len(have) and all(a in (b, -1) for a, b in zip(want, have, strict=True))

    if form.kind in (OutputKind.SOFTMAX, OutputKind.DENSE) and labels.dtype.kind in "iub":
        places = list(sizes)
        del places[form.axis]
        if same(places):
            return True
    if form.kind is OutputKind.DENSE:
        return False
    flat = -1 not in sizes[1:] and math.prod(sizes[1:]) == math.prod(labels.shape[1:])
    return labels.dtype.kind in "biuf" and (same(sizes) or (flat and form.kind is not OutputKind.SOFTMAX))


def _classes(output: TensorSpec) -> int:
    return output.shape[1] if len(output.shape) == 2 and isinstance(output.shape[1], int) else 0


def _dense(labels: Any, output: TensorSpec) -> bool:
    """Whether labels are class ids for each place of a map."""
    return labels.dtype.kind in "iu" and bool(class_axes(output.shape, tuple(labels.shape[1:])))


def watched(data: Dataset, output: TensorSpec) -> Dataset:
    """The data, whose labels are looked at as they are made, where that is when they are asked for.

    Args:
        data: of a training.
        output: that labels teach.
    """
    labels = data.labels
    if not isinstance(labels, Fetched) or labels.dtype.kind not in "iuf":
        return data
    taught = _taught(labels, output)
    return data if taught is None else dataclasses.replace(data, labels=dataclasses.replace(labels, taught=taught))


def _taught(labels: Any, output: TensorSpec) -> Taught | None:
    if are_classes(labels, output):
        return Taught(output.name, _classes(output))
    sizes = [
        size if isinstance(size, int) else 0 for size in output.shape[1:]
    ]  # labels that don't fit count for nothing
    values = labels.dtype.kind == "f" and math.prod(sizes) in (0, math.prod(labels.shape[1:]))
    return Taught(output.name) if values else None


def refuse_labels(labels: Any, output: TensorSpec, source: str, *, taught: bool) -> None:
    """Look at labels before they are trained on.

    Args:
        labels: [n, …]; those that are made when asked for are looked at by shape and dtype here, and else when they
            are (`watched`).
        output: the model's first.
        source: of the data.
        taught: by an original, beside which labels that don't fit don't count.

    Raises:
        DatasetError: labels that can't be trained on.
    """
    what = f"can't train on the labels in {source}"
    mend = "give class ids from 0 as integers [n], or values in the output's shape"
    if labels.dtype.kind not in "biuf" or not labels.dtype.isnative:
        raise DatasetError(what, why=f"they are {labels.dtype}", mend=mend)
    may = _taught(labels, output)
    if may is not None and may.classes is None and not isinstance(labels, Fetched):
        for start in range(0, len(labels), ROWS):
            part = np.asarray(labels[start : start + ROWS])
            may.refuse(part, np.arange(start, start + len(part)), source)
    if are_classes(labels, output):
        if isinstance(labels, Fetched):
            return
        values = np.asarray(labels[:])
        low, high, most = int(values.min()), int(values.max()), _classes(output) - 1
        if low < 0 or high > most:
            why = f"they go from {low} to {high}, the classes of {output.name!r} from 0 to {most}"
            raise DatasetError(what, why=why, mend=mend)
    elif _dense(labels, output):
        return
    elif not taught and all(isinstance(size, int) for size in output.shape[1:]):
        wanted, found = (math.prod(int(size) for size in shape[1:]) for shape in (output.shape, labels.shape))
        if wanted != found:
            why = f"they are {labels.dtype} {list(labels.shape[1:])} for each sample, the output {output.name!r} is "
            raise DatasetError(what, why=f"{why}{output.dtype} {list(output.shape[1:])}", mend=mend)
