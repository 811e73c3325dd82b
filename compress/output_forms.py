"""What all outputs of a model are, and which of them the labels teach: one answer for training and for importance."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from compress.artifact import Signature
from compress.data_sources import Fetched
from compress.model import TorchModel
from compress.output_choice import OutputContent, content_of, the_output
from compress.output_kind import BY_SHAPE, OutputForm, OutputKind, by_labels, form_of

__all__ = ["forms_of", "labelled_output"]

LOOKED_AT = 64  # labels that are made when asked for
_NAMED = {OutputContent.EMBEDDING: OutputKind.EMBEDDING, OutputContent.VALUES: OutputKind.REGRESSION}
PLAIN = OutputForm(OutputKind.REGRESSION, because="nothing says that it is more than numbers")


def labelled_output(signature: Signature, labels: Any | None) -> int:
    """The place of the output that labels belong to: chosen as a metric's output is, the first where nothing tells.

    Args:
        signature: of the model.
        labels: [n, …], or None.
    """
    specs = signature.outputs
    if labels is None or len(specs) < 2:
        return 0
    if isinstance(labels, Fetched):
        labels = labels[np.unique(np.linspace(0, len(labels) - 1, min(len(labels), LOOKED_AT)).astype(np.int64))]
    told = [by_labels(labels, spec, None) if spec.dtype.startswith("float") else None for spec in specs]
    kinds = {at: form.kind for at, form in enumerate(told) if form is not None}
    if labels.ndim == 1 and OutputKind.SOFTMAX in kinds.values():
        name = the_output(None, signature, labels, None, ask=False)
        at = next((at for at, spec in enumerate(specs) if spec.name == name), -1)
        classes = [at for at, kind in kinds.items() if kind is OutputKind.SOFTMAX]
        return at if at in classes else classes[0]
    return min(kinds, default=0)


def forms_of(model: TorchModel, labels: Any | None) -> tuple[tuple[OutputForm, ...], int]:
    """What each output is, by their order, and the place of the one that labels teach.

    Args:
        model: see `form_of`.
        labels: [n, …], or None.
    """
    names = [spec.name for spec in model.signature.outputs]
    at = labelled_output(model.signature, labels)
    forms = [form_of(model, name, labels if place == at else None) for place, name in enumerate(names)]
    for place, form in enumerate(forms):
        named = _NAMED.get(content_of(model.signature.outputs[place]))
        if named is not None and form.because == BY_SHAPE:
            forms[place] = OutputForm(named, because="its name says so")
            continue
        # Beside other outputs nothing says that numbers in a row are classes.
        if place != at and form.kind is OutputKind.SOFTMAX and not form.ending:
            forms[place] = dataclasses.replace(PLAIN)
    return tuple(forms), at
