"""The rows of the report: what each model on the way is worth, measured side by side."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from compress.artifact import Measured, Signature, StageReport
from compress.backends import Backend, open_model
from compress.bootstrap import Interval, mean_interval
from compress.compare import Comparison, batch_difference, compare
from compress.dataset import Dataset
from compress.footprint import Footprint, footprint
from compress.latency import Turns, latency
from compress.measure import onnx_macs, onnx_params, torch_macs, torch_params
from compress.metrics import Metric
from compress.model import EngineModel, Model, OnnxModel, TorchModel, example_inputs
from compress.pipeline import Outcome, Watcher

__all__ = ["Found", "measure", "rows_of"]

BATCH = 8


@dataclass(frozen=True)
class Found:
    """What was measured of the models, by row.

    Attributes:
        metric: what they were judged by, if there was data.
        compared: with the original.
        latency: of single calls at batch 1, of those whose speed means something here, in turns.
        runtimes: what ran them.
        batch_difference: between a sample alone and in a batch, as `compress.compare.batch_difference` has it.
        footprints: memory and loading time, of those that are files.
    """

    metric: Metric | None
    compared: Mapping[str, Comparison]
    latency: Turns
    runtimes: Mapping[str, str]
    batch_difference: Mapping[str, float] = field(default_factory=dict)
    footprints: Mapping[str, Footprint] = field(default_factory=dict)


def measure(rows: Mapping[str, Model], judged: tuple[Dataset, Metric] | None, threads: int, watcher: Watcher) -> Found:
    """The same samples through all models, then the clock, then each alone in a process of its own.

    Args:
        rows: models by row, "original" first.
        judged: evaluation data and the metric, or None.
        threads: for the latency.
        watcher: is told how it goes on.
    """
    opened = {name: open_model(model, threads=threads) for name, model in rows.items()}
    compared: Mapping[str, Comparison] = {}
    if judged is not None:
        progress = watcher.started("compare")
        compared = compare("original", opened, *judged, progress=lambda done, total: progress(done, total, "samples"))
    specs = rows["original"].signature.inputs
    one = judged[0].take(slice(0, 1))[0] if judged is not None else example_inputs(specs, 1)
    apart = _batches(opened, judged, rows["original"].signature)
    tick = watcher.started("measure")
    clocked = {name: backend for name, backend in opened.items() if not backend.emulated}
    timed = latency(
        clocked,
        one,
        references=("original", "original_onnx"),
        progress=lambda done, total: tick(done, total, "interleaved rounds"),
    )
    files = {name: model for name, model in rows.items() if isinstance(model, OnnxModel) and name in clocked}
    tick = watcher.started("memory")
    footprints = {}
    for number, (name, model) in enumerate(files.items(), 1):
        footprints[name] = footprint(model, threads)
        tick(number, len(files), "models loaded alone")
    runtimes = {name: backend.runtime for name, backend in opened.items()}
    return Found(None if judged is None else judged[1], compared, timed, runtimes, apart, footprints)


def _batches(
    opened: Mapping[str, Backend], judged: tuple[Dataset, Metric] | None, signature: Signature
) -> dict[str, float]:
    if any(isinstance(spec.shape[0], int) for spec in signature.inputs if spec.shape):
        return {}
    eight = judged[0].take(slice(0, BATCH))[0] if judged is not None else example_inputs(signature.inputs, BATCH)
    return {name: batch_difference(model, eight) for name, model in opened.items()}


def rows_of(
    models: Mapping[str, Model], outcomes: Mapping[str, Outcome], found: Found, checkpoint_bytes: int
) -> list[StageReport]:
    """A row for each model, in order; each tells what it lost against the original and against the row before.

    Args:
        models: by row: "original", "original_onnx", then the stages.
        outcomes: of the stages, by row.
        found: what was measured.
        checkpoint_bytes: size of the original's file.
    """
    did = {"original": "as it was given", "original_onnx": "exported as it is, to compare sizes and speed with"}
    reports = []
    before = "original"
    for name, model in models.items():
        outcome = outcomes.get(name)
        size = checkpoint_bytes if name == "original" else outcome.size_bytes if outcome else None
        measured = dataclasses.replace(
            _measured(name, model, found, size), **({} if found.metric is None else _judged(name, before, found))
        )
        if outcome is None:
            reports.append(StageReport(name, did[name], measured, seconds=0.0))
            continue
        given = outcome.given
        reports.append(
            StageReport(
                name, given.did, measured, outcome.seconds, given.warnings, given.details, dict(outcome.stage.options)
            )
        )
        before = name  # the original's own export is no step on the way
    return reports


def _measured(name: str, model: Model, found: Found, size: int | None) -> Measured:
    if isinstance(model, TorchModel):
        macs, params = torch_macs(model.module, model.signature), torch_params(model.module)
    else:
        graph = model.onnx if isinstance(model, EngineModel) else model
        macs, params = onnx_macs(graph.path), onnx_params(graph.path)
        size = model.path.stat().st_size
    alone, timed = found.footprints.get(name), found.latency.get(name)
    return Measured(
        macs=macs,
        params=params,
        size_bytes=size,
        latency_p50_ms=timed.p50_ms if timed else None,
        latency_p99_ms=timed.p99_ms if timed else None,
        latency_p50_low_ms=timed.low_ms if timed else None,
        latency_p50_high_ms=timed.high_ms if timed else None,
        latency_rounds_ms=timed.rounds_ms if timed else None,
        batch_difference=found.batch_difference.get(name),
        load_ms=alone.load_ms if alone else None,
        peak_memory_bytes=alone.peak_memory_bytes if alone else None,
        runtime=found.runtimes[name],
    )


def _judged(name: str, before: str, found: Found) -> dict[str, Any]:
    """The fields of Measured that the metric fills."""
    metric, here, first = found.metric, found.compared[name], found.compared["original"]
    assert metric is not None  # noqa: S101  asked for only where there is one
    fields: dict[str, Any] = {
        "metric": metric.name,
        "value": here.value,
        "accuracy": here.accuracy,
        "agreement": here.agreement,
        "cosine_similarity": here.cosine_similarity,
        "max_abs_error": here.max_abs_error,
        "drop": metric.drop(first.value, here.value),
        "stage_drop": metric.drop(found.compared[before].value, here.value),
    }
    if here.scores is not None and first.scores is not None:
        value = mean_interval(here.scores)
        drop: Interval = mean_interval(here.scores - first.scores).times(metric.points)
        fields |= {"value_low": value.low, "value_high": value.high, "drop_low": drop.low, "drop_high": drop.high}
    return fields
