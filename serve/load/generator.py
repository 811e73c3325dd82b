"""Closed loop: N clients, each with one keep-alive connection, each sending as soon as it was answered."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from serve.http_client import ExchangeError, Pool
from serve.load.options import LoadOptions
from serve.load.recorder import NS_PER_S, Recorder
from serve.load.result import LoadResult
from serve.load.target import Target

__all__ = ["Progress", "generate"]

PROGRESS_S = 0.2


@dataclass(frozen=True)
class Progress:
    """Where a run stands, told a few times a second.

    Attributes:
        elapsed_s, total_s: since the first request; warm-up and measured window together.
        successes, errors: measured so far.
    """

    elapsed_s: float
    total_s: float
    successes: int
    errors: int


async def generate(
    target: Target,
    options: LoadOptions,
    *,
    stop: asyncio.Event,
    on_progress: Callable[[Progress], None] | None = None,
) -> LoadResult:
    """Send requests until the time is over, the count is reached, or `stop` is set.

    Requests begun in time are waited for, because to drop the slow ones would flatter the server; once `stop` is
    set they are dropped.

    Args:
        on_progress: called in the event loop; what it costs, the measurement pays.
    """
    recorder = Recorder()
    loop = asyncio.get_running_loop()
    first_ns = time.perf_counter_ns()
    begin_ns = first_ns + int(options.warmup * NS_PER_S)
    limit_ns = begin_ns + int(options.duration * NS_PER_S)
    budget = _Budget(options.max_requests)
    cpu_s = time.process_time()
    clients = [
        asyncio.ensure_future(_client(target, options, recorder, budget, begin_ns, limit_ns))
        for _ in range(options.concurrency)
    ]
    finished = asyncio.gather(*clients)
    stopping = asyncio.ensure_future(stop.wait())
    total_s = options.warmup + options.duration
    ticker: asyncio.TimerHandle | None = None

    def tick() -> None:
        nonlocal ticker
        elapsed_s = (time.perf_counter_ns() - first_ns) / NS_PER_S
        if on_progress is not None:
            on_progress(Progress(elapsed_s, total_s, recorder.count, recorder.total - recorder.count))
        ticker = loop.call_later(PROGRESS_S, tick)

    tick()
    try:
        await asyncio.wait((finished, stopping), return_when=asyncio.FIRST_COMPLETED)
        if not stop.is_set():
            finished.result()  # a bug in a client is not a result
    finally:
        stopping.cancel()
        if ticker is not None:
            ticker.cancel()
        for client in clients:
            client.cancel()
        await asyncio.gather(finished, *clients, return_exceptions=True)
    now_ns = time.perf_counter_ns()
    interrupted = stop.is_set()
    end_ns = min(now_ns, limit_ns)
    if budget.spent:
        end_ns = recorder.last_success_ns() or end_ns
    elif not interrupted:
        end_ns = max(limit_ns, recorder.last_success_ns() or 0)
    return recorder.result(
        model=options.model,
        url=options.url,
        concurrency=options.concurrency,
        begin_ns=begin_ns,
        end_ns=end_ns,
        request_bytes=target.request_bytes,
        client_cpu_share=(time.process_time() - cpu_s) / max((now_ns - first_ns) / NS_PER_S, 1e-9),
        interrupted=interrupted,
    )


class _Budget:
    """How many measured requests may still be begun."""

    def __init__(self, requests: int | None) -> None:
        self._left = requests

    @property
    def spent(self) -> bool:
        return self._left == 0

    def take(self) -> bool:
        if self._left is None:
            return True
        if self._left == 0:
            return False
        self._left -= 1
        return True


async def _client(
    target: Target, options: LoadOptions, recorder: Recorder, budget: _Budget, begin_ns: int, limit_ns: int
) -> None:
    """One client's requests, one after the other."""
    clock = time.perf_counter_ns
    pool = Pool(target.address, max_connections=1, timeout_s=options.timeout)
    try:
        while (start_ns := clock()) < limit_ns:
            measured = start_ns >= begin_ns
            if measured and not budget.take():
                return
            kind = ""
            wire_bytes = 0
            try:
                response = await pool.exchange(target.head, target.body)
                wire_bytes = response.wire_bytes
                if response.status != 200:
                    kind = f"status {response.status}"
            except ExchangeError as err:
                kind = err.kind
            end_ns = clock()
            if not measured:
                recorder.warmup_count += 1
            elif kind:
                recorder.failure(kind, end_ns)
            else:
                recorder.success(start_ns, end_ns, wire_bytes)
            if kind == "refused":
                await asyncio.sleep(0.01)  # nobody listens: don't spin
    finally:
        await pool.close()
