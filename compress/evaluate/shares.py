"""Rows of labels that are 0 or more and sum to 1: shares of classes, which logits are taught, or numbers to hit.

The labels alone don't say which. A network that was trained to hit them gives about these numbers; the logits of one
that was trained to tell classes are no such numbers, but their softmax is about these shares.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from compress.evaluate.output_kind import SHARES, OutputForm, OutputKind

__all__ = ["UNSURE", "as_values", "hits"]

Array = np.ndarray[Any, Any]
NEARER = 0.5  # of the squared error of the softmax, that the outputs as they are may have at most
UNSURE = (
    "the rows of the labels sum to 1: they are taken as shares of classes, of which the output gives logits. Where "
    "they are numbers to hit, as in a regression, say so: --loss regression"
)


def hits(form: OutputForm, outputs: Array, labels: Any) -> bool:
    """Whether outputs are nearer to labels that are taken as shares than their softmax is.

    Args:
        form: of the output, by its labels.
        outputs: float [n, k] of some samples, by the network as it came.
        labels: of these.
    """
    if form.because != SHARES or form.ending is not None or outputs.shape != np.shape(labels):
        return False
    values, wanted = np.asarray(outputs, np.float64), np.asarray(labels, np.float64)
    if not np.isfinite(values).all():
        return False
    powers = np.exp(values - values.max(axis=1, keepdims=True))
    shares = powers / powers.sum(axis=1, keepdims=True)
    return bool(np.square(values - wanted).mean() < NEARER * np.square(shares - wanted).mean())


def as_values(form: OutputForm) -> OutputForm:
    """The form of an output that hits its labels."""
    because = "its own answers are nearer to the labels than their softmax is"
    return dataclasses.replace(form, kind=OutputKind.REGRESSION, because=because)
