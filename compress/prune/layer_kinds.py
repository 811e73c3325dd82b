"""Kinds of layers that can lose channels: which tensors hold these, along which axis, and which sizes say so."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import nn

__all__ = [
    "NORMALIZING", "PRUNABLE", "RECURRENT", "THROUGH", "WEIGHED", "Sliced", "depthwise", "hidden_parts", "shrink",
    "sizes_of", "sliced", "sliced_hidden", "width_of",
]  # fmt: skip

PRUNABLE = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, nn.Linear)
BATCH_NORM = nn.modules.batchnorm._BatchNorm
INSTANCE_NORM = nn.modules.instancenorm._InstanceNorm
# What is normalized over several channels counts those that are zero, too: zero is not nothing there.
NORMALIZING = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)
# Both sides of these are the same channels.
THROUGH = (BATCH_NORM, INSTANCE_NORM, *NORMALIZING, nn.PReLU, nn.Embedding)


# Of each hidden unit, a row in the matrix of so many gates. A unit without weights stays at zero in each of them.
RECURRENT: dict[type[nn.RNNBase], int] = {nn.LSTM: 4, nn.GRU: 3, nn.RNN: 1}

# Whose weights tell how important a channel is; those of an embedding would drown all others.
WEIGHED = (*PRUNABLE, *RECURRENT, BATCH_NORM, nn.LayerNorm, nn.RMSNorm)


class Sliced(NamedTuple):
    """A tensor of a layer that holds a place's channels along an axis.

    Attributes:
        name: of the tensor.
        axis: of it.
        parts: above 1: of one part of the channels, for all.
        gates: the channels lie there so many times, one after the other.
        start: where they begin.
    """

    name: str
    axis: int
    parts: int = 1
    gates: int = 1
    start: int = 0

    def at(self, channels: Iterable[int], width: int) -> frozenset[int]:
        """Where these of `width` channels lie along the axis."""
        held = list(channels)
        return frozenset(self.start + gate * width + channel for gate in range(self.gates) for channel in held)


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
    if isinstance(layer, nn.RNNBase) and not outside:
        return [Sliced("weight_ih_l0", 1), Sliced("weight_ih_l0_reverse", 1)]
    return None


def hidden_parts(layer: nn.RNNBase) -> int:
    """Of a recurrent layer with several layers and directions, the sets of hidden units, numbered as its states are."""
    return layer.num_layers * (2 if layer.bidirectional else 1)


def sliced_hidden(layer: nn.RNNBase, part: int) -> list[Sliced]:
    """The tensors that hold the hidden units of one layer and direction: in each gate, and where they are read."""
    directions = 2 if layer.bidirectional else 1
    number, direction = divmod(part, directions)
    own, gates = f"l{number}" + ("_reverse" if direction else ""), RECURRENT[type(layer)]
    made = [Sliced(f"{name}_{own}", 0, gates=gates) for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
    start = direction * layer.hidden_size
    behind = [Sliced(f"weight_ih_l{number + 1}{to}", 1, start=start) for to in ("", "_reverse")]
    return [*made, Sliced(f"weight_hh_{own}", 1), *behind]


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
    if isinstance(layer, nn.RNNBase):
        return ("hidden_size",) if side == "hidden" else ("input_size",)
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
    ):
        if isinstance(layer, kind):
            return (name,)
    return ("num_features",)


def shrink(layer: nn.Module, side: str, gone: int) -> None:
    """Say that so many channels are gone on a side."""
    for name in sizes_of(layer, side):
        size = getattr(layer, name)
        setattr(layer, name, (*size[:-1], size[-1] - gone) if isinstance(size, tuple) else size - gone)


def width_of(layer: Any) -> int:
    """How many channels a layer that can lose some gives; of a recurrent one, its hidden units."""
    return int(getattr(layer, sizes_of(layer, "hidden" if isinstance(layer, nn.RNNBase) else "out")[0]))
