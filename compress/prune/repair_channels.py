"""Repair after pruning: accuracy regained in seconds from unlabelled data, without a gradient."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from compress.console.wording import Note, counted
from compress.data.dataset import Dataset
from compress.errors import RecipeError, StageError
from compress.formats.exported.layers import NoLayersError
from compress.formats.exported.module import as_layers
from compress.formats.native.graph import GraphError, traced_of
from compress.model import Lost, Model, TorchModel
from compress.prune.repair.fit import Fitted
from compress.prune.repair.judge import Judge
from compress.prune.repair.repaired import RIDGE, repaired
from compress.prune.repair.samples import FEWEST, Samples
from compress.stage import Given, Progress

__all__ = ["RepairChannels"]

_EXPORTED = (
    "torch.fx can't trace the forward: it was repaired by the graph that torch.export gives of it at its "
    "representative sizes. The forward is as it was, with the weights of the repair."
)

_UNKNOWN = "the graph that torch.export gives of it has parameters outside of its layers"


@dataclass(frozen=True)
class RepairChannels:
    """Fit each layer behind channels or blocks that went, so that it gives what it gave with them.

    In the order of the forward, each linear layer and convolution is regressed on what comes into it in the pruned
    network, against what the original's gave; see `fit_layers`. One calibration sample of eight is held out: these say
    whether a layer's fit is taken, and, by the outputs of the whole, on the mean and for the worst of them, whether the
    repair is. Statistics of batch normalizations are taken again only where that brings the outputs nearer.

    Attributes:
        calibration: typical inputs; labels are not looked at.
        ridge: share of the mean of a Gram matrix' diagonal that holds weights to those that there were.
    """

    calibration: Dataset
    ridge: float = RIDGE

    name: ClassVar[str] = "repair_channels"
    takes: ClassVar[type] = TorchModel
    gives: ClassVar[type] = TorchModel

    @property
    def options(self) -> Mapping[str, Any]:
        return {"calibration": self.calibration.sha256, "ridge": self.ridge}

    def check(self, model: Model) -> None:  # noqa: ARG002
        if not 0 <= self.ridge < 1:
            why = f"the ridge is {self.ridge:g} of a matrix' diagonal"
            raise RecipeError("can't fit layers like this", why=why, mend="give 0 to below 1; 0.001 is usual")

    def run(self, model: TorchModel, folder: Path, progress: Progress) -> Given:
        if model.lost is None:
            return Given(model, "nothing: neither channels nor blocks went")
        followed, lost = _followed(model, model.lost)
        before = lost.before
        samples = Samples(self.calibration, before.module, before.signature)
        judge = Judge(before, samples)
        if judge.untold:
            return Given(_as_it_was(model), "nothing", warnings=(f"Nothing was repaired: {judge.untold}.",))
        try:
            found = repaired(followed.module, lost, samples, judge, folder, progress, self.ridge)
        except StageError as err:
            return Given(_as_it_was(model), "nothing", warnings=(f"Nothing was repaired: {err.what}, {err.why}.",))
        fitted, pruned, after = found.fitted, found.before, found.after
        details = {
            "error_pruned": {"mean": pruned.mean, "worst": pruned.worst},
            "error_repaired": {"mean": after.mean, "worst": after.worst},
            "kept": found.kept,
            "batch_norm_statistics_again": found.again,
            "layers": fitted.layers,
            "left_alone": fitted.left_alone,
            "constant": {name: list(counts) for name, counts in fitted.constant.items()},
        }
        told = (
            f"on {samples.judges}, outputs are {after.mean:.2%} of their spread from those before the pruning, "
            f"{pruned.mean:.2%} without the repair (the worst sample {after.worst:.1%}, {pruned.worst:.1%} without)"
        )
        if not found.kept:
            warning = f"The repair was not kept: {told}. --finetune trains instead."
            return Given(
                _as_it_was(model), "nothing: the repair was not kept", details, (warning, *self._cautions(fitted))
            )
        did = f"fitted {counted(len(fitted.layers), 'layers')} to {counted(len(self.calibration), 'samples')}: {told}"
        if followed is model:
            given = TorchModel(found.module, model.signature, macs_gone=model.macs_gone)
        else:
            own = _with_weights_of(found.module, model.module)
            if own is None:
                return Given(_as_it_was(model), "nothing", warnings=(f"Nothing was repaired: {_UNKNOWN}.",))
            given = _as_it_was(replace(model, module=own))
        exported = () if followed is model else (Note(_EXPORTED),)
        return Given(given, did, details, (*exported, *self._cautions(fitted)))

    def _cautions(self, fitted: Fitted) -> tuple[str, ...]:
        """What calibration data was not enough for, and what it costs."""
        found = []
        if fitted.short:
            shown = _listed(f"{name} ({rows} for {columns})" for name, (rows, columns) in fitted.short.items())
            found.append(
                f"Fewer rows of calibration data than a layer reads columns: {shown}. Such a fit leans on the weights "
                "as they were, and regains less; give more samples."
            )
        if fitted.constant:
            shown = _listed(f"{name} ({dead} of {all_})" for name, (dead, all_) in fitted.constant.items())
            found.append(Note(f"What some layers read never varies on the calibration data, in part: {shown}."))
        if fitted.left_alone:
            shown = _listed(f"{name} ({why})" for name, why in fitted.left_alone.items())
            found.append(Note(f"Left as pruning made them by the repair: {shown}."))
        if len(self.calibration) < FEWEST:
            few = counted(len(self.calibration), "samples")
            found.append(f"The repair had {few}, too few to hold some out: those that it was made with judged it.")
        return tuple(found)


def _followed(model: TorchModel, lost: Lost) -> tuple[TorchModel, Lost]:
    """Both networks as graphs of torch.export, with their own layers, where torch.fx can't follow their forward."""
    try:
        traced_of(lost.before.module, len(lost.before.signature.inputs))
    except GraphError:
        try:
            return as_layers(model), replace(lost, before=as_layers(lost.before))
        except NoLayersError:
            pass  # the repair says why torch.fx can't
    return model, lost


def _with_weights_of(graph: nn.Module, module: nn.Module) -> nn.Module | None:
    """A copy of a module with the parameters and buffers that a graph of its layers has; None where it lacks any.

    The graph itself has decided by one size what its forward decides by each.
    """
    found = copy.deepcopy(module)
    own = dict(found.named_modules())
    for name, layer in graph.named_modules():
        held = {**layer._parameters, **layer._buffers}
        if layer is graph:  # constants of the forward stand there, too
            held = {key: value for key, value in held.items() if hasattr(module, key)}
        elif held and (name not in own or type(own[name]) is not type(layer)):
            return None
        for key, value in held.items():
            setattr(own[name], key, value)
    return found


def _as_it_was(model: TorchModel) -> TorchModel:
    return TorchModel(model.module, model.signature, model.layered, model.ranges, macs_gone=model.macs_gone)


def _listed(texts: Iterable[str]) -> str:
    every = list(texts)
    return ", ".join(every[:3]) + (f" and {len(every) - 3} more" if len(every) > 3 else "")
