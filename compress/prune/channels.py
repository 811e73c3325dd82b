"""Which channels of a network go together, and which can go at all.

What `follow_channels` guesses is not believed. All groups lose some of their channels at once, as many and as
irregular as chance has it; the model has to run, its outputs have to keep their shapes, and their values those of the
network in which the same channels are silent. Where that fails, halves of the groups are tried, and what fails alone is
left alone, by name and with the reason. What is removed in the end is proven again, as it is.
"""

from __future__ import annotations

import contextlib
import copy
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import nn

from compress.artifact import Signature
from compress.console.wording import counted
from compress.data.dataset import Dataset
from compress.errors import StageError, first_line
from compress.evaluate.bearing import bearing
from compress.model import TorchModel, call, sample_inputs
from compress.model.frozen import freeze
from compress.prune.cut_layers import Cut, Layers, Place
from compress.prune.follow_channels import ChannelGroup, Follower
from compress.prune.follow_hidden import hidden_groups, one_step
from compress.prune.heads.open_heads import Opened, opened
from compress.prune.known_channels import Known
from compress.prune.layer_kinds import PRUNABLE, WEIGHED
from compress.prune.left_alone import keeps_size, multiplied
from compress.prune.prove_channels import Proof
from compress.stage import Progress

__all__ = ["PRUNABLE", "SECONDS", "ChannelGroup", "Channels", "same_outputs"]

# Discovery may take so long; it takes some seconds for most networks.
SECONDS = 600.0


class Channels:
    """The channel groups of a model, on a copy of it that loses channels and gets them back.

    Args:
        model: layered; left as it is.
        progress: is told of layers looked at and of trials.
        samples: what the model is made for; two of them are tried besides random inputs.
        seconds: what is not proven by then is left alone.
        known: from a search before this one.

    Attributes:
        groups: what can lose channels.
        left_alone: layers that can't, with the reason.
        model: whose channels these are: the one that was given, or, where it has heads that can go, its trace.
        module: the copy, with all its channels.
        late: whether the time ran out.
        refuted: of those left alone, the ones that a proof did not hold for.
    """

    def __init__(
        self,
        model: TorchModel,
        progress: Progress = lambda _done, _total, _note: None,
        samples: Dataset | None = None,
        seconds: float = SECONDS,
        known: Known | None = None,
    ) -> None:
        self.signature = model.signature
        self.refuted = dict(known.refuted) if known else {}
        self.late = False
        self._deadline, self._seconds, self._samples = time.monotonic() + seconds, seconds, samples
        found = opened(model)
        if known is not None and known.groups is not None:
            roots = {group.root for group in known.groups}
            self._begin(found if any(group.root in roots for group in found.groups) else Opened(model))
            self.left_alone |= known.left_alone
            self.groups = list(known.groups)
            progress(1, 1, f"{counted(len(self.groups), 'groups')} can lose channels, as was found before")
            return
        self._begin(found)
        self.groups = self._proven(self._found(progress), progress)
        if found.groups and not self.heads and not self.late:  # a trace for nothing: the model stays what it is
            self._begin(Opened(model))
            self.groups = self._proven(self._found(progress), progress)

    def _begin(self, found: Opened) -> None:
        self.model, self._heads = found.model, found.groups
        self.left_alone: dict[str, str] = {}
        self._layers = Layers(self.model.module)
        self.module = self._layers.module
        self._proof = Proof(self._layers, self.signature, self._samples)

    @property
    def heads(self) -> frozenset[str]:
        """Roots of the groups whose units are heads of attention."""
        return frozenset(group.root for group in self._heads) & frozenset(self._by_root)

    @property
    def known(self) -> Known:
        """For a search after this one, before what is removed was proven."""
        return Known(tuple(self.groups), dict(self.left_alone), dict(self.refuted))

    def macs(self, removed: Mapping[str, Sequence[int]]) -> int:
        """Multiply-accumulates for one sample without these units (by root).

        Raises:
            StageError: counts that do not go together.
        """
        return self._proof.macs(self._cut(removed))

    @contextlib.contextmanager
    def without(self, removed: Mapping[str, Sequence[int]]) -> Iterator[nn.Module]:
        """The module without these units (by root), until the end of the block."""
        with self._layers.without(self._cut(removed)) as module:
            yield module

    def pruned(self, removed: Mapping[str, Sequence[int]]) -> nn.Module:
        """A module of its own without these units, in eval mode, its gradients dropped.

        Raises:
            StageError: a parameter that layers share would come apart.
        """
        with self.without(removed) as module:
            own = copy.deepcopy(module).eval()
        for parameter in own.parameters():
            parameter.grad = None
        freeze(own, self._layers.frozen)
        if _ties(own) != _ties(self.module):
            raise StageError(
                "can't remove these channels",
                why="a parameter that several layers share would come apart",
                mend="leave --prune out for this model",
            )
        return own

    def leave(self, removed: Mapping[str, Sequence[int]], progress: Progress) -> list[str]:
        """Prove this very removal; groups that it does not hold for are dropped.

        Returns:
            Roots of the groups dropped; without any, removing is the same as silencing.
        """
        cuts = [(root, self._by_root[root].cut(units)) for root, units in removed.items() if len(units)]
        tried = 0

        def fails(part: Sequence[tuple[str, Cut]]) -> str | None:
            nonlocal tried
            tried += 1
            progress(tried, tried + 1, f"proving what is removed from {counted(len(part), 'groups')}")
            return self._proof.difference(_joined([cut for _, cut in part]), thorough=True)

        _, dropped = bearing(cuts, fails)
        gone = {cuts[place][0]: why for place, why in dropped.items()}
        for root, why in gone.items():
            self._blame(self._by_root[root], why)
        self.groups = [group for group in self.groups if group.root not in gone]
        return list(gone)

    def weights(self, group: ChannelGroup) -> Iterator[tuple[torch.Tensor, int, np.ndarray, np.ndarray]]:
        """Weights (biases don't count) that go with a group: each with the axis, the channels and their units."""
        for place, (index, unit) in group.places.items():
            layer = self._layers.layer(place)
            if place.side == "parameter" or not isinstance(layer, WEIGHED):
                continue
            width = self._layers.width(place)
            for tensor in self._layers.tensors(place):
                if tensor.name.startswith("weight"):
                    within = index % (width // tensor.parts) + tensor.start
                    for gate in range(tensor.gates):
                        yield layer.get_parameter(tensor.name), tensor.axis, within + gate * width, unit

    def places(self, removed: Mapping[str, Sequence[int]]) -> dict[tuple[str, str, int], frozenset[int]]:
        """The channels that go with these units (by root), by place."""
        return {(name, side, axis): gone for (name, side, axis), gone in self._cut(removed).items()}

    @property
    def _by_root(self) -> dict[str, ChannelGroup]:
        return {group.root: group for group in self.groups}

    def _cut(self, removed: Mapping[str, Sequence[int]]) -> Cut:
        by_root = self._by_root
        return _joined([by_root[root].cut(units) for root, units in removed.items() if len(units)])

    def _blame(self, group: ChannelGroup, why: str) -> None:
        self.left_alone[group.root] = why

    def _found(self, progress: Progress) -> list[ChannelGroup]:
        """What the graph says, layer by layer; what it can't follow is left alone."""
        whole = keeps_size(self.module)
        self.left_alone |= whole
        names = [
            name
            for name, layer in self.module.named_modules()
            if isinstance(layer, PRUNABLE) and not any(name.startswith(f"{outer}.") for outer in whole)
        ]
        inputs = self._proof.inputs[0]
        hidden, unfollowed = hidden_groups(self._layers, lambda: self._proof.run(inputs))
        self.left_alone |= {name: why for name, why in unfollowed.items() if name not in whole}
        self.left_alone |= {group.root: self.refuted[group.root] for group in hidden if group.root in self.refuted}
        groups: list[ChannelGroup] = []
        taken: dict[Place, tuple[str, set[int]]] = {}
        covered: set[str] = set()
        for group in (*self._heads, *hidden):
            if group.root not in self.refuted:
                groups.append(group)
                covered |= set(group.layers)
                taken |= {place: (group.root, set(index.tolist())) for place, (index, _) in group.places.items()}
        try:
            with one_step(self.module):
                follower = Follower(self._layers, lambda: self._proof.run(inputs))
        except StageError as err:
            self.left_alone |= {name: err.why for name in names if name not in covered}
            return groups
        for number, name in enumerate(names):
            progress(number, len(names), f"finding what can lose channels: {name}")
            if name in covered:
                continue
            if self._out_of_time():
                self.left_alone[name] = self._too_late
                continue
            try:
                group = follower.group(name)
                covered |= set(group.layers)
                if group.root in self.refuted:
                    raise StageError("", why=self.refuted[group.root], mend="")
                if group.units < 2:
                    raise StageError("", why="it has one channel, or one for each part", mend="")
                bound = next((other for other in group.layers if other in self.left_alone), None)
                if bound is not None:
                    raise StageError("", why=f"shares its channels with {bound}", mend="")
                for place, (index, _) in group.places.items():
                    other, there = taken.get(place, ("", set()))
                    if there & set(index.tolist()):
                        raise StageError("", why=f"shares some of its channels with {other}", mend="")
            except StageError as err:
                self.left_alone[name] = err.why
                continue
            for place, (index, _) in group.places.items():
                taken[place] = (name, taken.get(place, ("", set()))[1] | set(index.tolist()))
            groups.append(group)
        self.left_alone |= multiplied(self.module, {*(place.name for place in taken), *names, *self.left_alone})
        return groups

    def _proven(self, groups: list[ChannelGroup], progress: Progress) -> list[ChannelGroup]:
        tried = 0

        def failing(trial: Callable[[Cut], str | None], note: str) -> Callable[[Sequence[ChannelGroup]], str | None]:
            def fails(part: Sequence[ChannelGroup]) -> str | None:
                nonlocal tried
                if self._out_of_time():
                    return self._too_late
                tried += 1
                progress(tried, tried + len(part), f"{note} {counted(len(part), 'groups')}")
                return trial(_joined([group.cut(_some(group)) for group in part]))

            return fails

        for trial, note in (
            (self._proof.misfit, "looking at shapes without channels of"),
            (self._proof.difference, "removing channels of"),
        ):
            kept, dropped = bearing(groups, failing(trial, note))
            for place, why in sorted(dropped.items()):
                self._blame(groups[place], why)
                if why != self._too_late:
                    self.refuted[groups[place].root] = why
            groups = sorted(kept, key=groups.index)
        progress(1, 1, f"{counted(len(groups), 'groups')} can lose channels")
        return groups

    def _out_of_time(self) -> bool:
        self.late = self.late or time.monotonic() > self._deadline
        return self.late

    @property
    def _too_late(self) -> str:
        return f"time: it was not proven within {self._seconds:g} s"


def _joined(cuts: Sequence[Cut]) -> Cut:
    joined: dict[Place, frozenset[int]] = {}
    for cut in cuts:
        for place, gone in cut.items():
            joined[place] = joined.get(place, frozenset()) | gone
    return joined


def _some(group: ChannelGroup) -> list[int]:
    """Some of its units: an irregular choice, and no round number of them, always the same."""
    random = np.random.default_rng(zlib.crc32(group.root.encode()))
    count = int(random.integers(group.units // 4, 3 * group.units // 4 + 1))
    count = min(max(count | 1, 1), group.units - 1)
    return sorted(random.choice(group.units, count, replace=False).tolist())


def _ties(module: nn.Module) -> list[list[str]]:
    """Names of the parameters that are one."""
    named: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        named.setdefault(id(parameter), []).append(name)
    return list(named.values())


def same_outputs(module: nn.Module, signature: Signature) -> None:
    """Raise StageError unless the module runs and its outputs have the signature's shapes."""
    with torch.no_grad():
        try:
            outputs = list(call(module, signature.inputs, sample_inputs(signature, 2)).values())
        except (RuntimeError, ValueError, IndexError, AssertionError) as err:
            raise StageError(
                "a pruned model does not run",
                why=f"its forward fails: {first_line(err)}",
                mend="look for sizes written into the forward, such as view(-1, 512)",
            ) from err
    for spec, tensor in zip(signature.outputs, outputs, strict=True):
        fits = all(isinstance(want, str) or want == have for want, have in zip(spec.shape, tensor.shape, strict=True))
        if not fits:
            why = f"the shape of the output {spec.name!r} hangs on it"
            raise StageError("a pruned model has other outputs", why=why, mend="leave --prune out for this model")
