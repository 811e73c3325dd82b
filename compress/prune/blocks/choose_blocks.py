"""Which blocks go: those without which, once it is repaired, the network is nearest to the original.

Blocks are taken one after the other, and what is left is judged anew after each: ShortGPT (Men et al., arXiv
2403.03853) takes all at once, by how little a block turns what passes it; Shortened LLaMA (Kim et al., arXiv
2402.02834) by the output's loss. Here, too, the outputs judge, behind the repair.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import fx

from compress.data.dataset import Dataset
from compress.errors import StageError
from compress.evaluate.judge import spread
from compress.model import Lost, TorchModel
from compress.model.frozen import freeze, frozen_names
from compress.prune.blocks.find_blocks import Block
from compress.prune.blocks.without_blocks import Ends, unread_inputs, without
from compress.prune.repair.judge import Judge, statistics_again
from compress.prune.repair.repaired import repaired
from compress.prune.repair.samples import Samples
from compress.runtime.measure import torch_macs
from compress.stage import Progress

__all__ = ["Chooser", "Went", "ends_of"]

JUDGED = 256  # calibration samples, at most, that choose; the repair behind the choice has all
# Of the blocks that are left, so many are judged with the repair: those that cost least without it.
SHORTLIST = 4


@dataclass(frozen=True)
class Went:
    """A block that goes, in its turn.

    Attributes:
        block: it.
        error: of the network without it and those before it, by the outputs' spread, as `Apart.mean`.
        macs: share of the multiply-accumulates that went with it.
    """

    block: Block
    error: float
    macs: float


@dataclass
class Chooser:
    """Networks without blocks, held against the whole.

    Args:
        model: the whole, a graph.
        calibration: typical inputs.
        repair: whether what is judged is repaired.
        folder: for values that memory has no room for.
        progress: is told of networks judged.

    Raises:
        StageError: the outputs can't be held against each other.
    """

    model: TorchModel
    calibration: Dataset
    repair: bool
    folder: Path
    progress: Progress
    _told: int = 0

    def __post_init__(self) -> None:
        self.samples = Samples(spread(self.calibration, JUDGED), self.model.module, self.model.signature)
        self.judge = Judge(self.model, self.samples)
        if self.judge.untold:
            raise StageError(
                "can't choose blocks",
                why=self.judge.untold,
                mend="give --calibration data that the model is made for, or leave --drop-blocks out",
            )
        self.macs = torch_macs(self.model.module, self.model.signature)

    def next(self, left: Sequence[Block], gone: Sequence[Went], *, by_macs: bool) -> Went:
        """Of the blocks that are left, the one that costs least.

        Args:
            left: to choose from.
            gone: those that went before.
            by_macs: for each multiply-accumulate that goes with it.
        """
        before = [went.block for went in gone]
        error, share = (gone[-1].error, sum(went.macs for went in gone)) if gone else (0.0, 0.0)
        saved = {block: self.share([*before, block]) - share for block in left}

        def cost(block: Block, lost: float) -> float:
            return (lost - error) / max(saved[block], 1e-9) if by_macs else lost

        cheap = {block: cost(block, self._without_repair([*before, block])) for block in left}
        nearest = sorted(left, key=cheap.__getitem__)[:SHORTLIST]
        lost = {}
        for block in nearest:
            self._tell(f"judging the network without {block.name}")
            lost[block] = self.mended(self.pruned([*before, block]))[1]
        best = min(nearest, key=lambda block: cost(block, lost[block]))
        return Went(best, lost[best], saved[best])

    def left(self, blocks: Sequence[Block], gone: Sequence[Block]) -> list[Block]:
        """Blocks that are still there once others have gone, and can go, too, without an input that nothing reads."""
        alive = (block for block in blocks if block not in gone and not any(block.end in one.inside for one in gone))
        return [block for block in alive if not unread_inputs(self._graph, ends_of([*gone, block]))]

    def share(self, blocks: Sequence[Block]) -> float:
        """Of the multiply-accumulates that go with blocks."""
        left = torch_macs(without(self._graph, ends_of(blocks)), self.model.signature)
        return (self.macs - left) / max(1, self.macs)

    def mended(self, pruned: TorchModel) -> tuple[TorchModel, float]:
        """A network that has lost something, repaired where that is asked for, and how far from the whole it is."""
        if not self.repair or pruned.lost is None:
            return pruned, self.judge.apart(pruned.module).mean
        found = repaired(pruned.module, pruned.lost, self.samples, self.judge, self.folder, _silent)
        if not found.kept:
            return TorchModel(pruned.module, pruned.signature, macs_gone=pruned.macs_gone), found.before.mean
        return TorchModel(found.module, pruned.signature, macs_gone=pruned.macs_gone), found.after.mean

    def pruned(self, blocks: Sequence[Block]) -> TorchModel:
        """A network of its own without blocks, not repaired."""
        ends = ends_of(blocks)
        module = copy.deepcopy(without(self._graph, ends))
        freeze(module, frozen_names(self._graph))
        lost = Lost(self.model, {}, ends) if blocks else None
        return TorchModel(module, self.model.signature, lost=lost, macs_gone=self.share(blocks))

    def _without_repair(self, blocks: Sequence[Block]) -> float:
        """How far the outputs are, with statistics of batch normalizations taken again where that is nearer."""
        self._tell(f"looking at the network without {blocks[-1].name}")
        module = without(self._graph, ends_of(blocks))
        error = self.judge.apart(module).mean
        again = statistics_again(module, self.samples) if self.repair else None
        return error if again is None else min(error, self.judge.apart(again).mean)

    @property
    def _graph(self) -> fx.GraphModule:
        assert isinstance(self.model.module, fx.GraphModule)  # noqa: S101  it is a trace
        return self.model.module

    def tell_of_pruning(self, _done: int, _total: int, note: str) -> None:
        """A progress for what prunes channels on the way."""
        self._tell(note)

    def _tell(self, note: str) -> None:
        self._told += 1
        self.progress(self._told, self._told + 1, note)


def ends_of(blocks: Sequence[Block]) -> Ends:
    """The sums of blocks, without those inside others."""
    return {block.end: block.shortcut for block in blocks if not any(block.end in other.inside for other in blocks)}


def _silent(_done: int, _total: int, _note: str) -> None:
    """Shows nothing."""
