"""Try candidates: make each, drop early those that have lost too much, measure the rest side by side."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from compress.console.wording import counted
from compress.data.sizes import call_size
from compress.errors import RecipeError
from compress.evaluate.candidates import Candidate, candidates
from compress.evaluate.evaluation import Evaluation, budget_of
from compress.evaluate.judge import Judge
from compress.evaluate.search_result import SearchResult
from compress.jobs.branch import Setting, judged
from compress.jobs.branches import branches
from compress.jobs.candidate_runtime import Bench
from compress.jobs.on_ray import OnRay
from compress.jobs.on_runtimes import runtimes_of, weighed
from compress.jobs.original import Original
from compress.jobs.timed_on import multiplies_bf16
from compress.jobs.together import refuse_tuning
from compress.jobs.train_winner import allowance_of, with_training
from compress.options import OptimizeOptions
from compress.options.asked import prunes, trains_last
from compress.pipeline import Watcher
from compress.runtime.backends import open_model
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
    Latency is measured at the end, in this process alone, all candidates interleaved, each on every runtime that may
    serve it. Where the winner alone is trained (`trains_last`), all that is before it.

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
    bench = _bench(options, model, evaluation)
    wide = dataclasses.replace(options, max_drop=options.max_drop + bench.allowance)
    setting = Setting(checkpoint, wide, source, work, cache)
    trials, clocks = weighed(branches(setting, plan, watcher, cluster), bench, watcher)
    found = SearchResult(
        goal=options.goal,
        max_drop=options.max_drop,
        metric=bench.metric,
        original=bench.judge.original,
        constant=bench.judge.constant,
        samples=len(bench.data),
        trials=trials,
        confidence=bench.budget.confidence,
        runtimes=runtimes_of(options),
        allowance=bench.allowance if trains_last(options) else None,
        call=None if model.signature.batches else call_size(model.signature),
    )
    return with_training(found, clocks, setting, bench, watcher, cluster) if trains_last(options) else found


def _bench(options: OptimizeOptions, model: Original, evaluation: Evaluation) -> Bench:
    data, budget = evaluation.choice, budget_of(options, options.max_drop)
    assert data is not None  # noqa: S101  a search chooses
    judge = Judge(open_model(model, threads=cores()), data, evaluation.metric, confidence=evaluation.confidence)
    budget = budget.beside(judge.constant)
    return Bench(options, model, data, judge, evaluation.metric.name, budget, allowance_of(options, judge))


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
    if "bf16" in options.precision and options.goal != "size" and not multiplies_bf16(options):
        raise RecipeError(
            f"can't search for {options.goal} in BF16",
            why="ONNX Runtime only emulates it, and no other runtime that may serve the result multiplies it here",
            mend="take --goal size, leave --precision out, or install OpenVINO where the CPU multiplies BF16",
        )
    if options.train == "winner" and options.finetune is not None and prunes(options) and not trains_last(options):
        raise RecipeError(
            "can't train the winner alone",
            why="candidates are compared before, as the repair leaves them, which needs --calibration; and "
            "--importance taylor chooses channels by training data",
            mend="add --calibration calibration.npz, without --no-repair and --importance taylor; or take --train all",
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
