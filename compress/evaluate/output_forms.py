"""What all outputs of a model are, and which of them the labels teach: one answer for training and for importance."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

from compress.artifact import Signature
from compress.console.wording import counted
from compress.data.dataset import Dataset
from compress.data.sources import Fetched
from compress.data.spread import spread_over
from compress.errors import RecipeError
from compress.evaluate.endings import endings_of, unbounded_of
from compress.evaluate.output_choice import OutputContent, class_outputs, content_of, named_so
from compress.evaluate.output_kind import BY_SHAPE, OutputForm, OutputKind, by_labels, form_of, no_classes
from compress.evaluate.probe import hangs, probed, shares_among
from compress.evaluate.shares import as_values, hits
from compress.model import Arrays, TorchModel, call
from compress.model.inputs import run_on

__all__ = ["forms_by", "forms_of", "labelled_output"]

LOOKED_AT = 64  # labels that are made when asked for
_NAMED = {OutputContent.EMBEDDING: OutputKind.EMBEDDING, OutputContent.VALUES: OutputKind.REGRESSION}
PLAIN = OutputForm(OutputKind.REGRESSION, because="nothing says that it is more than numbers")


def labelled_output(signature: Signature, labels: Any | None, named: str | None = None, *, ask: bool = False) -> int:
    """The place of the output that labels belong to, of those that they fit.

    It is the one that is named, else chosen as a metric's output is, else the one that has as many classes as there are
    labels; else the first.

    Args:
        signature: of the model.
        labels: [n, …], or None.
        named: an output; one that labels don't fit is no answer.
        ask: whether class ids that fit outputs of unlike widths, where nothing tells which, are an error.

    Raises:
        RecipeError: it can't be told.
    """
    specs = signature.outputs
    if labels is None or len(specs) < 2:
        return 0
    made = isinstance(labels, Fetched)  # of some, it can't be told that there are no more classes
    if made:
        labels = labels[spread_over(len(labels), LOOKED_AT)]
    told = [by_labels(labels, spec, None) if spec.dtype.startswith("float") else None for spec in specs]
    kinds = {at: form.kind for at, form in enumerate(told) if form is not None}
    asked = next((at for at in kinds if specs[at].name == named), None)
    classes = [at for at, kind in kinds.items() if kind is OutputKind.SOFTMAX]
    if labels.ndim != 1 or not classes:
        return min(kinds, default=0) if asked is None else asked
    if asked in classes and content_of(specs[asked]) is OutputContent.CLASSES:
        return asked
    fitting = [at for at in classes if specs[at].name in class_outputs(signature, labels)]
    if len({specs[at].shape[1] for at in fitting}) < 2:
        return (fitting or classes)[0]
    exact = [] if made else [at for at in fitting if specs[at].shape[1] == int(np.max(labels)) + 1]
    if ask and len(exact) != 1:
        raise RecipeError(
            "can't tell which output the labels teach",
            why=f"they are class ids, which fit {'; '.join(str(specs[at]) for at in fitting)}",
            mend=f"name it: --judge {specs[fitting[0]].name}",
        )
    return (exact or fitting)[0]


def forms_of(model: TorchModel, labels: Any | None, named: str | None = None) -> tuple[tuple[OutputForm, ...], int]:
    """What each output is, by their order, and the place of the one that labels teach.

    Args:
        model: see `form_of`.
        labels: [n, …], or None.
        named: see `labelled_output`.
    """
    names = [spec.name for spec in model.signature.outputs]
    at = labelled_output(model.signature, labels, named)
    forms = [form_of(model, name, labels if place == at else None) for place, name in enumerate(names)]
    for place, form in enumerate(forms):
        kind = _NAMED.get(content_of(model.signature.outputs[place]))
        if kind is not None and form.because == BY_SHAPE:
            forms[place] = OutputForm(kind, because="its name says so")
            continue
        by_shape = form.because == BY_SHAPE and not named_so(model.signature.outputs[place].name)
        if place == at and by_shape and labels is not None and no_classes(labels):
            forms[place] = OutputForm(OutputKind.EMBEDDING, because="its labels are no classes")
            continue
        # Beside other outputs nothing says that numbers in a row are classes.
        if place != at and form.kind is OutputKind.SOFTMAX and not form.ending:
            forms[place] = dataclasses.replace(PLAIN)
    return tuple(forms), at


def forms_by(model: TorchModel, data: Dataset, named: str | None = None) -> tuple[tuple[OutputForm, ...], int]:
    """As `forms_of`, by labels and by what the model itself answers beside them.

    Args:
        model: as it came, before it is trained on these labels.
        data: with labels or without.
        named: see `labelled_output`.
    """
    forms, at = forms_of(model, data.labels, named)
    endings, unbounded = endings_of(model), unbounded_of(model)
    if not hangs(model.signature, data.labels, endings, unbounded):
        return forms, at
    values, rows = probed(lambda inputs: _answers(model, inputs), data, many=True)
    shares = shares_among(model.signature, data.labels, endings, unbounded, values)
    for place, spec in enumerate(model.signature.outputs):
        form = forms[place]
        if spec.name not in values:
            continue
        if place == at and form.kind is OutputKind.SIGMOID and spec.name in shares:
            because = f"{form.because}, and it gives 0 to 1 for {counted(len(rows), 'samples')}"
            form = dataclasses.replace(form, ending="sigmoid", because=because)
        elif place == at and hits(form, values[spec.name], data.take(rows)[1]):
            form = as_values(form)
        elif form.because == BY_SHAPE and content_of(spec, values[spec.name]) is OutputContent.EMBEDDING:
            form = OutputForm(OutputKind.EMBEDDING, because="its vectors have length 1")
        forms = (*forms[:place], form, *forms[place + 1 :])
    return forms, at


def _answers(model: TorchModel, inputs: Arrays) -> Arrays:
    """What a model in training, or not, gives in evaluation; float outputs, by the signature's names."""
    mode, device = model.module.training, next((each.device for each in model.module.parameters()), None)
    given = {name: torch.as_tensor(values, device=device) for name, values in inputs.items()}
    model.module.eval()
    try:
        with torch.no_grad():
            found = run_on(inputs, lambda: call(model.module, model.signature.inputs, given)).values()
    finally:
        model.module.train(mode)
    named = zip(model.signature.outputs, found, strict=True)
    return {spec.name: value.float().cpu().numpy() for spec, value in named if value.is_floating_point()}
