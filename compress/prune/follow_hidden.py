"""Which hidden units of recurrent layers can go, and who reads them.

The gates of an nn.LSTM, nn.GRU or nn.RNN are one matrix, and its layers and directions have one size: a unit to remove
is one hidden unit of each layer and direction. Without weights and biases it stays at zero: a gate is a half then, what
is written is tanh(0), and half of a state that begins at zero is zero. So removing it is the same as silencing it.

Who reads a unit is told by what moves: the layer gives random numbers in place of its own, units get other ones, and
columns that layers read move with them or don't. What these layers give stays as it was, so each is told of alone. A
unit's number is written in bits, so a hundred units take fourteen runs. What is found is a guess, which is proven.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_map

from compress.errors import StageError, first_line
from compress.model.unfused import unfused
from compress.prune.cut_layers import Layers, Place
from compress.prune.follow_channels import ChannelGroup
from compress.prune.layer_kinds import PRUNABLE, RECURRENT, THROUGH, depthwise, hidden_parts, sliced_hidden
from compress.storage.shortages import raise_shortage

__all__ = ["hidden_groups", "one_step"]

SAME = 1e-6  # share of the largest value: what moves less has not moved


def hidden_groups(layers: Layers, run: Callable[[], object]) -> tuple[list[ChannelGroup], dict[str, str]]:
    """Of each recurrent layer the units that can be tried; and those that can't be followed, with the reason.

    Args:
        layers: of the module.
        run: its forward, always on the same inputs.
    """
    found: list[ChannelGroup] = []
    left: dict[str, str] = {}
    for name, layer in layers.module.named_modules():
        if not isinstance(layer, nn.RNNBase) or type(layer) not in RECURRENT or layer.proj_size:
            continue
        try:
            found.append(_group(layers, name, layer, run))
        except StageError as err:
            left[name] = err.why
        except Exception as err:  # the forward is anybody's, and gets numbers that no layer gave
            raise_shortage(err)
            left[name] = f"its units can't be followed ({type(err).__name__}: {first_line(err)[:120]})"
    return found, left


class _Made(torch.autograd.Function):
    """Values that are made of others, in one step: what made them is not told."""

    @staticmethod
    def forward(_ctx: Any, _of: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return values.clone()


@contextlib.contextmanager
def one_step(module: nn.Module) -> Iterator[None]:
    """In the block, recurrent layers are one step from what they read to what they give, as far as gradients tell.

    The dependency graph is read off gradients, and would follow a unit through the gates of each step.
    """

    def hook(_layer: nn.Module, given: Any, output: Any) -> Any:
        if not given or not isinstance(given[0], torch.Tensor) or not isinstance(output[0], torch.Tensor):
            return output
        out: Any = _Made.apply(given[0], output[0].detach())  # type: ignore[no-untyped-call]
        return out, tree_map(lambda state: _Made.apply(out, state.detach()), output[1])  # type: ignore[no-untyped-call]

    hooks = [layer.register_forward_hook(hook) for layer in module.modules() if type(layer) in RECURRENT]
    try:
        yield
    finally:
        for each in hooks:
            each.remove()


def _group(layers: Layers, name: str, layer: nn.RNNBase, run: Callable[[], object]) -> ChannelGroup:
    width, parts = layer.hidden_size, hidden_parts(layer)
    for part in range(parts):
        layers.tensors(Place(name, "hidden", part))  # or they are computed from others
    if width < 2:
        raise _left("it has one hidden unit")
    units, read = _readers(layers, layer, run, width, parts)
    number = _numbers(layer, read.values(), width, parts)
    pairs: dict[Place, dict[int, int]] = defaultdict(dict)
    for part in range(parts):
        pairs[Place(name, "hidden", part)] = dict(enumerate(number[part].tolist()))
    for reader, unit in units.items():
        at = (unit >= 0).nonzero()[0]
        if len(at):
            one = read[reader].argmax(0)  # of the parts that a column reads, which agree
            pairs[_place(layers, reader)] = dict(zip(at.tolist(), number[one[at], unit[at]].tolist(), strict=True))
    places = {place: np.array([list(each), list(each.values())], np.int64) for place, each in pairs.items()}
    members = tuple((channel,) for channel in number[0].argsort().tolist())
    return ChannelGroup(name, (name,), width, members, places)


def _readers(
    layers: Layers, layer: nn.RNNBase, run: Callable[[], object], width: int, parts: int
) -> tuple[dict[str, np.ndarray[Any, Any]], dict[str, np.ndarray[Any, Any]]]:
    """By layer, for each column the unit that it reads (or -1), and of which parts, bool [parts, columns]."""
    look = _Look(layers, layer, run, width, parts)
    whole = look.moved(torch.ones(parts, width, dtype=torch.bool))
    units = {reader: np.where(moves, 0, -1) for reader, moves in whole.items()}
    for bit in range((width - 1).bit_length()):
        told = torch.tensor([bool(unit >> bit & 1) for unit in range(width)])
        set_, unset = look.moved(told.expand(parts, width)), look.moved(~told.expand(parts, width))
        for reader, moves in whole.items():
            if bool((set_[reader] & unset[reader] & moves).any()):
                raise _left(f"its hidden units are mixed with one another before {reader} reads them")
            units[reader] += np.where(set_[reader], 1 << bit, 0)
    read = {reader: np.zeros((parts, len(moves)), bool) for reader, moves in whole.items()}
    for part in range(parts):
        this = torch.zeros(parts, width, dtype=torch.bool)
        this[part] = True
        for reader, moves in look.moved(this).items():
            read[reader][part] = moves
    return units, read


class _Look:
    """Runs in which a recurrent layer gives random numbers, and what layers read then."""

    def __init__(self, layers: Layers, layer: nn.RNNBase, run: Callable[[], object], width: int, parts: int) -> None:
        self._layers, self._layer, self._run, self._parts = layers, layer, run, parts
        self._width = width
        self._given: dict[tuple[str, int], Any] = {}
        self._base = self._seen(None)

    def moved(self, units: torch.Tensor) -> dict[str, np.ndarray[Any, Any]]:
        """By layer, which of its columns move when these units, bool [parts, width], get other numbers."""
        found: dict[str, np.ndarray[Any, Any]] = {}
        for (name, call), tensor in self._seen(units).items():
            base = self._base[name, call]
            layer = self._layers.module.get_submodule(name)
            change = (tensor - base).abs().movedim(_axis(layer, base), 0).flatten(1)
            moves = (change > SAME * float(base.abs().max())).any(1).numpy()
            found[name] = found.get(name, np.zeros(len(moves), bool)) | moves
        return found

    @torch.no_grad()
    def _seen(self, units: torch.Tensor | None) -> dict[tuple[str, int], torch.Tensor]:
        read: dict[tuple[str, int], torch.Tensor] = {}
        calls: dict[str, int] = defaultdict(int)

        def hook(layer: nn.Module, given: Any, output: Any) -> Any:
            name = self._layers.names[layer]
            key = name, calls[name]
            calls[name] += 1
            again = layer is not self._layer or calls[name] > 1
            if again and given and isinstance(given[0], torch.Tensor) and given[0].is_floating_point():
                read[key] = given[0].clone()
            if layer is self._layer:
                return self._drawn(output, units)
            if isinstance(layer, THROUGH) and not isinstance(layer, nn.Embedding):
                return given[0]  # a channel is one before and after, whatever a normalization makes of all together
            return self._given.setdefault(key, output)  # whatever it reads

        watched = (*PRUNABLE, *THROUGH, nn.RNNBase, nn.Bilinear, nn.MultiheadAttention, nn.RNNCellBase)
        hooks = [
            layer.register_forward_hook(hook)
            for layer in self._layers.names
            if isinstance(layer, watched) and not (isinstance(layer, nn.PReLU) and layer.num_parameters == 1)
        ]
        try:
            with unfused():
                self._run()
        finally:
            for each in hooks:
                each.remove()
        return read

    def _drawn(self, output: Any, units: torch.Tensor | None) -> Any:
        """Numbers that a ReLU lets through, others for these units; outputs are the last layer's directions."""
        out, states = output
        if not isinstance(out, torch.Tensor):
            raise _left("it is called with packed sequences")
        random, others = (torch.Generator().manual_seed(seed) for seed in (0, 1))
        directions = 2 if self._layer.bidirectional else 1

        def drawn(like: torch.Tensor, moves: torch.Tensor) -> torch.Tensor:
            one, other = (torch.rand(like.shape, generator=each) / 2 + 0.25 for each in (random, others))
            return torch.where(moves, other, one).to(like.dtype)

        every = torch.zeros(self._parts, self._width, dtype=torch.bool) if units is None else units
        alone = states[0] if isinstance(states, tuple) else states
        of_states = every[:, None] if alone.ndim == 3 else every
        moved = drawn(out, every[-directions:].flatten())
        return moved, tree_map(lambda state: drawn(state, of_states), states)


def _numbers(
    layer: nn.RNNBase, read: Iterable[np.ndarray[Any, Any]], width: int, parts: int
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The unit that each hidden channel of each part belongs to, int64 [parts, width].

    Parts of which a column reads several, as of a sum of both directions, keep their channels side by side. Otherwise
    they are put together by the size of their weights: the least important of each layer and direction go together.
    """
    leader = list(range(parts))
    for each in read:
        for column in np.unique(each, axis=1).T:
            at = column.nonzero()[0]
            if len(at) > 1:
                first = leader[at[0]]
                others = {leader[other] for other in at}
                leader = [first if one in others else one for one in leader]
    if len(set(leader)) == 1:
        return np.tile(np.arange(width), (parts, 1))
    sizes = np.zeros((parts, width))
    for part in range(parts):
        for tensor in sliced_hidden(layer, part):
            weight = getattr(layer, tensor.name, None)
            if tensor.name.startswith("weight") and weight is not None:
                squares = weight.detach().double().square().movedim(tensor.axis, 0).flatten(1).sum(1).numpy()
                within = squares[tensor.start : tensor.start + tensor.gates * width]
                sizes[leader[part]] += within.reshape(tensor.gates, width).sum(0)
    ranks = sizes.argsort(1, kind="stable").argsort(1, kind="stable")
    return ranks[leader].astype(np.int64)


def _place(layers: Layers, reader: str) -> Place:
    layer = layers.module.get_submodule(reader)
    if depthwise(layer):
        raise _left(f"a depthwise convolution, {reader}, reads its hidden units")
    place = Place(reader, "out" if isinstance(layer, THROUGH) else "in")
    layers.tensors(place)
    return place


def _axis(layer: nn.Module, given: torch.Tensor) -> int:
    """Of what a layer reads, that of its columns."""
    last = isinstance(layer, nn.Linear | nn.LayerNorm | nn.RMSNorm | nn.RNNBase | nn.MultiheadAttention)
    return given.ndim - 1 if last or given.ndim < 2 else 1


def _left(why: str) -> StageError:
    return StageError("can't follow hidden units", why=why, mend="leave the layer alone")
