"""Kinds of layers that can lose channels: which tensors hold these, along which axis, and which sizes say so."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

__all__ = ["NORMALIZING", "PRUNABLE", "THROUGH", "WEIGHED", "Sliced", "depthwise", "shrink", "sizes_of", "sliced"]

PRUNABLE = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, nn.Linear)
BATCH_NORM = nn.modules.batchnorm._BatchNorm
INSTANCE_NORM = nn.modules.instancenorm._InstanceNorm
# What is normalized over several channels counts those that are zero, too: zero is not nothing there.
NORMALIZING = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)
# Both sides of these are the same channels.
THROUGH = (BATCH_NORM, INSTANCE_NORM, *NORMALIZING, nn.PReLU, nn.Embedding)


# Whose weights tell how important a channel is; those of an embedding would drown all others.
WEIGHED = (*PRUNABLE, BATCH_NORM, nn.LayerNorm, nn.RMSNorm)


class Sliced(NamedTuple):
    """A tensor of a layer that holds a place's channels along an axis; `parts` > 1: of one part of them, for all."""

    name: str
    axis: int
    parts: int = 1


def sliced(layer: nn.Module, side: str) -> list[Sliced] | None:
    """The tensors that hold a layer's channels on a side, "in" or "out"; None if it keeps its size."""
    outside = side == "out"
    if isinstance(layer, nn.Linear):
        return [Sliced("weight", 0), Sliced("bias", 0)] if outside else [Sliced("weight", 1)]
    if isinstance(layer, PRUNABLE):
        return _of_convolution(layer, outside=outside)
    if isinstance(layer, BATCH_NORM | INSTANCE_NORM):
        return [Sliced(name, 0) for name in ("weight", "bias", "running_mean", "running_var")]
    if isinstance(layer, nn.LayerNorm | nn.RMSNorm) and len(layer.normalized_shape) > 1:
        return None
    if isinstance(layer, NORMALIZING):
        return [Sliced("weight", 0), Sliced("bias", 0)]
    if isinstance(layer, nn.PReLU):
        return [Sliced("weight", 0)]
    if isinstance(layer, nn.Embedding):
        return [Sliced("weight", 1)]
    if isinstance(layer, nn.LSTM) and not outside:
        return [Sliced("weight_ih_l0", 1), Sliced("weight_ih_l0_reverse", 1)]
    return None


def depthwise(layer: object) -> bool:
    """Whether each channel is filtered on its own."""
    return (
        isinstance(layer, nn.modules.conv._ConvNd) and layer.groups == layer.in_channels == layer.out_channels
    ) and layer.groups > 1


def _of_convolution(layer: Any, *, outside: bool) -> list[Sliced]:
    makes, reads = (1, 0) if layer.transposed else (0, 1)
    if depthwise(layer):
        return [Sliced("weight", 0), Sliced("bias", 0)]
    if outside:  # the second axis of a weight holds the channels of one part
        return [Sliced("weight", makes, layer.groups if makes else 1), Sliced("bias", 0)]
    return [Sliced("weight", reads, layer.groups if reads else 1)]


def sizes_of(layer: nn.Module, side: str) -> tuple[str, ...]:
    """The attributes that hold how many channels there are on a side."""
    if isinstance(layer, nn.Linear):
        return ("out_features",) if side == "out" else ("in_features",)
    if isinstance(layer, PRUNABLE):
        if depthwise(layer):
            return ("out_channels", "in_channels", "groups")
        return ("out_channels",) if side == "out" else ("in_channels",)
    for kind, name in (
        (nn.GroupNorm, "num_channels"),
        (nn.LayerNorm | nn.RMSNorm, "normalized_shape"),
        (nn.PReLU, "num_parameters"),
        (nn.Embedding, "embedding_dim"),
        (nn.LSTM, "input_size"),
    ):
        if isinstance(layer, kind):
            return (name,)
    return ("num_features",)


def shrink(layer: nn.Module, side: str, gone: int) -> None:
    """Say that so many channels are gone on a side."""
    for name in sizes_of(layer, side):
        size = getattr(layer, name)
        setattr(layer, name, (*size[:-1], size[-1] - gone) if isinstance(size, tuple) else size - gone)
