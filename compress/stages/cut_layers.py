"""Take channels out of layers, or silence them there, and put everything back.

A place is one side of a layer (or one axis of a parameter that stands alone), a cut says which of its channels go.
Kinds of layers that this file does not know are refused. A parameter that several layers share is cut once, for all of
them, and only if all of them lose the same.
"""

from __future__ import annotations

import contextlib
import copy
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from compress.errors import StageError

__all__ = ["PRUNABLE", "Cut", "Layers", "Place", "Sliced"]

PRUNABLE = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, nn.Linear)
BATCH_NORM = nn.modules.batchnorm._BatchNorm
INSTANCE_NORM = nn.modules.instancenorm._InstanceNorm
# What is normalized over several channels counts those that are zero, too: zero is not nothing there.
NORMALIZING = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)
# Both sides of these are the same channels.
THROUGH = (BATCH_NORM, INSTANCE_NORM, *NORMALIZING, nn.PReLU, nn.Embedding)


class Place(NamedTuple):
    """A side of a layer, "in" or "out"; of a parameter outside torch's layers, "parameter" and the axis."""

    name: str
    side: str
    axis: int = 0


class Sliced(NamedTuple):
    """A tensor of a layer that holds a place's channels along an axis; `parts` > 1: of one part of them, for all."""

    name: str
    axis: int
    parts: int = 1


Cut = Mapping[Place, frozenset[int]]


class Layers:
    """The layers of a module, by name, and who shares which parameter.

    Args:
        module: is changed inside the blocks of `without` and `silenced`, and is as before at their end.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.names = {layer: name for name, layer in module.named_modules()}
        self.owners: dict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
        memory: dict[int, set[int]] = defaultdict(set)
        for layer in module.modules():
            for name, parameter in layer._parameters.items():
                if parameter is not None:
                    self.owners[id(parameter)].append((layer, name))
                    memory[parameter.untyped_storage().data_ptr()].add(id(parameter))
        # Parameters that are views of one memory can't be cut one by one.
        self._entwined = {one for several in memory.values() if len(several) > 1 for one in several}

    def place(self, target: nn.Module | nn.Parameter, side: str, axis: int) -> Place:
        """What the graph names by a layer or parameter.

        Raises:
            StageError: of a kind that keeps its size.
        """
        if isinstance(target, nn.Parameter):
            layer, name = self.owners[id(target)][0]
            if type(layer).__module__.startswith("torch.nn."):
                raise _refused(f"its channels go through {self.names[layer]}, which keeps its size")
            return Place(f"{self.names[layer]}.{name}".lstrip("."), "parameter", axis % target.ndim)
        if isinstance(target, THROUGH) or _depthwise(target):
            side = "out"
        place = Place(self.names[target], side)
        self.tensors(place)
        return place

    def layer(self, place: Place) -> nn.Module:
        """The layer of a place, or the module that a parameter belongs to."""
        name = place.name.rpartition(".")[0] if place.side == "parameter" else place.name
        return self.module.get_submodule(name)

    def parts(self, place: Place) -> int:
        """In how many equal parts the layer cuts the place's channels; each has to lose as many as the others."""
        layer = self.layer(place)
        if isinstance(layer, nn.GroupNorm):
            return layer.num_groups
        grouped = isinstance(layer, PRUNABLE) and not isinstance(layer, nn.Linear) and not _depthwise(layer)
        return int(layer.groups) if grouped else 1  # type: ignore[arg-type]

    def tensors(self, place: Place) -> list[Sliced]:
        """What holds the place's channels.

        Raises:
            StageError: the layer is of a kind that keeps its size, or its weights are computed from others.
        """
        if place.side == "parameter":
            return [Sliced(place.name.rpartition(".")[2], place.axis)]
        layer, outside = self.layer(place), place.side == "out"
        found: list[Sliced]
        if isinstance(layer, nn.Linear):
            found = [Sliced("weight", 0), Sliced("bias", 0)] if outside else [Sliced("weight", 1)]
        elif isinstance(layer, PRUNABLE):
            found = _of_convolution(layer, outside=outside)
        elif isinstance(layer, BATCH_NORM | INSTANCE_NORM):
            found = [Sliced(name, 0) for name in ("weight", "bias", "running_mean", "running_var")]
        elif isinstance(layer, nn.LayerNorm | nn.RMSNorm) and len(layer.normalized_shape) > 1:
            raise _refused(f"{self.names[layer]} normalizes over several dimensions")
        elif isinstance(layer, NORMALIZING):
            found = [Sliced("weight", 0), Sliced("bias", 0)]
        elif isinstance(layer, nn.PReLU):
            found = [Sliced("weight", 0)] if layer.num_parameters > 1 else []
        elif isinstance(layer, nn.Embedding):
            found = [Sliced("weight", 1)]
        elif isinstance(layer, nn.LSTM) and not outside:
            found = [Sliced("weight_ih_l0", 1), Sliced("weight_ih_l0_reverse", 1)]
        else:
            raise _refused(f"its channels go through {self.names[layer]}, which keeps its size")
        for tensor in found:
            if tensor.name in vars(layer) or "parametrizations" in layer._modules:
                raise _refused(f"the weights of {self.names[layer]} are computed from others (weight or spectral norm)")
        return [tensor for tensor in found if isinstance(getattr(layer, tensor.name, None), torch.Tensor)]

    @contextlib.contextmanager
    def without(self, cut: Cut, *, shapes_only: bool = False) -> Iterator[nn.Module]:
        """The module without these channels, until the end of the block.

        Args:
            cut: what goes.
            shapes_only: the tensors get the right shapes and some of the values; nothing is copied.

        Raises:
            StageError: the cut leaves nothing of a layer, or parts of unequal size, or differs between layers that
                share a parameter.
        """
        wanted = self._wanted(cut)
        touched = {layer for layer, _ in wanted} | {self.layer(place) for place in cut}
        saved = [(layer, _attributes(layer), dict(layer._parameters), dict(layer._buffers)) for layer in touched]
        made: dict[int, torch.Tensor] = {}
        try:
            for (layer, name), axes in wanted.items():
                tensor = getattr(layer, name)
                if id(tensor) not in made:
                    made[id(tensor)] = _kept(tensor, axes, shapes_only)
                setattr(layer, name, made[id(tensor)])
            for place, gone in cut.items():
                if place.side != "parameter":
                    _shrink(self.layer(place), place.side, len(gone))
            yield self.module
        finally:
            for layer, attributes, parameters, buffers in saved:
                layer.__dict__.clear()
                layer.__dict__.update(attributes)
                layer._parameters.clear()
                layer._parameters.update(parameters)
                layer._buffers.clear()
                layer._buffers.update(buffers)

    @contextlib.contextmanager
    def silenced(self, cut: Cut) -> Iterator[nn.Module]:
        """The module with all its channels, these zero where they are made and where they are read.

        Where layers normalize over channels, these are left out of the mean and of the deviation.
        """
        before: list[tuple[torch.Tensor, torch.Tensor]] = []
        hooks = []
        try:
            for (layer, name), axes in self._wanted(cut).items():
                tensor = getattr(layer, name)
                if name == "running_var" or isinstance(layer, NORMALIZING) or any(tensor is seen for seen, _ in before):
                    continue
                before.append((tensor, tensor.data))
                quiet = tensor.detach().clone()
                for axis, gone in axes.items():
                    quiet.index_fill_(axis, torch.tensor(sorted(gone)), 0)
                tensor.data = quiet
            for place, gone in cut.items():
                layer = self.layer(place)
                if place.side != "parameter" and isinstance(layer, NORMALIZING):
                    hooks.append(layer.register_forward_hook(_excluding(layer, self.tensors(place), gone)))
            yield self.module
        finally:
            for hook in hooks:
                hook.remove()
            for tensor, values in before:
                tensor.data = values

    def _wanted(self, cut: Cut) -> dict[tuple[nn.Module, str], dict[int, frozenset[int]]]:
        """What goes from each axis of each tensor."""
        wanted: dict[tuple[nn.Module, str], dict[int, frozenset[int]]] = defaultdict(dict)
        for place, gone in cut.items():
            layer, parts = self.layer(place), self.parts(place)
            width = self.width(place)
            if len(gone) >= width:
                raise _refused("a layer would be left with nothing")
            by_part = [
                frozenset(i % (width // parts) for i in gone if i // (width // parts) == p) for p in range(parts)
            ]
            if len({len(part) for part in by_part}) > 1:
                raise _refused(f"{place.name} would be left with parts of unequal size")
            for tensor in self.tensors(place):
                if tensor.parts > 1 and len(set(by_part)) > 1:
                    raise _refused(f"the parts of {place.name} would lose different channels")
                wanted[layer, tensor.name][tensor.axis] = by_part[0] if tensor.parts > 1 else gone
        for (layer, name), axes in list(wanted.items()):
            tensor = getattr(layer, name)
            if id(tensor) in self._entwined:
                raise _refused(f"the weights of {self.names[layer]} share their memory with others")
            for other, as_named in self.owners.get(id(tensor), ()):
                if wanted.get((other, as_named)) != axes:
                    raise _refused(f"the weights of {self.names[layer]} are also those of {self.names[other]}")
        return wanted

    def width(self, place: Place) -> int:
        """How many channels there are."""
        layer = self.layer(place)
        if place.side == "parameter":
            return int(getattr(layer, place.name.rpartition(".")[2]).shape[place.axis])
        for name in _sizes(layer, place.side):
            size = getattr(layer, name)
            return int(size[-1] if isinstance(size, tuple) else size)
        raise _refused(f"{place.name} has no size")  # pragma: no cover  every kind has


def _refused(why: str) -> StageError:
    return StageError("can't remove channels", why=why, mend="leave the layer alone")


def _depthwise(layer: object) -> bool:
    return (
        isinstance(layer, nn.modules.conv._ConvNd) and layer.groups == layer.in_channels == layer.out_channels
    ) and layer.groups > 1


def _of_convolution(layer: Any, *, outside: bool) -> list[Sliced]:
    makes, reads = (1, 0) if layer.transposed else (0, 1)
    if _depthwise(layer):
        return [Sliced("weight", 0), Sliced("bias", 0)]
    if outside:  # the second axis of a weight holds the channels of one part
        return [Sliced("weight", makes, layer.groups if makes else 1), Sliced("bias", 0)]
    return [Sliced("weight", reads, layer.groups if reads else 1)]


def _sizes(layer: nn.Module, side: str) -> tuple[str, ...]:
    """The attributes that hold how many channels there are on a side."""
    if isinstance(layer, nn.Linear):
        return ("out_features",) if side == "out" else ("in_features",)
    if isinstance(layer, PRUNABLE):
        if _depthwise(layer):
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


def _shrink(layer: nn.Module, side: str, gone: int) -> None:
    for name in _sizes(layer, side):
        size = getattr(layer, name)
        setattr(layer, name, (*size[:-1], size[-1] - gone) if isinstance(size, tuple) else size - gone)


def _kept(tensor: torch.Tensor, axes: Mapping[int, frozenset[int]], shapes_only: bool) -> torch.Tensor:
    values = tensor.detach()
    for axis, gone in axes.items():
        if shapes_only:
            values = values.narrow(axis, 0, values.shape[axis] - len(gone))
        else:
            values = values.index_select(axis, torch.tensor([i for i in range(values.shape[axis]) if i not in gone]))
    return nn.Parameter(values, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else values


def _excluding(layer: nn.Module, tensors: list[Sliced], gone: frozenset[int]) -> Any:
    """A hook by which a normalization sees the other channels alone, and gives zeros for these."""
    small = copy.copy(layer)
    small._forward_hooks = OrderedDict()
    small._parameters = dict(layer._parameters)
    for tensor in tensors:
        setattr(small, tensor.name, _kept(getattr(layer, tensor.name), {tensor.axis: gone}, shapes_only=False))
    _shrink(small, "out", len(gone))
    plain = isinstance(layer, nn.LayerNorm | nn.RMSNorm) and type(layer).forward in (
        nn.LayerNorm.forward,
        nn.RMSNorm.forward,
    )

    def hook(_layer: nn.Module, given: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        axis = output.ndim - 1 if plain else 1  # a LayerNorm with a forward of its own is one for images
        others = torch.tensor([i for i in range(output.shape[axis]) if i not in gone])
        return torch.zeros_like(output).index_copy(axis, others, small(given[0].index_select(axis, others)))

    return hook


def _attributes(layer: nn.Module) -> dict[str, Any]:
    """A layer's attributes, its lists copied: a recurrent layer keeps one of its weights."""
    return {name: list(value) if isinstance(value, list) else value for name, value in vars(layer).items()}
