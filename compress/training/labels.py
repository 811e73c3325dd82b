"""Whether labels fit what a model gives."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from compress.artifact import TensorSpec
from compress.data.dataset import Dataset
from compress.data.made import Taught
from compress.data.sources import Fetched
from compress.errors import DatasetError
from compress.evaluate.label_values import IGNORED, blocks, values_of
from compress.evaluate.layout import lies_alike, lies_otherwise
from compress.evaluate.output_kind import OutputForm, OutputKind, by_labels, class_axes

__all__ = ["alone", "are_classes", "counts", "left_out", "refuse_labels", "watched"]


def are_classes(labels: Any, output: TensorSpec) -> bool:
    """Whether labels are class ids [n], and the output has one logit for each class."""
    return _classes(output) > 1 and labels.ndim == 1 and labels.dtype.kind in "iu"


def counts(form: OutputForm, output: TensorSpec, labels: Any) -> bool:
    """Whether labels teach an output of this form, by shape and type."""
    # Of calls that take a fixed number of samples, that is no size of a sample.
    sizes = [-1, *(dim if isinstance(dim, int) else -1 for dim in output.shape[1:])]

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
    if form.kind is OutputKind.SOFTMAX:
        return labels.dtype.kind in "biuf" and same(sizes)
    return labels.dtype.kind in "biuf" and lies_alike(output.shape[1:], tuple(labels.shape[1:]))


def left_out(form: OutputForm, output: TensorSpec, labels: Any) -> str | None:
    """What of labels that fit teaches nothing, in words: what means "not known", and places without a class.

    Args:
        form: of the output.
        output: that they teach.
        labels: [n, …]; places of those that are made when asked for are not looked at.
    """
    if form.ignored:
        return f'labels of {_listed(form.ignored)} mean "not known": they teach nothing'
    classes = output.shape[form.axis] if form.kind is OutputKind.DENSE else None
    if not isinstance(classes, int) or isinstance(labels, Fetched) or labels.dtype.kind not in "iu":
        return None
    count = 0
    found: set[float] = set()
    for _, ids in blocks(labels):
        outside = ids[(ids < 0) | (ids >= classes)]
        count += outside.size
        found |= set(np.unique(outside).tolist())
    if not count:
        return None
    share = count / math.prod(labels.shape)
    return f"{share:.2%} of the places have labels ({_listed(sorted(found))}) that are no class: they teach nothing"


def _listed(values: Sequence[float]) -> str:
    return ", ".join(f"{value:g}" for value in values[:5]) + (", …" if len(values) > 5 else "")


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
    # Labels that don't fit count for nothing.
    sizes = [size if isinstance(size, int) else 0 for size in output.shape[1:]]
    if labels.dtype.kind != "f" or math.prod(sizes) not in (0, math.prod(labels.shape[1:])):
        return None
    found = values_of(labels)
    if found.nan and found.unknown(bounded=True) is not None:  # beside 0 and 1, it means "not known"
        return None
    return Taught(output.name)


def refuse_labels(labels: Any, output: TensorSpec, source: str, *, taught: bool, loss: str = "auto") -> None:
    """Look at labels before they are trained on.

    Args:
        labels: [n, …]; those that are made when asked for are looked at by shape and dtype here, and else when they
            are (`watched`).
        output: the model's first.
        source: of the data.
        taught: by an original, beside which labels that don't fit don't count; that lie otherwise is an error.
        loss: what the output is said to be, or "auto".

    Raises:
        DatasetError: labels that can't be trained on.
    """
    what = f"can't train on the labels in {source}"
    mend = "give class ids from 0 as integers [n], or values in the output's shape"
    if labels.dtype.kind not in "biuf" or not labels.dtype.isnative:
        raise DatasetError(what, why=f"they are {labels.dtype}", mend=mend)
    may = _taught(labels, output)
    if may is not None and may.classes is None and not isinstance(labels, Fetched):
        for start, part in blocks(labels):
            may.refuse(part, np.arange(start, start + len(part)), source)
    if are_classes(labels, output):
        if isinstance(labels, Fetched):
            return
        values = np.asarray(labels[:])
        low, high, most = int(values.min()), int(values.max()), _classes(output) - 1
        if low < 0 or high > most:
            why = f"they go from {low} to {high}, the classes of {output.name!r} from 0 to {most}"
            raise DatasetError(what, why=why, mend=mend)
        return
    if _dense(labels, output):
        return
    of = tuple(labels.shape[1:])
    found = f"they are {labels.dtype} {list(of)} for each sample, the output {output.name!r} is "
    found += f"{output.dtype} {list(output.shape[1:])}"
    if lies_otherwise(output.shape[1:], of):
        raise DatasetError(what, why=f"{found}: their axes are in another order", mend="transpose them to the output's")
    if not lies_alike(output.shape[1:], of):
        if not taught and all(isinstance(size, int) for size in output.shape[1:]):
            raise DatasetError(what, why=found, mend=mend)
        return
    if loss in ("auto", "sigmoid"):
        _refuse_values(labels, output, what, loss)


def _refuse_values(labels: Any, output: TensorSpec, what: str, loss: str) -> None:
    form = by_labels(labels, output, None)
    if form is not None and form.wrong:
        mend = "write them as 0 and 1 (255 or -1 where it is not known); numbers to hit as floats, or --loss regression"
        raise DatasetError(what, why=form.wrong, mend=mend)
    if loss == "sigmoid" and form is not None and form.kind is OutputKind.REGRESSION:
        others = [value for value in values_of(labels).others if not 0 <= value <= 1 and value not in IGNORED]
        if others:
            why = f"some are {', '.join(f'{value:g}' for value in others[:5])}, and --loss sigmoid takes 0 to 1"
            raise DatasetError(what, why=why, mend="write them so, or give --loss regression")


def alone(labels: Any, output: TensorSpec) -> int | None:
    """The class that all labels are of; None where there are several, or that is not known before they are made."""
    if not are_classes(labels, output) or isinstance(labels, Fetched) or len(labels) < 2:
        return None
    values = np.asarray(labels[:])
    return int(values[0]) if (values == values[0]).all() else None
