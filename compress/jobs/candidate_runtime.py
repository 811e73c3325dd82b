"""Which runtime serves a candidate of a search, and what the candidate is there: by the rules of an export."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from compress.artifact import Runtime
from compress.console.wording import counted
from compress.data.dataset import Dataset
from compress.data.sizes import call_size, samples_of
from compress.evaluate.candidates import Candidate
from compress.evaluate.judge import Budget, Drop, Judge
from compress.evaluate.runtime_choice import Choice, RuntimeFigures, choose
from compress.evaluate.search_result import THROUGHPUT_BATCH, Trial
from compress.jobs.compared_inputs import compared_inputs
from compress.jobs.original import Original
from compress.jobs.serving_runtime import apart, is_worse
from compress.model import OnnxModel
from compress.options import OptimizeOptions
from compress.runtime.backends import Backend
from compress.runtime.backends.onnxrt import is_half
from compress.runtime.latency import Latency, ratio

__all__ = ["Bench", "Opened", "Timed", "taken"]


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
class Opened:
    """A candidate's file on one runtime.

    Attributes:
        model: the file.
        drop: by all samples that choose.
        backend: with the threads that it is timed with.
    """

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


def taken(
    trial: Trial,
    by_runtime: Mapping[Runtime, Opened],
    timed: Mapping[Runtime, Timed],
    before: Backend | None,
    bench: Bench,
) -> Trial:
    """A trial as the runtime makes it that serves it: judged there, and with what it takes.

    Args:
        trial: as it was made.
        by_runtime: its file on each that runs it; on ONNX Runtime, if there are two.
        timed: on each of these.
        before: the float32 file that it was made of, on ONNX Runtime; None where that is not known.
        bench: what it is held against.
    """
    choice = _choice(trial.candidate, by_runtime, timed, before, bench)
    return _filled(trial, choice, by_runtime[choice.runtime], timed[choice.runtime], bench)


def _choice(
    candidate: Candidate,
    by_runtime: Mapping[Runtime, Opened],
    timed: Mapping[Runtime, Timed],
    before: Backend | None,
    bench: Bench,
) -> Choice:
    """What serves a candidate: the faster one, if it computes it alike."""
    if len(by_runtime) < 2:
        return Choice(next(iter(by_runtime)))
    here, there = by_runtime["onnxruntime"], by_runtime["openvino"]
    made_of = {} if before is None or candidate.in_float32 else {"before": before}
    groups = compared_inputs(bench.data, here.model.signature, here.backend, there.backend)
    half = is_half(here.model.path)
    difference, quantized = apart({"last": here.backend, "other": there.backend} | made_of, groups, half=half)
    judge, one, other = bench.judge, timed["onnxruntime"].one, timed["openvino"].one
    return choose(
        (_figures("onnxruntime", here.drop, one, 0.0), _figures("openvino", there.drop, other, difference)),
        None if one is None or other is None else ratio(one.rounds_ms, other.rounds_ms),
        quantized,
        at=f"at batch {call_size(here.model.signature)} with {counted(bench.options.threads, 'threads')}",
        keeps=(bench.keeps(candidate, here.drop), bench.keeps(candidate, there.drop)),
        worse=is_worse(judge.loss_between(there.drop, here.drop), judge.metric, judge.original, judge.constant),
        half=half,
    )


def _figures(runtime: Runtime, drop: Drop, timed: Latency | None, difference: float) -> RuntimeFigures:
    p50 = None if timed is None else timed.p50_ms
    return RuntimeFigures(runtime, p50, value=drop.after, drop=drop.points, drop_high=drop.high, difference=difference)


def _filled(trial: Trial, choice: Choice, opened: Opened, timed: Timed, bench: Bench) -> Trial:
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
        throughput=1000 * samples_of(opened.model.signature, THROUGHPUT_BATCH) / timed.more.p50_ms,
        rounds_ms=timed.one.rounds_ms,
        batched_rounds_ms=timed.more.rounds_ms,
    )
