"""From options to the list of stages that they stand for."""

from __future__ import annotations

from pathlib import Path

from compress.dataset import Dataset
from compress.errors import RecipeError
from compress.machine import int8_saturates
from compress.model import TorchModel
from compress.options import ExportOptions
from compress.stages import Stage
from compress.stages.finetune import Finetune
from compress.stages.fold_onnx import FoldOnnx
from compress.stages.onnx_from_torch import OnnxFromTorch
from compress.stages.prune_channels import PruneChannels
from compress.stages.quantize_onnx import QuantizeOnnx

__all__ = ["find_data", "stages_for"]


def find_data(source: str, checkpoint: Path) -> str:
    """The path as it is, or, if there is nothing there, beside the checkpoint."""
    beside = checkpoint.parent / source
    return str(beside) if not Path(source).exists() and beside.exists() else source


def stages_for(options: ExportOptions, model: TorchModel, checkpoint: Path) -> list[Stage]:
    """The list of stages, with their data opened and checked.

    Raises:
        RecipeError: options that don't go together.
        DatasetError, SignatureError: data that can't be used.
    """

    def data(source: str) -> Dataset:
        return Dataset.open(find_data(source, checkpoint), model.signature)

    if options.calibration is not None and options.int8 != "static":
        raise RecipeError(
            "calibration data is given, but nothing to calibrate",
            why="only static INT8 takes its ranges from calibration data",
            mend="add --int8 static, or leave --calibration out",
        )
    if options.threads < 1:
        raise RecipeError("can't measure with no thread", why=f"--threads is {options.threads}", mend="give 1 or more")
    stages: list[Stage] = []
    if options.prune is not None:
        stages.append(PruneChannels(options.prune, options.importance, options.seed, options.round_to))
    if options.finetune is not None:
        stages.append(
            Finetune(
                data(options.finetune),
                model,
                epochs=options.epochs,
                learning_rate=options.learning_rate,
                batch_size=options.batch_size,
                seed=options.seed,
            )
        )
    stages += [OnnxFromTorch(), FoldOnnx()]
    if options.int8 is not None:
        calibration = data(options.calibration) if options.calibration is not None else None
        stages.append(QuantizeOnnx(options.int8, calibration, options.calibrator, int8_saturates()))
    return stages
