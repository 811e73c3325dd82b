"""A linear layer or a convolution as a matrix: the columns that it reads at each position, and its weights over them.

The columns of a convolution are its unfolded input, channel by channel and, of each, tap by tap. Grouped convolutions
are a matrix for each group, depthwise ones for each channel. Transposed ones read an input with zeros between.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

__all__ = ["channel_axis", "columns_of", "fits", "groups_of", "outputs_of", "put_weights", "taps_of", "weights_of"]

CONVOLUTION = nn.modules.conv._ConvNd


def channel_axis(layer: nn.Module) -> int:
    """Of what the layer gives."""
    return -1 if isinstance(layer, nn.Linear) else 1


def groups_of(layer: nn.Module) -> int:
    """Matrices in it."""
    return int(layer.groups) if isinstance(layer, CONVOLUTION) else 1


def taps_of(layer: nn.Module) -> int:
    """Columns for each channel that it reads."""
    return math.prod(layer.kernel_size) if isinstance(layer, CONVOLUTION) else 1


def fits(layer: nn.Module, given: torch.Tensor) -> bool:
    """Whether an input has the dimensions that this file knows: a batch first."""
    if isinstance(layer, CONVOLUTION):
        return given.ndim == 2 + len(layer.kernel_size)
    return given.ndim >= 2


def positions_of(layer: nn.Module, output_shape: Sequence[int]) -> int:
    """Places for each sample."""
    return math.prod(output_shape[2:] if isinstance(layer, CONVOLUTION) else output_shape[1:-1])


def columns_of(layer: Any, given: torch.Tensor, places: torch.Tensor | None = None) -> torch.Tensor:
    """What each output is a linear function of, [samples, places, groups, columns].

    Args:
        layer: linear, or a convolution of any kind.
        given: its input.
        places: of a sample's positions, those to take; all by default.
    """
    if isinstance(layer, nn.Linear):
        rows = given.flatten(1, -2) if given.ndim > 2 else given[:, None]
        return (rows if places is None else rows[:, places])[:, :, None]
    dims = len(layer.kernel_size)
    views = _stuffed(layer, given) if layer.transposed else _padded(layer, given)
    strides = (1,) * dims if layer.transposed else layer.stride
    for dim, (kernel, dilation, stride) in enumerate(zip(layer.kernel_size, layer.dilation, strides, strict=True)):
        views = views.unfold(2 + dim, dilation * (kernel - 1) + 1, stride)[..., ::dilation]
    shape = views.shape[2 : 2 + dims]
    if places is None:
        places = torch.arange(math.prod(shape))
    index: Any = (slice(None), slice(None), *torch.unravel_index(places, shape))
    taken = views[index]  # [samples, channels, places, taps…]
    rows = taken.transpose(1, 2)
    return rows.reshape(*rows.shape[:2], layer.groups, -1)


def outputs_of(layer: nn.Module, output: torch.Tensor, places: torch.Tensor | None = None) -> torch.Tensor:
    """[samples, places, groups, outputs of one group]."""
    if isinstance(layer, nn.Linear):
        rows = output.flatten(1, -2) if output.ndim > 2 else output[:, None]
    else:
        rows = output.flatten(2).transpose(1, 2)
    rows = rows if places is None else rows[:, places]
    return rows.reshape(*rows.shape[:2], groups_of(layer), -1)


def weights_of(layer: Any) -> torch.Tensor:
    """[groups, outputs of one group, columns], a copy in float64."""
    weight: torch.Tensor = layer.weight.detach().double()
    if isinstance(layer, nn.Linear):
        return weight[None].clone()
    if layer.transposed:  # [in, out of a group, taps]
        split = weight.reshape(layer.groups, -1, *weight.shape[1:]).transpose(1, 2)
        weight = split.flip(tuple(range(3, split.ndim))).flatten(0, 1)
    return weight.reshape(layer.groups, weight.shape[0] // layer.groups, -1).clone()


@torch.no_grad()
def put_weights(layer: Any, weights: torch.Tensor) -> None:
    """The inverse of `weights_of`."""
    if isinstance(layer, CONVOLUTION) and layer.transposed:
        kernel = layer.kernel_size
        split = weights.reshape(layer.groups, weights.shape[1], -1, *kernel).transpose(1, 2)
        weights = split.flip(tuple(range(3, split.ndim)))
    layer.weight.copy_(weights.reshape(layer.weight.shape))


def _padded(layer: Any, given: torch.Tensor) -> torch.Tensor:
    around = layer._reversed_padding_repeated_twice
    if layer.padding_mode != "zeros":
        return F.pad(given, around, mode=layer.padding_mode)
    if isinstance(layer.padding, str):
        return F.pad(given, around)
    return F.pad(given, [side for size in reversed(layer.padding) for side in (size, size)])


def _stuffed(layer: Any, given: torch.Tensor) -> torch.Tensor:
    """The input of the plain convolution that a transposed one is: zeros between, and around."""
    sizes = [(size - 1) * stride + 1 for size, stride in zip(given.shape[2:], layer.stride, strict=True)]
    wide = given.new_zeros(*given.shape[:2], *sizes)
    wide[(slice(None), slice(None), *(slice(None, None, stride) for stride in layer.stride))] = given
    around: list[int] = []
    for kernel, dilation, padding, more in reversed(
        list(zip(layer.kernel_size, layer.dilation, layer.padding, layer.output_padding, strict=True))
    ):
        side = dilation * (kernel - 1) - padding
        around += [side, side + more]
    return F.pad(wide, around)
