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
from compress.model.frozen import frozen_names
from compress.prune.layer_kinds import (
    NORMALIZING,
    PRUNABLE,
    THROUGH,
    Sliced,
    depthwise,
    shrink,
    sizes_of,
    sliced,
    sliced_hidden,
)

__all__ = ["Cut", "Layers", "Place"]


class Place(NamedTuple):
    """A side of a layer, "in" or "out"; of a parameter outside torch's layers, "parameter" and the axis.

    Of a recurrent layer, "hidden" and which of its layers and directions, as its states are numbered.
    """

    name: str
    side: str
    axis: int = 0


Cut = Mapping[Place, frozenset[int]]


class Layers:
    """The layers of a copy of a module, by name, and who shares which parameter.

    Args:
        module: left as it is.

    Attributes:
        module: the copy, in eval mode. It is changed inside the blocks of `without` and `silenced`, and is as before at
            their end.
        names: of its layers.
        owners: the layers that have a parameter, with its name there, by its id.
    """

    def __init__(self, module: nn.Module) -> None:
        self.frozen = frozen_names(module)
        self.module, self._entwined = _copied(module)
        module = self.module
        self.names = {layer: name for name, layer in module.named_modules()}
        self.owners: dict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
        for layer in module.modules():
            for name, parameter in layer._parameters.items():
                if parameter is not None:
                    self.owners[id(parameter)].append((layer, name))

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
        if isinstance(target, THROUGH) or depthwise(target):
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
        grouped = isinstance(layer, PRUNABLE) and not isinstance(layer, nn.Linear) and not depthwise(layer)
        return int(layer.groups) if grouped else 1  # type: ignore[arg-type]

    def tensors(self, place: Place) -> list[Sliced]:
        """What holds the place's channels.

        Raises:
            StageError: the layer is of a kind that keeps its size, or its weights are computed from others.
        """
        if place.side == "parameter":
            return [Sliced(place.name.rpartition(".")[2], place.axis)]
        layer = self.layer(place)
        hidden = place.side == "hidden" and isinstance(layer, nn.RNNBase)
        found = sliced_hidden(layer, place.axis) if hidden else sliced(layer, place.side)  # type: ignore[arg-type]
        if found is None and isinstance(layer, nn.RNNBase):
            raise _refused(f"its channels would have to go with hidden units of {self.names[layer]}")
        if found is None:
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
                if place.side in ("in", "out") or place == (place.name, "hidden", 0):  # one size for all its parts
                    shrink(self.layer(place), place.side, len(gone))
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
                axes = wanted[layer, tensor.name]
                at = tensor.at(by_part[0] if tensor.parts > 1 else gone, width)
                axes[tensor.axis] = axes.get(tensor.axis, frozenset()) | at
        for (layer, name), axes in list(wanted.items()):
            tensor = getattr(layer, name)
            if id(tensor) in self._entwined:
                raise _refused(f"the weights of {self.names[layer]} are a part of the memory of others")
            for other, as_named in self.owners.get(id(tensor), ()):
                if wanted.get((other, as_named)) != axes:
                    raise _refused(f"the weights of {self.names[layer]} are also those of {self.names[other]}")
        return wanted

    def width(self, place: Place) -> int:
        """How many channels there are."""
        layer = self.layer(place)
        if place.side == "parameter":
            return int(getattr(layer, place.name.rpartition(".")[2]).shape[place.axis])
        size = getattr(layer, sizes_of(layer, place.side)[0])
        return int(size[-1] if isinstance(size, tuple) else size)


def _copied(module: nn.Module) -> tuple[nn.Module, set[int]]:
    """A copy in eval mode, and the ids of those of its parameters that can't be cut: parts of one memory.

    Parameters that are the same memory become one: a plain copy would give each its own.
    """
    memory: dict[int, list[str]] = defaultdict(list)
    named = dict(module.named_parameters(remove_duplicate=False))
    for name, parameter in named.items():
        memory[parameter.untyped_storage().data_ptr() or id(parameter)].append(name)
    copied = copy.deepcopy(module).eval()
    entwined: set[int] = set()
    for names in memory.values():
        views = {(named[n].storage_offset(), named[n].shape, named[n].stride()) for n in names}
        one = copied.get_parameter(names[0])
        for name in names:
            owner, _, last = name.rpartition(".")
            if len(views) > 1:
                entwined.add(id(copied.get_parameter(name)))
            elif copied.get_parameter(name) is not one:
                setattr(copied.get_submodule(owner), last, one)
    for parameter in copied.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    return copied, entwined


def _refused(why: str) -> StageError:
    return StageError("can't remove channels", why=why, mend="leave the layer alone")


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
    shrink(small, "out", len(gone))
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
