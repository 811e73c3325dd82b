"""The samples that a model runs on where it is measured: random numbers may be none that it takes."""

from __future__ import annotations

from pathlib import Path

from compress.data.dataset import Dataset
from compress.evaluate.evaluation import Evaluation
from compress.jobs.recipe import data_at
from compress.model import OnnxModel, TorchModel
from compress.options import ExportOptions

__all__ = ["representative"]


def representative(
    options: ExportOptions, model: TorchModel | OnnxModel, judged: Evaluation | None, checkpoint: Path
) -> Dataset | None:
    """Of the evaluation data what proves, else the calibration data; None where there is neither.

    Args:
        options: of the run.
        model: the original.
        judged: evaluation data and the metric, if there is data.
        checkpoint: data is looked for beside it, too.
    """
    if judged is not None:
        return judged.proof
    if options.calibration is None:
        return None
    return Dataset.open(data_at(options.calibration, checkpoint, model), model.signature)
