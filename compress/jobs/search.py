"""Try candidates: make each, drop early those that have lost too much, measure the rest side by side."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

from compress.console.wording import counted
from compress.data.sizes import typical_inputs
from compress.errors import RecipeError, StageError
from compress.evaluate.evaluation import Evaluation, budget_of
from compress.evaluate.judge import Judge
from compress.evaluate.search_result import THROUGHPUT_BATCH, Candidate, SearchResult, Trial, candidates
from compress.jobs.branch import Setting, judged
from compress.jobs.branches import branches
from compress.jobs.on_ray import OnRay
from compress.jobs.original import Original
from compress.jobs.timed_on import timed_on
from compress.jobs.together import refuse_tuning
from compress.model import OnnxModel
from compress.options import OptimizeOptions
from compress.pipeline import Watcher
from compress.runtime.backends import Backend, open_model
from compress.runtime.latency import latency
from compress.runtime.measure import cores
from compress.storage.stage_cache import StageCache

__all__ = ["search"]


def search(
    checkpoint: Path, options: OptimizeOptions, model: Original, *, source: str, work: Path, watcher: Watcher,
    cache: StageCache | None = None, cluster: OnRay | None = None,
) -> SearchResult:  # fmt: skip
    """Make and measure every candidate of the options.

    Those of one pruning ratio are made one after the other and share what they have in common; with several workers,
    ratios are made at the same time. A ratio whose float model has lost too much ends the search for higher ones.
    Latency is measured at the end, in this process alone, all candidates interleaved.

    Args:
        checkpoint: the model file, which workers load again.
        options: what to try.
        model: the original.
        source: what `pipeline.run` takes as the hash of what goes in.
        work: keeps every stage's output, so that an interrupted search goes on.
        watcher: is told of stages, or, with several workers, of ratios.
        cache: keeps outputs for runs with other work folders.
        cluster: makes the candidates; this machine does by default.

    Raises:
        RecipeError: options that leave nothing to search.
    """
    plan = candidates(options)
    _check(options, plan)
    evaluation = judged(options, model, checkpoint)
    evaluation.refuse(model, budget_of(options, options.max_drop))
    setting = Setting(checkpoint, options, source, work, cache)
    trials = branches(setting, plan, watcher, cluster)
    return _measured(trials, options, model, evaluation, watcher)


def _check(options: OptimizeOptions, plan: Sequence[Candidate]) -> None:
    refuse_tuning(options)
    if options.workers < 1 or options.max_drop < 0:
        raise RecipeError(
            "can't search like this",
            why=f"--workers is {options.workers}, --max-drop is {options.max_drop:g}",
            mend="give at least 1 worker, and a drop of 0 or more",
        )
    if options.target != "cpu" and options.goal != "size":
        raise RecipeError(
            f"can't search for {options.goal} on {options.target}",
            why="it would be measured with ONNX Runtime on this CPU, which says nothing of a GPU",
            mend="take --goal size, or export candidates and run `compress measure --device cuda` where the GPU is",
        )
    if len(plan) < 2:
        raise RecipeError(
            "there is nothing to search",
            why=f"the options leave {counted(len(plan), 'candidates')}",
            mend="name several --prune fractions or --int8 kinds, and --calibration for static ones",
        )
    if any(not 0 <= candidate.prune < 1 for candidate in plan):
        why = f"--prune holds {', '.join(f'{c:g}' for c in options.prune)}"
        raise RecipeError("can't prune so much", why=why, mend="give fractions from 0 to below 1")


def _measured(
    trials: Sequence[Trial],
    options: OptimizeOptions,
    model: Original,
    evaluation: Evaluation,
    watcher: Watcher,
) -> SearchResult:
    """All samples that choose through what is left, then the clock."""
    left = {trial.candidate.name: trial for trial in trials if trial.status == "measured"}
    data, budget = evaluation.choice, budget_of(options, options.max_drop)
    assert data is not None  # noqa: S101  a search chooses
    judge = Judge(open_model(model, threads=cores()), data, evaluation.metric, confidence=evaluation.confidence)
    tick = watcher.started("compare")
    runtime = timed_on(options)  # the winner alone is measured on both, where it is to be chosen
    opened: dict[str, Backend] = {}
    for number, (name, trial) in enumerate(left.items(), 1):
        assert trial.path is not None  # noqa: S101  set for what is measured
        onnx = OnnxModel(trial.path, model.signature, runtime=runtime)
        try:
            drop = judge.drop(open_model(onnx, threads=cores()))
        except StageError as err:  # an operator that OpenVINO lacks
            left[name] = dataclasses.replace(trial, status="failed", why=f"{err.what}: {err.why}")
            continue
        if math.isfinite(drop.points):
            left[name] = dataclasses.replace(
                trial, value=drop.after, drop=drop.points, drop_low=drop.low, drop_high=drop.high
            )
            opened[name] = open_model(onnx, threads=options.threads)
        else:
            left[name] = dataclasses.replace(trial, status="failed", why="its answers, or their metric, are no numbers")
        tick(number, len(left), "candidates evaluated")
    tick = watcher.started("measure")
    one, eight = (typical_inputs(model.signature, data, size) for size in (1, THROUGHPUT_BATCH))
    single = latency(opened, one, progress=lambda done, total: tick(done, 2 * total, "interleaved rounds"))
    batched = latency(opened, eight, progress=lambda done, total: tick(total + done, 2 * total, "interleaved rounds"))
    for name in opened:
        left[name] = dataclasses.replace(
            left[name],
            latency_p50_ms=single[name].p50_ms,
            throughput=1000 * THROUGHPUT_BATCH / batched[name].p50_ms,
            rounds_ms=single[name].rounds_ms,
            batched_rounds_ms=batched[name].rounds_ms,
        )
    return SearchResult(
        goal=options.goal,
        max_drop=options.max_drop,
        metric=evaluation.metric.name,
        original=judge.original,
        constant=judge.constant,
        samples=len(data),
        trials=tuple(left.get(trial.candidate.name, trial) for trial in trials),
        confidence=budget.confidence,
        runtime=runtime,
    )
