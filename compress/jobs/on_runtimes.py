"""Candidates of a search on what may serve them: judged by all samples that choose, timed in turns.

What is taken is what an export of the candidate would take (see `compress.jobs.serving_runtime`), as far as it is known
here: by the samples that choose, and without what a file costs alone.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from compress.artifact import Runtime
from compress.data.sizes import typical_inputs
from compress.errors import StageError
from compress.evaluate.candidates import Candidate
from compress.evaluate.search_result import THROUGHPUT_BATCH, Trial
from compress.jobs.candidate_runtime import Bench, Opened, Timed, taken
from compress.jobs.serving_runtime import beside
from compress.model import Model, OnnxModel
from compress.options import OptimizeOptions
from compress.pipeline import Watcher
from compress.runtime.backends import open_model
from compress.runtime.backends.openvino_cpu import installed
from compress.runtime.latency import latency
from compress.runtime.measure import cores

__all__ = ["Clocks", "as_timed", "runtimes_of", "weighed"]

NO_NUMBERS = "its answers, or their metric, are no numbers"

Clocks = Mapping[Candidate, Mapping[Runtime, Timed]]


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
    opened: dict[Candidate, dict[Runtime, Opened]] = {}
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
            found[candidate] = taken(found[candidate], by_runtime, clocks[candidate], before, bench)
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
    timed = clocks[before.candidate]
    by_runtime = {runtime: each for runtime, each in tried.items() if runtime in timed}
    if not by_runtime:
        return dataclasses.replace(trial, status="failed", why=why or "it runs only where it was not timed before")
    source = None if floating is None or floating.path is None else OnnxModel(floating.path, bench.model.signature)
    backend = None if source is None else open_model(source, threads=bench.options.threads)
    return taken(trial, by_runtime, timed, backend, bench)


def _tried(file: OnnxModel, later: Mapping[str, Model], bench: Bench) -> tuple[dict[Runtime, Opened], str]:
    """What a candidate's file is on each runtime, or why on none."""
    try:
        found = _opened(file, later, bench)
    except StageError as err:  # an operator that OpenVINO lacks
        return {}, f"{err.what}: {err.why}"
    return found, "" if found else NO_NUMBERS


def _opened(file: OnnxModel, later: Mapping[str, Model], bench: Bench) -> dict[Runtime, Opened]:
    """By runtime, of those that run it and give numbers; nothing where the first of them gives none.

    Raises:
        StageError: the first of them can't run it.
    """
    files = [] if bench.options.runtime == "openvino" else [file]
    others, _, _ = beside(bench.options, {**later, "candidate": file}, bench.data)
    files += others.values()
    found: dict[Runtime, Opened] = {}
    for each in files:
        try:
            drop = bench.judge.drop(open_model(each, threads=cores()))
        except StageError:
            if not found:
                raise
            continue
        if math.isfinite(drop.points):
            found[each.runtime] = Opened(each, drop, open_model(each, threads=bench.options.threads))
        elif not found:
            break
    return found


def _timed(opened: Mapping[Candidate, Mapping[Runtime, Opened]], bench: Bench, watcher: Watcher) -> Clocks:
    every = {(candidate, runtime): each for candidate, held in opened.items() for runtime, each in held.items()}
    clocked = {str(at): each.backend for at, each in enumerate(every.values()) if not each.backend.emulated}
    tick = watcher.started("measure")
    one, more = (typical_inputs(bench.model.signature, bench.data, size) for size in (1, THROUGHPUT_BATCH))
    single = latency(clocked, one, progress=lambda done, total: tick(done, 2 * total, "interleaved rounds"))
    batched = latency(clocked, more, progress=lambda done, total: tick(total + done, 2 * total, "interleaved rounds"))
    found: dict[Candidate, dict[Runtime, Timed]] = {candidate: {} for candidate in opened}
    for at, (candidate, runtime) in enumerate(every):
        found[candidate][runtime] = Timed(single.get(str(at)), batched.get(str(at)))
    return found
