"""What a layer reads and what it is to give, as rows: of padding none, and of many positions some."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from compress.prune.repair.columns import columns_of, outputs_of, positions_of
from compress.prune.repair.samples import Samples

__all__ = ["rows_of"]

ROWS = 60_000  # that are enough for a layer, or so many times its columns, whichever is more
TIMES = 16


def rows_of(
    name: str, layer: nn.Module, given: torch.Tensor, target: torch.Tensor, samples: Samples, batch: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Columns [rows, groups, columns] and targets [rows, groups, outputs of one group].

    Args:
        name: of the layer.
        layer: linear, or a convolution.
        given: its input.
        target: of the shape of its output.
        samples: that these are of.
        batch: which of its batches.
    """
    places = _places(layer, target, samples.count)
    x, t = columns_of(layer, given, places), outputs_of(layer, target, places)
    kept = samples.kept(batch, name, given)
    x, t = x.flatten(0, 1), t.flatten(0, 1)
    if kept is None:
        return x, t
    rows = (kept if places is None else kept[:, places]).flatten()
    return x[rows], t[rows]


def _places(layer: nn.Module, target: torch.Tensor, samples: int) -> torch.Tensor | None:
    """Which of a sample's positions are looked at; None for all: neighbours tell nearly the same."""
    every = positions_of(layer, target.shape)
    weight: Any = layer.weight
    wanted = math.ceil(max(ROWS, TIMES * weight[0].numel()) / max(1, samples))
    if every <= wanted:
        return None
    random = torch.Generator().manual_seed(0)
    return torch.randperm(every, generator=random)[:wanted].sort().values
