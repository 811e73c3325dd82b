"""`--dry-run`: the stages of a run, checked against the model and the data, and how long they may take here."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from compress.console.durations import duration
from compress.console.wording import counted
from compress.data.dataset import Dataset
from compress.jobs.export import baseline_of, prepare
from compress.model import TorchModel, sample_inputs
from compress.onnx_export.fold import FoldOnnx
from compress.onnx_export.from_torch import OnnxFromTorch
from compress.options import ExportOptions
from compress.options.training import TrainingOptions
from compress.pipeline import kept_from_before
from compress.prune.prune_channels import PruneChannels
from compress.prune.prune_to_budget import STEPS, PruneToBudget
from compress.quantize.faster import BLOCK_SECONDS as MIXTURE_SECONDS
from compress.quantize.faster import ROUNDS
from compress.quantize.qat.train_quantized import TrainQuantized
from compress.quantize.quantize_faster import QuantizeFaster
from compress.quantize.quantize_onnx import QuantizeOnnx
from compress.quantize.quantize_within import QuantizeWithin
from compress.runtime.backends import TorchBackend
from compress.runtime.latency import BLOCK_SECONDS, FEWEST, MOST, SECONDS
from compress.runtime.measure import cores
from compress.stage import Stage
from compress.training.finetune import Finetune

__all__ = ["estimate", "plan"]

# How many forwards of one sample each kind of work costs, and what goes with the size of the file and not with them,
# as seen on a ResNet-50, a ViT-B and a BERT-base (benchmarks/compress_large.py).
TRAINING_STEP = 3  # the student forward and backward
FAKE_QUANTIZED_STEP = 5
TEACHER = 1  # its forward: once for each sample, or in every epoch where samples are changed at random
PRUNING = 140  # trials of every group, and the search for the ratio
MIXED_EVALUATIONS = 12
MIXTURES = 30
FORWARDS = 3  # that are timed: the fastest counts
HASH = re.compile(r"[0-9a-f]{64}")
LONGEST = 80  # characters of one option


@dataclass(frozen=True)
class Cost:
    """Of one kind of work: so many seconds, so many for each gigabyte of weights, and so many forwards."""

    seconds: float
    per_gigabyte: float
    forwards: float

    def of(self, gigabytes: float, single: float) -> float:
        """In seconds."""
        return self.seconds + self.per_gigabyte * gigabytes + self.forwards * single


EXPORT, FOLD, QUANTIZE = Cost(2.5, 20, 25), Cost(0.3, 20, 12), Cost(1.0, 25, 2)
ALONE, ROOFS, TELLING = Cost(1.5, 4, 4), Cost(2.0, 8, 6), Cost(4.0, 5, 2)  # memory, roofline, counts and report


def plan(checkpoint: Path, options: ExportOptions) -> Table:
    """A table of stages, what each is to do, and its estimated time; nothing is written.

    The estimate comes from the size of the model, and from timing its own forward, at batch 1 and at the training
    batch: good to a factor of two or so. What the work folder keeps from before costs nothing.

    Raises:
        ToolkitError: whatever `export` would refuse.
    """
    begun = time.perf_counter()
    prepared = prepare(checkpoint, options)
    samples = 0 if prepared.judged is None else len(prepared.judged.proof)
    kept = kept_from_before(prepared.stages, prepared.work, prepared.source)
    baseline = baseline_of(prepared.stages)
    first = all(kept_from_before(baseline, prepared.work / "original", prepared.source))
    seconds = [("load, check", "", time.perf_counter() - begun, False)]
    seconds += estimate(prepared.model, prepared.stages, samples, kept, original_kept=first)
    sizes = prepared.model.signature.sizes_text
    title = f"{escape(str(checkpoint))}: what would be done{', at ' + escape(sizes) if sizes else ''}"
    table = Table(title=title, title_justify="left")
    for column in ("stage", "options", "about"):
        table.add_column(column, justify="right" if column == "about" else "left", overflow="fold")
    for name, text, took, done in seconds:
        table.add_row(name, escape(text), "kept from before" if done else duration(took))
    total = sum(took for *_, took, done in seconds if not done)
    table.add_row("", f"to {escape(str(options.output))}", duration(total), style="bold")
    return table


def estimate(
    model: TorchModel, stages: Sequence[Stage], samples: int, kept: Sequence[bool] = (), *, original_kept: bool = False
) -> list[tuple[str, str, float, bool]]:
    """(stage, its options, seconds, whether it is kept from before): the original's export, each stage, the measuring.

    Args:
        model: what the run starts from.
        stages: of the run.
        samples: for evaluation.
        kept: for each stage, whether an earlier run did it.
        original_kept: likewise.
    """
    single, gigabytes = _forward_seconds(model, 1), _gigabytes(model)
    exporting = EXPORT.of(gigabytes, single) + FOLD.of(gigabytes, single)
    shared = isinstance(stages[0], OnnxFromTorch)  # the original's own export is the first stage's
    found = [("original: onnx_from_torch, fold_onnx", "to compare with", exporting, original_kept)]
    for place, stage in enumerate(stages):
        names = _sources(stage)
        worth = {name: _short(value, names) for name, value in _worth_saying(stage).items()}
        text = ", ".join(f"{name}={value}" for name, value in worth.items() if value)
        done = bool(kept) and kept[place]
        seconds = 0.0 if shared and not place else _stage_seconds(stage, model, single, gigabytes)
        found.append((stage.name, text, seconds, done))
    rows = len(stages) + 2
    text = f"{counted(rows, 'models')}, {counted(samples, 'samples')} each" if samples else counted(rows, "models")
    files = sum(stage.gives is not TorchModel for stage in stages) + 1
    measuring = rows * samples * single + _latency_seconds(rows, single)
    measuring += files * ALONE.of(gigabytes, single) + 2 * ROOFS.of(gigabytes, single) + TELLING.of(gigabytes, single)
    found.append(("compare, measure", text, measuring, False))
    return found


def _latency_seconds(rows: int, single: float) -> float:
    """Of turns that end about halfway between the fewest rounds and the most, or at the limit."""
    block = max(BLOCK_SECONDS, single)
    halfway = rows * (FEWEST + MOST) / 2 * block
    return min(halfway, max(SECONDS, rows * FEWEST * block)) + rows * 2 * single


def _gigabytes(model: TorchModel) -> float:
    tensors = (*model.module.parameters(), *model.module.buffers())
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors) / 1e9


def _sources(stage: Any) -> dict[str, str]:
    """Names of the data that a stage reads, by hash."""
    found: dict[str, str] = {}
    for field in dataclasses.fields(stage):
        value = getattr(stage, field.name)
        if isinstance(value, Dataset):
            found[value.sha256] = Path(value.source).name
        elif dataclasses.is_dataclass(value) and not isinstance(value, type) and not isinstance(value, TorchModel):
            found |= _sources(value)
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


def _stage_seconds(stage: Stage, model: TorchModel, single: float, gigabytes: float) -> float:
    if isinstance(stage, Finetune | TrainQuantized):
        training = stage if isinstance(stage, Finetune) else stage.training
        asked = training.training.batch_size
        size = min(64 if asked == "auto" else asked, len(training.data))
        factor = TRAINING_STEP if isinstance(stage, Finetune) else FAKE_QUANTIZED_STEP
        epochs = training.training.epochs
        taught = epochs if training.training.augment else 1
        forwards = epochs * factor + (TEACHER * taught if training.teacher is not None else 0)
        return forwards * len(training.data) / size * _forward_seconds(model, size)
    if isinstance(stage, PruneToBudget):
        tail = sum(_stage_seconds(each, model, single, gigabytes) for each in stage.tail)
        return PRUNING * single + STEPS * (tail + _latency_seconds(1, single))
    if isinstance(stage, PruneChannels):
        return PRUNING * single
    if isinstance(stage, QuantizeWithin):
        choosing = 0.0 if stage.faster is None else _choosing_seconds(single)
        evaluating = MIXED_EVALUATIONS * len(stage.data) * single
        return _stage_seconds(stage.quantize, model, single, gigabytes) + choosing + evaluating
    if isinstance(stage, QuantizeFaster):
        return _stage_seconds(stage.quantize, model, single, gigabytes) + _choosing_seconds(single)
    if isinstance(stage, QuantizeOnnx):
        calibrating = 0 if stage.calibration is None else len(stage.calibration) * single
        return QUANTIZE.of(gigabytes, single) + calibrating
    return (FOLD if isinstance(stage, FoldOnnx) else EXPORT).of(gigabytes, single)


def _choosing_seconds(single: float) -> float:
    """Of mixtures of INT8 and float in turns."""
    return MIXTURES * (ROUNDS * max(MIXTURE_SECONDS, 3 * single) + 0.1)


def _forward_seconds(model: TorchModel, batch: int) -> float:
    backend = TorchBackend(model, cores())
    inputs = sample_inputs(model.signature, batch)
    backend.infer(inputs)
    taken: list[float] = []
    while len(taken) < FORWARDS and sum(taken) < 1.0:
        start = time.perf_counter()
        backend.infer(inputs)
        taken.append(time.perf_counter() - start)
    return min(taken)


def _short(value: object, names: Mapping[str, str]) -> str:
    """In words; a hash is the name of what it is of, and nothing where that is not known."""
    if isinstance(value, Mapping):
        inner = {str(key): _short(held, names) for key, held in value.items() if held not in (None, {}, [])}
        text = f"({', '.join(f'{key}={held}' for key, held in inner.items() if held)})"
    elif isinstance(value, list | tuple):  # of stages, each with its options: their names will do
        text = " ".join(_short(held, names) for held in value if not isinstance(held, Mapping))
    elif isinstance(value, str) and HASH.fullmatch(value):
        text = names.get(value, "")
    else:
        text = HASH.sub("", str(value))
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"
