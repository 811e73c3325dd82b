"""How long the comparing and measuring behind the stages takes: a part of each kind of it, done for real."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from compress.data.sizes import batches_of, typical_inputs
from compress.evaluate.compare import compare
from compress.evaluate.evaluation import Evaluation
from compress.formats.files import size_of
from compress.jobs.evidence import exported_row, rows_before, unique_names
from compress.jobs.examine import roofline_of
from compress.jobs.original import Original
from compress.jobs.prove import Found, rows_of
from compress.jobs.rehearsal import Clock, turns_seconds
from compress.model import Model, OnnxModel, sample_inputs
from compress.options import ExportOptions
from compress.pipeline import Outcome
from compress.report.export import Report
from compress.runtime.backends import open_model
from compress.runtime.footprint import footprint
from compress.runtime.latency import FEWEST, latency
from compress.runtime.machine import environment
from compress.runtime.measure import cores
from compress.runtime.roofline import Roofline
from compress.stage import Progress
from compress.training.trial import SECONDS, Enough

__all__ = ["report_seconds"]


def report_seconds(
    checkpoint: Path,
    options: ExportOptions,
    model: Original,
    baseline: OnnxModel,
    outcomes: Sequence[Outcome],
    judged: Evaluation | None,
    progress: Progress,
) -> float:
    """Seconds that `report_of`, and writing what it gives, would take.

    Args:
        checkpoint: that the run starts from.
        options: of the run.
        model: the original.
        baseline: the original, exported as it is; itself, where it is an ONNX file.
        outcomes: of the stages, or what stands for theirs.
        judged: evaluation data and the metric, if there is data.
        progress: is told how it goes on.
    """
    names = unique_names([outcome.stage.name for outcome in outcomes])
    rows = rows_before(model, baseline)
    rows |= {name: outcome.given.model for name, outcome in zip(names, outcomes, strict=True)}
    files = {name: each for name, each in rows.items() if isinstance(each, OnnxModel)}
    data = None if judged is None else judged.proof
    seconds = 0.0 if judged is None else _comparing(rows, judged, progress)
    seconds += turns_seconds(rows, options.threads, inputs=typical_inputs(model.signature, data, 1))
    begun = time.perf_counter()
    footprint(baseline, options.threads)
    seconds += len(files) * (time.perf_counter() - begun)
    begun = time.perf_counter()
    roofline = roofline_of(baseline.path, baseline.signature, options.threads)
    seconds += 2 * (time.perf_counter() - begun)
    seconds += _grid(options, rows)
    begun = time.perf_counter()
    _told(checkpoint, options, rows, dict(zip(names, outcomes, strict=True)), {exported_row(rows): roofline})
    return seconds + time.perf_counter() - begun


def _comparing(rows: Mapping[str, Model], judged: Evaluation, progress: Progress) -> float:
    """By the first batches, which go through all models."""
    clock = Clock(progress, enough=lambda clock: clock.spent > SECONDS and len(clock.told) > 1)
    opened = {name: open_model(each, threads=cores()) for name, each in rows.items()}
    with suppress(Enough):
        compare(
            "original", opened, judged.proof, judged.metric, confidence=judged.confidence,
            progress=lambda done, total: clock(done, total),
        )  # fmt: skip
    left = clock.told[-1][2] - clock.told[-1][1] if clock.told else 0
    return clock.spent + left * clock.each()


def _grid(options: ExportOptions, rows: Mapping[str, Model]) -> float:
    """Each setting has its fewest rounds: one call of each tells how long they are."""
    if not options.batches and not options.thread_counts:
        return 0.0
    compared = {name: rows[name] for name in ("original", exported_row(rows), list(rows)[-1])}
    signature = rows["original"].signature
    return sum(
        turns_seconds(compared, threads, FEWEST, sample_inputs(signature, batch))
        for threads in options.thread_counts or (options.threads,)
        for batch in batches_of(signature, options.batches or (1,))
    )


def _told(
    checkpoint: Path,
    options: ExportOptions,
    rows: Mapping[str, Model],
    outcomes: Mapping[str, Outcome],
    rooflines: Mapping[str, Roofline],
) -> None:
    """Count, and write a page."""
    opened = {name: open_model(each, threads=options.threads) for name, each in rows.items()}
    timed = latency({"original": opened["original"]}, sample_inputs(rows["original"].signature, 1), rounds=1)
    found = Found(None, {}, timed, {name: backend.runtime for name, backend in opened.items()})
    reports = rows_of(rows, outcomes, found, size_of(checkpoint))
    report = Report(
        command="", source=str(checkpoint), signature=rows["original"].signature,
        environment=environment(options.threads), data={"samples": 0, "sha256": ""}, stages=tuple(reports),
        findings=(), rooflines=rooflines,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        report.write(Path(folder), {})
