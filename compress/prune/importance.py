"""How important a channel is: by the size of its weights, by what the loss would feel, or by chance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from compress.artifact import Signature
from compress.data.dataset import Dataset
from compress.evaluate.labels_told import squeezed
from compress.evaluate.output_forms import forms_by, labelled_output
from compress.evaluate.output_kind import OutputForm, OutputKind
from compress.model import TorchModel, call
from compress.model.inputs import run_on
from compress.prune.channels import Channels
from compress.stage import Progress
from compress.training.frozen import refuse_untaught
from compress.training.labels import watched
from compress.training.losses import CLASSES, fits, labelled, logits_of

__all__ = ["Importance", "importance_of", "squared_changes"]

Importance = Literal["magnitude", "taylor", "obs", "random"]

SAMPLES = 1024
BATCH = 32


def importance_of(
    channels: Channels,
    kind: Importance,
    seed: int = 0,
    data: Dataset | None = None,
    progress: Progress = lambda _done, _total, _note: None,
    labelled: str | None = None,
) -> dict[str, torch.Tensor]:
    """The importance of each unit, float32 [units], by its group's root; large is important.

    magnitude: the sum of the squares of all weights that go with a unit (Li et al., Pruning Filters for Efficient
    ConvNets, 2017, section 3.1; over the group as in DepGraph, 2023, section 3.3). taylor: the sum of the squared
    changes of the loss, to first order, that each of these weights makes (see `squared_changes`). Both against the
    group's own mean, so that groups can be ranked together. random: a control.

    Args:
        channels: with all of the model's weights.
        kind: of importance.
        seed: for random, and for which samples taylor looks at.
        data: for taylor.
        progress: is told of samples done.
        labelled: the output that labels are of, where they fit several.
    """
    if kind == "random":
        random = torch.Generator().manual_seed(seed)
        return {group.root: torch.rand(group.units, generator=random) for group in channels.groups}
    changes: Mapping[torch.Tensor, torch.Tensor] = {}
    if kind == "taylor":
        assert data is not None  # noqa: S101  checked before
        changes = squared_changes(channels.module, channels.signature, data, seed, progress, labelled)
    found = {}
    for group in channels.groups:
        score = torch.zeros(group.units)
        for weight, axis, index, unit in channels.weights(group):
            squares = changes[weight] if kind == "taylor" else weight.detach().float().square()
            by_channel = squares.movedim(axis, 0).flatten(1).sum(1) if squares.ndim > 1 else squares
            score.index_add_(0, torch.from_numpy(unit), by_channel[torch.from_numpy(index)])
        score /= torch.tensor([len(members) for members in group.members])
        found[group.root] = score / score.mean().clamp(min=1e-30)
    return found


def squared_changes(
    module: nn.Module,
    signature: Signature,
    data: Dataset,
    seed: int,
    progress: Progress,
    labelled: str | None = None,
) -> dict[torch.Tensor, torch.Tensor]:
    """For each parameter, (gradient · weight)² summed over batches.

    Molchanov et al., Importance Estimation for Neural Network Pruning, CVPR 2019, equation 8: the squared change of the
    loss without that weight, to first order; squared for each batch, so that gradients of unlike signs don't cancel.

    The loss is that of a training, by the kind of each output (see `forms_by`): against the labels where they fit;
    outputs without any against the model's own answers, or, of numbers, half their squares by their mean square, whose
    gradient is the answer itself.

    Args:
        module: in eval mode, its parameters requiring gradients, which are dropped afterwards.
        signature: of the module.
        data: fits it; at most 1,024 samples from all over it are taken, one batch of 32 in memory at a time.
        seed: for which samples.
        progress: is told of samples done.
        labelled: the output that labels are of, where they fit several.

    Raises:
        StageError: gradients don't reach all of it.
    """
    refuse_untaught(module, "taylor")
    total = min(len(data), SAMPLES)
    chosen = np.random.default_rng(seed).permutation(len(data))[:total]
    found: dict[torch.Tensor, torch.Tensor] = {
        parameter: torch.zeros_like(parameter, dtype=torch.float32) for parameter in module.parameters()
    }
    data = squeezed(data, signature, labelled)
    data = watched(data, signature.outputs[labelled_output(signature, data.labels, labelled)])
    forms, at = forms_by(TorchModel(module, signature), data, labelled)
    done = 0
    for batch in np.array_split(chosen, -(-total // BATCH)):
        inputs, labels = data.take(np.sort(batch))
        with torch.enable_grad():
            outputs = run_on(inputs, partial(call, module, signature.inputs, inputs))
            loss = _loss(list(outputs.values()), forms, at, labels)
            loss.backward()  # type: ignore[no-untyped-call]
        for parameter, sum_ in found.items():
            if parameter.grad is not None:
                sum_ += (parameter.grad * parameter.detach()).float().square()
        module.zero_grad(set_to_none=True)
        done += len(batch)
        progress(done, total, "gradients for the importance of channels")
    return found


def _loss(outputs: Sequence[torch.Tensor], forms: Sequence[OutputForm], at: int, labels: Any) -> torch.Tensor:
    """[], the mean over samples, summed over the outputs: none of them may lose what it alone needs."""
    taught = None if labels is None else torch.from_numpy(np.asarray(labels))
    parts = []
    for place, (output, form) in enumerate(zip(outputs, forms, strict=True)):
        if not output.is_floating_point():
            continue
        if place == at and taught is not None and fits(form, output, taught):
            parts.append(labelled(form, output, taught, 0.0))
        else:
            parts.append(_by_itself(output, form))
    return torch.stack(parts).sum()


def _by_itself(output: torch.Tensor, form: OutputForm) -> torch.Tensor:
    """The loss against the model's own answer; of numbers, half their squares by their mean square."""
    logits, answer = logits_of(form, output), output.detach()
    if form.kind in CLASSES:
        return F.cross_entropy(logits.movedim(form.axis, 1), answer.argmax(form.axis))
    if form.kind is OutputKind.SIGMOID:
        return labelled(form, output, (logits.detach() > 0).float(), 0.0)
    return output.float().square().mean() / 2 / answer.float().square().mean().clamp(min=1e-30)
