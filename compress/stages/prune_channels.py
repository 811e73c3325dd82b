"""Structural pruning: whole channels go, so that the layers become smaller, not sparser."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from compress.dataset import Dataset
from compress.errors import RecipeError, StageError
from compress.measure import torch_params
from compress.model import Model, TorchModel
from compress.stages import Given, Progress
from compress.stages.channels import PRUNABLE, SECONDS, ChannelGroup, Channels, same_outputs
from compress.stages.importance import Importance, importance_of

__all__ = ["Prepared", "PruneChannels", "bearable", "chosen"]

TOLERANCE = 0.02
SEARCH_STEPS = 14
# Channel counts that vector units like, tried in this order until one meets the fraction.
ROUND_TO = (16, 8, 4, 2, 1)
MOST = 0.9


@dataclass(frozen=True)
class Prepared:
    """A model looked at: what can go, the importance of each unit by its group's root, and the MACs of the whole."""

    model: TorchModel
    channels: Channels
    scores: Mapping[str, torch.Tensor]
    before: int


@dataclass(frozen=True)
class PruneChannels:
    """Remove a fraction of the model's MACs.

    Attributes:
        fraction: of the MACs, above 0 and below 1; reached within 0.02.
        importance: "magnitude", "taylor" (needs `data`) or "random", the control; see `importance_of`.
        seed: for "random".
        round_to: channel counts are multiples of this; None takes the largest of 16, 8, 4, 2, 1 that still reaches the
            fraction.
        scope: "global" ranks all channels together, so that the weakest layers lose most; "local" takes the same share
            from each layer.
        data: what taylor takes its gradients on.
        samples: what the model is made for; the removal is proven on some of it, besides random inputs.
        seconds: for finding what can lose channels. What is not proven by then is left alone, by name: only there the
            machine's speed decides the result, which the stage then warns of.
        curves: by layer, pairs of (share of channels taken away, drop that this alone costs), shares rising, as
            `compress sensitivity` measures them: every layer then loses what costs it the same drop, in place of
            `scope`.
    """

    fraction: float
    importance: Importance = "magnitude"
    seed: int = 0
    round_to: int | None = None
    scope: Literal["global", "local"] = "global"
    data: Dataset | None = None
    samples: Dataset | None = None
    seconds: float = SECONDS
    curves: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)

    name: ClassVar[str] = "prune_channels"
    takes: ClassVar[type] = TorchModel
    gives: ClassVar[type] = TorchModel

    @property
    def options(self) -> Mapping[str, Any]:
        return {
            "fraction": self.fraction,
            "importance": self.importance,
            "seed": self.seed,
            "round_to": self.round_to,
            "scope": self.scope,
            "data": self.data.sha256 if self.data is not None and self.importance == "taylor" else None,
            "samples": self.samples.sha256 if self.samples is not None else None,
            "seconds": self.seconds,
            "curves": {name: [list(pair) for pair in curve] for name, curve in self.curves.items()},
        }

    def check(self, model: Model) -> None:
        if not 0 < self.fraction < 1:
            raise RecipeError(
                f"can't prune {self.fraction}",
                why="--prune is the fraction of multiply-accumulates to remove: above 0 and below 1",
                mend="try --prune 0.5",
            )
        most = 1 - (1 - MOST) ** 2
        if self.fraction > most:
            raise RecipeError(
                f"can't remove {self.fraction:.1%} of the MACs",
                why=f"a layer keeps a tenth of its channels on either side, so that no network can lose over {most:.0%}",
                mend=f"ask for --prune {most:.2f} at most; what this network can lose is told once it was looked at",
            )
        if self.round_to is not None and self.round_to < 1:
            why = f"--round-to is {self.round_to}: channel counts are multiples of it"
            raise RecipeError("can't prune to such channel counts", why=why, mend="give 8 or 16, or leave it out")
        if self.importance == "taylor" and self.data is None:
            why = "it takes gradients on data, and there is none"
            raise RecipeError("can't rank channels by taylor", why=why, mend="give training data, or take magnitude")
        if isinstance(model, TorchModel) and not model.layered:
            raise RecipeError(
                "can't prune this file",
                why="TorchScript and exported programs have no layers any more",
                mend="give the model from before: compress.save(module, path, inputs=…), or leave --prune out",
            )

    def run(self, model: TorchModel, folder: Path, progress: Progress) -> Given:  # noqa: ARG002
        return self.cut(self.prepare(model, progress), progress)

    def prepare(self, model: TorchModel, progress: Progress) -> Prepared:
        """What does not hang on the fraction: which channels can go, and how important each is.

        Raises:
            StageError: no layer can lose a channel.
        """
        channels = Channels(model, progress, self.samples, self.seconds)
        before = channels.macs({})
        if not channels.groups or before == 0:
            raise _nothing(channels)
        return Prepared(model, channels, importance_of(channels, self.importance, self.seed, self.data, progress), before)

    def cut(self, prepared: Prepared, progress: Progress) -> Given:
        """Remove the fraction; several can be tried on what was prepared once.

        Raises:
            StageError: it can't be reached.
        """
        model, channels = prepared.model, prepared.channels
        unknown = sorted(set(self.curves) - {layer for group in channels.groups for layer in group.layers})
        while True:  # until what is removed is proven; each time around there is a group less
            reached, removed, rounded = self._best(prepared, progress)
            if abs(reached - self.fraction) > TOLERANCE:
                raise StageError(
                    f"can't remove {self.fraction:.0%} of the MACs" if reached > 0 else "nothing was pruned",
                    why=f"the nearest that keeps the outputs' shapes is {reached:.1%}; {_listed(channels.left_alone)}",
                    mend=f"ask for --prune {max(reached, 0.01):.2f}",
                )
            if not channels.leave(removed, progress):
                break
            if not channels.groups:
                raise _nothing(channels)
        pruned = channels.pruned(removed)
        same_outputs(pruned, model.signature)
        lost = 1 - torch_params(pruned) / torch_params(model.module)
        progress(1, 1, f"{reached:.1%} of the MACs removed")
        warnings = []
        if unknown:
            warnings.append(f"the sensitivity names layers that can't be pruned here: {', '.join(unknown)}")
        if channels.late:
            warnings.append(
                f"time for finding what can lose channels ran out after {self.seconds:g} s: on a faster machine more "
                "layers may be pruned"
            )
        return Given(
            TorchModel(pruned, model.signature),
            did=f"removed {reached:.1%} of the MACs and {lost:.1%} of the weights by {self.importance}, "
            + ("each layer as it bears it" if self.curves else self.scope),
            details={
                "macs_removed": reached,
                "round_to": rounded,
                "channels": _table(model.module, pruned),
                "left_alone": dict(channels.left_alone),
            },
            warnings=tuple(warnings),
        )

    def _best(self, prepared: Prepared, progress: Progress) -> tuple[float, dict[str, list[int]], int]:
        """The share of MACs nearest to the fraction, the units whose removal gives it, and what counts are rounded to.

        With less than the fraction at the most that every layer can lose there is nothing to search for.
        """
        channels, finest = prepared.channels, ROUND_TO[-1] if self.round_to is None else self.round_to
        scores = {group.root: prepared.scores[group.root] for group in channels.groups}
        most = chosen(channels.groups, scores, self._shares(channels.groups, scores, 1.0), finest)
        with contextlib.suppress(StageError):
            reached = 1 - channels.macs(most) / prepared.before
            if reached < self.fraction - TOLERANCE:
                return reached, most, finest
        best: tuple[float, dict[str, list[int]]] = (0.0, {})
        rounded = finest
        for rounded in ROUND_TO if self.round_to is None else (self.round_to,):
            best = self._search(prepared, scores, rounded, progress)
            if abs(best[0] - self.fraction) <= TOLERANCE:
                break
        return *best, rounded

    def _shares(
        self, groups: Sequence[ChannelGroup], scores: Mapping[str, torch.Tensor], ratio: float
    ) -> dict[str, float]:
        """How much each group loses when, over all, this share is to go; it rises with the ratio for each."""
        if self.curves:
            most = max(drop for curve in self.curves.values() for _, drop in curve)
            allowed = max(most, 0.0) * ratio**3  # small drops finely, large ones coarsely
            return {
                group.root: min(
                    (bearable(self.curves[name], allowed) for name in group.layers if name in self.curves),
                    default=ratio,
                )
                for group in groups
            }
        if self.scope == "local":
            return {group.root: ratio for group in groups}
        everything = torch.cat(list(scores.values()))
        count = int(ratio * len(everything))
        threshold = float(everything.sort().values[count - 1]) if count else -math.inf
        # With one threshold for all layers, a weak layer could vanish altogether.
        return {root: min(float((values <= threshold).float().mean()), ratio * 1.5) for root, values in scores.items()}

    def _search(
        self, prepared: Prepared, scores: Mapping[str, torch.Tensor], rounded: int, progress: Progress
    ) -> tuple[float, dict[str, list[int]]]:
        """Bisect the channel ratio: it is not the fraction of MACs, since a layer shrinks on both sides.

        Where rounded counts jump past the fraction between one ratio and the next, some groups take the step and the
        others don't, the first ones first; then single groups take one more.
        """
        channels = prepared.channels
        lowest, highest = 0.0, 1.0
        below: dict[str, list[int]] = {group.root: [] for group in channels.groups}
        above: dict[str, list[int]] = {}
        best: tuple[float, dict[str, list[int]]] = (0.0, {})
        counted: dict[tuple[int, ...], float | None] = {}

        def count(removed: dict[str, list[int]], step: int, note: str) -> float | None:
            nonlocal best
            counts = tuple(len(units) for units in removed.values())
            if counts not in counted:  # the last steps differ by less than a rounded count
                counted[counts] = _share(prepared, removed)
            reached = counted[counts]
            if reached is not None:
                if not best[1] or abs(reached - self.fraction) < abs(best[0] - self.fraction):
                    best = reached, removed
                progress(min(step, 2 * SEARCH_STEPS), 2 * SEARCH_STEPS + 1, f"{note} removes {reached:.1%}")
            return reached

        for step in range(SEARCH_STEPS):
            ratio = (lowest + highest) / 2
            removed = chosen(channels.groups, scores, self._shares(channels.groups, scores, ratio), rounded)
            reached = count(removed, step + 1, f"channel ratio {ratio:.3f}")
            if reached is not None and abs(reached - self.fraction) < TOLERANCE / 10:
                return best
            if reached is not None and reached < self.fraction:
                lowest, below = ratio, removed
            else:
                highest, above = ratio, removed if reached is not None else above
        fewest, most = 0, len(below) if above else 0
        while most - fewest > 1:
            middle = (fewest + most) // 2
            removed = {root: (above if at < middle else below)[root] for at, root in enumerate(below)}
            reached = count(removed, SEARCH_STEPS + 1, f"rounding {middle} groups further")
            fewest, most = (middle, most) if reached is None or reached < self.fraction else (fewest, middle)
        between = {root: (above if at < fewest else below)[root] for at, root in enumerate(below)}
        for group in channels.groups:
            if abs(best[0] - self.fraction) <= TOLERANCE:
                break
            left = group.units - len(between.get(group.root, ())) - _step(group, rounded)
            if left >= _fewest(group):
                weakest = sorted(scores[group.root].argsort(stable=True)[: group.units - left].tolist())
                count(between | {group.root: weakest}, SEARCH_STEPS + 1, f"rounding {group.root} further")
        return best


def _share(prepared: Prepared, removed: Mapping[str, Sequence[int]]) -> float | None:
    """Of the MACs, that goes with these units; None for counts that do not go together."""
    try:
        return 1 - prepared.channels.macs(removed) / prepared.before
    except (StageError, RuntimeError, ValueError, AssertionError, IndexError):
        return None


def chosen(
    groups: Sequence[ChannelGroup], scores: Mapping[str, torch.Tensor], shares: Mapping[str, float], round_to: int
) -> dict[str, list[int]]:
    """The units to remove from each group, the least important first, by its root.

    Args:
        groups: what can be pruned.
        scores: importance of each unit [units], by root.
        shares: of its units that each group loses, before rounding, by root.
        round_to: what is left of a group is a multiple of this (the nearest), where it is that wide.
    """
    found: dict[str, list[int]] = {}
    for group in groups:
        if group.root in scores:
            left = _rounded(group, (1 - min(shares[group.root], MOST)) * group.units, round_to)
            found[group.root] = sorted(scores[group.root].argsort(stable=True)[: group.units - left].tolist())
    return found


def bearable(curve: Sequence[tuple[float, float]], drop: float) -> float:
    """The largest share of its channels that a layer may lose for this drop; between two points, on their line."""
    share, cost = 0.0, 0.0
    for next_share, next_cost in curve:
        if next_cost > drop:
            return share + (next_share - share) * ((drop - cost) / (next_cost - cost) if drop > cost else 0.0)
        share, cost = next_share, next_cost
    return share


def _rounded(group: ChannelGroup, units: float, round_to: int) -> int:
    """Units to keep: all of them, or so many that the channels left are a multiple of `round_to`, whatever is nearer."""
    step, fewest = _step(group, round_to), _fewest(group)
    counts = {group.units} | {
        count for count in (math.floor(units / step) * step, math.ceil(units / step) * step) if count >= fewest
    }
    counts |= {math.ceil(fewest / step) * step}
    return min((count for count in counts if count <= group.units), key=lambda count: (abs(count - units), -count))


def _step(group: ChannelGroup, round_to: int) -> int:
    """So many units are a multiple of `round_to` in channels."""
    return round_to // math.gcd(round_to, group.width // group.units)


def _fewest(group: ChannelGroup) -> int:
    return max(math.ceil((1 - MOST) * group.units - 1e-9), 1)


def _table(before: nn.Module, after: nn.Module) -> dict[str, list[int]]:
    """Output channels of each layer, before and after."""
    return {
        name: [_width(layer), _width(after.get_submodule(name))]
        for name, layer in before.named_modules()
        if isinstance(layer, PRUNABLE)
    }


def _width(layer: Any) -> int:
    return int(layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels)


def _nothing(channels: Channels) -> StageError:
    return StageError(
        "nothing was pruned",
        why=f"no layer could lose a channel; {_listed(channels.left_alone)}",
        mend="leave --prune out for this model",
    )


def _listed(left_alone: Mapping[str, str]) -> str:
    shown = "; ".join(f"{name} ({reason})" for name, reason in list(left_alone.items())[:3])
    return f"left alone: {shown or 'none'}" + (f" and {len(left_alone) - 3} more" if len(left_alone) > 3 else "")
