"""Blocks against channels: a block goes where the budget is then kept with outputs nearer to the original's."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from compress.errors import BudgetError, StageError
from compress.model import TorchModel
from compress.prune.blocks.choose_blocks import Chooser, Went
from compress.prune.blocks.find_blocks import Block
from compress.prune.choose_channels import TOLERANCE
from compress.prune.prune_channels import PruneChannels
from compress.prune.prune_to_budget import PruneToBudget

__all__ = ["weighed"]


def weighed(
    chooser: Chooser, blocks: Sequence[Block], prune: PruneChannels | PruneToBudget
) -> tuple[list[Went], list[dict[str, Any]]]:
    """The blocks that go, and each network that was compared.

    The block that costs least for each multiply-accumulate goes first. With it and without it, channels are pruned
    until the budget is kept, and the network is repaired: the block goes if its outputs are nearer so, else no further
    one is looked at. Where channels alone don't keep the budget, blocks go until they do.

    Args:
        chooser: which judges.
        blocks: to choose from.
        prune: what prunes channels to the budget.
    """
    most = prune.fraction + TOLERANCE if isinstance(prune, PruneChannels) else 1.0
    gone: list[Went] = []
    best = _within(chooser, [], prune)
    tried = [_row([], best)]
    while True:
        before = [went.block for went in gone]
        left = [block for block in chooser.left(blocks, before) if chooser.share([*before, block]) <= most]
        if not left:
            break
        went = chooser.next(left, gone, by_macs=True)
        error = _within(chooser, [*before, went.block], prune)
        tried.append(_row([*before, went.block], error))
        if error >= best < math.inf:
            break
        gone.append(went)
        best = error
    return gone if best < math.inf else [], tried


def _within(chooser: Chooser, blocks: Sequence[Block], prune: PruneChannels | PruneToBudget) -> float:
    """How far the network is without blocks and, to keep the budget, without channels; infinite where it can't."""
    model = chooser.mended(chooser.pruned(blocks))[0] if blocks else chooser.model
    with tempfile.TemporaryDirectory(dir=chooser.folder) as name:
        folder = Path(name) / "trial"
        folder.mkdir()
        try:
            pruned = prune.run(model, folder, chooser.tell_of_pruning).model
        except (BudgetError, StageError):
            return math.inf
        assert isinstance(pruned, TorchModel)  # noqa: S101  both prune these
        return chooser.mended(pruned)[1]


def _row(blocks: Sequence[Block], error: float) -> dict[str, Any]:
    return {"blocks": [block.name for block in blocks], "error": error if error < math.inf else None}
