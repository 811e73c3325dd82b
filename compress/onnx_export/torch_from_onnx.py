"""An ONNX file of someone else's as a network of torch.nn layers, proven against it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import onnx

from compress.console.wording import counted
from compress.data.dataset import Dataset
from compress.evaluate.parity import TOLERANCE
from compress.formats.onnx.scope import made_by
from compress.formats.onnx_layers.graph import NOT_PRUNED, layers_of
from compress.model import Model, OnnxModel, TorchModel, sample_inputs
from compress.onnx_export.equal import Wording, equal_throughout, sizes_assumed
from compress.onnx_export.from_file import HALF_TOLERANCE, plain, refuse, whole
from compress.runtime.backends import OnnxBackend, TorchBackend
from compress.runtime.measure import cores
from compress.stage import Given, Progress

__all__ = ["TorchFromOnnx", "taken_back"]

MEND = f"{NOT_PRUNED}; and report this file"
FIXED = (
    "where it is given inputs of one size alone, fix {} at it in the file, as "
    "`python -m onnxruntime.tools.make_dynamic_shape_fixed` does"
)


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
        given, half = _layers(model)
        parity = _proven(model, given, self.data, progress, half=half)
        worst = max(figures["max_abs_error"] for figures in parity.values())
        layers = sum(1 for each in given.module.modules() if next(each.parameters(recurse=False), None) is not None)
        return Given(
            given,
            did=f"taken back to {counted(layers, 'layers')} of torch; "
            f"answers as the file does (largest difference {worst:.1e})",
            details={"parity": parity},
            warnings=sizes_assumed(model.signature.settled),
        )


def taken_back(model: OnnxModel) -> TorchModel:
    """The network of a file, proven on random inputs.

    Raises:
        StageError: an operator has no form as a layer or function of torch, or the answers are others.
    """
    given, half = _layers(model)
    _proven(model, given, None, lambda _done, _total, _note: None, half=half)
    return given


def _layers(model: OnnxModel) -> tuple[TorchModel, bool]:
    refuse(model.path)
    made = whole(model.path)
    _, half = plain(made, model.signature.settled, model.path)
    module = layers_of(made, sample_inputs(model.signature, 2), str(model.path))
    return TorchModel(module, model.signature.settled, processor=model.processor), half


def _proven(
    model: OnnxModel, given: TorchModel, data: Dataset | None, progress: Progress, *, half: bool
) -> dict[str, dict[str, Any]]:
    signature = model.signature.settled
    before, after = OnnxBackend(OnnxModel(model.path, signature), cores()), TorchBackend(given, cores())
    words = Wording("the file, taken back to layers,", "in the original", MEND, MEND, FIXED)
    tolerance = HALF_TOLERANCE if half else TOLERANCE
    logistic = made_by("Sigmoid", onnx.load(model.path, load_external_data=False).graph)
    return equal_throughout(
        model.module, before, after, signature, data, progress, words, tolerance=tolerance, both=True,
        logistic=logistic,
    )  # fmt: skip
