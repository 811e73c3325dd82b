"""Which channels of which layers go together, as far as torch_pruning's dependency graph can tell.

The graph (Fang et al., DepGraph: Towards Any Structural Pruning, CVPR 2023, section 3) is read here and nowhere else,
and what comes out is plain: for each place, which of the root's channels each of its own belongs to. It is a guess,
which `prove_channels` tries. Whatever torch_pruning raises ends here, with the layer that it was asked about.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch_pruning as tp
from torch import nn
from torch_pruning.dependency import index_mapping, shape_infer

from compress.errors import StageError, first_line
from compress.formats.native.onnx_part import OnnxPart
from compress.prune.cut_layers import Cut, Layers, Place
from compress.prune.layer_kinds import PRUNABLE
from compress.storage.shortages import raise_shortage

__all__ = ["ChannelGroup", "Follower"]

# Channels looked at along the graph for one layer, besides a few for each operation: where there are more, each goes
# with many others.
PAIRS = 500_000


@dataclass(frozen=True)
class ChannelGroup:
    """Channels that can only go together.

    Attributes:
        root: the layer that the group is named by.
        layers: all layers that give these channels, the root first.
        width: how many channels the root gives.
        members: by unit, the root's channels: one, or, where layers cut channels into equal parts (grouped
            convolutions, group normalization) or gate some by others, several, which can only go together.
        places: by place, its channels and the unit that each belongs to, int64 [2, n].
    """

    root: str
    layers: tuple[str, ...]
    width: int
    members: tuple[tuple[int, ...], ...]
    places: Mapping[Place, np.ndarray[Any, np.dtype[np.int64]]]

    @property
    def units(self) -> int:
        """How many can be chosen from."""
        return len(self.members)

    def channels(self, units: Sequence[int]) -> list[int]:
        """The root's channels of these units."""
        return sorted(channel for unit in units for channel in self.members[unit])

    def cut(self, units: Sequence[int]) -> Cut:
        """What goes, and where, with these units."""
        gone = {
            place: index[np.isin(unit, np.asarray(list(units), np.int64))]
            for place, (index, unit) in self.places.items()
        }
        return {place: frozenset(index.tolist()) for place, index in gone.items() if len(index)}


class Follower:
    """The dependency graph of a module.

    Args:
        layers: of the module, whose parameters require gradients.
        forward: runs the module and gives its outputs.

    Raises:
        StageError: the graph can't be built.
    """

    def __init__(self, layers: Layers, forward: Callable[[], Sequence[torch.Tensor]]) -> None:
        self._layers = layers
        self._graph = tp.DependencyGraph()
        self._lost: dict[Any, str] = {}
        try:
            with _quiet():
                self._build(forward)
        except Exception as err:  # it fails in many ways on what it does not know
            raise_shortage(err)
            raise StageError(
                "can't follow the channels of this model",
                why=f"torch_pruning fails on it ({type(err).__name__}: {first_line(err)[:120]})",
                mend="leave --prune out for this model",
            ) from err

    def _build(self, forward: Callable[[], Sequence[torch.Tensor]]) -> None:
        """As `DependencyGraph.build_dependency` does, but an operation that fails costs its own groups alone."""
        graph = self._graph
        graph.verbose, graph.model, graph.ignored_params = False, self._layers.module, []
        graph._module2name = dict(self._layers.names)
        graph.register_customized_layer(nn.RMSNorm, _RmsNorm())
        graph.register_customized_layer(nn.GRU, _Gru())
        graph.register_customized_layer(nn.RNN, _Rnn())
        graph._param_to_name, graph.unwrapped_parameters = graph._detect_unwrapped_parameters(None)
        traced = graph._trace(
            self._layers.module,
            None,
            lambda _module, _given: [each for each in self._ends(forward) if each.grad_fn is not None],
            output_transform=None,
        )
        graph._build_dependency(traced)
        for step in (shape_infer.init_shape_information, index_mapping.update_index_mapping):
            for target, node in traced.items():
                graph.module2node = {target: node}
                try:
                    step(graph)
                except Exception as err:
                    raise_shortage(err)
                    self._lost[node] = f"{type(err).__name__}: {first_line(err)[:120]}"
        graph.module2node = traced

    def _ends(self, forward: Callable[[], Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        """The outputs, and what is read by parts that are in ONNX: behind these no gradient tells of anything."""
        read: list[torch.Tensor] = []
        parts = [layer for layer in self._layers.names if isinstance(layer, OnnxPart)]
        hooks = [part.register_forward_pre_hook(lambda _part, given: read.extend(given)) for part in parts]
        try:
            return [*forward(), *read]
        finally:
            for each in hooks:
                each.remove()

    def group(self, name: str) -> ChannelGroup:
        """All that goes with the channels that a layer gives.

        Raises:
            StageError: they can't be followed, or go through a layer that keeps its size.
        """
        layer = self._layers.module.get_submodule(name)
        try:
            with _quiet():
                return self._group(name, layer)
        except StageError:
            raise
        except Exception as err:
            raise_shortage(err)
            why = f"its channels can't be followed ({type(err).__name__}: {first_line(err)[:120]})"
            raise StageError("can't follow channels", why=why, mend="leave the layer alone") from err

    def _group(self, name: str, layer: nn.Module) -> ChannelGroup:
        root = self._layers.place(layer, "out", 0)
        width = self._layers.width(root)
        if layer not in self._graph.module2node:
            raise StageError("can't follow channels", why="no output depends on it", mend="leave the layer alone")
        pairs = self._walk(layer, width)
        layers = [name]
        for place in pairs:
            kind = self._layers.layer(place)
            if place.side == "out" and isinstance(kind, PRUNABLE) and place.name not in layers:
                layers.append(place.name)
        unit_of = self._units(pairs, width)
        members: dict[int, list[int]] = defaultdict(list)
        for channel, unit in enumerate(unit_of):
            members[unit].append(channel)
        numbers = {unit: number for number, unit in enumerate(members)}
        places = {}
        for place, found in pairs.items():
            units = {index: numbers[unit_of[channel]] for index, channel in sorted(found)}
            places[place] = np.array([list(units), list(units.values())], np.int64)
        return ChannelGroup(name, tuple(layers), width, tuple(map(tuple, members.values())), places)

    def _walk(self, layer: nn.Module, width: int) -> dict[Place, set[tuple[int, int]]]:
        """Pairs of (a place's channel, the root's channel that it goes with), by place."""
        start = self._graph.module2node[layer]
        function = self._graph.get_pruner_of_module(layer).prune_out_channels
        first = [tp._helpers._HybridIndex(index, index) for index in range(width)]
        found: dict[Place, set[tuple[int, int]]] = defaultdict(set)
        found[self._layers.place(layer, "out", 0)] |= set(first)
        seen: dict[Any, set[Any]] = defaultdict(set)
        seen[start, function] |= set(first)
        stack = [(start, function, first)]
        looked = 0
        while stack:
            node, function, at = stack.pop()
            for edge in node.dependencies:
                if edge.trigger != function:
                    continue
                index = at
                for mapping in edge.index_mapping:
                    index = mapping(index) if mapping is not None else index
                if not index:
                    continue
                if edge.target in self._lost or node in self._lost:
                    raise _unfollowed(self._lost.get(edge.target) or self._lost[node])
                if any(pair.root_idx is None for pair in index):
                    raise _unfollowed("heads are repeated on the way")
                before = seen[edge.target, edge.handler]
                new = [pair for pair in index if pair not in before]
                if not new:
                    continue
                before |= set(new)
                looked += len(new)
                if looked > PAIRS + 4 * width * len(self._graph.module2node):
                    raise _unfollowed("they are mixed with one another")
                self._note(found, edge, new)
                stack.append((edge.target, edge.handler, new))
        return found

    def _note(self, found: dict[Place, set[tuple[int, int]]], edge: Any, index: Sequence[tuple[int, int]]) -> None:
        target = edge.target.module
        if isinstance(target, nn.PReLU) and target.num_parameters == 1:
            return
        if isinstance(target, nn.Parameter) or target in self._layers.names:
            side = "in" if edge.handler.__name__ == "prune_in_channels" else "out"
            place = self._layers.place(target, side, edge.target.pruning_dim)
            if not all(0 <= at < self._layers.width(place) for at, _ in index):
                raise _unfollowed(f"{place.name} has fewer")
            found[place] |= set(index)

    def _units(self, pairs: Mapping[Place, set[tuple[int, int]]], width: int) -> list[int]:
        """For each of the root's channels the first of those that it can only go with."""
        leader = list(range(width))

        def find(channel: int) -> int:
            while leader[channel] != channel:
                leader[channel] = leader[leader[channel]]
                channel = leader[channel]
            return channel

        for place, found in pairs.items():
            part = self._layers.width(place) // self._layers.parts(place)
            at: dict[int, int] = {}
            for index, channel in sorted(found):
                other = find(at.setdefault(index % part, channel))
                one = find(channel)
                leader[max(one, other)] = min(one, other)
        return [find(channel) for channel in range(width)]


class _RmsNorm(tp.pruner.function.LayernormPruner):  # type: ignore[misc]
    """nn.RMSNorm carries channels as nn.LayerNorm does."""

    TARGET_MODULES = nn.RMSNorm


class _Gru(tp.pruner.function.LSTMPruner):  # type: ignore[misc]
    """What is read of nn.LSTM's pruner, that channels end where it reads them, holds for nn.GRU."""

    TARGET_MODULES = nn.GRU


class _Rnn(tp.pruner.function.LSTMPruner):  # type: ignore[misc]
    """And for nn.RNN."""

    TARGET_MODULES = nn.RNN


def _unfollowed(why: str) -> StageError:
    return StageError("can't follow channels", why=f"its channels can't be followed ({why})", mend="leave it alone")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """With gradients, which the graph is read from; without warnings of parameters outside layers, which are tried."""
    with torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield
