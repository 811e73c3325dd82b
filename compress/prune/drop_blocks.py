"""Structural pruning by depth: whole residual blocks go, so that the network has fewer steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from torch import fx

from compress.console.wording import counted
from compress.data.dataset import Dataset
from compress.errors import RecipeError, StageError
from compress.formats.native.graph import GraphError
from compress.model import Model, TorchModel
from compress.prune.blocks.choose_blocks import Chooser, Went, ends_of
from compress.prune.blocks.find_blocks import Block, blocks_of, shapes_of
from compress.prune.blocks.prove_blocks import BlockProof
from compress.prune.blocks.weigh_blocks import weighed
from compress.prune.channels import same_outputs
from compress.prune.heads.open_heads import plain_trace
from compress.prune.left_alone import listed
from compress.prune.prune_channels import PruneChannels
from compress.prune.prune_to_budget import PruneToBudget
from compress.prune.repair.walk import Walk
from compress.runtime.measure import torch_params
from compress.stage import Given, Progress

__all__ = ["DropBlocks"]


@dataclass(frozen=True)
class DropBlocks:
    """Remove branches that a sum adds back to what they were computed from, least hurt first.

    Each that could go is tried: without it, and repaired where `repair` says so, how far are the outputs from the
    original's? What costs least goes, and the others are judged anew; see `Chooser`. Calibration data alone chooses.

    Attributes:
        count: blocks that go; "auto": as many as keep the budget of `prune` with outputs nearer to the original's than
            channels alone do, which may be none; see `weighed`.
        calibration: typical inputs; labels are not looked at.
        repair: whether the repair comes behind it, and so is part of what is judged.
        prune: for "auto", what prunes channels behind it.
        samples: what the model is made for; the removal is proven on some of it, besides random inputs.
    """

    count: int | Literal["auto"]
    calibration: Dataset
    repair: bool = True
    prune: PruneChannels | PruneToBudget | None = None
    samples: Dataset | None = None

    name: ClassVar[str] = "drop_blocks"
    takes: ClassVar[type] = TorchModel
    gives: ClassVar[type] = TorchModel

    @property
    def options(self) -> Mapping[str, Any]:
        found = {
            "count": self.count,
            "calibration": self.calibration.sha256,
            "repair": self.repair,
            "samples": None if self.samples is None else self.samples.sha256,
        }
        return found if self.prune is None else found | {"prune": {self.prune.name: dict(self.prune.options)}}

    def check(self, model: Model) -> None:
        if self.count != "auto" and self.count < 1:
            raise RecipeError(
                f"can't drop {counted(self.count, 'blocks')}",
                why="--drop-blocks is how many residual blocks go: 1 or more",
                mend="give --drop-blocks 1, or --drop-blocks auto with --prune",
            )
        if self.count == "auto" and self.prune is None:
            raise RecipeError(
                "can't weigh blocks against channels",
                why="--drop-blocks auto drops what keeps a budget better than channels do, and there is no budget",
                mend="add --prune 0.5 or a --target-…, or say how many: --drop-blocks 1",
            )
        if isinstance(model, TorchModel) and not model.layered:
            raise RecipeError(
                "can't drop blocks of this file",
                why="TorchScript and exported programs have no layers any more",
                mend="give the model from before: compress.save(module, path, inputs=…), or leave --drop-blocks out",
            )

    def run(self, model: TorchModel, folder: Path, progress: Progress) -> Given:
        graph, blocks, left_alone, proof = self._found(model, progress)
        whole = TorchModel(graph, model.signature)
        if self.count != "auto" and self.count > len(blocks):
            raise _too_many(self.count, [block.name for block in blocks], left_alone)
        chooser = Chooser(whole, self.calibration, self.repair, folder, progress)
        tried: list[dict[str, Any]] = []
        if self.prune is not None and self.count == "auto":
            gone, tried = weighed(chooser, blocks, self.prune)
        else:
            gone = self._fixed(chooser, blocks, left_alone)
        if not gone:
            return Given(
                model,
                f"nothing: channels alone keep the budget better, of {counted(len(blocks), 'blocks')} that could go",
                {"blocks": {}, "macs_removed": 0.0, "left_alone": left_alone, "tried": tried},
            )
        pruned = chooser.pruned([went.block for went in gone])
        failed = proof.difference(ends_of([went.block for went in gone]), pruned.module)
        if failed:
            raise StageError(
                f"can't drop {', '.join(went.block.name for went in gone)} together",
                why=failed,
                mend="ask for fewer blocks",
            )
        same_outputs(pruned.module, model.signature)
        lost = 1 - torch_params(pruned.module) / max(1, torch_params(graph))
        progress(1, 1, f"{counted(len(gone), 'blocks')} dropped")
        names = ", ".join(went.block.name for went in gone)
        return Given(
            pruned,
            f"dropped {len(gone)} of {counted(len(blocks), 'blocks')} that could go ({names}): "
            f"{pruned.macs_gone:.1%} of the MACs and {lost:.1%} of the weights",
            {
                "macs_removed": pruned.macs_gone,
                "blocks": {went.block.name: {"macs": went.macs, "error": went.error} for went in gone},
                "could_go": [block.name for block in blocks],
                "left_alone": left_alone,
            }
            | ({"tried": tried} if tried else {}),
        )

    def _found(
        self, model: TorchModel, progress: Progress
    ) -> tuple[fx.GraphModule, list[Block], dict[str, str], BlockProof]:
        """The model's graph, the blocks that are proven to go, others with the reason, and what proves them."""
        progress(0, 1, "looking for blocks")
        try:
            graph, inputs = plain_trace(model)
        except GraphError as err:
            raise StageError(
                "can't look for blocks", why=str(err), mend="leave --drop-blocks out; --prune removes channels"
            ) from err
        walk = Walk(graph)
        blocks, left_alone = blocks_of(walk, shapes_of(walk, inputs))
        proof = BlockProof(graph, model.signature, self.samples or self.calibration)
        proven = []
        for number, block in enumerate(blocks):
            progress(number, len(blocks), f"proving that {block.name} can go")
            why = proof.difference(ends_of([block]))
            if why:
                left_alone[block.name] = why
            else:
                proven.append(block)
        if not proven:
            raise StageError(
                "no block can go",
                why=listed(left_alone)
                if left_alone
                else "no sum adds a branch back to what it was computed from: the model has no residual blocks",
                mend="leave --drop-blocks out; --prune removes channels",
            )
        return graph, proven, left_alone, proof

    def _fixed(self, chooser: Chooser, blocks: Sequence[Block], left_alone: Mapping[str, str]) -> list[Went]:
        gone: list[Went] = []
        while len(gone) != self.count:
            left = chooser.left(blocks, [went.block for went in gone])
            if not left:  # blocks in blocks, or an input that the others alone read
                assert isinstance(self.count, int)  # noqa: S101  "auto" goes another way
                raise _too_many(self.count, [went.block.name for went in gone], left_alone)
            gone.append(chooser.next(left, gone, by_macs=False))
        return gone


def _too_many(count: int, names: Sequence[str], left_alone: Mapping[str, str]) -> StageError:
    more = f"; {listed(left_alone)}" if left_alone else ""
    return StageError(
        f"can't drop {counted(count, 'blocks')}",
        why=f"{len(names)} can go: {', '.join(names)}{more}",
        mend=f"give --drop-blocks {len(names)} or fewer",
    )
