"""Layers and tensors under the names that they had, in a module that a graph is about to be of."""

from __future__ import annotations

import keyword
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn

from compress.formats.native.layers import LayerError, plain_name

__all__ = ["Placed"]

_TAKEN = frozenset(dir(fx.GraphModule(nn.Module(), fx.Graph())))

Held = Mapping[str, tuple[str, torch.Tensor] | None]


class Placed:
    """What a graph calls and reads.

    Attributes:
        root: holds all of it.
    """

    def __init__(self) -> None:
        self.root = nn.Module()
        self._parameters: dict[int, nn.Parameter] = {}
        self._layers: dict[Any, str] = {}

    def layer(self, kind: type[nn.Module], form: tuple[Any, ...], held: Held) -> str:
        """The path of the layer with these weights: the one that there is, if the same was asked for before.

        Args:
            kind: its class.
            form: what the class is called with.
            held: weights and buffers by their names in the layer, each with its name in the network, or None.
        """
        with torch.device("meta"):
            layer = kind(*form)
        key = (kind, form, *(None if each is None else id(each[1]) for each in held.values()))
        if key not in self._layers:
            for name, each in held.items():
                if each is not None and name in layer._buffers:
                    layer._buffers[name] = each[1].detach()
                elif each is not None:
                    setattr(layer, name, self.parameter(each[1]))  # recurrent layers keep a list of theirs
            if layer._buffers.get("num_batches_tracked") is not None:
                layer._buffers["num_batches_tracked"] = torch.zeros((), dtype=torch.int64)
            first = next(each for each in held.values() if each is not None)
            self._layers[key] = self.put(first[0].rpartition(".")[0] or "layer", layer)
        return self._layers[key]

    def parameter(self, tensor: torch.Tensor) -> nn.Parameter:
        """A tensor as a parameter, the same one wherever it is used."""
        if id(tensor) not in self._parameters:
            kept = tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, tensor.is_floating_point())
            self._parameters[id(tensor)] = kept
        return self._parameters[id(tensor)]

    def put(self, path: str, value: nn.Module | torch.Tensor) -> str:
        """Place it under that path, or one with a number where that is taken or is no name of a layer's."""
        words = [_word(word) for word in path.split(".")]
        if words[0] in _TAKEN:
            words[0] = f"{words[0]}_"
        *parents, name = words
        place = self.root
        for at, parent in enumerate(parents):
            if parent not in place._modules:
                place.add_module(parent, nn.Module())
            inner = place._modules[parent]
            if type(inner) is not nn.Module:  # a layer with weights of its own: beside it
                return self.put(".".join([*words[:at], f"{parent}_{'_'.join(words[at + 1 :])}"]), value)
            place = inner
        taken = {*place._modules, *place._parameters, *place._buffers}
        name = next(each for each in (name, *(f"{name}_{n}" for n in range(1, len(taken) + 2))) if each not in taken)
        if isinstance(value, nn.Module):
            place.add_module(name, value)
        elif isinstance(value, nn.Parameter):
            place.register_parameter(name, value)
        else:
            place.register_buffer(name, value)
        return ".".join([*parents, name])


def _word(word: str) -> str:
    """A name that a module of a file may have."""
    try:
        return f"{plain_name(word)}_" if keyword.iskeyword(word) else plain_name(word)  # the graph's code spells it
    except LayerError:
        return f"at_{''.join(c if c.isalnum() or c == '_' else '_' for c in word)}"[:100]
