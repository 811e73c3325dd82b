"""Replicas over time under an autoscaler: request by request where there are few, as a fluid where there are many."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from serve.load.slo import Objective
from serve.plan.autoscaler import Autoscaler, Scaling
from serve.plan.curve import BOUNDS_S, Curve, binned, percentile_s
from serve.plan.replica import Clock, Replica, new_clock
from serve.plan.service import Service
from serve.plan.traffic import Traffic

__all__ = ["Course", "Hosting", "keeps", "run_exact", "run_fluid"]

Floats = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Hosting:
    """What a replica costs and takes.

    Attributes:
        start_s: from when a replica is asked for until it answers.
        max_wait_s: how long the gateway lets a request wait before it refuses it.
        hourly_cost: of one replica, from when it is asked for.
    """

    start_s: float = 60.0
    max_wait_s: float = 0.5
    hourly_cost: float = 0.0


@dataclass(frozen=True, eq=False)
class Course:
    """What happened.

    Attributes:
        step_s: seconds of a step.
        rates: requests a second in each step. replicas: that are paid for. ready: that answer.
        refused: requests a second that were refused.
        slow_ms: the objective's percentile in each step; 0 without an answer.
        weights: requests in each bin of BOUNDS_S.
        requests, refusals: in all.
        replica_hours: paid for.
        exact: whether each request was simulated.
    """

    step_s: float
    rates: Floats
    replicas: Floats
    ready: Floats
    refused: Floats
    slow_ms: Floats
    weights: Floats
    requests: float
    refusals: float
    replica_hours: float
    exact: bool

    @property
    def refused_share(self) -> float:
        return self.refusals / max(self.requests, 1e-9)

    def percentile_ms(self, percent: float) -> float:
        """Over all answers."""
        return 1000 * percentile_s(self.weights, percent)


def keeps(objective: Objective, weights: Floats, refused_share: float = 0.0) -> bool:
    """Whether latencies and refusals keep an objective (of its terms, those on latency and errors)."""
    total = float(weights.sum())
    for term in objective.terms:
        if term.name == "errors" and refused_share > term.bound:
            return False
        if term.name == "mean" and total and 1000 * float(weights @ BOUNDS_S) / total > term.bound:
            return False
        if term.name == "max" and 1000 * percentile_s(weights, 100) > term.bound:
            return False
        if term.percent is not None and 1000 * percentile_s(weights, term.percent) > term.bound:
            return False
    return True


def run_fluid(curve: Curve, traffic: Traffic, scaling: Scaling, hosting: Hosting, percent: float = 99.0) -> Course:
    """Each step at the latencies of its rate, shared evenly by the replicas that are ready.

    A step over their peak leaves a backlog that all wait behind, as long as the gateway lets them; the rest is refused.

    Args:
        curve: of one replica.
        traffic: what comes.
        scaling: how replicas follow it; the first ones are ready at the beginning.
        hosting: start and costs.
        percent: of `Course.slow_ms`.
    """
    rates = traffic.steps(scaling.period_s)
    step_s, scaler = scaling.period_s, Autoscaler(scaling)
    begin = min(max(math.ceil(rates[0] / scaling.target), scaling.least), scaling.most)
    wanted, starting = begin, deque[tuple[float, int]]()
    seen: deque[float] = deque(maxlen=max(round(scaling.window_s / step_s), 1))
    backlog = refusals = 0.0
    weights = np.zeros(len(BOUNDS_S))
    shown = np.zeros((4, len(rates)))
    for number, rate in enumerate(rates):
        now = number * step_s
        while starting and starting[0][0] <= now:
            starting.popleft()
        ready = wanted - sum(count for _, count in starting)
        most = ready * curve.peak
        served = min(rate * step_s + backlog, most * step_s)
        left = rate * step_s + backlog - served
        kept = min(left, hosting.max_wait_s * most)
        refused = left - kept
        mine = _later(curve.at(served / step_s / ready), (backlog + kept) / 2 / most)
        weights += served * mine
        backlog = kept
        refusals += refused
        shown[:, number] = wanted, ready, refused / step_s, 1000 * percentile_s(mine, percent) if served else 0.0
        seen.append(served / step_s)
        then = scaler.replicas(wanted, sum(seen) / len(seen))
        if then > wanted:
            starting.append((now + step_s + hosting.start_s, then - wanted))
        for _ in range(wanted - then):  # those that still start go first
            if starting:
                when, count = starting.pop()
                if count > 1:
                    starting.append((when, count - 1))
        wanted = then
    return Course(
        step_s, rates, shown[0], shown[1], shown[2], shown[3], weights, traffic.requests, refusals,
        float(shown[0].sum()) * step_s / 3600, exact=False,
    )  # fmt: skip


def _later(shares: Floats, seconds: float) -> Floats:
    """Latencies that are all longer by so much."""
    if seconds <= 0:
        return shares
    at = np.minimum(np.searchsorted(BOUNDS_S, BOUNDS_S + seconds), len(BOUNDS_S) - 1)
    moved: Floats = np.bincount(at, weights=shares, minlength=len(BOUNDS_S)).astype(np.float64)
    return moved


def run_exact(
    service: Service,
    traffic: Traffic,
    scaling: Scaling,
    hosting: Hosting,
    peak: float,
    *,
    percent: float = 99.0,
    seed: int = 0,
) -> Course:
    """Each request on its own, sent to the least busy replica that is ready, as the gateway does.

    Args:
        service: one replica.
        traffic: what comes; Poisson.
        scaling: how replicas follow it.
        hosting: start and costs.
        peak: requests a second that one replica answers at most.
        percent: of `Course.slow_ms`.
        seed: the same one draws the same.
    """
    clock, step_s = new_clock(), scaling.period_s
    rates = traffic.steps(step_s)
    fleet = _Fleet(service, scaling, hosting, clock, seed)
    fleet.grow(min(max(math.ceil(rates[0] / scaling.target), scaling.least), scaling.most), at_once=True)
    latencies: list[list[float]] = [[] for _ in rates]
    refused = np.zeros(len(rates))
    shown = np.zeros((2, len(rates)))

    def arrivals() -> Any:
        for due in traffic.arrivals(seed).tolist():
            if due > clock.now:
                yield clock.timeout(due - clock.now)
            step = min(int(due / step_s), len(rates) - 1)
            replica = min(fleet.ready, key=lambda each: each.in_flight)
            if replica.in_flight > hosting.max_wait_s * peak + 1:
                refused[step] += 1
            else:
                replica.ask(latencies[step].append)

    def control() -> Any:
        for number in range(len(rates)):
            shown[:, number] = len(fleet.replicas), len(fleet.ready)
            yield clock.timeout(step_s)
            fleet.follow(sum(map(len, latencies)) / step_s)

    clock.process(arrivals())
    clock.process(control())
    clock.run()
    every = np.array([value for step in latencies for value in step])
    slow = np.array([1000 * float(np.percentile(step, percent)) if step else 0.0 for step in latencies])
    return Course(
        step_s, rates, shown[0], shown[1], refused / step_s, slow, binned(every) * len(every),
        float(len(every) + refused.sum()), float(refused.sum()), float(shown[0].sum()) * step_s / 3600, exact=True,
    )  # fmt: skip


class _Fleet:
    """Replicas, those that answer, and the autoscaler over them."""

    def __init__(self, service: Service, scaling: Scaling, hosting: Hosting, clock: Clock, seed: int) -> None:
        self.replicas: list[Replica] = []
        self.ready: list[Replica] = []
        self._service, self._seed = service, seed
        self._made = 0
        self._clock = clock
        self._start_s = hosting.start_s
        self._scaler = Autoscaler(scaling)
        self._answers: deque[float] = deque([0.0], maxlen=max(round(scaling.window_s / scaling.period_s), 1) + 1)

    def follow(self, answers: float) -> None:
        """Look at the answers up to now, over the seconds of a step, and change what there is."""
        self._answers.append(answers)
        rate = (self._answers[-1] - self._answers[0]) / (len(self._answers) - 1)
        then = self._scaler.replicas(len(self.replicas), rate)
        self.grow(then - len(self.replicas))
        # Those that still start go first; one that is ready still answers what it has.
        for replica in sorted(self.replicas, key=lambda each: each in self.ready)[: len(self.replicas) - then]:
            self.replicas.remove(replica)
            if replica in self.ready:
                self.ready.remove(replica)

    def grow(self, count: int, *, at_once: bool = False) -> None:
        for _ in range(count):
            replica = Replica(self._clock, self._service, self._seed * 100_003 + self._made)
            self._made += 1
            self.replicas.append(replica)
            if at_once:
                self.ready.append(replica)
            else:
                self._clock.timeout(self._start_s).callbacks.append(partial(self._started, replica))

    def _started(self, replica: Replica, _event: object) -> None:
        if replica in self.replicas:
            self.ready.append(replica)
