"""The distance of an output to the original's, and to labels, by the kind of the output.

Classes: Hinton et al., Distilling the Knowledge in a Neural Network, 2015, section 2; at each place of a map, Liu et
al., Structured Knowledge Distillation for Semantic Segmentation, CVPR 2019, section 3.1. Several labels at once: a
Bernoulli distribution each, as in Yang et al., Multi-Label Knowledge Distillation, ICCV 2023, section 3.2.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from compress.evaluate.layout import lies_alike
from compress.evaluate.output_kind import OutputForm, OutputKind

__all__ = ["distance", "fits", "labelled", "logits_of"]

LEAST = 1e-12  # of a probability, before its logarithm
CLASSES = (OutputKind.SOFTMAX, OutputKind.DENSE)
IGNORED = -100


def logits_of(form: OutputForm, output: torch.Tensor) -> torch.Tensor:
    """float32, what a softmax along the axis or a sigmoid makes probabilities of.

    The logarithm of a softmax's probabilities differs from its logits by the same number for all classes of a sample,
    which no softmax sees.
    """
    output = output.float()
    if form.ending == "softmax":
        return output.clamp(min=LEAST).log()
    if form.ending == "sigmoid":
        inside = output.clamp(1e-7, 1 - 1e-7)
        return inside.log() - torch.log1p(-inside)
    return output


def distance(
    form: OutputForm, got: torch.Tensor, taught: torch.Tensor, temperature: float, variance: torch.Tensor | float
) -> torch.Tensor:
    """[], 0 where the two are equal.

    Args:
        form: of both.
        got: by the model in training, [n, …].
        taught: by the original, of the same shape.
        temperature: softens classes.
        variance: of the original's output, by which squares are measured.
    """
    if form.kind in CLASSES:
        mine, wanted = (
            F.log_softmax(logits_of(form, output) / temperature, form.axis).movedim(form.axis, -1).flatten(0, -2)
            for output in (got, taught)
        )
        return F.kl_div(mine, wanted, reduction="batchmean", log_target=True) * temperature * temperature
    if form.kind is OutputKind.SIGMOID:
        wanted = torch.sigmoid(logits_of(form, taught))
        entropy = F.binary_cross_entropy(wanted, wanted)
        return _bernoulli(form, got, wanted) - entropy
    squares = F.mse_loss(got.float(), taught.float()) / variance
    if form.kind is OutputKind.EMBEDDING:
        mine, wanted = got.float().flatten(1), taught.float().flatten(1)
        return (1 - F.cosine_similarity(mine, wanted, dim=1)).mean() + squares
    return squares


def _bernoulli(
    form: OutputForm, got: torch.Tensor, wanted: torch.Tensor, known: torch.Tensor | None = None
) -> torch.Tensor:
    """The mean over what is known, float 1 or 0; by default all of it."""
    how = {} if known is None else {"weight": known, "reduction": "sum"}
    if form.ending == "sigmoid":  # its logits are rounded away near 0 and 1
        with torch.autocast(got.device.type, enabled=False):
            loss = F.binary_cross_entropy(got.float().clamp(0, 1), wanted, **how)  # type: ignore[arg-type]
    else:
        loss = F.binary_cross_entropy_with_logits(got.float(), wanted, **how)  # type: ignore[arg-type]
    return loss if known is None else loss / known.sum().clamp(min=1)


def fits(form: OutputForm, output: torch.Tensor, labels: torch.Tensor) -> bool:
    """Whether labels can teach an output of this form."""
    ids = not labels.is_floating_point()
    if form.kind in CLASSES:
        if ids and labels.ndim == output.ndim - 1:
            places = list(output.shape)
            del places[form.axis]
            return list(labels.shape) == places
        return form.kind is OutputKind.SOFTMAX and labels.shape == output.shape
    return len(labels) == len(output) and lies_alike(tuple(output.shape[1:]), tuple(labels.shape[1:]))


def labelled(
    form: OutputForm, got: torch.Tensor, labels: torch.Tensor, smoothing: float, variance: torch.Tensor | float = 1.0
) -> torch.Tensor:
    """[], the mean loss against labels that fit.

    Places whose label is no class are left out, and so are labels that are there or not and are not from 0 to 1.
    """
    if form.kind in CLASSES:
        logits = logits_of(form, got).movedim(form.axis, 1)
        if labels.shape == got.shape:
            return F.cross_entropy(logits, labels.float(), label_smoothing=smoothing)
        ids = labels.long()
        if form.kind is OutputKind.SOFTMAX:
            return F.cross_entropy(logits, ids, label_smoothing=smoothing)
        there = (ids >= 0) & (ids < logits.shape[1])
        total = F.cross_entropy(
            logits, ids.where(there, IGNORED), label_smoothing=smoothing, ignore_index=IGNORED, reduction="sum"
        )
        return total / there.sum().clamp(min=1)
    wanted = labels.float().reshape(got.shape)
    if form.kind is OutputKind.SIGMOID:
        known = (wanted >= 0) & (wanted <= 1)
        wanted = wanted.where(known, 0.0)  # NaN times 0 is NaN
        return _bernoulli(form, got, wanted * (1 - smoothing) + smoothing / 2, known.float())
    return F.mse_loss(got.float(), wanted) / variance
