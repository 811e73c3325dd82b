"""How many channels each group loses, so that together it comes to the fraction of MACs that was asked for."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from compress.console.wording import counted
from compress.prune.follow_channels import ChannelGroup
from compress.stage import Progress

__all__ = ["MOST", "TOLERANCE", "Choice", "bearable", "chosen", "fewest_of", "step_of"]

TOLERANCE = 0.02
STEPS = 14
# No group loses a larger share of its channels.
MOST = 0.9


@dataclass
class Choice:
    """A search for the units to remove.

    Attributes:
        groups: to choose from.
        scores: importance of each unit [units], by root.
        shares: of its units that each group loses at a channel ratio, by root; they rise with it.
        count: the share of MACs that goes with units, by root; None if they can't go together.
        fraction: of the MACs that is to go.
    """

    groups: Sequence[ChannelGroup]
    scores: Mapping[str, torch.Tensor]
    shares: Callable[[float], Mapping[str, float]]
    count: Callable[[Mapping[str, Sequence[int]]], float | None]
    fraction: float
    _counted: dict[tuple[int, ...], float | None] = field(default_factory=dict)

    def nearest(self, round_to: Sequence[int], progress: Progress) -> tuple[float, dict[str, list[int]], int]:
        """The share of MACs nearest to the fraction, the units by root, and what channel counts are rounded to.

        Args:
            round_to: tried in this order, until one meets the fraction within 0.02.
            progress: is told of what was counted.
        """
        finest = min(round_to)
        most = chosen(self.groups, self.scores, self.shares(1.0), finest)
        reached = self._share(most)
        if reached is not None and reached < self.fraction - TOLERANCE:  # more than all can lose: nothing to search for
            return reached, most, finest
        best: tuple[float, dict[str, list[int]]] = (0.0, {})
        rounded = finest
        for rounded in round_to:
            best = self._search(rounded, progress)
            if abs(best[0] - self.fraction) <= TOLERANCE:
                break
        return *best, rounded

    def _share(self, removed: Mapping[str, Sequence[int]]) -> float | None:
        counts = tuple(len(removed.get(group.root, ())) for group in self.groups)
        if counts not in self._counted:  # the last steps differ by less than a rounded count
            self._counted[counts] = self.count(removed)
        return self._counted[counts]

    def _search(self, rounded: int, progress: Progress) -> tuple[float, dict[str, list[int]]]:
        """Bisect the channel ratio: it is not the fraction of MACs, since a layer shrinks on both sides.

        Where rounded counts jump past the fraction between one ratio and the next, some groups take the step and the
        others don't, the first ones first; then single groups go part of their way.
        """
        lowest, highest = 0.0, 1.0
        below: dict[str, list[int]] = {group.root: [] for group in self.groups}
        above: dict[str, list[int]] = {}
        best: tuple[float, dict[str, list[int]]] = (0.0, {})

        def tried(removed: dict[str, list[int]], step: int, note: str) -> float | None:
            nonlocal best
            reached = self._share(removed)
            if reached is not None:
                if not best[1] or abs(reached - self.fraction) < abs(best[0] - self.fraction):
                    best = reached, removed
                progress(step, STEPS + 2, f"{note} removes {reached:.1%}")
            return reached

        for step in range(STEPS):
            ratio = (lowest + highest) / 2
            removed = chosen(self.groups, self.scores, self.shares(ratio), rounded)
            reached = tried(removed, step + 1, f"channel ratio {ratio:.3f}")
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
            reached = tried(removed, STEPS + 1, f"rounding {counted(middle, 'groups')} further")
            fewest, most = (middle, most) if reached is None or reached < self.fraction else (fewest, middle)
        between = {root: (above if at < fewest else below)[root] for at, root in enumerate(below)}
        # Where that falls short, what is in fine steps goes on for what is not: a head is many channels.
        further = [False, True] if above else []
        while further and abs(best[0] - self.fraction) > TOLERANCE:
            before = between
            for group in self.groups:
                step, most = step_of(group, rounded), len(above[group.root])
                gone = len(between[group.root]) + step
                limit = group.units if further[0] else most + step
                # What is to lose nothing loses nothing.
                if most and gone <= min(limit, group.units - fewest_of(group)):
                    weakest = sorted(self.scores[group.root].argsort(stable=True)[:gone].tolist())
                    reached = tried(between | {group.root: weakest}, STEPS + 1, f"rounding {group.root} further")
                    if reached is not None and reached <= self.fraction:
                        between = between | {group.root: weakest}
            if between is before:
                further.pop(0)
        return best


def chosen(
    groups: Sequence[ChannelGroup], scores: Mapping[str, torch.Tensor], shares: Mapping[str, float], round_to: int
) -> dict[str, list[int]]:
    """The units to remove from each group, the least important first, by its root.

    Args:
        groups: what can be pruned.
        scores: importance of each unit [units], by root.
        shares: of its units that each group loses, before rounding, by root.
        round_to: what is left of a group is a multiple of this, or all of it, whichever is nearer.
    """
    found: dict[str, list[int]] = {}
    for group in groups:
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
    """Units to keep: all of them, or so many that the channels left are a multiple of `round_to`."""
    step, fewest = step_of(group, round_to), fewest_of(group)
    multiples = {math.floor(units / step) * step, math.ceil(units / step) * step, math.ceil(fewest / step) * step}
    counts = [group.units, *(count for count in multiples if fewest <= count < group.units)]
    return min(counts, key=lambda count: (abs(count - units), -count))


def step_of(group: ChannelGroup, round_to: int) -> int:
    """So many units are a multiple of `round_to` in channels."""
    return round_to // math.gcd(round_to, group.width // group.units)


def fewest_of(group: ChannelGroup) -> int:
    """Units that are left of a group, at least."""
    return max(math.ceil((1 - MOST) * group.units - 1e-9), 1)
