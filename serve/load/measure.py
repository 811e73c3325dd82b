"""A load test whole: one run, a sweep, a scenario, or the search for the highest rate that keeps an objective."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import uvloop

from compress.errors import ServerError
from serve.load.figures.result import LoadResult
from serve.load.options import LoadOptions, Scenario
from serve.load.report.report import Found, LoadReport, describe_machine
from serve.load.run import OnProgress, Session
from serve.load.search import search
from serve.load.slo import Objective, parse_objective

__all__ = ["Plan", "concurrencies", "measure"]

OFFLINE_CLIENTS = 64
MULTI_STREAM_ROWS = "8"


@dataclass(frozen=True)
class Plan:
    """What to measure beyond one load.

    Attributes:
        concurrency: of closed loops, such as "1..128", "1,4,16", "32".
        rates: of open loops, each a run of its own.
        scenario: after MLPerf Inference: "single-stream" (one query at a time), "multi-stream" (queries of 8 samples,
            one at a time), "server" (the highest Poisson rate that keeps a bound), "offline" (all at once: throughput).
        objective: such as "p99<20ms,errors<0.1%"; without a load, its highest rate is searched.
        hourly_cost: of what serves.
        precision: how near the rates that keep it and do not shall come in a search, as a share.
        confirmations: runs with fresh arrivals that must keep it.

    Raises:
        ServerError: a value that can't work.
    """

    concurrency: tuple[str, ...] = ()
    rates: tuple[str, ...] = ()
    scenario: Scenario | None = None
    objective: str = ""
    hourly_cost: float | None = None
    precision: float = 0.05
    confirmations: int = 3

    def __post_init__(self) -> None:
        for name, holds, bound in (
            ("precision", 0.01 <= self.precision <= 1, "from 0.01 to 1"),
            ("confirmations", self.confirmations >= 1, "of 1 or more"),
            ("hourly_cost", self.hourly_cost is None or 0 < self.hourly_cost < math.inf, "over 0"),
        ):
            if not holds:
                raise ServerError(
                    "the load test can't run",
                    why=f"{name} is {getattr(self, name)}",
                    mend=f"give {name.replace('_', '-')} a value {bound}",
                )


def measure(
    options: LoadOptions,
    plan: Plan,
    *,
    on_progress: OnProgress | None = None,
    on_run: Callable[[LoadResult], None] | None = None,
) -> LoadReport:
    """Send the loads, and report.

    Ctrl-C ends it early, with what was measured up to then.

    Args:
        on_progress: told a few times a second.
        on_run: given each run when it is done.

    Raises:
        ServerError: the target can't be used, or the plan makes no sense.
    """
    objective = parse_objective(plan.objective) if plan.objective else None
    loads = _loads(options, plan, objective)

    async def main() -> LoadReport:
        async with Session(options if loads is None else loads[0], on_progress) as session:
            if loads is None:
                assert objective is not None  # noqa: S101
                found, confirmed = await search(
                    session, options, objective,
                    precision=plan.precision, confirmations=plan.confirmations, on_run=on_run,
                )  # fmt: skip
                return _report(confirmed, options, plan, objective, found, session.ended)
            runs = []
            for load in loads:
                try:
                    runs.append(await session.run(load))
                except ServerError:  # `ended` has its words
                    if not runs:
                        raise
                    break
                if on_run is not None:
                    on_run(runs[-1])
                if session.stopped:
                    break
            ended = session.ended if len(runs) < len(loads) else ""
            return _report(runs, options, plan, objective, None, ended)

    return uvloop.run(main())


def concurrencies(texts: Sequence[str]) -> list[int]:
    """Read "32", "1,4,16" and "1..128" (powers of two between, and both ends).

    Raises:
        ServerError: it is none of these.
    """
    found: list[int] = []
    for part in (part for text in texts for part in text.split(",")):
        match = re.fullmatch(r"(\d+)(?:\.\.(\d+))?", part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 0 < first <= last <= 100_000:
            raise ServerError(
                f"can't have {part!r} requests at a time",
                why="it is no number or range",
                mend="give 32, 1,4,16 or 1..128",
            )
        between = [2**power for power in range(last.bit_length()) if first < 2**power < last]
        found += [first, *between, *([last] if last > first else [])]
    return list(dict.fromkeys(found))


def _loads(options: LoadOptions, plan: Plan, objective: Objective | None) -> list[LoadOptions] | None:
    """One for each run; None for a search."""
    if plan.rates and plan.concurrency:
        raise ServerError(
            "can't send both kinds of load", why="--rate is an open loop, --concurrency a closed one", mend="give one"
        )
    if plan.scenario:
        if plan.rates or plan.concurrency:
            raise ServerError(
                f"can't run the scenario {plan.scenario}",
                why="--rate and --concurrency are its own to choose",
                mend="leave them out",
            )
        return _scenario(options, plan, objective)
    if plan.rates:
        return [options.with_(rate=rate) for rate in plan.rates]
    if options.open_loop:
        return [options]
    if plan.concurrency:
        return [options.with_(concurrency=count) for count in concurrencies(plan.concurrency)]
    return None if objective is not None else [options]


def _scenario(options: LoadOptions, plan: Plan, objective: Objective | None) -> list[LoadOptions] | None:
    match plan.scenario:
        case "single-stream":
            return [options.with_(concurrency=1)]
        case "multi-stream":
            return [options.with_(concurrency=1, batch=options.batch or (MULTI_STREAM_ROWS,))]
        case "offline":
            return [options.with_(concurrency=OFFLINE_CLIENTS)]
        case _:
            if objective is None or objective.latency_ms is None:
                raise ServerError(
                    "can't run the scenario server",
                    why="it is the highest rate that keeps a bound on latency, and none was given",
                    mend="give one, such as --slo 'p99<20ms'",
                )
            return None


def _report(
    runs: Sequence[LoadResult],
    options: LoadOptions,
    plan: Plan,
    objective: Objective | None,
    found: Found | None,
    ended: str,
) -> LoadReport:
    broken = tuple(tuple(objective.broken(run)) if objective is not None else () for run in runs)
    title = f"{options.model} at {options.url}" if options.model else options.url
    return LoadReport(
        tuple(runs), title, plan.scenario or "", str(objective or ""), broken, found,
        _verdict(runs, plan, objective, broken, found), plan.hourly_cost, describe_machine(), ended,
    )  # fmt: skip


def _verdict(
    runs: Sequence[LoadResult],
    plan: Plan,
    objective: Objective | None,
    broken: Sequence[Sequence[str]],
    found: Found | None,
) -> str:
    if found is not None:
        return found.words
    if not runs:
        return "Nothing was measured."
    if objective is not None:
        good = [run for run, words in zip(runs, broken, strict=True) if not words]
        if not good:
            return f"{objective} is not kept" + (" by any load." if len(runs) > 1 else f": {'; '.join(broken[0])}.")
        if len(runs) == 1:
            return f"{objective} is kept."
        best = max(good, key=lambda run: run.throughput)
        return f"{objective} is kept up to {best.offered}: {best.throughput:,.0f} answers/s."
    best = max(runs, key=lambda run: run.throughput)
    match plan.scenario:
        case "single-stream" | "multi-stream":
            name = "p90" if plan.scenario == "single-stream" else "p99"  # MLPerf's choice of percentile
            value = runs[0].latency.at(name)
            told = "too few samples" if value is None else f"{value:.3g} ms"
            return f"{plan.scenario}: {name} of a query {told}."
        case "offline":
            return f"offline: {best.inferences:,.0f} inferences/s."
    if len(runs) > 1:
        return f"Most with {best.offered}: {best.throughput:,.0f} answers/s."
    return ""
