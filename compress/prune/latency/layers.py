"""The layers of a network that lose channels, as a runtime sees them: sizes, and which groups their channels are of."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from compress.errors import StageError
from compress.model import call, sample_inputs
from compress.prune.channels import Channels
from compress.prune.choose_channels import MOST
from compress.prune.cut_layers import Place
from compress.prune.follow_channels import ChannelGroup
from compress.prune.layer_kinds import PRUNABLE, depthwise

__all__ = ["Layer", "Shape", "layers_of"]

POINTS = 4  # channel counts of a side that are measured, at most
WIDE, LIKED, LIKED_WIDE = 64, 8, 16  # channels that vector units like: multiples of 8, of 16 where there are 64


@dataclass(frozen=True)
class Shape:
    """All that decides what a layer takes, but its channels' values.

    Attributes:
        kind: of operator; "linear" multiplies matrices.
        given: sizes of what comes in: the batch first, without the channels.
        inputs, outputs: channels, all of them.
        groups: into which a convolution cuts them; as many as channels where each is filtered on its own.
        vary: whether inputs, and outputs, can become fewer.
        window: of a convolution: kernel, stride, padding before and after, dilation, and what a transposed one adds.
        bias: whether there is one.
    """

    kind: Literal["conv", "transposed", "linear"]
    given: tuple[int, ...]
    inputs: int
    outputs: int
    groups: int = 1
    vary: tuple[bool, bool] = (True, True)
    window: Mapping[str, tuple[int, ...]] = field(default_factory=dict, hash=False)
    bias: bool = True

    @property
    def depthwise(self) -> bool:
        """Whether inputs, outputs and groups are one number."""
        return self.groups > 1 and self.groups == self.inputs == self.outputs

    @property
    def key(self) -> str:
        """The same for layers that take the same."""
        return repr((self.kind, self.given, self.inputs, self.outputs, self.groups, self.vary, self.bias,
                     sorted(self.window.items())))  # fmt: skip

    def __str__(self) -> str:
        kernel = "×".join(map(str, self.window.get("kernel_shape", ())))
        where = "×".join(map(str, self.given))
        return f"{self.kind} {kernel + ' ' if kernel else ''}{self.inputs}→{self.outputs} at {where}"

    def counts(self, side: int) -> tuple[int, ...]:
        """Channels of a side (0: inputs, 1: outputs) that are worth measuring, rising, all of them last."""
        whole = (self.inputs, self.outputs)[side]
        if not self.vary[side]:
            return (whole,)
        liked = LIKED_WIDE if whole >= WIDE else LIKED
        step = liked if self.depthwise else math.lcm(liked, self.groups)
        fewest = (1 - MOST) * whole
        points = (fewest + (whole - fewest) * at / (POINTS - 1) for at in range(POINTS))
        return tuple(sorted({min(whole, max(step, round(point / step) * step)) for point in points} | {whole}))


@dataclass(frozen=True)
class Layer:
    """A layer, and how many of its channels go with a unit of each group, by the group's root.

    Attributes:
        name: of it.
        shape: of one of its calls.
        calls: how often it is called so.
        reads, gives: channels of its inputs, of its outputs, that go with a unit.
    """

    name: str
    shape: Shape
    calls: int
    reads: Mapping[str, float]
    gives: Mapping[str, float]


def layers_of(channels: Channels) -> list[Layer]:
    """Every layer with weights that loses channels with some group.

    Args:
        channels: of the network; run once, on one sample of the representative sizes.

    Raises:
        StageError: a group has hidden units of a recurrent layer, of which nothing here tells the time.
    """
    sides: dict[str, dict[str, dict[str, float]]] = {}
    for group in channels.groups:
        for place, per_unit in _per_unit(group):
            layer = channels.module.get_submodule(place.name) if place.side != "parameter" else None
            if isinstance(layer, nn.RNNBase):
                raise StageError(
                    "can't prune to a share of the latency",
                    why=f"{place.name} is a recurrent layer, whose time by hidden units is not measured",
                    mend="leave --allocate latency out: --target-latency-ms finds the fraction by measuring the whole",
                )
            if isinstance(layer, PRUNABLE):
                sides.setdefault(place.name, {"in": {}, "out": {}})[place.side][group.root] = per_unit
    found: list[Layer] = []
    for name, shapes in _called(channels, list(sides)).items():
        reads, gives = sides[name]["in"], sides[name]["out"]
        layer = channels.module.get_submodule(name)
        if depthwise(layer):
            reads = gives
        for given in dict.fromkeys(shapes):
            shape = _shape(layer, given, (bool(reads), bool(gives)))
            found.append(Layer(name, shape, shapes.count(given), reads, gives))
    return found


def _per_unit(group: ChannelGroup) -> list[tuple[Place, float]]:
    return [(place, index.size / group.units) for place, (index, _) in group.places.items()]


def _called(channels: Channels, names: Sequence[str]) -> dict[str, list[tuple[int, ...]]]:
    """Sizes of what comes into each layer, of each of its calls."""
    found: dict[str, list[tuple[int, ...]]] = {name: [] for name in names}

    def seen(name: str, _layer: nn.Module, given: tuple[Any, ...]) -> None:
        if given:
            found[name].append(tuple(given[0].shape))

    handles = [channels.module.get_submodule(name).register_forward_pre_hook(partial(seen, name)) for name in names]
    try:
        with torch.no_grad():
            call(channels.module, channels.signature.inputs, sample_inputs(channels.signature, 1))
    finally:
        for handle in handles:
            handle.remove()
    return found


def _shape(layer: Any, given: tuple[int, ...], vary: tuple[bool, bool]) -> Shape:
    bias = layer.bias is not None
    if isinstance(layer, nn.Linear):
        return Shape("linear", given[:-1] or (1,), layer.in_features, layer.out_features, vary=vary, bias=bias)
    dims = len(layer.kernel_size)
    spatial = given[-dims:]
    batch = given[0] if len(given) > dims + 1 else 1
    window = {
        "kernel_shape": tuple(layer.kernel_size), "strides": tuple(layer.stride), "dilations": tuple(layer.dilation),
        "pads": _pads(layer),
    }  # fmt: skip
    if layer.transposed:
        window["output_padding"] = tuple(layer.output_padding)
    kind: Literal["conv", "transposed"] = "transposed" if layer.transposed else "conv"
    sizes = (layer.in_channels, layer.out_channels, layer.groups)
    return Shape(kind, (batch, *spatial), *sizes, vary=vary, window=window, bias=bias)


def _pads(layer: Any) -> tuple[int, ...]:
    """Before and after each axis, as ONNX has them."""
    if layer.padding == "valid":
        return (0,) * 2 * len(layer.kernel_size)
    if layer.padding == "same":
        whole = [step * (size - 1) for size, step in zip(layer.kernel_size, layer.dilation, strict=True)]
        return (*(each // 2 for each in whole), *(each - each // 2 for each in whole))
    return (*layer.padding, *layer.padding)
