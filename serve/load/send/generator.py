"""The load of one process: an open loop that keeps to its schedule, or a closed one.

Each request leaves seven numbers in an array, which is handed on a few times a second as it is: to make histograms of
them is the work of whoever asked, so that it delays no request.
"""

from __future__ import annotations

import asyncio
import gc
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from compress.vetting.memory import peak_memory
from serve.load.ask.check import Judge
from serve.load.send.batch import NS_PER_S, Batch, Ending
from serve.load.send.connection import Connection, Flight, HttpConnection
from serve.load.send.job import Job
from serve.load.send.timer import PreciseTimer
from serve.load.send.turns import numbers, order_of, share

__all__ = ["DOWN", "Generator"]

HAND_ON_S = 0.2
OPEN_AHEAD, OPEN_S = 64, 10.0
PAUSE_S, LONGEST_PAUSE_S = 0.01, 1.0
DOWN = frozenset(("refused", "closed", "grpc unavailable"))
BUSY = frozenset(("status 429", "status 503", "grpc resource_exhausted"))
clock = time.perf_counter_ns


class Generator:
    """Sends one process's part of a load.

    Args:
        job: the load.
        part, parts: this process and how many there are.
        hand_on: called in the event loop with what was measured, a few times a second and at the end.
    """

    def __init__(self, job: Job, hand_on: Callable[[Batch], None], *, part: int = 0, parts: int = 1) -> None:
        self._job = job
        self._part = part
        self._parts = parts
        self._hand_on = hand_on
        self._loop = asyncio.get_running_loop()
        self._wires = [request.wire for request in job.requests]
        self._order = order_of(job)
        self._judge = None if job.check is None else Judge(job.check)
        self._records = array("q")
        self._kinds = {"": 0}
        self._right = self._labelled = self._began = self._warmup = 0
        self._flying: dict[Connection, None] = {}
        self._idle: list[Connection] = []
        self._opened = 0
        self._backlog: deque[Flight] = deque()
        self._ended = asyncio.Event()
        self._stopped = False
        self._ending: Ending = "whole"
        self._next = numbers(job, part, parts)
        self._left = share(job.max_requests, part, parts)
        self._end_number: int | None = None
        self._begin_ns = self._limit_ns = 0
        self._cpu_s = 0.0
        self._channels: Any = None
        self._timer: PreciseTimer | None = None
        self._times: list[int] = []
        self._numbers: list[int] = []
        self._at = 0
        self._chunks: Iterator[Any] = iter(())
        self._exhausted = True
        self._freezes = False

    async def prepare(self) -> None:
        """Open connections ahead, and tidy up, so that the first requests are on time."""
        job = self._job
        if job.protocol == "grpc":
            from serve.load.send.grpc_connection import Channels

            self._channels = Channels(job)
        wanted = self._concurrency()
        if job.arrivals is not None:
            if job.max_requests is not None:
                self._end_number = job.arrivals.before(int(job.warmup_s * NS_PER_S)) + job.max_requests
            wanted = min(self._connections(), max(8, min(OPEN_AHEAD, int(job.arrivals.rate / self._parts / 50))))
        connections = [self._new_connection() for _ in range(wanted)]
        with suppress(TimeoutError):  # what does not answer shows when requests are sent
            async with asyncio.timeout(min(job.timeout_s, OPEN_S)):
                await asyncio.gather(*(each.open() for each in connections if isinstance(each, HttpConnection)))
        self._idle.extend(connections)
        self._freezes = not gc.get_freeze_count()  # what somebody else has frozen stays so
        gc.collect()  # here, as it can take a second in a large process
        if self._freezes:
            gc.freeze()

    async def run(self, start_ns: int) -> None:
        """Send the load, from `start_ns` of `perf_counter_ns` on, until it is over or `stop` is called.

        Requests begun in time are waited for, because to drop the slow ones would flatter the server.
        """
        job = self._job
        self._begin_ns = start_ns + int(job.warmup_s * NS_PER_S)
        self._limit_ns = self._begin_ns + int(job.duration_s * NS_PER_S)
        self._cpu_s = time.process_time()
        self._timer = PreciseTimer(self._arrive if job.arrivals is not None else self._release)
        watcher = self._loop.create_task(self._watch())
        gc.disable()  # a full collection takes longer than a request may be late
        ending: Ending = "cut"
        try:
            if job.arrivals is not None:
                self._chunks = job.arrivals.chunks(self._part, self._parts)
                self._exhausted = False
                self._timer.at(self._next_due(start_ns))
            else:
                self._timer.at(start_ns)
            if not self._stopped:
                await self._ended.wait()
            ending = self._ending
        finally:
            gc.enable()
            if self._freezes:
                gc.unfreeze()
            watcher.cancel()
            self._timer.close()
            self._stopped = True
            await self.close()
            self._drain(ending)

    def stop(self, ending: Ending = "stopped") -> None:
        """Drop what is under way, and end; `ending` tells how that came."""
        if not self._ended.is_set():
            self._ending = ending
        self._stopped = True
        self._ended.set()

    async def close(self) -> None:
        """Close its connections, also where it was prepared for nothing."""
        for connection in (*self._flying, *self._idle):
            connection.close()
        if self._channels is not None:
            await self._channels.close()

    # The open loop.

    def _next_due(self, start_ns: int) -> int:
        """When the next request is due; past the end, the time to look whether all have ended."""
        while self._at >= len(self._times):
            chunk = next(self._chunks, None)
            if chunk is None:
                self._exhausted = True
                return 0
            times, numbers = chunk
            self._times, self._numbers, self._at = (times + start_ns).tolist(), numbers.tolist(), 0
        return self._times[self._at]

    def _arrive(self) -> None:
        """Send what is due."""
        start_ns = self._begin_ns - int(self._job.warmup_s * NS_PER_S)
        while not self._stopped:
            due = self._next_due(start_ns)
            if self._exhausted:
                break
            now = clock()
            if due > now:
                assert self._timer is not None  # noqa: S101
                self._timer.at(due)
                return
            number = self._numbers[self._at]
            if self._end_number is not None and number >= self._end_number:
                self._exhausted = True
                break
            self._at += 1
            flight = Flight(number, due, now)
            self._count(due)
            if self._idle:
                self._send(self._idle.pop(), flight)
            elif self._opened < self._connections():
                self._send(self._new_connection(), flight)
            else:
                self._backlog.append(flight)
        self._maybe_end()

    # The closed loop.

    def _release(self) -> None:
        """Start every client."""
        connections, self._idle = self._idle, []
        for connection in connections:
            self._again(connection)
        self._maybe_end()

    def _again(self, connection: Connection) -> None:
        """One client's next request, at once."""
        now = clock()
        if self._stopped or now >= self._limit_ns:
            self._idle.append(connection)
            return
        if now >= self._begin_ns and self._left is not None:
            if self._left == 0:
                self._idle.append(connection)
                return
            self._left -= 1
        flight = Flight(next(self._next), now, now)
        self._count(now)
        self._send(connection, flight)

    # Both.

    def _concurrency(self) -> int:
        return share(self._job.concurrency, self._part, self._parts) or 0

    def _connections(self) -> int:
        return share(self._job.connections, self._part, self._parts) or 1

    def _new_connection(self) -> Connection:
        self._opened += 1
        if self._channels is not None:
            connection: Connection = self._channels.connection(self._done)
            return connection
        keep = self._judge is not None or self._job.back_off
        return HttpConnection(self._job.host, self._job.port, self._done, keep=keep)

    def _count(self, due_ns: int) -> None:
        if due_ns >= self._begin_ns:
            self._began += 1
        else:
            self._warmup += 1

    def _send(self, connection: Connection, flight: Flight) -> None:
        self._flying[connection] = None
        connection.send(flight, self._wires[self._order[flight.number % len(self._order)]])

    def _done(self, connection: Connection) -> None:
        """A connection's request has ended."""
        end_ns = clock()
        flight = connection.flight
        connection.flight = None
        if flight is None:
            return
        del self._flying[connection]
        kind = connection.kind
        which = self._order[flight.number % len(self._order)]
        if flight.due_ns >= self._begin_ns:
            if self._judge is not None and connection.answer is not None:
                verdict = self._judge.verdict(which, connection.answer)
                kind = verdict.wrong
                self._right += verdict.right
                self._labelled += verdict.labelled
            begin = self._begin_ns
            self._records.extend(
                (
                    flight.due_ns - begin, flight.taken_ns - begin, flight.sent_ns - begin, end_ns - begin,
                    connection.wire_bytes, which, self._kinds.setdefault(kind, len(self._kinds)),
                )
            )  # fmt: skip
        if self._job.arrivals is None:
            if kind in DOWN or (self._job.back_off and kind in BUSY):  # don't spin where nobody listens
                self._loop.call_later(self._pause_s(connection), self._later, connection)
            else:
                connection.refusals = 0
                self._again(connection)
        elif self._backlog:
            self._send(connection, self._backlog.popleft())
        else:
            self._idle.append(connection)
        self._maybe_end()

    def _pause_s(self, connection: Connection) -> float:
        """Twice as long each time, unless the server says how long."""
        connection.refusals += 1
        if connection.kind in BUSY and connection.retry_after_s is not None:
            return connection.retry_after_s
        return min(PAUSE_S * 2.0 ** (connection.refusals - 1), LONGEST_PAUSE_S)

    def _later(self, connection: Connection) -> None:
        self._again(connection)
        self._maybe_end()

    def _maybe_end(self) -> None:
        if self._flying or self._backlog:
            return
        over = self._exhausted if self._job.arrivals is not None else len(self._idle) == self._opened
        if over:
            self._ended.set()

    async def _watch(self) -> None:
        """Hand on what was measured, and end what takes too long."""
        timeout_ns = int(self._job.timeout_s * NS_PER_S)
        pause_s = min(HAND_ON_S, self._job.timeout_s / 10)
        handed = clock()
        while True:
            await asyncio.sleep(pause_s)
            now = clock()
            for connection in list(self._flying):  # the oldest come first
                if connection.flight is None or now - connection.flight.sent_ns < timeout_ns:
                    break
                connection.fail("timeout")
            if now - handed >= HAND_ON_S * NS_PER_S:
                handed = now
                self._drain()

    def _drain(self, ended: Ending = "") -> None:
        records, self._records = self._records, array("q")
        self._hand_on(
            Batch(
                records.tobytes(), tuple(self._kinds), right=self._right, labelled=self._labelled, began=self._began,
                warmup=self._warmup, waiting=len(self._backlog), cpu_s=time.process_time() - self._cpu_s,
                memory_bytes=peak_memory(), ended=ended,
            )
        )  # fmt: skip
