"""A server whose delays are known, for benchmarks of the load tester: python benchmarks/load_server.py MODE [VALUES]

    trivial                        answers at once
    fixed MS                       after so long
    lognormal MEDIAN_MS SIGMA      after so long, drawn
    stall MS EVERY_S FOR_S         after so long; but holds all answers back for FOR_S every EVERY_S
    queue exponential|constant PER_S   one worker that serves one request after the other (M/M/1, M/D/1)

It prints its port first, and draws in the order in which requests come, always the same.
"""

from __future__ import annotations

import asyncio
import heapq
import sys
import time
from collections.abc import Callable, Iterator

import numpy as np
import uvloop

from serve.load.send.timer import PreciseTimer

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 64\r\n\r\n" + b" " * 64
SEED = 20_261
"""Another than the arrivals', which would come in step with the service times."""
clock = time.perf_counter_ns


def drawn(draw: Callable[[np.random.Generator, int], np.ndarray[tuple[int], np.dtype[np.float64]]]) -> Iterator[int]:
    """Nanoseconds, without end."""
    generator = np.random.default_rng(SEED)
    while True:
        yield from (draw(generator, 4096) * 1e9).astype(np.int64).tolist()


def answer_times(words: list[str]) -> Callable[[int], int]:
    """When to answer a request that came at a time; both of `perf_counter_ns`."""
    match words:
        case ["fixed", ms]:
            delay = int(float(ms) * 1e6)
            return lambda now: now + delay
        case ["lognormal", median_ms, sigma]:
            scale, shape = float(median_ms) / 1e3, float(sigma)
            delays = drawn(lambda generator, size: scale * np.exp(shape * generator.standard_normal(size)))
            return lambda now: now + next(delays)
        case ["stall", ms, every_s, for_s]:
            delay, every, length = int(float(ms) * 1e6), int(float(every_s) * 1e9), int(float(for_s) * 1e9)
            return lambda now: max(now, now - now % every + length if now % every < length else now) + delay
        case ["queue", kind, per_s]:
            mean = 1 / float(per_s)
            if kind == "exponential":
                services = drawn(lambda generator, size: generator.exponential(mean, size))
            else:
                services = drawn(lambda _, size: np.full(size, mean))
            free = 0

            def serve(now: int) -> int:
                nonlocal free
                free = max(now, free) + next(services)
                return free

            return serve
    raise SystemExit(__doc__)


class Trivial(asyncio.Protocol):
    """Answers at once."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, _: bytes) -> None:
        self.transport.write(ANSWER)  # type: ignore[attr-defined]


class Delayed:
    """Answers at known times."""

    def __init__(self, when: Callable[[int], int]) -> None:
        self._when = when
        self._heap: list[tuple[int, int, asyncio.BaseTransport]] = []
        self._count = 0
        self._timer = PreciseTimer(self._due)

    def came(self, transport: asyncio.BaseTransport) -> None:
        self._count += 1
        heapq.heappush(self._heap, (self._when(clock()), self._count, transport))
        self._timer.at(self._heap[0][0])

    def _due(self) -> None:
        while self._heap and self._heap[0][0] <= clock():
            transport = heapq.heappop(self._heap)[2]
            transport.write(ANSWER)  # type: ignore[attr-defined]
        if self._heap:
            self._timer.at(self._heap[0][0])


class Client(asyncio.Protocol):
    """A connection; each request is small enough to come in one piece."""

    def __init__(self, delayed: Delayed) -> None:
        self._delayed = delayed

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, _: bytes) -> None:
        self._delayed.came(self._transport)


async def main(words: list[str]) -> None:
    loop = asyncio.get_running_loop()
    if words == ["trivial"]:
        server = await loop.create_server(Trivial, "127.0.0.1", 0, backlog=4096)
    else:
        delayed = Delayed(answer_times(words))
        server = await loop.create_server(lambda: Client(delayed), "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1:]))
