"""The order in which each group's channels go by block OBS; by their weights, where nothing tells of it."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np
import torch

from compress.data.dataset import Dataset
from compress.prune.channels import Channels
from compress.prune.importance import importance_of
from compress.prune.layer_kinds import PRUNABLE
from compress.prune.repair.felt import felt
from compress.prune.repair.obs import Elimination, eliminations
from compress.prune.repair.samples import Samples
from compress.stage import Progress

__all__ = ["MOST_BY_OBS", "ranked", "shares_at"]

# Of a group that seems to be of a low rank, no more goes, since the rank is that of the calibration data: unless all
# groups lose so much that the fraction is not to be had otherwise.
MOST_BY_OBS = 0.75
ALL_LOSE = 0.9


def ranked(
    channels: Channels, calibration: Dataset, progress: Progress
) -> tuple[dict[str, Elimination], tuple[str, ...]]:
    """By a group's root, in which order its units go and what that costs; and warnings of what could not be told.

    Args:
        channels: with all of the model's weights.
        calibration: typical inputs.
        progress: is told of samples.

    Raises:
        StageError: the forward can't be followed.
    """
    samples = Samples(calibration, channels.module, channels.signature)
    with tempfile.TemporaryDirectory() as held:
        felt_by = _felt(channels, samples, progress)
        found, left = eliminations(channels.module, channels.groups, samples, Path(held), progress, felt_by)
    told: tuple[str, ...] = ()
    if left:
        _by_magnitude(channels, found, left, weighed=felt_by is not None)
        first = "; ".join(f"{root} ({why})" for root, why in list(left.items())[:3])
        told = (f"obs can't tell which channels of some layers matter, magnitude chose: {first}.",)
    return (found if felt_by is None else _weighed(channels, found)), told


def _by_magnitude(channels: Channels, found: dict[str, Elimination], left: Collection[str], *, weighed: bool) -> None:
    """Add the groups that obs can't tell of; where errors are the outputs', as errors up to the worst of the others."""
    worst = max((one.errors[-1] for one in found.values()), default=1.0) if weighed else 1.0
    scores = importance_of(channels, "magnitude")
    for root in left:
        order = scores[root].argsort(stable=True)
        lost = worst * scores[root][order].cumsum(0) / scores[root].sum()
        found[root] = Elimination(tuple(order.tolist()), tuple(lost.tolist()))


def _felt(channels: Channels, samples: Samples, progress: Progress) -> Mapping[str, torch.Tensor] | None:
    """Where heads are among the groups, whose units are of many sizes: what the outputs feel of those that read them.

    By the spread of a layer's own outputs, a feed-forward and an attention can't be held against each other: both are
    added to a stream that the network goes on with.
    """
    if not any(group.root in channels.heads for group in channels.groups):
        return None
    names = {
        place.name
        for group in channels.groups
        for place in group.places
        if place.side == "in" and isinstance(channels.module.get_submodule(place.name), PRUNABLE)
    }
    return felt(channels.module, names, samples, progress)


def _weighed(channels: Channels, found: Mapping[str, Elimination]) -> dict[str, Elimination]:
    """With the multiply-accumulates that go with a unit, of each group."""
    whole = channels.macs({})
    macs = {root: float(whole - channels.macs({root: [0]})) for root in found}
    if min(macs.values()) <= 0:
        return dict(found)
    return {root: dataclasses.replace(one, macs=macs[root]) for root, one in found.items()}


def shares_at(eliminated: Mapping[str, Elimination], ratio: float) -> dict[str, float]:
    """How much of each group may go, rising with the ratio: for one error, or, where units are weighed, for one price.

    Small errors and prices finely. A price is an error by multiply-accumulate: what the cheapest has of it goes first.
    """
    if all(one.macs for one in eliminated.values()):
        every = np.concatenate([one.prices for one in eliminated.values()])
        lowest, highest = every[every > 0].min(initial=1.0), every.max(initial=1e-30)
        price = lowest * (highest / lowest) ** ratio if 0 < ratio < 1 else highest * ratio
        return {root: float((one.prices <= price).mean()) if ratio else 0.0 for root, one in eliminated.items()}
    worst = max(one.errors[-1] for one in eliminated.values())
    most = MOST_BY_OBS + (1 - MOST_BY_OBS) * max(0.0, ratio - ALL_LOSE) / (1 - ALL_LOSE)
    return {root: min(one.share(worst * ratio**4), most) for root, one in eliminated.items()}
