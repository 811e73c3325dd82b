"""Try candidates: make each, drop early those that have lost too much, measure the rest side by side."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import math
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from compress.artifact import Runtime
from compress.console.wording import counted
from compress.data.sizes import typical_inputs
from compress.errors import RecipeError, ResourceError, StageError, ToolkitError
from compress.evaluate.evaluation import Evaluation, budget_of, evaluation_of
from compress.evaluate.gains import drop_told, signed
from compress.evaluate.intervals import percent
from compress.evaluate.judge import Judge
from compress.evaluate.search_result import THROUGHPUT_BATCH, Candidate, SearchResult, Trial, candidates
from compress.jobs.original import Original, original
from compress.jobs.recipe import sources_of, stages_for
from compress.jobs.together import refuse_tuning
from compress.model import OnnxModel
from compress.options import OptimizeOptions
from compress.pipeline import Outcome, Watcher, check, run
from compress.prune.prune_channels import PruneChannels
from compress.runtime.backends import Backend, open_model
from compress.runtime.latency import latency
from compress.runtime.measure import cores
from compress.stage import Progress, Stage
from compress.storage.stage_cache import StageCache

__all__ = ["search"]

SCREEN_SHARE = 0.2
SCREEN_LEAST = 256


@dataclass(frozen=True)
class _Setting:
    """What every process of a search needs to begin."""

    checkpoint: Path
    options: OptimizeOptions
    source: str
    work: Path
    cache: StageCache | None


def search(
    checkpoint: Path, options: OptimizeOptions, model: Original, *, source: str, work: Path, watcher: Watcher,
    cache: StageCache | None = None,
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

    Raises:
        RecipeError: options that leave nothing to search.
    """
    plan = candidates(options)
    _check(options, plan)
    evaluation = judged(options, model, checkpoint)
    evaluation.refuse(model, budget_of(options, options.max_drop))
    setting = _Setting(checkpoint, options, source, work, cache)
    made = [trial for branch in _branches(setting, plan, watcher) for trial in branch]
    trials = tuple(sorted(made, key=lambda trial: plan.index(trial.candidate)))
    return _measured(trials, options, model, evaluation, watcher)


def judged(options: OptimizeOptions, model: Original, checkpoint: Path) -> Evaluation:
    """The evaluation data and the metric of a search."""
    if options.eval is None:
        raise RecipeError(
            "can't tell good candidates from bad ones",
            why="there is no evaluation data",
            mend="add --eval eval.npz: inputs, and labels where there are some",
        )
    found = evaluation_of(options, model, sources_of(options, checkpoint, model), chooses=True, proves=False)
    assert found is not None  # noqa: S101  there is data
    return found


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


def _branches(setting: _Setting, plan: Sequence[Candidate], watcher: Watcher) -> Iterator[list[Trial]]:
    """The trials of each ratio, lightly pruned first; once a float model is out, so are all that lose more."""
    ratios = sorted({candidate.prune for candidate in plan})
    groups = [[candidate for candidate in plan if candidate.prune == ratio] for ratio in ratios]
    workers = min(setting.options.workers, len(groups))
    if workers == 1:
        lost: Trial | None = None
        for group in groups:
            trials = _skipped(group, lost) if lost else _branch(setting, group, watcher)
            lost = lost or _lost(trials)
            yield trials
        return
    tick = watcher.started("candidates")
    share = max(1, cores() // workers)
    places = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=places) as pool:
        waiting = {
            pool.submit(_branch_alone, setting, group, index % workers, share): group
            for index, group in enumerate(groups)
        }
        for done, future in enumerate(concurrent.futures.as_completed(waiting), 1):
            tick(done, len(groups), f"pruning ratios, {counted(len(waiting[future]), 'candidates')} in the last")
            yield future.result()


def _lost(trials: Sequence[Trial]) -> Trial | None:
    """The float model of a pruned ratio, if it is out: then every higher ratio is."""
    return next(
        (t for t in trials if t.candidate.int8 == "none" and t.candidate.prune and t.status != "measured"), None
    )


def _skipped(group: Sequence[Candidate], lost: Trial) -> list[Trial]:
    why = f"not tried: {lost.candidate.name} is out already"
    return [Trial(candidate, "eliminated", why) for candidate in group]


def _branch_alone(setting: _Setting, group: Sequence[Candidate], place: int, share: int) -> list[Trial]:
    """A branch in a process of its own, on its own cores."""
    if hasattr(os, "sched_setaffinity"):
        mine = sorted(os.sched_getaffinity(0))[place * share : (place + 1) * share]
        os.sched_setaffinity(0, mine or os.sched_getaffinity(0))
    return _branch(setting, group, _Silent())


class _Silent:
    def started(self, stage: str) -> Progress:  # noqa: ARG002
        return lambda _done, _total, _note: None

    def ended(self, outcome: Outcome) -> None:
        """Nothing to show."""


class _Named:
    """Tells a watcher which candidate a stage is for."""

    def __init__(self, watcher: Watcher, name: str) -> None:
        self._watcher, self._name = watcher, name

    def started(self, stage: str) -> Progress:
        return self._watcher.started(f"{self._name}: {stage}")

    def ended(self, outcome: Outcome) -> None:
        if not outcome.reused:
            self._watcher.ended(outcome)


def _branch(setting: _Setting, group: Sequence[Candidate], watcher: Watcher) -> list[Trial]:
    """Make the candidates of one ratio, its float model first, and screen each on a part of the data."""
    options = setting.options
    model = original(setting.checkpoint, options)
    evaluation = judged(options, model, setting.checkpoint)
    assert evaluation.choice is not None  # noqa: S101  a search chooses
    count = max(SCREEN_LEAST, int(len(evaluation.choice) * SCREEN_SHARE))
    judge = Judge.of_part(
        open_model(model, threads=cores()), evaluation.choice, evaluation.metric, count, evaluation.confidence
    )
    trials: list[Trial] = []
    for candidate in group:
        lost = _lost(trials)
        if lost is not None:
            trials += _skipped([candidate], lost)
            continue
        try:
            asked = stages_for(
                candidate.options(options), model, setting.checkpoint, (evaluation.choice, evaluation.metric)
            )
            stages = [_sharing(stage) for stage in asked]
            check(stages, model)
            outcomes = run(
                stages, model, work=setting.work, source=setting.source, watcher=_Named(watcher, candidate.name),
                tidy=False, cache=setting.cache,
            )  # fmt: skip
        except ResourceError:  # which every other would end with, too
            raise
        except ToolkitError as err:  # one that can't be made does not end the search
            trials.append(Trial(candidate, "failed", f"{err.what}: {err.why}"))
            continue
        final = outcomes[-1].given.model
        assert isinstance(final, OnnxModel)  # noqa: S101  recipes end in ONNX stages
        trials.append(_screened(candidate, final, judge, options))
    return trials


def ranked_on(options: OptimizeOptions) -> Runtime:
    """What candidates are timed on. The winner alone is measured on both, where the runtime is to be chosen."""
    return "openvino" if options.runtime == "openvino" else "onnxruntime"


def _sharing(stage: Stage) -> Stage:
    """What can lose channels does not hang on the candidate: the next ratio finds it in the work folder."""
    if isinstance(stage, PruneChannels):
        return dataclasses.replace(stage, shared=True)
    return stage


def _screened(candidate: Candidate, model: OnnxModel, judge: Judge, options: OptimizeOptions) -> Trial:
    """Out when even the lower end of its drop's interval, on a part of the data, is beyond the limit."""
    kept = Trial(candidate, "measured", size_bytes=model.path.stat().st_size, path=model.path)
    if candidate.prune == 0 and candidate.int8 == "none":
        return kept
    drop = judge.drop(open_model(model, threads=cores()))
    if drop.low is None or drop.high is None or drop.low <= options.max_drop:
        return kept
    why = f"out early: {drop_told(drop.points)} on {counted(len(judge), 'samples')}, at least {signed(drop.low)}"
    why += f" at {percent(options.confidence)} confidence"
    return dataclasses.replace(
        kept, status="eliminated", why=why, drop=drop.points, drop_low=drop.low, drop_high=drop.high
    )


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
    opened: dict[str, Backend] = {}
    for number, (name, trial) in enumerate(left.items(), 1):
        assert trial.path is not None  # noqa: S101  set for what is measured
        onnx = OnnxModel(trial.path, model.signature, runtime=ranked_on(options))
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
        samples=len(data),
        trials=tuple(left.get(trial.candidate.name, trial) for trial in trials),
        confidence=budget.confidence,
        runtime=ranked_on(options),
    )
