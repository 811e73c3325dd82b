"""How important a channel is: by the size of its weights, by what the loss would feel, or by chance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch_pruning as tp
from torch import nn
from torch.nn import functional as F

from compress.artifact import Signature
from compress.dataset import Dataset
from compress.model import call
from compress.stages import Progress

__all__ = ["Importance", "add_gradients", "importance_of"]

Importance = Literal["magnitude", "taylor", "random"]

SAMPLES = 1024
BATCH = 32


def importance_of(kind: Importance) -> Callable[[Any], torch.Tensor | None]:
    """A function from a channel group to its channels' importance.

    magnitude: L2 norm of all weights that go with a channel, each layer's against its own mean (Li et al., Pruning
    Filters for Efficient ConvNets, 2017, section 3.1; over the group as in DepGraph, 2023, section 3.3). taylor: the
    first-order change of the loss (Molchanov et al., Importance Estimation for Neural Network Pruning, 2019,
    equation 8); its gradients come from `add_gradients`. random: a control.
    """
    if kind == "magnitude":
        return tp.importance.GroupMagnitudeImportance(p=2)  # type: ignore[no-any-return]
    if kind == "taylor":
        return tp.importance.GroupTaylorImportance()  # type: ignore[no-any-return]
    return tp.importance.RandomImportance()  # type: ignore[no-any-return]


def add_gradients(module: nn.Module, signature: Signature, data: Dataset, progress: Progress) -> None:
    """Sum up the loss's gradients over (at most 1,024 samples of) the data, in each parameter's `grad`.

    Classifiers: cross-entropy with the labels, or, where there are none, with the model's own answers. Others: half the
    squared outputs, whose gradient is the answer itself.

    Args:
        module: in eval mode, its parameters requiring gradients.
        signature: of the module.
        data: fits it; memory holds one batch at a time.
        progress: is told of samples done.
    """
    total = min(len(data), SAMPLES)
    module.zero_grad(set_to_none=True)
    done = 0
    with torch.enable_grad():
        for inputs, labels in data.batches(BATCH):
            logits = call(module, signature.inputs, inputs)
            _loss(logits, labels).backward()  # type: ignore[no-untyped-call]
            done += len(next(iter(inputs.values())))
            progress(min(done, total), total, "gradients for the importance of channels")
            if done >= total:
                return


def _loss(outputs: dict[str, torch.Tensor], labels: Any) -> torch.Tensor:
    first = next(iter(outputs.values()))
    if first.ndim != 2 or first.shape[1] < 2:
        floats = [tensor for tensor in outputs.values() if tensor.is_floating_point()]
        return torch.stack([tensor.float().square().sum() / 2 for tensor in floats]).sum()
    if labels is not None and labels.ndim == 1 and labels.dtype.kind in "iu":
        return F.cross_entropy(first.float(), torch.from_numpy(labels).long(), reduction="sum")
    return F.cross_entropy(first.float(), first.detach().argmax(1), reduction="sum")
