"""Structural pruning: whole channels go, so that the layers become smaller, not sparser."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from compress.data.dataset import Dataset
from compress.errors import RecipeError, StageError
from compress.formats.native.onnx_part import OnnxPart
from compress.model import Lost, Model, TorchModel
from compress.prune.channels import PRUNABLE, SECONDS, Channels, same_outputs
from compress.prune.choose_channels import MOST, TOLERANCE, Choice, bearable
from compress.prune.importance import Importance, importance_of
from compress.prune.known_channels import KnownChannels
from compress.prune.latency.allocate import Gone
from compress.prune.latency.by_latency import ByLatency, Timed, held_to_it, like_macs, nearest, timed
from compress.prune.latency.layers import LIKED
from compress.prune.layer_kinds import RECURRENT, width_of
from compress.prune.left_alone import listed
from compress.prune.rank_by_obs import ranked, shares_at
from compress.prune.repair.obs import Elimination
from compress.runtime.measure import torch_params
from compress.stage import Given, Progress

__all__ = ["TOLERANCE", "Prepared", "PruneChannels", "bearable"]

# Channel counts that vector units like, tried in this order until one meets the fraction.
ROUND_TO = (16, 8, 4, 2, 1)


@dataclass(frozen=True)
class Prepared:
    """A model looked at.

    Attributes:
        model: it.
        channels: what can go.
        scores: the importance of each unit, by its group's root.
        before: the MACs of the whole, blocks that went before it with it.
        eliminated: by a group's root, in which order its units go and what that costs, where obs has told.
        warnings: of what could not be told.
        timed: what its layers take, where a share of the latency is to go.
    """

    model: TorchModel
    channels: Channels
    scores: Mapping[str, torch.Tensor]
    before: int
    eliminated: Mapping[str, Elimination] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    timed: Timed | None = None


@dataclass(frozen=True)
class PruneChannels:
    """Remove a fraction of the model's MACs, or of its latency.

    Attributes:
        fraction: of the MACs, above 0 and below 1; reached within 0.02. What blocks took with them in a stage before
            counts (`TorchModel.macs_gone`). With `latency`, of that.
        importance: "magnitude", "taylor" (needs `data`) or "random", the control; see `importance_of`. "obs" (needs
            `calibration`) takes channels that the others can stand in for, from each group until its consumers lose the
            same; without the repair behind it, that is worse than magnitude. See `eliminations`.
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
        labelled: the output that labels are of, where they fit several: for taylor.
        calibration: what obs looks at.
        shared: whether what can lose channels is kept in the work folder, for the rounds and candidates that follow.
        latency: how layers are timed, which then decides what each group loses; needs obs, which tells what that costs.
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
    labelled: str | None = None
    shared: bool = False
    calibration: Dataset | None = None
    latency: ByLatency | None = None

    name: ClassVar[str] = "prune_channels"
    takes: ClassVar[type] = TorchModel
    gives: ClassVar[type] = TorchModel

    @property
    def options(self) -> Mapping[str, Any]:
        more: dict[str, Any] = {}
        if self.labelled is not None and self.importance == "taylor":
            more = {"labelled": self.labelled}
        if self.calibration is not None and self.importance == "obs":
            more = {"calibration": self.calibration.sha256}
        more |= {} if self.latency is None else {"latency": self.latency.options}
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
        } | more

    def check(self, model: Model) -> None:
        if not 0 < self.fraction < 1:
            raise RecipeError(
                f"can't prune {self.fraction}",
                why=f"--prune is the fraction of the {self._unit} to remove: above 0 and below 1",
                mend="try --prune 0.5",
            )
        most = 1 - (1 - MOST) ** 2
        if self.fraction > most and self.latency is None:
            raise RecipeError(
                f"can't remove {self.fraction:.1%} of the MACs",
                why=f"a layer keeps a tenth of its channels on each side: no network can lose over {most:.0%}",
                mend=f"ask for --prune {most:.2f} at most; what this network can lose is told once it was looked at",
            )
        if self.round_to is not None and self.round_to < 1:
            why = f"--round-to is {self.round_to}: channel counts are multiples of it"
            raise RecipeError("can't prune to such channel counts", why=why, mend="give 8 or 16, or leave it out")
        if self.importance == "taylor" and self.data is None:
            why = "it takes gradients on data, and there is none"
            raise RecipeError("can't rank channels by taylor", why=why, mend="give training data, or take magnitude")
        if self.importance == "obs" and self.calibration is None:
            why = "it looks at what layers read, and there is no data"
            raise RecipeError("can't rank channels by obs", why=why, mend="give calibration data, or take magnitude")
        if self.latency is not None and (self.importance != "obs" or self.curves):
            raise RecipeError(
                "can't choose by latency how much each layer loses",
                why="it weighs time against what obs tells that each number of channels costs, and nothing else",
                mend="take --importance obs, with calibration data and without a sensitivity, or --allocate macs",
            )
        if isinstance(model, TorchModel) and not model.layered:
            raise RecipeError(
                "can't prune this file",
                why="TorchScript and exported programs have no layers any more",
                mend="give the model from before: compress.save(module, path, inputs=…), or leave --prune out",
            )

    def run(self, model: TorchModel, folder: Path, progress: Progress) -> Given:
        if model.macs_gone and model.macs_gone >= self.fraction - TOLERANCE:
            done = f"{model.macs_gone:.1%} of the MACs have gone with blocks, {self.fraction:.1%} were asked for"
            return Given(dataclasses.replace(model, lost=None), f"nothing: {done}", {"macs_removed": model.macs_gone})
        prepared = self.prepare(model, progress, folder.parent)
        if self.latency is None or prepared.timed is None:
            return self.cut(prepared, progress)

        def cut(found: Timed) -> tuple[Given, Gone, int]:
            again = dataclasses.replace(prepared, timed=found)
            _, removed, rounded = self._proven(again, progress)
            gone = {root: len(units) for root, units in removed.items()}
            return self._given(again, removed, rounded, progress), gone, rounded

        def rival(gone: Gone, rounded: int) -> TorchModel | None:
            other = like_macs(prepared.channels.groups, prepared.eliminated, rounded, gone)
            return None if other is None else self._like(prepared, other)

        whole = prepared.channels.model
        return held_to_it(self.latency, whole, prepared.timed, self.fraction, cut, rival, progress)

    def prepare(self, model: TorchModel, progress: Progress, work: Path) -> Prepared:
        """What does not hang on the fraction: which channels can go, and how important each is.

        Args:
            model: is left as it is.
            progress: is told of layers looked at and of trials.
            work: keeps what is shared.

        Raises:
            StageError: no layer can lose a channel.
        """
        kept = KnownChannels(work, model, self.samples, self.seconds) if self.shared else None
        channels = Channels(model, progress, self.samples, self.seconds, kept.read() if kept else None)
        if kept and not channels.late:
            kept.write(channels.known)
        before = round(channels.macs({}) / (1 - model.macs_gone))
        if not channels.groups or before == 0:
            raise _nothing(channels, model)
        if self.importance == "obs" and self.calibration is not None:
            found, warnings = ranked(channels, self.calibration, progress)
            scores = {root: one.scores() for root, one in found.items()}
            held = None if self.latency is None else timed(self.latency, channels, progress)
            return Prepared(model, channels, scores, before, found, warnings, held)
        scores = importance_of(channels, self.importance, self.seed, self.data, progress, self.labelled)
        return Prepared(model, channels, scores, before)

    def cut(self, prepared: Prepared, progress: Progress, *, prove: bool = True) -> Given:
        """Remove the fraction; several can be tried on what was prepared once.

        Args:
            prepared: by `prepare`; groups that the removal does not hold for drop out of it.
            progress: is told of what was counted and tried.
            prove: what is only measured and thrown away needs no proof.

        Raises:
            StageError: it can't be reached.
        """
        _, removed, rounded = self._proven(prepared, progress, prove=prove)
        return self._given(prepared, removed, rounded, progress)

    def _proven(
        self, prepared: Prepared, progress: Progress, *, prove: bool = True
    ) -> tuple[float, dict[str, list[int]], int]:
        """What `_best` gives, proven; raises as `cut` does."""
        channels = prepared.channels
        while True:  # until what is removed is proven; each time around there is a group less
            reached, removed, rounded = self._best(prepared, progress)
            if reached < self.fraction - TOLERANCE or (prepared.timed is None and reached > self.fraction + TOLERANCE):
                self._refuse_rounding(prepared, reached, progress)
                mend = f"ask for --prune {max(reached, 0.01):.2f}"
                if prepared.timed is not None:
                    mend = f"ask for far less than --prune {reached:.2f}, which has each layer at its narrowest, "
                    mend += "or leave --allocate latency out"
                raise StageError(
                    f"can't remove {self.fraction:.0%} of the {self._unit}" if reached > 0 else "nothing was pruned",
                    why=f"the nearest that keeps the outputs' shapes is {reached:.1%}; {listed(channels.left_alone)}",
                    mend=mend,
                )
            if not prove or not channels.leave(removed, progress):
                return reached, removed, rounded
            if not channels.groups:
                raise _nothing(channels, channels.model)

    def _given(
        self, prepared: Prepared, removed: Mapping[str, Sequence[int]], rounded: int, progress: Progress
    ) -> Given:
        """The network without these units, and what is to be said of that."""
        channels, model = prepared.channels, prepared.channels.model
        reached = 1 - channels.macs(removed) / prepared.before
        pruned = channels.pruned(removed)
        same_outputs(pruned, model.signature)
        lost = 1 - torch_params(pruned) / torch_params(model.module)
        progress(1, 1, f"{reached:.1%} of the MACs removed")
        with_blocks = " (with the blocks that went before)" if prepared.model.macs_gone else ""
        if any(isinstance(layer, OnnxPart) for layer in model.module.modules()):
            with_blocks += " outside of what stays in ONNX, whose own are not counted,"
        warnings = list(prepared.warnings)
        unknown = sorted(set(self.curves) - {layer for group in channels.groups for layer in group.layers})
        if unknown:
            warnings.append(f"the sensitivity names layers that can't be pruned here: {', '.join(unknown)}")
        if channels.late:
            warnings.append(
                f"time for finding what can lose channels ran out after {self.seconds:g} s: on a faster machine more "
                "layers may be pruned"
            )
        how = "each layer as it bears it" if self.curves or prepared.eliminated else self.scope
        return Given(
            TorchModel(pruned, model.signature, lost=Lost(model, channels.places(removed))),
            did=f"removed {reached:.1%} of the MACs{with_blocks} and {lost:.1%} of the weights by {self.importance}, "
            + (how if prepared.timed is None else "each layer by what its time is worth"),
            details={
                "macs_removed": reached,
                "round_to": rounded or LIKED,
                "channels": _table(model.module, pruned),
                "left_alone": dict(channels.left_alone),
            },
            warnings=tuple(warnings),
        )

    @property
    def _unit(self) -> str:
        return "MACs" if self.latency is None else "latency"

    def _like(self, prepared: Prepared, gone: Gone) -> TorchModel | None:
        """The network without so many units of each group, to be measured: unproven; None where they don't fit."""
        try:
            pruned = prepared.channels.pruned(_weakest(prepared.scores, gone))
            same_outputs(pruned, prepared.channels.signature)
        except StageError:
            return None
        return TorchModel(pruned, prepared.channels.signature)

    def _refuse_rounding(self, prepared: Prepared, reached: float, progress: Progress) -> None:
        """Say so where it is the rounding of channel counts that keeps the fraction from being reached."""
        if self.round_to is None or self.round_to == 1:
            return
        free, _, rounded = dataclasses.replace(self, round_to=None)._best(prepared, progress)
        if free < self.fraction - TOLERANCE or (prepared.timed is None and free > self.fraction + TOLERANCE):
            return
        raise StageError(
            f"can't remove {self.fraction:.0%} of the MACs with --round-to {self.round_to}",
            why=f"channel counts that are multiples of {self.round_to} come no nearer than {reached:.1%}",
            mend=f"give --round-to {rounded or LIKED}, which reaches {free:.1%}, or leave it out",
        )

    def _best(self, prepared: Prepared, progress: Progress) -> tuple[float, dict[str, list[int]], int]:
        """The share of MACs nearest to the fraction, the units that go with it, and what counts are rounded to.

        Of the latency, where that is timed.
        """
        channels = prepared.channels
        if prepared.timed is not None:
            share, gone, rounded = nearest(
                prepared.timed, channels.groups, prepared.eliminated, self.fraction, self.round_to
            )
            return share, _weakest(prepared.scores, gone), rounded
        scores = {group.root: prepared.scores[group.root] for group in channels.groups}

        def count(removed: Mapping[str, Sequence[int]]) -> float | None:
            try:
                return 1 - channels.macs(removed) / prepared.before
            except (StageError, RuntimeError, ValueError, AssertionError, IndexError):  # counts that don't go together
                return None

        choice = Choice(
            channels.groups, scores, lambda ratio: self._shares(prepared, scores, ratio), count, self.fraction
        )
        return choice.nearest(ROUND_TO if self.round_to is None else (self.round_to,), progress)

    def _shares(self, prepared: Prepared, scores: Mapping[str, torch.Tensor], ratio: float) -> dict[str, float]:
        """How much each group loses when, over all, this share is to go; it rises with the ratio for each."""
        groups = prepared.channels.groups
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
        if prepared.eliminated:
            return shares_at({root: prepared.eliminated[root] for root in scores}, ratio)
        if self.scope == "local":
            return {group.root: ratio for group in groups}
        everything = torch.cat(list(scores.values()))
        count = int(ratio * len(everything))
        threshold = float(everything.sort().values[count - 1]) if count else -math.inf
        # With one threshold for all layers, a weak layer could vanish altogether.
        return {root: min(float((values <= threshold).float().mean()), ratio * 1.5) for root, values in scores.items()}


def _weakest(scores: Mapping[str, torch.Tensor], gone: Gone) -> dict[str, list[int]]:
    """So many units of each group, the least important first."""
    return {root: sorted(scores[root].argsort(stable=True)[:count].tolist()) for root, count in gone.items()}


def _table(before: nn.Module, after: nn.Module) -> dict[str, list[int]]:
    """Output channels, or hidden units, of each layer, before and after."""
    return {
        name: [width_of(layer), width_of(after.get_submodule(name))]
        for name, layer in before.named_modules()
        if isinstance(layer, PRUNABLE) or type(layer) in RECURRENT
    }


def _nothing(channels: Channels, model: TorchModel) -> StageError:
    outputs = model.signature.outputs
    if not any(spec.dtype.startswith("float") for spec in outputs):
        told = ", ".join(map(str, outputs))
        return StageError(
            "nothing was pruned",
            why=f"the model gives whole numbers alone ({told}), from which it can't be told what a channel changes",
            mend="give the model that ends in the scores, and choose the largest behind it; or leave --prune out",
        )
    return StageError(
        "nothing was pruned",
        why=f"no layer could lose a channel; {listed(channels.left_alone)}",
        mend="leave --prune out for this model",
    )
