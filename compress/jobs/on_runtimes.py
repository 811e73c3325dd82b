"""Candidates of a search on what may serve them: judged by all samples that choose, timed in turns, one runtime taken.

What is taken is what an export of the candidate would take (see `compress.jobs.serving_runtime`), as far as it is known
here: by the samples that choose, and without what a file costs alone.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from compress.artifact import Runtime
from compress.console.wording import counted
from compress.data.dataset import Dataset
from compress.data.sizes import typical_inputs
from compress.errors import StageError
from compress.evaluate.candidates import Candidate
from compress.evaluate.judge import Budget, Drop, Judge
from compress.evaluate.runtime_choice import Choice, RuntimeFigures, choose
from compress.evaluate.search_result import THROUGHPUT_BATCH, Trial
from compress.jobs.original import Original
from compress.jobs.serving_runtime import apart, beside, is_worse, looked_at
from compress.model import Model, OnnxModel
from compress.options import OptimizeOptions
from compress.pipeline import Watcher
from compress.runtime.backends import Backend, open_model
from compress.runtime.backends.onnxrt import is_half
from compress.runtime.backends.openvino_cpu import installed
from compress.runtime.latency import Latency, latency, ratio
from compress.runtime.measure import cores

__all__ = ["Bench", "Clocks", "as_timed", "runtimes_of", "weighed"]

NO_NUMBERS = "its answers, or their metric, are no numbers"


@dataclass(frozen=True)
class Bench:
    """What candidates are held against.

    Attributes:
        options: of the search.
        model: the original.
        data: the samples that choose.
        judge: by these.
        metric: its name.
        budget: of the drop.
        allowance: points more that one may lose that is pruned and can still be trained.
    """

    options: OptimizeOptions
    model: Original
    data: Dataset
    judge: Judge
    metric: str
    budget: Budget
    allowance: float = 0.0

    def keeps(self, candidate: Candidate, drop: Drop) -> bool:
        """Whether a drop is one to go on with."""
        return candidate.budget(self.budget, self.allowance).keeps(drop.points, drop.high)


@dataclass(frozen=True)
class _Opened:
    """A candidate's file on one runtime."""

    model: OnnxModel
    drop: Drop
    backend: Backend


@dataclass(frozen=True)
class Timed:
    """A candidate's file on one runtime in turns with all others; None where its speed means nothing.

    Attributes:
        one: a sample in a call.
        more: `THROUGHPUT_BATCH` in a call.
    """

    one: Latency | None
    more: Latency | None


Clocks = Mapping[tuple[Candidate, Runtime], Timed]


def runtimes_of(options: OptimizeOptions) -> tuple[Runtime, ...]:
    """What candidates are asked on."""
    if options.runtime != "auto":
        return (options.runtime,)
    return ("onnxruntime", "openvino") if options.target == "cpu" and installed() else ("onnxruntime",)


def weighed(trials: Sequence[Trial], bench: Bench, watcher: Watcher) -> tuple[tuple[Trial, ...], Clocks]:
    """Trials with what was measured of those that are left, in their order; and what these took on each runtime.

    Args:
        trials: those that count as measured have a file.
        bench: what they are held against.
        watcher: is told how it goes on.
    """
    found = {trial.candidate: trial for trial in trials if trial.status == "measured"}
    files = {each: OnnxModel(trial.path, bench.model.signature) for each, trial in found.items() if trial.path}
    opened: dict[Candidate, dict[Runtime, _Opened]] = {}
    tick = watcher.started("compare")
    for number, candidate in enumerate(files, 1):
        later: dict[str, Model] = {str(at): file for at, file in enumerate(list(files.values())[number:])}
        opened[candidate], why = _tried(files[candidate], later, bench)
        if why:
            found[candidate] = dataclasses.replace(found[candidate], status="failed", why=why)
        tick(number, len(files), "candidates evaluated")
    clocks = _timed(opened, bench, watcher)
    for candidate, by_runtime in opened.items():
        if by_runtime:
            floating = opened.get(candidate.floating, {}).get("onnxruntime")
            before = None if floating is None else floating.backend
            found[candidate] = _taken(found[candidate], candidate, by_runtime, clocks, before, bench)
    return tuple(found.get(trial.candidate, trial) for trial in trials), clocks


def as_timed(trial: Trial, before: Trial, floating: Trial | None, clocks: Clocks, bench: Bench) -> Trial:
    """One that was trained after all were timed: judged on each runtime anew, by what the same layers took before.

    Args:
        trial: as it was made.
        before: the same candidate, not trained.
        floating: the float32 file that it was made of; None where it is one, or only one runtime is asked.
        clocks: of all that were timed.
        bench: what they are held against.
    """
    if trial.path is None or trial.status != "measured":
        return trial
    tried, why = _tried(OnnxModel(trial.path, bench.model.signature), {}, bench)
    by_runtime = {runtime: each for runtime, each in tried.items() if (before.candidate, runtime) in clocks}
    if not by_runtime:
        return dataclasses.replace(trial, status="failed", why=why or "it runs only where it was not timed before")
    source = None if floating is None or floating.path is None else OnnxModel(floating.path, bench.model.signature)
    backend = None if source is None else open_model(source, threads=bench.options.threads)
    return _taken(trial, before.candidate, by_runtime, clocks, backend, bench)


def _tried(file: OnnxModel, later: Mapping[str, Model], bench: Bench) -> tuple[dict[Runtime, _Opened], str]:
    """What a candidate's file is on each runtime, or why on none."""
    try:
        found = _opened(file, later, bench)
    except StageError as err:  # an operator that OpenVINO lacks
        return {}, f"{err.what}: {err.why}"
    return found, "" if found else NO_NUMBERS


def _opened(file: OnnxModel, later: Mapping[str, Model], bench: Bench) -> dict[Runtime, _Opened]:
    """By runtime, of those that run it and give numbers; nothing where the first of them gives none.

    Raises:
        StageError: the first of them can't run it.
    """
    files = [] if bench.options.runtime == "openvino" else [file]
    others, _, _ = beside(bench.options, {**later, "candidate": file})
    files += others.values()
    found: dict[Runtime, _Opened] = {}
    for each in files:
        try:
            drop = bench.judge.drop(open_model(each, threads=cores()))
        except StageError:
            if not found:
                raise
            continue
        if math.isfinite(drop.points):
            found[each.runtime] = _Opened(each, drop, open_model(each, threads=bench.options.threads))
        elif not found:
            break
    return found


def _timed(opened: Mapping[Candidate, Mapping[Runtime, _Opened]], bench: Bench, watcher: Watcher) -> Clocks:
    every = {(candidate, runtime): each for candidate, held in opened.items() for runtime, each in held.items()}
    clocked = {str(at): each.backend for at, each in enumerate(every.values()) if not each.backend.emulated}
    tick = watcher.started("measure")
    one, more = (typical_inputs(bench.model.signature, bench.data, size) for size in (1, THROUGHPUT_BATCH))
    single = latency(clocked, one, progress=lambda done, total: tick(done, 2 * total, "interleaved rounds"))
    batched = latency(clocked, more, progress=lambda done, total: tick(total + done, 2 * total, "interleaved rounds"))
    return {key: Timed(single.get(str(at)), batched.get(str(at))) for at, key in enumerate(every)}


def _taken(
    trial: Trial,
    timed_as: Candidate,
    by_runtime: Mapping[Runtime, _Opened],
    clocks: Clocks,
    before: Backend | None,
    bench: Bench,
) -> Trial:
    """A trial as what serves it makes it.

    Args:
        trial: as it was made.
        timed_as: the candidate whose times are those of its layers.
        by_runtime: it on each.
        clocks: of all.
        before: the float32 file that it was made of.
        bench: what it is held against.
    """
    timed = {runtime: clocks[timed_as, runtime] for runtime in by_runtime}
    choice = _choice(trial.candidate, by_runtime, timed, before, bench)
    return _filled(trial, choice, by_runtime[choice.runtime], timed[choice.runtime], bench)


def _choice(
    candidate: Candidate,
    by_runtime: Mapping[Runtime, _Opened],
    timed: Mapping[Runtime, Timed],
    before: Backend | None,
    bench: Bench,
) -> Choice:
    """What serves a candidate: the faster one, if it computes it alike."""
    if len(by_runtime) < 2:
        return Choice(next(iter(by_runtime)))
    here, there = by_runtime["onnxruntime"], by_runtime["openvino"]
    made_of = {} if before is None or candidate.in_float32 else {"before": before}
    difference, quantized = apart(
        {"last": here.backend, "other": there.backend} | made_of, looked_at(bench.data, here.backend)
    )
    one, other = timed["onnxruntime"].one, timed["openvino"].one
    return choose(
        (_figures("onnxruntime", here.drop, one, 0.0), _figures("openvino", there.drop, other, difference)),
        None if one is None or other is None else ratio(one.rounds_ms, other.rounds_ms),
        quantized,
        at=f"at batch 1 with {counted(bench.options.threads, 'threads')}",
        keeps=(bench.keeps(candidate, here.drop), bench.keeps(candidate, there.drop)),
        worse=is_worse(
            bench.judge.loss_between(there.drop, here.drop), bench.metric, bench.judge.original, bench.judge.constant
        ),
        half=is_half(here.model.path),
    )


def _figures(runtime: Runtime, drop: Drop, timed: Latency | None, difference: float) -> RuntimeFigures:
    p50 = None if timed is None else timed.p50_ms
    return RuntimeFigures(runtime, p50, value=drop.after, drop=drop.points, drop_high=drop.high, difference=difference)


def _filled(trial: Trial, choice: Choice, opened: _Opened, timed: Timed, bench: Bench) -> Trial:
    drop = opened.drop
    trial = dataclasses.replace(
        trial, runtime=choice.runtime, value=drop.after, drop=drop.points, drop_low=drop.low, drop_high=drop.high
    )
    if timed.one is None or timed.more is None:
        if bench.options.goal == "size":
            return trial
        why = "its BF16 is only emulated here, which has no speed" + (f": {choice.why}" if choice.why else "")
        return dataclasses.replace(trial, status="failed", why=why)
    return dataclasses.replace(
        trial,
        latency_p50_ms=timed.one.p50_ms,
        throughput=1000 * THROUGHPUT_BATCH / timed.more.p50_ms,
        rounds_ms=timed.one.rounds_ms,
        batched_rounds_ms=timed.more.rounds_ms,
    )
