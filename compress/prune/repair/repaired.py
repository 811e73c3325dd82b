"""A network that has lost channels or blocks, fitted, if that brings its outputs nearer to the original's."""

from __future__ import annotations

import copy
import tempfile
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from compress.model import Lost
from compress.prune.heads.open_heads import is_plain_trace, plain_trace
from compress.prune.repair.fit import Fitted, fit_layers
from compress.prune.repair.judge import Apart, Judge, statistics_again
from compress.prune.repair.samples import Samples
from compress.stage import Progress

__all__ = ["Repaired", "repaired"]

RIDGE = 1e-3


@dataclass(frozen=True)
class Repaired:
    """What came of a repair.

    Attributes:
        module: fitted, with statistics of batch normalizations taken again where that is nearer.
        before: how far the outputs are from the original's without it.
        after: and with it.
        again: whether statistics were taken again.
        fitted: what became of each layer.
    """

    module: nn.Module
    before: Apart
    after: Apart
    again: bool
    fitted: Fitted

    @property
    def kept(self) -> bool:
        """Whether it is any better."""
        return self.after.below(self.before)


def repaired(
    module: nn.Module,
    lost: Lost,
    samples: Samples,
    judge: Judge,
    folder: Path,
    progress: Progress,
    ridge: float = RIDGE,
) -> Repaired:
    """Fit each layer behind what a network has lost, so that it gives what it gave before.

    Args:
        module: left as it is.
        lost: what it has lost.
        samples: to fit by; some of them are held out.
        judge: of outputs.
        folder: for values that memory has no room for.
        progress: is told of batches.
        ridge: share of the mean of a Gram matrix' diagonal.

    Raises:
        StageError: the forwards can't be followed.
    """
    own = copy.deepcopy(module)
    before = lost.before.module
    if lost.blocks and not is_plain_trace(before):  # as a run that goes on finds it
        before = plain_trace(lost.before)[0]
    with tempfile.TemporaryDirectory(dir=folder) as held:
        fitted = fit_layers(
            before, own, lost.channels, samples, Path(held), progress, ridge=ridge, blocks=lost.blocks
        )  # fmt: skip
    after = judge.apart(own)
    again = statistics_again(own, samples)
    renewed = None if again is None else judge.apart(again)
    taken = renewed is not None and renewed.below(after)
    return Repaired(
        again if taken and again is not None else own,
        judge.apart(module),
        renewed if taken and renewed is not None else after,
        taken,
        fitted,
    )
