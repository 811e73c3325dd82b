"""Structural pruning: whole channels go, so that the layers become smaller, not sparser."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from compress.dataset import Dataset
from compress.errors import RecipeError, StageError
from compress.measure import torch_macs, torch_params
from compress.model import Model, TorchModel
from compress.stages import Given, Progress
from compress.stages.channels import PRUNABLE, ChannelGroup, Channels, same_outputs
from compress.stages.importance import Importance, add_gradients, importance_of

__all__ = ["PruneChannels", "bearable", "chosen"]

TOLERANCE = 0.02
SEARCH_STEPS = 14
# Channel counts that vector units like, tried in this order until one meets the fraction.
ROUND_TO = (16, 8, 4, 2, 1)
MOST = 0.9


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
            "curves": {name: [list(pair) for pair in curve] for name, curve in self.curves.items()},
        }

    def check(self, model: Model) -> None:
        if not 0 < self.fraction < 1:
            raise RecipeError(
                f"can't prune {self.fraction}",
                why="--prune is the fraction of multiply-accumulates to remove: above 0 and below 1",
                mend="try --prune 0.5",
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
        before = torch_macs(model.module, model.signature)
        channels = Channels(model, progress)
        unknown = sorted(set(self.curves) - {layer for group in channels.groups for layer in group.layers})
        if not channels.groups or before == 0:
            raise StageError(
                "nothing was pruned",
                why=f"no layer could lose a channel; {_listed(channels.left_alone)}",
                mend="leave --prune out for this model",
            )
        scores = self._scores(channels, model, progress)
        best: tuple[float, dict[str, list[int]]] | None = None
        rounded = 1
        for rounded in ROUND_TO if self.round_to is None else (self.round_to,):
            best = self._search(channels, scores, before, rounded, progress)
            if abs(best[0] - self.fraction) <= TOLERANCE:
                break
        assert best is not None  # noqa: S101  there is at least one to try
        reached, removed = best
        if abs(reached - self.fraction) > TOLERANCE:
            raise StageError(
                f"can't remove {self.fraction:.0%} of the MACs" if reached > 0 else "nothing was pruned",
                why=f"the nearest that keeps the outputs' shapes is {reached:.1%}; {_listed(channels.left_alone)}",
                mend=f"ask for --prune {max(reached, 0.01):.2f}",
            )
        pruned = channels.pruned(removed)
        same_outputs(pruned, model.signature)
        progress(1, 1, f"{reached:.1%} of the MACs removed")
        lost = 1 - torch_params(pruned) / torch_params(model.module)
        return Given(
            TorchModel(pruned, model.signature),
            did=f"removed {reached:.1%} of the MACs and {lost:.1%} of the weights by {self.importance}, "
            + ("each layer as it bears it" if self.curves else self.scope),
            details={
                "macs_removed": reached,
                "round_to": rounded,
                "channels": _table(model.module, pruned),
                "left_alone": channels.left_alone,
            },
            warnings=(f"the sensitivity names layers that can't be pruned here: {', '.join(unknown)}",)
            if unknown
            else (),
        )

    def _scores(self, channels: Channels, model: TorchModel, progress: Progress) -> dict[str, torch.Tensor]:
        if self.importance == "taylor":
            assert self.data is not None  # noqa: S101  checked
            add_gradients(channels.module.eval(), model.signature, self.data, progress)
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            return channels.scores(importance_of(self.importance))

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
        self, channels: Channels, scores: Mapping[str, torch.Tensor], before: int, rounded: int, progress: Progress
    ) -> tuple[float, dict[str, list[int]]]:
        """Bisect the channel ratio: it is not the fraction of MACs, since a layer shrinks on both sides."""
        lowest, highest = 0.0, 1.0
        best: tuple[float, dict[str, list[int]]] = (0.0, {})
        for step in range(SEARCH_STEPS):
            ratio = (lowest + highest) / 2
            removed = chosen(channels.groups, scores, self._shares(channels.groups, scores, ratio), rounded)
            try:
                with channels.without(removed) as module:
                    reached = 1 - torch_macs(module, channels.signature) / before
            except (RuntimeError, ValueError, AssertionError, IndexError):  # counts that do not go together
                highest = ratio
                continue
            if not best[1] or abs(reached - self.fraction) < abs(best[0] - self.fraction):
                best = reached, removed
            lowest, highest = (ratio, highest) if reached < self.fraction else (lowest, ratio)
            progress(step + 1, SEARCH_STEPS + 1, f"channel ratio {ratio:.3f} removes {reached:.1%}")
            if abs(reached - self.fraction) < TOLERANCE / 10:
                break
        return best


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
    """Units to keep, so that the channels left are a multiple of `round_to`, and not none."""
    parts = group.width // group.units
    step = round_to // math.gcd(round_to, parts)
    if step > group.units:
        return group.units
    return min(max(round(units / step) * step, step), group.units)


def _table(before: nn.Module, after: nn.Module) -> dict[str, list[int]]:
    """Output channels of each layer, before and after."""
    return {
        name: [_width(layer), _width(after.get_submodule(name))]
        for name, layer in before.named_modules()
        if isinstance(layer, PRUNABLE)
    }


def _width(layer: Any) -> int:
    return int(layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels)


def _listed(left_alone: Mapping[str, str]) -> str:
    shown = "; ".join(f"{name} ({reason})" for name, reason in list(left_alone.items())[:3])
    return f"left alone: {shown or 'none'}" + (f" and {len(left_alone) - 3} more" if len(left_alone) > 3 else "")
