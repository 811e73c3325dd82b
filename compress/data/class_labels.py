"""Labels of evaluation data as class ids, whatever way they were written."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from compress.console.wording import Note, counted
from compress.data.dataset import Dataset
from compress.data.sources import Fetched
from compress.errors import RecipeError

__all__ = ["read_labels", "with_class_ids"]

BATCH = 256
LARGEST = 1 << 63  # from here on a whole float is no int64


def with_class_ids(data: Dataset) -> tuple[Dataset, tuple[str, ...]]:
    """The data with labels [n] of integers, where they can be read as such, and what was made of them, in words.

    Whole floats, booleans, a second dimension of 1 and one-hot rows become ids. Other labels stay as they are: they
    are a user's metric's own.

    Args:
        data: its labels are read whole; of a torch Dataset by making its samples once.

    Raises:
        RecipeError: the labels are text.
    """
    if data.labels is None:
        return data, ()
    labels = read_labels(data)
    if labels.dtype.kind not in "biuf":
        raise RecipeError(
            f"can't judge by the labels in {data.source}",
            why=f"they are {'text' if labels.dtype.kind in 'SU' else labels.dtype}, the model gives numbers of classes",
            mend="save them as class ids from 0 in the order of the model's classes; --metric agreement, cosine or mse "
            "leaves labels aside, a function of your own is given them as they are",
        )
    ids, words = _ids(labels)
    if ids is None:
        return data, (words,)
    return dataclasses.replace(data, labels=ids), (words,) if words else ()


def read_labels(data: Dataset) -> np.ndarray[Any, Any]:
    """All labels [n, …] of data that has some; of a torch Dataset by making its samples once."""
    if not isinstance(data.labels, Fetched):
        return np.asarray(data.labels[:])  # type: ignore[index]
    return np.concatenate([np.asarray(labels) for _, labels in data.batches(BATCH)])


def _ids(labels: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any] | None, str]:
    """Class ids [n], or None; and what was done or why not."""
    kind = f"{labels.dtype} [{', '.join(map(str, ('n', *labels.shape[1:])))}]"
    if labels.dtype.kind == "f" and (missing := int((~np.isfinite(labels)).reshape(len(labels), -1).any(axis=1).sum())):
        of = counted(len(labels), "samples")
        told = f"The labels ({kind}) hold NaN or infinite values in {missing:,} of {of}: they are not looked at."
        return None, f"{told} Leave these samples out to be judged by labels."
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim == 1:
        if labels.dtype.kind == "f":
            if not ((labels == np.rint(labels)) & (np.abs(labels) < LARGEST)).all():
                return None, f"The labels ({kind}) are no class ids: they are not looked at."
            return labels.astype(np.int64), Note(f"The labels ({kind}) are whole numbers: they are taken as class ids.")
        return (labels, "") if labels.dtype.kind in "iu" else (labels.astype(np.int64), "")
    if labels.ndim == 2 and np.isin(labels, (0, 1)).all():
        if (labels.sum(axis=1) == 1).all():
            return labels.argmax(1).astype(np.int64), Note(
                f"The labels ({kind}) are one-hot: they are taken as class ids."
            )
        return None, (
            f"The labels ({kind}) name several classes or none for a sample: top1 does not fit them, and they are not "
            "looked at. A metric of your own (--metric package.module:function) is given them."
        )
    return None, f"The labels ({kind}) are no class ids: they are not looked at."
