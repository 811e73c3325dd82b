"""`--dry-run`: the stages of a run, checked against the model and the data, and how long they may take here."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from compress.backends import TorchBackend
from compress.durations import duration
from compress.job import prepare
from compress.measure import cores
from compress.model import TorchModel, sample_inputs
from compress.options import ExportOptions
from compress.stages import Stage
from compress.stages.finetune import Finetune
from compress.stages.prune_channels import PruneChannels
from compress.stages.prune_to_budget import STEPS, PruneToBudget
from compress.stages.quantize_onnx import QuantizeOnnx
from compress.stages.quantize_within import QuantizeWithin
from compress.stages.train_quantized import TrainQuantized
from compress.training_options import TrainingOptions
from compress.wording import counted

__all__ = ["estimate", "plan"]

# How many forwards each kind of work costs, as seen on the benchmark models.
TRAINING_STEP = 3  # the student forward and backward
FAKE_QUANTIZED_STEP = 5
TEACHER = 1  # its forward: once for each sample, or in every epoch where samples are changed at random
PRUNING = 60  # trials of every group, and the search for the ratio
EXPORT_SECONDS = 4.0
MIXED_EVALUATIONS = 12


def plan(checkpoint: Path, options: ExportOptions) -> Table:
    """A table of stages, what each is to do, and its estimated time; nothing is written.

    The estimate comes from timing the model's own forward, at batch 1 and at the training batch: good to a factor of
    two or so.

    Raises:
        ToolkitError: whatever `export` would refuse.
    """
    prepared = prepare(checkpoint, options)
    samples = 0 if prepared.judged is None else len(prepared.judged.proof)
    seconds = estimate(prepared.model, prepared.stages, samples)
    sizes = prepared.model.signature.sizes_text
    title = f"{escape(str(checkpoint))}: what would be done{', at ' + escape(sizes) if sizes else ''}"
    table = Table(title=title, title_justify="left")
    for column in ("stage", "options", "about"):
        table.add_column(column, justify="right" if column == "about" else "left", overflow="fold")
    for name, text, took in seconds:
        table.add_row(name, escape(text), duration(took))
    table.add_row("", f"to {escape(str(options.output))}", duration(sum(took for _, _, took in seconds)), style="bold")
    return table


def estimate(model: TorchModel, stages: Sequence[Stage], samples: int) -> list[tuple[str, str, float]]:
    """(stage, its options, seconds) for each stage, and for the measuring at the end.

    Args:
        model: what the run starts from.
        stages: of the run.
        samples: for evaluation.
    """
    single = _forward_seconds(model, 1)
    found = []
    for stage in stages:
        text = ", ".join(f"{name}={_short(value)}" for name, value in _worth_saying(stage).items())
        found.append((stage.name, text, _stage_seconds(stage, model, single)))
    rows = len(stages) + 2
    text = f"{counted(rows, 'models')}, {counted(samples, 'samples')} each" if samples else f"{counted(rows, 'models')}"
    found.append(("compare, measure", text, rows * (samples * single + 3.0)))
    return found


def _worth_saying(stage: Stage) -> dict[str, object]:
    """Its options; of a training's many, those that are not at their defaults, and the first few."""
    usual = dataclasses.asdict(TrainingOptions()) if isinstance(stage, Finetune | TrainQuantized) else {}
    usual = {name: list(value) if isinstance(value, tuple) else value for name, value in usual.items()}
    always = ("epochs", "learning_rate", "batch_size")
    return {
        name: value
        for name, value in stage.options.items()
        if value not in (None, {}, []) and (name not in usual or name in always or value != usual[name])
    }


def _stage_seconds(stage: Stage, model: TorchModel, single: float) -> float:
    if isinstance(stage, Finetune | TrainQuantized):
        training = stage.finetune
        asked = training.training.batch_size
        size = min(64 if asked == "auto" else asked, len(training.data))
        factor = TRAINING_STEP if isinstance(stage, Finetune) else FAKE_QUANTIZED_STEP
        epochs = training.training.epochs
        taught = epochs if training.training.augment else 1
        forwards = epochs * factor + (TEACHER * taught if training.teacher is not None else 0)
        return forwards * len(training.data) / size * _forward_seconds(model, size)
    if isinstance(stage, PruneToBudget):
        return STEPS * (PRUNING * 2 * single + EXPORT_SECONDS)
    if isinstance(stage, PruneChannels):
        return PRUNING * 2 * single
    if isinstance(stage, QuantizeWithin):
        return _stage_seconds(stage.quantize, model, single) + MIXED_EVALUATIONS * len(stage.data) * single
    if isinstance(stage, QuantizeOnnx):
        return EXPORT_SECONDS / 2 + (0 if stage.calibration is None else len(stage.calibration) * single)
    return EXPORT_SECONDS


def _forward_seconds(model: TorchModel, batch: int) -> float:
    backend = TorchBackend(model, cores())
    inputs = sample_inputs(model.signature, batch)
    backend.infer(inputs)
    start = time.perf_counter()
    backend.infer(inputs)
    return time.perf_counter() - start


def _short(value: object) -> str:
    text = str(value)
    return text[:12] if isinstance(value, str) and len(value) == 64 else text if len(text) <= 40 else text[:37] + "…"
