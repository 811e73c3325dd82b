"""The rows of the report: what each model on the way is worth, measured side by side."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from compress.artifact import Measured, Signature, StageReport
from compress.console.wording import Note, counted
from compress.data.dataset import Dataset
from compress.data.sizes import typical_inputs
from compress.evaluate.compare import Comparison, batch_difference, compare
from compress.evaluate.evaluation import Evaluation
from compress.evaluate.intervals import Interval, difference_interval, mean_interval
from compress.evaluate.scoring import batch_for
from compress.formats.files import size_of
from compress.model import Arrays, EngineModel, Model, OnnxModel, TorchModel, sample_inputs, weight_bytes
from compress.pipeline import Outcome, Watcher
from compress.runtime.backends import Backend
from compress.runtime.backends.in_turns import open_all
from compress.runtime.footprint import Footprint, footprint
from compress.runtime.latency import Turns, latency
from compress.runtime.measure import cores, onnx_macs, onnx_params, torch_params, torch_work
from compress.runtime.memory import give_back

__all__ = ["Found", "judged_fields", "loss_between", "measure", "rows_of"]

BATCH = 8
BATCH_SECONDS = 4.0  # for what a batch changes: of a slow model fewer samples are looked at, but these at least
FEWEST_TOGETHER, FEWEST_ALONE = 4, 2


@dataclass(frozen=True)
class Found:
    """What was measured of the models, by row.

    Attributes:
        judged: by what and on what, if there was data.
        compared: with the original.
        latency: of single calls at batch 1, of those whose speed means something here, in turns.
        runtimes: what ran them.
        batch_difference: between a sample alone and in a batch, as `compress.evaluate.compare.batch_difference` has it;
            of the original and of the result.
        footprints: memory and loading time, of those that are files.
    """

    judged: Evaluation | None
    compared: Mapping[str, Comparison]
    latency: Turns
    runtimes: Mapping[str, str]
    batch_difference: Mapping[str, float] = field(default_factory=dict)
    footprints: Mapping[str, Footprint] = field(default_factory=dict)


def measure(
    rows: Mapping[str, Model],
    judged: Evaluation | None,
    threads: int,
    watcher: Watcher,
    beside: Mapping[str, Model] | None = None,
    footprints: Mapping[str, Footprint] | None = None,
    data: Dataset | None = None,
) -> Found:
    """The same samples through all models on all cores, then the clock, then each alone in a process of its own.

    Args:
        rows: models by row, "original" first.
        judged: evaluation data and the metric, or None.
        threads: for the latency.
        watcher: is told how it goes on.
        beside: the last row's file on other runtimes, by names of their own: all that is measured of a row is measured
            of these, too, in the same turns.
        footprints: those that are known by now.
        data: that the models are timed on, where none judges them; without any they run on random inputs.
    """
    give_back()
    data = data if judged is None else judged.proof
    last, others = list(rows)[-1], beside or {}
    rows = {**rows, **others}
    compared = {} if judged is None else _compared(rows, judged, watcher)
    opened = open_all(rows, threads=threads)
    signature = rows["original"].signature
    one = typical_inputs(signature, data, 1)
    apart = _batches({name: opened[name] for name in ("original", last, *others)}, data, signature)
    tick = watcher.started("measure")
    clocked = {name: backend for name, backend in opened.items() if not backend.emulated}
    timed = latency(
        clocked,
        one,
        references=("original", "original_onnx", *((last,) if others else ())),
        claimed=(last, *others),
        progress=lambda done, total: tick(done, total, "interleaved rounds"),
    )
    files = {name: model for name, model in rows.items() if isinstance(model, OnnxModel) and name in clocked}
    runtimes = {name: backend.runtime for name, backend in opened.items()}
    del opened, clocked
    give_back()
    tick = watcher.started("memory")
    known = dict(footprints or {})
    for number, (name, model) in enumerate(files.items(), 1):
        known[name] = known.get(name) or footprint(model, threads)
        tick(number, len(files), "models loaded alone")
    return Found(judged, compared, timed, runtimes, apart, known)


def _compared(rows: Mapping[str, Model], judged: Evaluation, watcher: Watcher) -> dict[str, Comparison]:
    """On all cores: what is told of accuracy does not depend on their number."""
    progress = watcher.started("compare")
    return compare(
        "original",
        open_all(rows, threads=cores()),
        judged.proof,
        judged.metric,
        confidence=judged.confidence,
        progress=lambda done, total: progress(done, total, "samples"),
    )


def _batches(opened: Mapping[str, Backend], data: Dataset | None, signature: Signature) -> dict[str, float]:
    # Samples can be taken one by one only where all that goes in and comes out counts the same.
    leading = {spec.shape[0] if spec.shape else None for spec in (*signature.inputs, *signature.outputs)}
    if not signature.batches or leading != signature.batches or len(leading) > 1:
        return {}
    one = typical_inputs(signature, data, 1)
    seconds = max(_seconds(model, one) for model in opened.values())
    affordable = int(BATCH_SECONDS / len(opened) / max(seconds, 1e-9))
    together = max(FEWEST_TOGETHER, min(BATCH, affordable // 2))
    if data is None:
        inputs = sample_inputs(signature, together)
    else:  # two are enough to see it, where eight would be large
        few = max(2, min(together, batch_for(opened["original"], data)))
        inputs = data.take(slice(0, few))[0]
    alone = max(FEWEST_ALONE, affordable - together)
    return {name: batch_difference(model, inputs, alone=alone) for name, model in opened.items()}


def _seconds(model: Backend, inputs: Arrays) -> float:
    model.infer(inputs)  # the first makes ready what the others find
    start = time.perf_counter()
    model.infer(inputs)
    return time.perf_counter() - start


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
    if isinstance(models["original"], OnnxModel):
        did["original"] = "the file as it was given"
    reports = []
    before = "original"
    for name, model in models.items():
        outcome = outcomes.get(name)
        size = outcome.size_bytes if outcome else None
        if name == "original" and isinstance(model, TorchModel):
            # What else lies in a trainer's checkpoint is no part of the model.
            size = min(checkpoint_bytes, weight_bytes(model.module))
            did["original"] = f"as it was given: a file of {checkpoint_bytes:,} bytes, {size:,} of them weights"
        judged = {} if found.judged is None else judged_fields(name, before, found, found.judged)
        measured = dataclasses.replace(_measured(name, model, found, size), **judged)
        warnings = _warnings(name, found)
        if outcome is None:
            reports.append(StageReport(name, did[name], measured, seconds=0.0, warnings=warnings))
            continue
        given = outcome.given
        reports.append(
            StageReport(
                name,
                given.did,
                measured,
                outcome.seconds,
                (*given.warnings, *warnings),
                given.details,
                dict(outcome.stage.options),
            )
        )
        before = name  # the original's own export is no step on the way
    return reports


def _measured(name: str, model: Model, found: Found, size: int | None) -> Measured:
    if isinstance(model, TorchModel):
        macs, params = torch_work(model.module, model.signature).macs, torch_params(model.module)
    else:
        graph = model.onnx if isinstance(model, EngineModel) else model
        macs, params = onnx_macs(graph.path, model.signature), onnx_params(graph.path)
        size = size_of(model.path)
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
        batch_difference=_finite(found.batch_difference.get(name)),
        load_ms=alone.load_ms if alone else None,
        peak_memory_bytes=alone.peak_memory_bytes if alone else None,
        runtime=found.runtimes[name],
    )


def _warnings(name: str, found: Found) -> tuple[str, ...]:
    """What makes the figures of a row mean less than they look."""
    if found.judged is None:
        return ()
    here = found.compared[name]
    words: tuple[str, ...] = ()
    if name == "original":
        words += (*found.judged.notes, *((Note(f"{_sentence(found.judged.how)}."),) if found.judged.how else ()))
        words += tuple(f"{doubt} No drop is told, and no budget counts as kept." for doubt in here.doubts)
    if here.not_numbers:
        held = f"outputs for {here.not_numbers} of {counted(here.samples, 'samples')} hold NaN"
        words += (f"{name}: {held}: the worst score counts.",)
    elif here.not_finite:  # of an output that is not judged, or a mask's
        held = f"outputs for {here.not_finite} of {counted(here.samples, 'samples')} hold NaN or infinity"
        words += (Note(f"{name}: {held}, which no cosine counts as alike."),)
    if not math.isfinite(here.max_abs_error):
        words += (f"{name}: its outputs hold NaN, or infinities that the original's don't: no error is larger.",)
    if not math.isfinite(here.value):
        words += (f"{name}: its {found.judged.metric.name} is no number.",)
    return words


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def judged_fields(name: str, before: str, found: Found, judged: Evaluation) -> dict[str, Any]:
    """The fields of Measured that the metric fills; what is no number, or means nothing, is left out."""
    metric, here, first = judged.metric, found.compared[name], found.compared["original"]
    fields: dict[str, float | None] = {
        "value": here.value,
        "accuracy": here.accuracy,
        "agreement": here.agreement,
        "cosine_similarity": here.cosine_similarity,
        "max_abs_error": here.max_abs_error,
    }
    if here.scores is not None:
        value = mean_interval(here.scores, confidence=judged.confidence, bounds=metric.bounds)
        fields |= {"value_low": value.low, "value_high": value.high}
    if not first.doubts:
        fields |= {
            "drop": metric.drop(first.value, here.value),
            "drop_constant": first.constant,
            "stage_drop": metric.drop(found.compared[before].value, here.value),
        }
        if here.scores is not None and first.scores is not None:
            drop = _drop(name, here.scores, first.scores, judged)
            fields |= {"drop_low": drop.low, "drop_high": drop.high}
    return {
        "metric": metric.name,
        "metric_scale": metric.scale,
        **{key: _finite(value) for key, value in fields.items()},
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def loss_between(found: Found, name: str, other: str) -> float | None:
    """What a row loses against another for sure: the lower end of the interval, in points; None without intervals."""
    here, there = found.compared[name].scores, found.compared[other].scores
    if found.judged is None or here is None or there is None or found.compared["original"].doubts:
        return None
    return _drop(name, here, there, found.judged).low


def _drop(name: str, scores: Any, first: Any, judged: Evaluation) -> Interval:
    if name == "original":
        return Interval(0.0, 0.0, 0.0)  # itself, for sure
    metric = judged.metric
    found = difference_interval(scores, first, confidence=judged.confidence, bounds=metric.bounds)
    return found.times(metric.points)
