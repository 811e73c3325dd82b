"""A simulated replica: what all requests pass, then each model's queue, dynamic batcher and instances (SimPy)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from compress.errors import MissingExtraError
from serve.plan.service import Service, Stage

__all__ = ["Clock", "Replica", "capacity", "closed_loop", "new_clock", "open_loop", "poisson"]

Floats = np.ndarray[Any, np.dtype[np.float64]]
Clock = Any  # simpy.Environment, which has no types
FULL_HOUSE = 256


def new_clock() -> Clock:
    """The simulation's time, in seconds from 0.

    Raises:
        MissingExtraError: SimPy is not installed.
    """
    try:
        import simpy
    except ModuleNotFoundError as err:
        raise MissingExtraError("can't simulate", module="simpy", extra="deploy") from err
    return simpy.Environment()


@dataclass(slots=True)
class _Request:
    begun_s: float
    luck: float
    done: Callable[[float], None]
    stage: int = 0
    waits_from_s: float = 0.0


class Replica:
    """One server; `ask` sends it a request.

    Attributes:
        in_flight: requests with it.
    """

    def __init__(self, clock: Clock, service: Service, seed: int) -> None:
        self.clock = clock
        self.service = service
        self.in_flight = 0
        self._spread = np.array(service.spread)
        self._random = np.random.default_rng(seed)
        self._lucks: list[float] = []
        self._front_free_s = 0.0
        self._half_s = max(service.around_s - service.front_s, 0.0) / 2
        self._queues = [_Queue(self, stage) for stage in service.stages]

    def ask(self, done: Callable[[float], None]) -> None:
        """Send a request now; `done` is told its latency in seconds."""
        request = _Request(self.clock.now, self.luck(), done)
        self.in_flight += 1
        after = self._half_s * request.luck
        if self.service.front_s:
            begins = max(self._front_free_s, self.clock.now)
            self._front_free_s = begins + self.service.front_s
            after += self._front_free_s - self.clock.now
        self.later(after, lambda: self.arrive(request))

    def luck(self) -> float:
        if not self._lucks:
            self._lucks = self._random.choice(self._spread, 4096).tolist()
        return self._lucks.pop()

    def arrive(self, request: _Request) -> None:
        if request.stage < len(self._queues):
            self._queues[request.stage].put(request)
        else:
            self.later(self._half_s * request.luck, lambda: self._leave(request))

    def _leave(self, request: _Request) -> None:
        self.in_flight -= 1
        request.done(self.clock.now - request.begun_s)

    def later(self, seconds: float, what: Callable[[], None]) -> None:
        self.clock.timeout(seconds).callbacks.append(lambda _: what())


class _Queue:
    """One model: requests wait, are put together, and run on an instance that is free."""

    def __init__(self, replica: Replica, stage: Stage) -> None:
        self.replica = replica
        self.stage = stage
        self.waiting: deque[_Request] = deque()
        self.free = stage.batching.instances
        rows = replica.service.rows
        self.rows = rows
        self.most = max(stage.batching.most // rows, 1) if stage.batching.most else 1

    def put(self, request: _Request) -> None:
        request.waits_from_s = self.replica.clock.now
        self.waiting.append(request)
        self.run()

    def run(self) -> None:
        delay_s = self.stage.batching.delay_s
        while self.free and self.waiting:
            if delay_s and len(self.waiting) < self.most:
                left = self.waiting[0].waits_from_s + delay_s - self.replica.clock.now
                if left > 1e-9:
                    self.replica.later(left, self.run)
                    return
            batch = [self.waiting.popleft() for _ in range(min(self.most, len(self.waiting)))]
            self.free -= 1
            # One request alone varies just as it was measured; of several, each has its own luck, and a part of it.
            luck = batch[0].luck
            if len(batch) > 1:
                luck = 1 + (self.replica.luck() - 1) / math.sqrt(len(batch))
            seconds = self.stage.duration_s(len(batch) * self.rows, self.replica.in_flight) * luck
            self.replica.later(seconds, lambda batch=batch: self.ran(batch))  # type: ignore[misc]

    def ran(self, batch: Sequence[_Request]) -> None:
        for request in batch:
            request.stage += 1
            self.replica.arrive(request)
        if self.stage.gap_row_s:
            self.replica.later(self.stage.gap_row_s * len(batch) * self.rows, self.freed)
        else:
            self.freed()

    def freed(self) -> None:
        self.free += 1
        self.run()


@dataclass
class _Tally:
    latencies: list[float] = field(default_factory=list)
    last_s: float = 0.0


def poisson(rate: float, requests: int, seed: int = 0) -> Floats:
    """When requests are due, in seconds: so many of them, at so many a second on average."""
    found: Floats = np.cumsum(np.random.default_rng((seed, 1)).exponential(1 / rate, requests))
    return found


def open_loop(service: Service, times_s: Floats, *, warmup_s: float = 0.0, seed: int = 0) -> Floats:
    """Latencies in seconds, in the order of the answers, of requests that one replica gets at given times.

    Args:
        service: the replica.
        times_s: ascending.
        warmup_s: requests that are due before are not counted.
        seed: the same one draws the same.
    """
    clock = new_clock()
    replica = Replica(clock, service, seed)
    latencies: list[float] = []

    def arrivals() -> Any:
        for due in times_s.tolist():
            if due > clock.now:
                yield clock.timeout(due - clock.now)
            replica.ask(latencies.append if due >= warmup_s else lambda _: None)

    clock.process(arrivals())
    clock.run()
    return np.array(latencies)


def closed_loop(service: Service, clients: int, requests: int, seed: int = 0) -> tuple[float, Floats]:
    """Answers a second, and latencies, of clients that each wait for an answer before they ask again."""
    clock = new_clock()
    replica = Replica(clock, service, seed)
    tally = _Tally()
    begun = [0.0]

    def answered(latency_s: float) -> None:
        if len(tally.latencies) == requests // 10:
            begun[0] = clock.now
        if len(tally.latencies) < requests:
            tally.latencies.append(latency_s)
            tally.last_s = clock.now
            replica.ask(answered)

    for _ in range(clients):
        replica.ask(answered)
    clock.run()
    counted = np.array(tally.latencies[requests // 10 :])
    return len(counted) / max(tally.last_s - begun[0], 1e-9), counted


def capacity(service: Service, requests: int = 10_000) -> float:
    """Requests a second that one replica answers at most."""
    return closed_loop(service, FULL_HOUSE, requests)[0]
