"""One load from options to result."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import uvloop

from compress.errors import ServerError
from serve.load.ask.target import Target, find_target
from serve.load.figures.recorder import Recorder
from serve.load.figures.result import LoadResult
from serve.load.figures.server_side import Observation, observe
from serve.load.figures.summary import summarize
from serve.load.options import LoadOptions
from serve.load.send.arrivals import Arrivals, Leg, parse_arrivals, parse_rate, read_trace
from serve.load.send.batch import NS_PER_S
from serve.load.send.generator import DOWN
from serve.load.send.job import Job
from serve.load.send.processes import Processes

__all__ = ["Progress", "Session", "run_load"]

PROGRESS_S = 0.25
GIVE_UP_S = 10
"""A server that has not answered for so long is left alone."""
LEAST_FAILURES = 20


@dataclass(frozen=True)
class Progress:
    """Where a run stands, told a few times a second.

    Attributes:
        elapsed_s, total_s: since the first request; warm-up and measured part together.
        successes, errors: measured so far.
        in_flight, waiting: begun and not ended; due, without a connection.
        per_s, p50_ms, p99_ms: of the last whole second; None where there is none.
        late_ms: the largest lateness of the generator in it.
        offered: the load in words.
    """

    elapsed_s: float
    total_s: float
    successes: int
    errors: int
    in_flight: int = 0
    waiting: int = 0
    per_s: float | None = None
    p50_ms: float | None = None
    p99_ms: float | None = None
    late_ms: float | None = None
    offered: str = ""


OnProgress = Callable[[Progress], None]


def run_load(options: LoadOptions, *, on_progress: OnProgress | None = None) -> LoadResult:
    """Find the target, send the load, and measure.

    Ctrl-C ends it early, with the figures up to then.

    Args:
        on_progress: told a few times a second.

    Raises:
        ServerError: the target can't be used.
    """

    async def main() -> LoadResult:
        async with Session(options, on_progress) as session:
            return await session.run(options)

    return uvloop.run(main())


class Session:
    """A target and the processes that send to it, for load after load.

    Args:
        options: what is asked of whom, and from where.
        on_progress: told a few times a second.

    Attributes:
        ended: why no load can be sent any more, in words; "" where one can, and after Ctrl-C.
    """

    def __init__(self, options: LoadOptions, on_progress: OnProgress | None = None) -> None:
        self._options = options
        self._on_progress = on_progress
        self._processes = Processes(options)
        self._targets: dict[str, Target] = {}
        self._interrupted = False
        self.ended = ""

    @property
    def stopped(self) -> bool:
        """Whether no load is to follow: Ctrl-C came, or a generator was lost."""
        return self._interrupted or bool(self.ended)

    async def __aenter__(self) -> Session:
        await self.target(self._options)  # before any process is started for nothing
        await self._processes.__aenter__()
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                asyncio.get_running_loop().add_signal_handler(number, self.stop)
        return self

    async def __aexit__(self, *reason: object) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                asyncio.get_running_loop().remove_signal_handler(number)
        await self._processes.__aexit__(None, None, None)

    def stop(self) -> None:
        """End the load that is under way, and let none follow; the second time, wait for no generator any longer."""
        if self._interrupted:
            self._processes.abandon("it was not waited for")
        self._interrupted = True
        self._processes.stop()

    async def target(self, options: LoadOptions) -> Target:
        """Whom these options ask, and what."""
        seed = options.seed if options.data is None else 0  # it draws synthetic inputs; a dataset is read once
        key = repr((options.url, options.model, options.batch, options.shape, seed))
        if key not in self._targets:
            self._targets[key] = await find_target(options)
        return self._targets[key]

    async def run(self, options: LoadOptions, *, give_up: Callable[[Recorder], bool] | None = None) -> LoadResult:
        """Send one load.

        Args:
            options: with the same workers as those that this was made with.
            give_up: asked a few times a second whether the load can be ended early.

        Raises:
            ServerError: it can't be sent, and none can after it.
        """
        try:
            return await self._run(options, give_up)
        except ServerError as err:
            self.ended = f"{err.what}: {err.why}"
            raise

    async def _run(self, options: LoadOptions, give_up: Callable[[Recorder], bool] | None) -> LoadResult:
        target = await self.target(options)
        job = make_job(target, options)
        recorder = Recorder(job)
        seen: list[Observation] = []
        began: list[int] = []
        tasks: list[asyncio.Task[None]] = []
        given_up = False

        async def look(at_ns: int) -> None:
            await asyncio.sleep(max(at_ns - time.perf_counter_ns(), 0) / NS_PER_S)
            seen.append(await observe(target, options.model, time.perf_counter_ns()))

        async def tell(start_ns: int) -> None:
            nonlocal given_up
            while True:
                await asyncio.sleep(PROGRESS_S)
                if self._on_progress is not None:
                    self._on_progress(_standing(recorder, options, job, start_ns))
                if given_up or self._interrupted:
                    continue
                if _is_gone(recorder, (time.perf_counter_ns() - start_ns) / NS_PER_S - job.warmup_s):
                    recorder.gone = True
                if recorder.gone or (give_up is not None and give_up(recorder)):
                    given_up = True
                    self._processes.stop()

        def on_start(start_ns: int) -> None:
            began.append(start_ns)
            tasks.append(asyncio.ensure_future(look(start_ns + int(options.warmup * NS_PER_S))))
            tasks.append(asyncio.ensure_future(tell(start_ns)))

        started = time.time()
        try:
            await self._processes.run(job, recorder.add, on_start)
        finally:
            ended_ns = time.perf_counter_ns()
            for task in tasks[1:]:
                task.cancel()
            if tasks and (self._interrupted or given_up or not tasks[0].done()):
                tasks[0].cancel()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
        for end in ends:
            if isinstance(end, Exception):
                raise end
        lost = list(self._processes.lost)
        if not (lost or self._interrupted or given_up):
            lost = await asyncio.to_thread(_unsent, job, recorder)
        self.ended = "; ".join(lost)
        if seen:
            seen.append(await observe(target, options.model, ended_ns))
        return summarize(
            recorder,
            options,
            job,
            request_bytes=target.request_bytes,
            began_ns=began[0] if began else ended_ns,
            ended_ns=ended_ns,
            started=started,
            processes=self._processes.size,
            lost=lost,
            stopped=self._interrupted or given_up,
            seen=seen,
            clock_error_ns=self._processes.clock_error_ns,
        )


def make_job(target: Target, options: LoadOptions) -> Job:
    """What the generators are told."""
    arrivals = _arrivals(options) if options.open_loop else None
    duration = options.duration if arrivals is None else arrivals.seconds - options.warmup
    return Job(
        target.endpoint.protocol, target.endpoint.address.host, target.endpoint.address.port, target.requests,
        weights=target.weights, arrivals=arrivals, concurrency=options.concurrency, connections=options.connections,
        warmup_s=options.warmup, duration_s=duration, max_requests=options.max_requests, timeout_s=options.timeout,
        back_off=options.back_off, seed=options.seed, metadata=target.metadata, check=target.check,
    )  # fmt: skip


def _arrivals(options: LoadOptions) -> Arrivals:
    """The schedule, its first rate kept up through the warm-up before it."""
    kind, burst, trace = parse_arrivals(options.arrivals)
    warmup = options.warmup
    if trace is not None:
        legs = parse_rate(options.rate, options.duration) if options.rate else ()
        times = read_trace(trace, rate=legs[0].first if legs else None)
        return Arrivals("trace", times_s=tuple(warmup + at for at in times))
    legs = parse_rate(options.rate, options.duration)
    if warmup > 0:
        legs = (Leg(legs[0].first, legs[0].first, warmup), *legs)
    return Arrivals(kind, legs, options.seed, burst)


def _unsent(job: Job, recorder: Recorder) -> list[str]:
    """What an open loop's schedule has and the generators did not begin, in words."""
    if job.arrivals is None:
        return []
    due = job.arrivals.total() - job.arrivals.before(int(job.warmup_s * NS_PER_S))
    due = due if job.max_requests is None else min(due, job.max_requests)
    if recorder.began == due:
        return []
    return [f"{due:,} requests were due, and {recorder.began:,} were begun"]


def _is_gone(recorder: Recorder, elapsed_s: float) -> bool:
    """Whether connections only failed for a while."""
    now = int(elapsed_s)
    last = [recorder.seconds[number] for number in range(now - GIVE_UP_S, now + 1) if number in recorder.seconds]
    errors = sum((tally.errors for tally in last), Counter[str]())
    return (
        now >= GIVE_UP_S
        and not any(tally.answers for tally in last)
        and errors.total() >= LEAST_FAILURES
        and errors.keys() <= DOWN | {"timeout"}
    )


def _standing(recorder: Recorder, options: LoadOptions, job: Job, start_ns: int) -> Progress:
    elapsed_s = (time.perf_counter_ns() - start_ns) / NS_PER_S
    errors = recorder.errors.total()
    successes = recorder.count
    last = recorder.seconds.get(int(elapsed_s - job.warmup_s) - 1)
    latency = last.latency if last is not None and last.latency.total else None
    return Progress(
        elapsed_s,
        job.warmup_s + job.duration_s,
        successes,
        errors,
        max(recorder.began - successes - errors - recorder.waiting, 0),
        recorder.waiting,
        None if last is None else float(last.answers),
        None if latency is None else latency.value_at(50) / 1e6,
        None if latency is None else latency.value_at(99) / 1e6,
        None if last is None or not last.lateness.total else last.lateness.value_at(100) / 1e6,
        f"{options.rate or options.arrivals} requests/s" if options.open_loop else f"{options.concurrency} at a time",
    )
