"""`compress finetune`: a training alone, of any model that has its layers; all or nothing."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shlex
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from compress.console.wording import assumed_of, counted
from compress.data.dataset import Dataset
from compress.errors import CheckpointError, LostError, SignatureError, ToolkitError
from compress.evaluate.compare import compare
from compress.evaluate.evaluation import judged as judged_by
from compress.evaluate.intervals import difference_interval, mean_interval
from compress.evaluate.kinder import overlap_words
from compress.evaluate.metrics import Metric
from compress.formats.checkpoint import fingerprint, write
from compress.jobs.places import TRAINING, check_output, claimed, held
from compress.jobs.profiled import profile_told
from compress.jobs.recipe import data_at, inputs_of, labelled_of, training_of, with_sizes
from compress.jobs.source import load_source
from compress.model import TorchModel
from compress.model.in_order import in_order_of, places_of
from compress.options import FinetuneOptions
from compress.options.ranges import check_ranges
from compress.pipeline import Outcome, Watcher, check, hashing_shown, run, with_seen
from compress.report.training import write_page
from compress.runtime.backends import Backend, TorchBackend
from compress.runtime.machine import environment, versions
from compress.runtime.measure import cores, torch_params, torch_work
from compress.stage import Given
from compress.storage.stage_cache import StageCache
from compress.storage.steady import refuse_changed, steady
from compress.training.finetune import Finetune
from compress.training.loop import TRACE_FILE
from compress.training.machine.launch import all_here, lost_another
from compress.training.machine.setup import device_kind, distributed, fabric_for, launched, rank, refuse_others
from compress.vetting.swap import replacing_folder

__all__ = ["Recovery", "Row", "finetune"]


@dataclass(frozen=True)
class Row:
    """A model judged on the evaluation data.

    Attributes:
        name: "before", "after" or "original".
        value, low, high: the metric with its 95% interval.
        drop, drop_low, drop_high: against the first row, paired by sample, in points for shares.
    """

    name: str
    value: float
    low: float | None = None
    high: float | None = None
    drop: float | None = None
    drop_low: float | None = None
    drop_high: float | None = None


@dataclass(frozen=True)
class Recovery:
    """What a training gave.

    Attributes:
        folder: with model.pt (or weights.pt), training.json and training.html.
        model_file: its name in the folder.
        did: in a clause.
        seconds: that the stage took, earlier parts of a resumed one not counted.
        metric: of the rows; None without evaluation data.
        rows: the models judged.
        details: the training's own figures.
        warnings: what to know.
        findings: those of the warnings that the stage itself did not tell.
        profile: where the time of a step went, in clauses, or why that is not known; none where nobody asked.
        flags: that the file is loaded with, where it is a state_dict.
    """

    folder: Path
    model_file: str
    did: str
    seconds: float
    metric: str | None
    rows: tuple[Row, ...]
    details: Mapping[str, Any]
    warnings: tuple[str, ...]
    findings: tuple[str, ...] = ()
    profile: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()

    @property
    def next(self) -> tuple[str, ...]:
        """Commands and files to go on with."""
        model = shlex.join([str(self.folder / self.model_file), *self.flags])
        return (
            f"compress inspect {model}",
            f"compress export {model} -o ARTIFACT",
            f"see {self.folder / 'training.html'}",
        )


def finetune(
    checkpoint: str | Path, options: FinetuneOptions, *, watcher: Watcher, cache: StageCache | None = None
) -> Recovery | None:
    """Train a model, judge it before and after, and write it with a report.

    Args:
        checkpoint: any model file that still has its layers.
        options: what to do.
        watcher: is told how it goes on.
        cache: where a training is found again by runs with other folders; by default nowhere.

    Returns:
        What was written; None in a process that torchrun started beside the first one.

    Raises:
        ToolkitError: input that can't be used, or a training that diverges; what was there before is left as it was.
    """
    check_ranges(options)
    checkpoint = Path(checkpoint)
    if rank() > 0:  # the first process holds the places for all
        with steady():
            held(checkpoint)
            return _finetune(checkpoint, options, watcher, cache)
    with claimed(options.output, _work(options), inputs_of(options, checkpoint)), hashing_shown(watcher):
        return _finetune(checkpoint, options, watcher, cache)


def _work(options: FinetuneOptions) -> Path:
    return options.work or options.output.parent / f"{options.output.name}.work"


def _finetune(
    checkpoint: Path, options: FinetuneOptions, watcher: Watcher, cache: StageCache | None
) -> Recovery | None:
    with _failure_told(options):
        check_output(options.output, TRAINING)
        model = with_sizes(
            load_source(checkpoint, options), checkpoint, {"training": options.data, "evaluation": options.eval}
        )
        if options.teacher is not None:
            held(options.teacher)
        teacher = None if options.teacher is None else load_source(options.teacher, options)
        by_place = "" if teacher is None else _taught_by(teacher, model, options, checkpoint)

        def data(source: str | None) -> Dataset | None:
            return None if source is None else Dataset.open(data_at(source, checkpoint, model), model.signature)

        training, validation, judged = data(options.data), data(options.validation), data(options.eval)
        assert training is not None  # noqa: S101  the option is required
        metric: Metric | None = None
        notes: tuple[str, ...] = ()
        if judged is not None:
            judged, metric, notes = judged_by(judged, options.metric, options.judge, model)
        seen = "" if judged is None else judged.sha256
        stage = Finetune(training, teacher, training_of(options), options.seed, validation, seen, labelled_of(options))
        check([stage], model)
        if judged is not None and rank() == 0:  # of the same data as a whole, the stage warns
            made_with = {"data": training} | ({} if validation is None else {"validation": validation})
            notes += overlap_words(judged, {name: each for name, each in made_with.items() if each.sha256 != seen})
    findings = notes + ((by_place,) if by_place else ())
    source = fingerprint(model) + ("" if teacher is None else fingerprint(teacher)) + json.dumps(versions())
    work = _work(options)
    outcome = _run(stage, model, work, source, watcher, tidy=options.work is None, cache=cache)
    if rank() > 0:  # a machine that was let go is made anew, or ends the first one, too
        with _loss_told():
            all_here()
        return None
    profile = profile_told(outcome)
    if "profile" not in outcome.given.details:  # which the page tells by itself
        notes += profile
    notes += ((by_place,) if by_place else ()) + assumed_of(model.assumed, "" if teacher is None else teacher.assumed)
    given = dataclasses.replace(outcome.given, warnings=(*outcome.given.warnings, *notes))
    assert isinstance(given.model, TorchModel)  # noqa: S101  the stage gives one
    rows: tuple[Row, ...] = ()
    if judged is not None and metric is not None:
        models = {"before": model, "after": given.model} | (
            {} if teacher is None else {"original": in_order_of(teacher, model.signature)}
        )
        progress = watcher.started("compare")
        backends: dict[str, Backend] = {name: TorchBackend(each, cores()) for name, each in models.items()}
        reference = "before" if teacher is None else "original"
        found = compare(reference, backends, judged, metric, progress=lambda d, t: progress(d, t, "samples"))
        first = found[reference]
        odd = tuple(
            f"{name}: outputs for {each.not_finite} of {counted(each.samples, 'samples')} hold NaN or infinity."
            for name, each in found.items()
            if each.not_finite
        )
        given, findings = dataclasses.replace(given, warnings=(*given.warnings, *odd)), findings + odd
        for name in [reference, *(name for name in ("before", "after") if name != reference)]:
            row = Row(name, found[name].value)
            scores = found[name].scores
            if scores is not None and first.scores is not None:
                own = mean_interval(scores, bounds=metric.bounds)
                against = difference_interval(scores, first.scores, bounds=metric.bounds).times(metric.points)
                drop = None if name == reference else metric.drop(first.value, found[name].value)
                row = Row(name, found[name].value, own.low, own.high, drop, against.low, against.high)
            rows = (*rows, row)
        if teacher is not None or not _clearly_better(rows[-1]):
            doubts = tuple(f"{doubt} No drop is told." for doubt in first.doubts)
            given = dataclasses.replace(given, warnings=(*given.warnings, *doubts))
            findings += doubts
            rows = tuple(_untold(row) for row in rows) if first.doubts else rows
    refuse_changed()
    _write(model, given, outcome.seconds, rows, options, checkpoint, metric.name if metric else None, stage, work)
    if launched():
        shutil.rmtree(_folder(stage, source, work), ignore_errors=True)
        with suppress(RuntimeError):  # what is written is written, whoever is gone
            all_here()
    name = "model.pt" if (options.output / "model.pt").exists() else "weights.pt"
    flags: tuple[str, ...] = ()
    if name == "weights.pt":
        flags = (
            "--model",
            options.model or "MODULE:FACTORY",
            *(word for text in options.input for word in ("--input", text)),
        )
    return Recovery(
        options.output, name, given.did, outcome.seconds, metric.name if metric else None, rows, given.details,
        given.warnings, findings, profile, flags,
    )  # fmt: skip


def _clearly_better(after: Row) -> bool:
    """Whether a training from labels alone has brought something: before it, chance is what is to be beaten."""
    return after.drop_high is not None and after.drop_high < 0


def _untold(row: Row) -> Row:
    """A row without its drop, which would mean nothing."""
    return dataclasses.replace(row, drop=None, drop_low=None, drop_high=None)


def _run(
    stage: Finetune, model: TorchModel, work: Path, source: str, watcher: Watcher, *, tidy: bool,
    cache: StageCache | None,
) -> Outcome:  # fmt: skip
    if not launched():
        return run([stage], model, work=work, source=source, watcher=watcher, tidy=tidy, cache=cache)[-1]
    # All processes train, whatever the folder of the first one holds already; of how many there are the key says
    # nothing, as torchrun goes on with those that are left.
    folder = _folder(stage, source, work)
    if rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
    progress = watcher.started(stage.name) if rank() == 0 else lambda _done, _total, _note: None
    with _loss_told():
        given = stage.run(model, folder, progress)
    outcome = with_seen(Outcome(stage, given, given.details["training_seconds"], reused=False, size_bytes=None))
    if rank() == 0:
        watcher.ended(outcome)
    return outcome


@contextmanager
def _loss_told() -> Iterator[None]:
    """Of another process, in words.

    Raises:
        LostError: one is gone.
    """
    try:
        yield
    except RuntimeError as err:
        if not lost_another(err):
            raise
        raise LostError(
            "the training has lost one of its processes",
            why=f"what this one waited for from another did not come: {str(err).splitlines()[0][:200]}",
            mend="start it again: it goes on from what was kept; torchrun does so by itself with --max-restarts",
        ) from err


@contextmanager
def _failure_told(options: FinetuneOptions) -> Iterator[None]:
    """Let the processes that wait for this one refuse, too, where it can't begin."""
    try:
        yield
    except ToolkitError:
        if distributed():
            with suppress(Exception):  # that they don't go together is what the others tell
                kind, sharded = device_kind(options.accelerator), options.strategy == "fsdp"
                refuse_others(fabric_for(kind, "32-true", nn.Identity(), sharded=sharded), f"{rank()} can't begin")
        raise


def _folder(stage: Finetune, source: str, work: Path) -> Path:
    """Of a training that torchrun started."""
    key = hashlib.sha256(json.dumps([source, dict(stage.options)], sort_keys=True).encode()).hexdigest()
    return work / f"training-{key[:12]}"


def _taught_by(teacher: TorchModel, model: TorchModel, options: FinetuneOptions, checkpoint: Path) -> str:
    """What is assumed of which outputs and inputs of the two are the same, in words; "" where names say it.

    Raises:
        SignatureError: they don't fit.
    """
    words = []
    for ours, theirs, what in (
        (model.signature.inputs, teacher.signature.inputs, "inputs"),
        (model.signature.outputs, teacher.signature.outputs, "outputs"),
    ):
        try:
            places_of(ours, theirs)
        except SignatureError as err:
            raise SignatureError(
                f"{options.teacher} can't teach {checkpoint}",
                why=f"its {what} are {', '.join(map(str, theirs))}, the model's {', '.join(map(str, ours))}",
                mend=f"name the model that this one was pruned from; here {err.what}: {err.mend}",
            ) from err
        if len(ours) > 1 and ours[0].name not in {spec.name for spec in theirs}:
            pairs = (f"{mine.name} as {its.name}" for mine, its in zip(ours, theirs, strict=True))
            words.append(f"{what} by their order ({', '.join(pairs)})")
    if not words:
        return ""
    return f"The teacher has other names: it is assumed to take and give the same {' and '.join(words)}."


def _write(
    before: TorchModel, given: Given, seconds: float, rows: tuple[Row, ...], options: FinetuneOptions,
    checkpoint: Path, metric: str | None, stage: Finetune, work: Path,
) -> None:  # fmt: skip
    """Fill a folder beside the output, then swap the two."""
    model = given.model
    assert isinstance(model, TorchModel)  # noqa: S101  the stage gives one
    report = {
        "checkpoint": str(checkpoint),
        "teacher": None if options.teacher is None else str(options.teacher),
        "did": given.did,
        "seconds": seconds,
        "params": torch_params(before.module),
        "macs": torch_work(before.module, before.signature).macs,
        "metric": metric,
        "rows": [dataclasses.asdict(row) for row in rows],
        "options": dict(stage.options),
        "training": dict(given.details),
        "warnings": list(given.warnings),
        "environment": environment(cores()),
    }
    with replacing_folder(options.output) as beside:
        try:
            write(model, beside / "model.pt")
        except CheckpointError:  # a forward that can't be traced: the factory that made it is needed again
            torch.save(model.module.state_dict(), beside / "weights.pt")
        for trace in work.glob(f"*/{TRACE_FILE}") if "profile" in given.details else ():
            shutil.copyfile(trace, beside / TRACE_FILE)
        (beside / "training.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        write_page(report, beside / "training.html")
