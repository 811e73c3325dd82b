"""`--dry-run`: the stages of a run, checked against the model and the data, and how long they will take here."""

from __future__ import annotations

import dataclasses
import re
import tempfile
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
from compress.errors import StageError
from compress.jobs.export import Prepared, Silent, baseline_of, prepare
from compress.jobs.rehearsal import Tried, rehearse
from compress.jobs.rehearse_report import report_seconds
from compress.model import Model, OnnxModel, TorchModel
from compress.onnx_export.from_torch import OnnxFromTorch
from compress.options import ExportOptions
from compress.options.training import TrainingOptions
from compress.pipeline import Outcome, Watcher, kept_from_before
from compress.quantize.qat.train_quantized import TrainQuantized
from compress.stage import Given, Stage
from compress.storage.stage_cache import StageCache
from compress.training.finetune import Finetune

__all__ = ["Estimate", "estimates", "plan"]

HASH = re.compile(r"[0-9a-f]{64}")
LONGEST = 80  # characters of one option


@dataclass(frozen=True)
class Estimate:
    """Of a row of the table.

    Attributes:
        name: of the stage.
        text: its options, in words.
        seconds: that it will take; None where that can't be tried.
        kept: whether it is taken from an earlier run.
        one_thread: seconds that a training takes with one thread, where that is far less.
    """

    name: str
    text: str
    seconds: float | None
    kept: bool = False
    one_thread: float | None = None

    @property
    def told(self) -> str:
        """For the table."""
        if self.kept:
            return "kept from before"
        told = "not tried" if self.seconds is None else duration(self.seconds)
        return told if self.one_thread is None else f"{told}; {duration(self.one_thread)} with --train-threads 1"


def plan(
    checkpoint: Path, options: ExportOptions, watcher: Watcher | None = None, cache: StageCache | None = None
) -> Table:
    """A table of stages, what each is to do, and how long it will take; nothing is written.

    Raises:
        ToolkitError: whatever `export` would refuse, and what its stages would end with at once.
    """
    found, sizes = estimates(checkpoint, options, watcher or Silent(), cache)
    title = f"{escape(str(checkpoint))}: what would be done{', at ' + escape(sizes) if sizes else ''}"
    table = Table(title=title, title_justify="left")
    for column in ("stage", "options", "about"):
        table.add_column(column, justify="right" if column == "about" else "left", overflow="fold")
    for row in found:
        table.add_row(row.name, escape(row.text), row.told)
    total = sum(row.seconds or 0.0 for row in found)
    least = "at least " if any(row.seconds is None for row in found) else ""
    table.add_row("", f"to {escape(str(options.output))}", f"{least}{duration(total)}", style="bold")
    return table


def estimates(
    checkpoint: Path, options: ExportOptions, watcher: Watcher, cache: StageCache | None = None
) -> tuple[list[Estimate], str]:
    """Each row of a dry run, and the sizes that its figures are for.

    Stages are begun for real, one after the other, each on what the one before it gave (see `rehearsal`): of what has
    samples or steps a few are done, the rest whole. What the work folder or the cache keeps from before costs nothing.
    """
    begun = time.perf_counter()
    prepared = prepare(checkpoint, options).cached(cache)
    found = [Estimate("load, check", "", time.perf_counter() - begun)]
    with tempfile.TemporaryDirectory() as name:
        baseline, original = _original(prepared, Path(name) / "original", watcher)
        outcomes, rows = _stages(prepared, Path(name), baseline, watcher)
        found += [*original, *rows]
        last = baseline[-1].given.model if baseline else prepared.model
        assert isinstance(last, OnnxModel)  # noqa: S101  the original's own export ends in a file
        samples = 0 if prepared.judged is None else len(prepared.judged.proof)
        models = counted(len(outcomes) + 2, "models")
        text = f"{models}, {counted(samples, 'samples')} each" if samples else models
        progress = watcher.started("trying: compare, measure")
        measuring = report_seconds(checkpoint, options, prepared.model, last, outcomes, prepared.judged, progress)
        found.append(Estimate("compare, measure", text, measuring))
    return found, prepared.model.signature.sizes_text


def _original(prepared: Prepared, folder: Path, watcher: Watcher) -> tuple[list[Outcome], list[Estimate]]:
    """The original's own export, which the result is compared with, if it has one."""
    stages = baseline_of(prepared.stages)
    if not stages:
        return [], []
    tried = _tried(prepared, stages, prepared.work / "original", folder, watcher)
    kept = all(outcome.reused for outcome, _ in tried)
    seconds = sum(each.seconds or 0.0 for _, each in tried)
    row = Estimate("original: onnx_from_torch, fold_onnx", "to compare with", seconds, kept)
    return [outcome for outcome, _ in tried], [row]


def _stages(
    prepared: Prepared, folder: Path, baseline: Sequence[Outcome], watcher: Watcher
) -> tuple[list[Outcome], list[Estimate]]:
    # Where nothing is done in torch, the original's own export is the first stage's.
    shared = baseline[:1] if isinstance(prepared.stages[0], OnnxFromTorch) else ()
    tried = _tried(prepared, prepared.stages, prepared.work, folder, watcher, shared)
    rows = []
    for outcome, each in tried:
        names = _sources(outcome.stage)
        worth = {name: _short(value, names) for name, value in _worth_saying(outcome.stage).items()}
        text = ", ".join(f"{name}={value}" for name, value in worth.items() if value)
        text += f"; as tried: {each.failed}" if each.failed else ""
        rows.append(Estimate(outcome.stage.name, text, each.seconds, outcome.reused, each.one_thread))
    return [outcome for outcome, _ in tried], rows


def _tried(
    prepared: Prepared,
    stages: Sequence[Stage],
    work: Path,
    folder: Path,
    watcher: Watcher,
    shared: Sequence[Outcome] = (),
) -> list[tuple[Outcome, Tried]]:
    """What each stage gave, or what stands for that, and how long it will take.

    Args:
        prepared: the run.
        stages: of it.
        work: keeps what earlier runs did of them.
        folder: for what is written now.
        watcher: is told how it goes on.
        shared: the first stages' outcomes, where others have them.
    """
    found: list[tuple[Outcome, Tried]] = [(outcome, Tried(outcome.given, 0.0)) for outcome in shared]
    folder.mkdir(exist_ok=True)
    kept = kept_from_before(stages, work, prepared.source, prepared.cache, folder, prepared.model)
    for place, stage in list(enumerate(stages))[len(shared) :]:
        outcome, at = kept[place]
        if outcome is not None:
            found.append((outcome, Tried(outcome.given, 0.0)))
            continue
        model: Model = found[-1][0].given.model if found else prepared.model
        beside = folder / at.name
        beside.mkdir()
        progress = watcher.started(f"trying: {stage.name}")
        begun = time.perf_counter()
        try:
            tried = rehearse(stage, model, beside, at, progress)
        except StageError as err:
            weights_to_come = any(_trains(each.stage) and not each.reused for each, _ in found)
            if not weights_to_come or stage.takes is not stage.gives:
                raise
            tried = Tried(Given(model, ""), time.perf_counter() - begun, failed=err.what)
        found.append((Outcome(stage, tried.given, tried.seconds or 0.0, reused=False, size_bytes=None), tried))
    return found


def _trains(stage: Stage) -> bool:
    return isinstance(stage, Finetune | TrainQuantized)


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
    usual = dataclasses.asdict(TrainingOptions()) if _trains(stage) else {}
    usual = {name: list(value) if isinstance(value, tuple) else value for name, value in usual.items()}
    always = ("epochs", "learning_rate", "batch_size")
    return {
        name: value
        for name, value in stage.options.items()
        if value not in (None, {}, []) and (name not in usual or name in always or value != usual[name])
    }


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
