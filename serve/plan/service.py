"""What a load test says of a server, as a simulation needs it: batch times, what lies around them, and their spread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from compress.errors import ServerError
from serve.config.model_config import ModelConfig
from serve.load.figures.result import LoadResult
from serve.load.figures.server_side import ModelTime
from serve.load.report.report import LoadReport

__all__ = ["Batching", "Service", "Stage", "batching_of", "service_of"]

Floats = np.ndarray[Any, np.dtype[np.float64]]
ENOUGH = 10  # executions; sizes that were run less are taken together with their neighbours
BUSY = 0.7  # of the time: instances that were busier are what the fullest run lacked
QUANTILES = 2001
CROWDED = 0.7  # of the cores: from there on processes wait for each other
SWEEP = "measure again with `serve load … --concurrency 1,2,4,8,16,32 --output load.json`"


@dataclass(frozen=True)
class Batching:
    """How Triton runs one model.

    Attributes:
        name: of the model.
        instances: how many of it.
        most: rows of one execution at most; 0 where requests are never put together.
        delay_s: how long a batch that is not full is waited for.
    """

    name: str
    instances: int = 1
    most: int = 0
    delay_s: float = 0.0


@dataclass(frozen=True)
class Stage:
    """One model on a request's way, with its measured times.

    Attributes:
        batching: how it is run.
        sizes, seconds: rows of an execution, and how long it takes while the server is busy; ascending.
        row_s: what a row more takes, for sizes beyond.
        alone: what an execution takes when nothing else is asked for, as a share of that.
        gap_row_s: what each row of an execution keeps its instance busy after its answer.
    """

    batching: Batching
    sizes: tuple[float, ...]
    seconds: tuple[float, ...]
    row_s: float
    alone: float = 1.0
    gap_row_s: float = 0.0

    def duration_s(self, rows: int, in_system: int) -> float:
        """Of one execution, while so many requests are with the server."""
        crowd = min((in_system - 1) / max(self.batching.instances - 1, 1), 1.0)
        return self._busy_s(rows) * (self.alone + (1 - self.alone) * crowd)

    def _busy_s(self, rows: int) -> float:
        found = self._known.get(rows)
        if found is None:
            if self.sizes[0] <= rows <= self.sizes[-1]:
                found = float(np.interp(rows, self.sizes, self.seconds))
            else:
                end = 0 if rows < self.sizes[0] else -1
                found = max(self.seconds[end] + self.row_s * (rows - self.sizes[end]), 1e-9)
            self._known[rows] = found
        return found

    @cached_property
    def _known(self) -> dict[int, float]:
        return {}


@dataclass(frozen=True)
class Service:
    """One replica.

    Attributes:
        model: its name.
        rows: of a request.
        stages: the models on a request's way, in order.
        around_s: what a request takes beside them: network, HTTP, gateway.
        spread: quantiles of the time of one request at a time, over its mean; ascending.
        front_s: what a request takes of the one part that all pass (the gateway's loop, HTTP), where that is what
            bounded the measured throughput; 0 where the models did.
        measured_peak: the most answers a second of any run.
        warnings: what is less sure.
    """

    model: str
    rows: int
    stages: tuple[Stage, ...]
    around_s: float
    spread: tuple[float, ...]
    front_s: float = 0.0
    measured_peak: float = 0.0
    warnings: tuple[str, ...] = ()


def batching_of(configs: Mapping[str, ModelConfig], model: str) -> tuple[Batching, ...]:
    """How Triton runs a model, by its config.pbtxt; of an ensemble, each step in its order.

    Raises:
        ServerError: there is no such model.
    """
    if model not in configs:
        raise ServerError(
            f"can't plan for {model!r}", why="it is not in the repository", mend=f"it has {', '.join(sorted(configs))}"
        )
    config = configs[model]
    if config.ensemble_scheduling is not None:
        return tuple(part for step in config.ensemble_scheduling.step for part in batching_of(configs, step.model_name))
    together = config.dynamic_batching
    return (
        Batching(
            model,
            sum(group.count for group in config.instance_group) or 1,
            0 if together is None else config.max_batch_size,
            0.0 if together is None else together.max_queue_delay_microseconds / 1e6,
        ),
    )


def service_of(report: LoadReport, batching: Sequence[Batching]) -> Service:
    """What a load test's runs, from one request at a time to a full house, say of one replica.

    Args:
        report: a sweep of closed loops, the first with one client, against one replica.
        batching: of the models that a request passes.

    Raises:
        ServerError: the runs do not tell enough.
    """
    runs = [run for run in report.runs if run.count and run.breakdown is not None]
    alone = [run for run in runs if run.concurrency == 1]
    busy = [run for run in runs if run.concurrency > 1]
    if not alone or not busy:
        what = "with one client" if not alone else "with several clients"
        raise ServerError(
            "can't plan with this load test", why=f"it has no run {what} and Triton's account", mend=SWEEP
        )
    first, fullest = alone[0], max(busy, key=lambda run: run.concurrency)
    rows = max(round(first.inferences / first.throughput), 1)
    others = [run for run in runs if run.concurrency != 1]
    stages = tuple(_stage(part, first, others, fullest, rows) for part in batching)
    shares = [_busy_share(stage, fullest) for stage in stages]
    warnings = []
    if fullest.concurrency < 4 * max(part.instances for part in batching):
        warnings.append(f"the fullest run had {fullest.concurrency} clients: what a full house does is a guess")
    cores = report.machine.get("cores")
    if fullest.server is not None and cores and fullest.server.cpu_share > CROWDED * cores:
        warnings.append(
            f"the server took {fullest.server.cpu_share:.1f} of {cores} cores in the fullest run: its processes wait "
            "for each other there, which is not simulated; latencies will be longer than planned (docs/plan.md)"
        )
    if any(run.invalid for run in (first, fullest)):
        warnings.append("the load test calls its own figures invalid: " + (first.invalid or fullest.invalid)[0])
    if any(run.interrupted for run in runs):
        warnings.append("the load test was interrupted")
    histogram = first.latency.samples()
    mean_ms = first.latency.mean_ms or 1.0
    at = (np.arange(QUANTILES) + 0.5) / QUANTILES
    below = (np.cumsum(histogram.counts) - histogram.counts / 2) / histogram.total
    spread = np.interp(at, below, histogram.highest / 1e6 / mean_ms)
    in_models_s = sum(stage.duration_s(rows, 1) for stage in stages)
    return Service(
        first.model,
        rows,
        stages,
        max(mean_ms / 1000 - in_models_s, 0.0),
        tuple(float(value) for value in spread / spread.mean()),
        front_s=1 / fullest.throughput if max(shares) < BUSY else 0.0,
        measured_peak=max(run.throughput for run in runs),
        warnings=tuple(warnings),
    )


def _stage(part: Batching, first: LoadResult, busy: Sequence[LoadResult], fullest: LoadResult, rows: int) -> Stage:
    told = [time for run in busy if (time := _of(part.name, run)) is not None and time.batch_ms]
    lonely = _of(part.name, first)
    if not told or lonely is None or not lonely.batch_ms:
        raise ServerError(
            "can't plan with this load test",
            why=f"it has no time of {part.name!r} by batch size: it is of another model, or of an earlier release",
            mend=SWEEP,
        )
    counts: dict[int, int] = {}
    spent: dict[int, float] = {}
    for time in told:
        for size, count in time.batches.items():
            counts[size] = counts.get(size, 0) + count
            spent[size] = spent.get(size, 0.0) + count * time.batch_ms[size] / 1000
    sizes, seconds = _grouped(counts, spent)
    stage = Stage(part, sizes, seconds, _row_s(counts, spent))
    size = min(lonely.batch_ms, key=lambda each: abs(each - rows))
    alone = lonely.batch_ms[size] / 1000 / stage.duration_s(size, 10**6)
    if (share := _busy_share(stage, fullest)) < BUSY:
        return replace(stage, alone=min(alone, 1.0))
    mean_s, mean_rows = _mean_execution(part.name, fullest)
    return replace(stage, alone=min(alone, 1.0), gap_row_s=max(mean_s * (1 / share - 1) / mean_rows, 0.0))


def _busy_share(stage: Stage, run: LoadResult) -> float:
    """What of the time the instances of a model were executing."""
    time = _of(stage.batching.name, run)
    if time is None or not time.executions or not time.batches:
        return 0.0
    executions = run.throughput * time.executions / max(time.requests, 1)
    return executions * _mean_execution(stage.batching.name, run)[0] / stage.batching.instances


def _mean_execution(name: str, run: LoadResult) -> tuple[float, float]:
    """Seconds and rows."""
    time = _of(name, run)
    if time is None or not time.batches:
        return 0.0, 1.0
    count = sum(time.batches.values())
    seconds = sum(many * time.batch_ms[size] for size, many in time.batches.items()) / 1000
    return seconds / count, sum(size * many for size, many in time.batches.items()) / count


def _grouped(counts: Mapping[int, int], spent: Mapping[int, float]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean sizes and times of neighbouring sizes that were run often enough together."""
    sizes: list[float] = []
    seconds: list[float] = []
    many, rows, total = 0, 0.0, 0.0
    for size in sorted(counts):
        many, rows, total = many + counts[size], rows + size * counts[size], total + spent[size]
        if many >= ENOUGH:
            sizes.append(rows / many)
            seconds.append(total / many)
            many, rows, total = 0, 0.0, 0.0
    if many and (many >= ENOUGH / 3 or not sizes):
        sizes.append(rows / many)
        seconds.append(total / many)
    return tuple(sizes), tuple(np.maximum.accumulate(seconds).tolist())


def _row_s(counts: Mapping[int, int], spent: Mapping[int, float]) -> float:
    """Of the line through the times, by least squares weighted by executions; nothing on it is negative."""
    sizes = np.array(list(counts), np.float64)
    means = np.array([spent[size] / counts[size] for size in counts])
    weights = np.array(list(counts.values()), np.float64)
    middle, mean = np.average(sizes, weights=weights), np.average(means, weights=weights)
    across = float(np.sum(weights * (sizes - middle) ** 2))
    if across == 0:
        return float(mean / middle)  # one size: the careful guess is that nothing is gained by larger ones
    return min(max(float(np.sum(weights * (sizes - middle) * (means - mean))) / across, 0.0), float(mean / middle))


def _of(name: str, run: LoadResult) -> ModelTime | None:
    models = run.breakdown.models if run.breakdown is not None else ()
    return next((time for time in models if time.model.partition(":")[0] == name), None)
