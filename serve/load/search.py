"""The highest rate that keeps an objective: bracketed, bisected, and confirmed with arrivals that it has not seen."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from compress.errors import ServerError
from serve.load.figures.intervals import share_above
from serve.load.figures.result import LoadResult
from serve.load.figures.summary import LATE_SHARE, LEAST_BOUND_MS
from serve.load.options import LoadOptions
from serve.load.report.report import Found, Trial
from serve.load.run import Session
from serve.load.slo import Objective

__all__ = ["search"]

FIRST = 0.7
"""Share of a closed loop's peak that is tried first."""
UP, DOWN = 1.3, 0.6
LOWEST = 0.01
PEAK_CLIENTS = 32
PEAK_S = 3.0
LONGEST = 6.0
"""A run may last so many times what was asked, to have enough samples."""
STEPS_BACK = 6


class _Search:
    def __init__(
        self, session: Session, options: LoadOptions, objective: Objective, on_run: Callable[[LoadResult], None] | None
    ) -> None:
        self.session = session
        self.options = options
        self.objective = objective
        self.on_run = on_run
        self.trials: list[Trial] = []
        self.seed = options.seed
        self.late: dict[float, str] = {}
        """Why the generator, and not the server, may be what did not keep a rate."""

    async def peak(self) -> float:
        """Answers a second of a closed loop."""
        seconds = min(self.options.duration, PEAK_S)
        closed = self.options.with_(rate="", arrivals="poisson", concurrency=PEAK_CLIENTS, duration=seconds)
        result = await self.session.run(closed)
        self._note(result, result.throughput, "peak", kept=True, why=())
        return result.throughput

    async def kept(self, rate: float, stage: str) -> tuple[bool, LoadResult | None]:
        """Whether a rate keeps the objective, with arrivals of its own; no figures where nothing can be sent now."""
        self.seed += 1
        options = self.options
        enough = min(self.objective.samples * 1.2 / rate, LONGEST * options.duration)
        late_ms = options.max_lateness_ms or max(LEAST_BOUND_MS, LATE_SHARE * (self.objective.latency_ms or 0))
        load = options.with_(
            rate=f"{rate:.6g}", seed=self.seed, duration=max(options.duration, enough),
            max_lateness_ms=late_ms,
        )  # fmt: skip
        expected = rate * load.duration
        try:
            result = await self.session.run(load, give_up=lambda recorder: self.objective.lost(recorder, expected))
        except ServerError:  # `ended` has its words, and no more is sent
            return False, None
        why = self.objective.broken(result)
        lost = result.interrupted and not self.session.stopped
        if lost and not why:
            why = ["given up before its end: too much had gone wrong by then"]
        kept = not why and not self.session.stopped
        if result.invalid and not kept:  # late sending makes latencies longer: what is kept is kept
            self.late[rate] = result.invalid[0]
        self._note(result, rate, stage, kept=kept, why=tuple(why))
        return kept, result

    def _note(self, result: LoadResult, rate: float, stage: str, *, kept: bool, why: tuple[str, ...]) -> None:
        terms = [term for term in self.objective.terms if term.percent is not None]
        latency = terms[0].value(result) if terms else result.latency.at("p99")
        self.trials.append(Trial(rate, kept, why, stage, result.seconds, result.throughput, latency))
        if self.on_run is not None:
            self.on_run(result)


async def search(
    session: Session,
    options: LoadOptions,
    objective: Objective,
    *,
    precision: float,
    confirmations: int,
    on_run: Callable[[LoadResult], None] | None = None,
) -> tuple[Found, list[LoadResult]]:
    """Find the rate.

    A trial ends as soon as it can't keep the objective any more. The rate found is confirmed by runs with fresh seeds,
    all of which must keep it; where one does not, the next lower rate is confirmed.

    Args:
        precision: how near the highest rate that keeps it and the lowest that does not shall come, as a share.
        confirmations: how many runs.

    Returns:
        What was found, and the confirming runs.
    """
    run = _Search(session, options, objective, on_run)
    peak = await run.peak()
    low: float | None = None
    high: float | None = None
    rate = _round(max(FIRST * peak, 1.0))
    while peak > 0 and not session.stopped and (low is None or high is None):
        kept, _ = await run.kept(rate, "bracket")
        if kept:
            low = rate
            rate = _round(rate * UP)
        else:
            high = rate
            rate = _round(rate * DOWN)
            if rate < max(LOWEST * peak, 1.0):
                break
    while low is not None and high is not None and high / low > 1 + precision and not session.stopped:
        middle = _round(math.sqrt(low * high))
        if middle in (low, high):  # there is no readable rate between them
            break
        kept, _ = await run.kept(middle, "bisect")
        low, high = (middle, high) if kept else (low, middle)
    confirmed: list[LoadResult] = []
    for _ in range(STEPS_BACK):
        if low is None or session.stopped:
            break
        confirmed = []
        for _ in range(confirmations):
            kept, result = await run.kept(low, "confirm")
            if not kept or result is None:
                high = high if session.stopped else low
                break
            confirmed.append(result)
        if len(confirmed) == confirmations:
            break
        low = _round(low / (1 + precision))
    else:
        low = None
    if len(confirmed) < confirmations:
        low = None
    return _found(run, low, high, peak, confirmed), confirmed


def _round(rate: float) -> float:
    """A rate that people can read."""
    return float(f"{rate:.3g}")


def _found(run: _Search, low: float | None, high: float | None, peak: float, confirmed: Sequence[LoadResult]) -> Found:
    objective = run.objective
    term = next((term for term in objective.terms if term.percent is not None), None)
    share = bound = allowed = None
    if low is None:
        stopped = f"No rate was found that keeps {objective}"
        if run.session.stopped:
            stopped = "Stopped before a rate was found"
            stopped += f" ({run.session.ended})" if run.session.ended else ""
        why: Sequence[str] = next((trial.why for trial in reversed(run.trials) if trial.why), ())
        if not peak:
            why = ["a closed loop, the first one, had no answer"]
        words = f"{stopped}; the last one tried: {'; '.join(why)}." if why else f"{stopped}."
    else:
        words = f"{objective} is kept up to {low:,.4g} requests/s"
        words += f", not at {high:,.4g}" if high is not None else ""
        words += f" ({low / peak:.0%} of a closed loop's peak of {peak:,.4g})" if peak else ""
        words += f", in {len(confirmed)} of {len(confirmed)} runs with fresh arrivals"
        if term is not None and term.percent is not None:
            allowed = 1 - term.percent / 100
            share, bound = share_above(confirmed, term.bound)
            sure = "which is inside" if bound <= allowed else "so that it is not certain at 95%"
            words += (
                f"; {share:.2%} of the answers were slower than {term.bound:g} ms (with 95% confidence at most "
                f"{bound:.2%}), {100 * allowed:.3g}% may be, {sure}"
            )
        words += "."
    if high in run.late:
        words += f" Whether it is the server that fails at {high:,.4g} is not certain: {run.late[high]}."
    return Found(low, high, peak, len(confirmed), share, bound, allowed, words, tuple(run.trials))
