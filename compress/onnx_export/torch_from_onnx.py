"""An ONNX file of someone else's as a network of torch.nn layers, proven against it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import onnx

from compress.console.wording import counted
from compress.data.dataset import Dataset
from compress.evaluate.parity import TOLERANCE
from compress.formats.onnx.scope import made_by
from compress.formats.onnx_layers.graph import NOT_PRUNED, layers_of
from compress.model import Arrays, Model, OnnxModel, TorchModel, example_inputs, sample_inputs
from compress.model.infer import elsewhere, runs_at
from compress.onnx_export.equal import BATCHES, Wording, equal_throughout, sizes_assumed
from compress.onnx_export.equal_elsewhere import equal_elsewhere
from compress.onnx_export.from_file import HALF_TOLERANCE, UNSIGNED, plain, refuse, refuse_random, whole
from compress.onnx_export.from_torch import OPSET
from compress.runtime.backends import OnnxBackend, TorchBackend
from compress.runtime.measure import cores
from compress.stage import Given, Progress

__all__ = ["TorchFromOnnx", "taken_back"]

MEND = f"{NOT_PRUNED}; and report this file"
FIXED = (
    "where it is given inputs of one size alone, fix {} at it in the file, as "
    "`python -m onnxruntime.tools.make_dynamic_shape_fixed` does"
)
FIXED_ALL = FIXED.format("the dimension")


@dataclass(frozen=True)
class TorchFromOnnx:
    """The file's graph as layers, which can be pruned and trained; inputs and outputs stay as they are.

    Attributes:
        data: samples to compare on, besides random inputs.
    """

    data: Dataset | None = None

    name: ClassVar[str] = "torch_from_onnx"
    takes: ClassVar[type] = OnnxModel
    gives: ClassVar[type] = TorchModel

    @property
    def options(self) -> Mapping[str, Any]:
        return {"data": None if self.data is None else self.data.sha256}

    def check(self, model: Model) -> None:
        assert isinstance(model, OnnxModel)  # noqa: S101  it is what a pipeline starts from
        _layers(model)

    def run(self, model: OnnxModel, folder: Path, progress: Progress) -> Given:  # noqa: ARG002
        given, half, kept = _layers(model)
        parity, others = _proven(model, given, self.data, progress, half=half)
        worst = max(figures["max_abs_error"] for figures in parity.values())
        layers = sum(1 for each in given.module.modules() if next(each.parameters(recurse=False), None) is not None)
        return Given(
            given,
            did=f"taken back to {counted(layers, 'layers')} of torch; "
            f"answers as the file does (largest difference {worst:.1e})",
            details={"parity": parity, "equal_at_sizes": others, "kept_as_they_are": dict(kept)},
            warnings=(*_stay(kept), *sizes_assumed(model.signature.settled)),
        )


def _stay(kept: Mapping[str, str]) -> tuple[str, ...]:
    if not kept:
        return ()
    some = "; ".join(f"{node} ({why})" for node, why in list(kept.items())[:5])
    more = f"; and {len(kept) - 5} more" if len(kept) > 5 else ""
    what = f"kept in ONNX as in the file, {counted(len(kept), 'nodes')} that nothing is pruned or trained through"
    return (f"{what}: {some}{more}",)


def taken_back(model: OnnxModel) -> TorchModel:
    """The network of a file, proven on random inputs.

    Raises:
        StageError: an operator has no form as a layer or function of torch, or the answers are others.
    """
    given, half, _ = _layers(model)
    _proven(model, given, None, lambda _done, _total, _note: None, half=half)
    return given


def _layers(model: OnnxModel) -> tuple[TorchModel, bool, Mapping[str, str]]:
    """The network, whether the file is in FP16, and which of its nodes stay as they are, with the reason."""
    refuse(model.path)
    made = whole(model.path)
    _, half = plain(made, model.signature.settled, model.path)
    signature = model.signature.settled

    def others() -> list[Arrays]:
        sizes, runs = signature.at(2), runs_at(model.module, signature.inputs)
        tried = [elsewhere(runs, sizes, dims) for dims in (*([dim] for dim in sizes), sizes)]
        return [example_inputs(signature.inputs, each) for each in tried if each != sizes]

    module, kept = layers_of(made, sample_inputs(model.signature, 2), str(model.path), others, OPSET)
    return TorchModel(module, signature, processor=model.processor), half, kept


def _proven(
    model: OnnxModel, given: TorchModel, data: Dataset | None, progress: Progress, *, half: bool
) -> tuple[dict[str, dict[str, Any]], dict[str, list[int]]]:
    """How far both are apart, by what they were compared on, and the other sizes that they are equal at."""
    signature = model.signature.settled
    before, after = OnnxBackend(OnnxModel(model.path, signature), cores()), TorchBackend(given, cores())
    words = Wording("the file, taken back to layers,", "in the original", MEND, MEND, FIXED, UNSIGNED)
    tolerance = HALF_TOLERANCE if half else TOLERANCE
    logistic = made_by("Sigmoid", onnx.load(model.path, load_external_data=False).graph)
    parity = equal_throughout(
        model.module, before, after, signature, data, progress, words, tolerance=tolerance, both=True, steps=(0, 1),
        logistic=logistic, doubted=lambda inputs, err: refuse_random(model.path, before, inputs, err),
    )  # fmt: skip
    total = len(BATCHES) + (data is not None) + 1
    others = equal_elsewhere(
        model.module, before, after, signature, progress, replace(words, fails=f"{FIXED_ALL}; {MEND}",
        differs=f"{FIXED_ALL}; {MEND}"), done=(total - 1, total), tolerance=tolerance, logistic=logistic, smaller=True,
    )  # fmt: skip
    return parity, others.equal
