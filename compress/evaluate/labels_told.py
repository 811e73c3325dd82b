"""Labels that a built-in metric would pass over in silence, in part or all of them: taken up, or told."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np

from compress.artifact import Signature
from compress.console.wording import Note, counted
from compress.data.class_labels import read_labels
from compress.data.dataset import Dataset
from compress.data.sources import Fetched
from compress.evaluate.label_values import IGNORED
from compress.evaluate.metrics import PLACES, SETS, Metric
from compress.evaluate.output_kind import OutputKind, by_labels
from compress.model import Arrays

__all__ = ["known_alone", "labels_told", "squeezed"]

ROWS = 64  # samples in memory at a time
MANY = 0.5  # of all places: so few are left that a reader should know


def squeezed(data: Dataset, signature: Signature, output: str | None = None) -> Dataset:
    """Labels without axes of 1: class ids [n, 1, …] where they fit no output as they are, and one without them; rows
    [n, classes, 1] of an output that has no more axes than its classes.

    Args:
        data: its labels stay where they are: those of a torch Dataset are made when they are asked for.
        signature: of the model.
        output: that is judged, of several.
    """
    labels = data.labels
    if labels is None or labels.ndim < 2 or 1 not in labels.shape[1:]:
        return data
    specs = [spec for spec in signature.outputs if output in (None, spec.name) and spec.dtype.startswith("float")]
    bare = (len(labels), *(size for size in labels.shape[1:] if size != 1))
    rows = [spec.shape[1:] for spec in specs]
    if len(bare) == 2 and bare[1:] in rows and all(len(row) == 1 for row in rows):
        return dataclasses.replace(data, labels=_shaped(labels, bare))
    if labels.dtype.kind not in "iub" or any(by_labels(labels, spec, None) is not None for spec in specs):
        return data
    ones = [axis for axis in range(1, labels.ndim) if labels.shape[axis] == 1]
    for shape in (*((*labels.shape[:axis], *labels.shape[axis + 1 :]) for axis in ones), bare):
        tried = _shaped(labels, shape)
        found = [by_labels(tried, spec, None) for spec in specs]
        if any(form is not None and form.kind in (OutputKind.DENSE, OutputKind.SOFTMAX) for form in found):
            return dataclasses.replace(data, labels=tried)
    return data


def _shaped(labels: Any, shape: tuple[int, ...]) -> Any:
    return dataclasses.replace(labels, shape=shape) if isinstance(labels, Fetched) else labels[:].reshape(shape)


def known_alone(data: Dataset, metric: Metric, signature: Signature) -> tuple[Dataset, tuple[str, ...]]:
    """The samples with a label that is known, and words on the labels that are not: they are neither right nor wrong.

    Args:
        data: that is judged on.
        metric: that judges it.
        signature: of the model.
    """
    if data.labels is None or metric.name not in (*SETS, *PLACES) or metric.output is None:
        return data, ()
    spec = next(spec for spec in signature.outputs if spec.name == metric.output)
    form = by_labels(data.labels, spec, "sigmoid" if metric.threshold else None)
    if form is None or form.kind not in (OutputKind.SIGMOID, OutputKind.DENSE):
        return data, ()
    classes = spec.shape[form.axis] if form.kind is OutputKind.DENSE else 2
    most = classes if isinstance(classes, int) else np.inf
    counts, unknown, values = [], 0, 0
    for _, labels in data.batches(ROWS):
        flat = np.asarray(labels).reshape(len(labels), -1)  # type: ignore[arg-type]
        known = (flat >= 0) & (flat < most)
        counts.append(known.sum(axis=1))
        unknown, values = unknown + int(flat.size - known.sum()), values + flat.size
    there = np.concatenate(counts) > 0
    words: tuple[str, ...] = ()
    if unknown and form.kind is OutputKind.SIGMOID:
        shown = ", ".join(f"{value:g}" for value in form.ignored)
        share = unknown / values
        told = f'{share:.2%} of the labels of the evaluation data ({shown}) mean "not known": they do not count.'
        words = (Note(told) if share < MANY else told,)
    if there.all() or not there.any():
        return data, words
    share = float((~there).mean())
    told = f"{share:.2%} of {counted(len(there), 'samples')} have no label that is known: they are left out."
    return data.part(np.flatnonzero(there)), (*words, Note(told) if share < MANY else told)


def labels_told(data: Dataset, metric: Metric, signature: Signature, sample: Arrays, *, named: bool) -> tuple[str, ...]:
    """What a reader should know of labels that are not all looked at, in sentences.

    Args:
        data: that is judged on.
        metric: that judges it.
        signature: of the model.
        sample: outputs for some samples.
        named: whether the metric was asked for.
    """
    if data.labels is None:
        return ()
    if metric.name in PLACES:
        return _ignored(data, metric, signature, sample)
    floats = [spec for spec in signature.outputs if spec.dtype.startswith("float")]
    fitting = [spec.name for spec in floats if by_labels(data.labels, spec, None) is not None]
    if named or metric.needs_labels or len(fitting) < 2:
        return ()
    which = f"The labels fit {counted(len(fitting), 'outputs')} ({', '.join(fitting)})"
    return (f"{which}: {metric.name} does not look at them. --judge {fitting[0]} judges this one by them.",)


def _ignored(data: Dataset, metric: Metric, signature: Signature, sample: Arrays) -> tuple[str, ...]:
    """The share of places without a class of the model, which count for nothing."""
    spec = next(spec for spec in signature.outputs if metric.output in (None, spec.name))
    form = by_labels(data.labels, spec, None)
    if form is None or form.kind is not OutputKind.DENSE or spec.name not in sample:
        return ()
    classes = sample[spec.name].shape[form.axis]
    labels = read_labels(data)
    outside = (labels < 0) | (labels >= classes)
    if not outside.any():
        return ()
    share, values = float(outside.mean()), np.unique(labels[outside]).tolist()
    shown = ", ".join(map(str, itertools.islice(values, 5))) + (", …" if len(values) > 5 else "")
    words = (
        f"{share:.2%} of the places of the evaluation data have labels ({shown}) that are no class of the model (0 to "
        f"{classes - 1}): they are not counted."
    )
    return (Note(words) if len(values) == 1 and values[0] in IGNORED and share < MANY else words,)
