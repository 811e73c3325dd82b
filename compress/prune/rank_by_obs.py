"""The order in which each group's channels go by block OBS; by their weights, where nothing tells of it."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

from compress.data.dataset import Dataset
from compress.prune.channels import Channels
from compress.prune.importance import importance_of
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
    samples = Samples(calibration, channels.signature)
    with tempfile.TemporaryDirectory() as held:
        found, left = eliminations(channels.module, channels.groups, samples, Path(held), progress)
    if not left:
        return found, ()
    scores = importance_of(channels, "magnitude")
    for root in left:
        order = scores[root].argsort(stable=True)
        lost = scores[root][order].cumsum(0) / scores[root].sum()
        found[root] = Elimination(tuple(order.tolist()), tuple(lost.tolist()))
    told = "; ".join(f"{root} ({why})" for root, why in list(left.items())[:3])
    return found, (f"obs can't tell which channels of some layers matter, magnitude chose: {told}.",)


def shares_at(eliminated: Mapping[str, Elimination], ratio: float) -> dict[str, float]:
    """How much of each group may go for one error, which rises with the ratio: small errors finely."""
    worst = max(one.errors[-1] for one in eliminated.values())
    most = MOST_BY_OBS + (1 - MOST_BY_OBS) * max(0.0, ratio - ALL_LOSE) / (1 - ALL_LOSE)
    return {root: min(one.share(worst * ratio**4), most) for root, one in eliminated.items()}
