"""The cheapest settings of the autoscaler that keep the objective."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from compress.errors import ServerError
from serve.load.slo import Objective
from serve.plan.autoscaler import Scaling
from serve.plan.curve import Curve, simulate_curve
from serve.plan.fleet import Course, Hosting, keeps, run_exact, run_fluid
from serve.plan.service import Service
from serve.plan.traffic import Traffic

__all__ = ["Candidate", "Planned", "plan"]

FILLS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
FEW_REQUESTS = 200_000
"""From more on, a fluid; SimPy takes some ten microseconds for a step of a request."""


@dataclass(frozen=True)
class Candidate:
    """Settings that were tried.

    Attributes:
        scaling: the settings. kept: whether the objective was.
        replica_hours: what they took. slow_ms: the objective's percentile over all. refused_share: of the requests.
    """

    scaling: Scaling
    kept: bool
    replica_hours: float
    slow_ms: float
    refused_share: float


@dataclass(frozen=True, eq=False)
class Planned:
    """What was found.

    Attributes:
        service, curve: one replica. objective, hosting: what was asked for.
        percent: the objective's highest percentile.
        replica_rate: the most requests a second that one replica takes within the objective.
        candidates: that were tried, by target.
        chosen: the cheapest that keeps it; where none does, the one with the fewest misses.
        kept: whether it does.
        course: what happens with it.
        fixed: replicas that the highest rate takes without an autoscaler, and their hours.
    """

    service: Service
    curve: Curve
    objective: Objective
    hosting: Hosting
    percent: float
    replica_rate: float
    candidates: tuple[Candidate, ...]
    chosen: Candidate
    kept: bool
    course: Course
    fixed: tuple[int, float]

    def cost(self, replica_hours: float) -> float:
        return replica_hours * self.hosting.hourly_cost


def plan(
    service: Service,
    traffic: Traffic,
    objective: Objective,
    hosting: Hosting,
    *,
    least: int = 1,
    most: int | None = None,
    target: float | None = None,
    samples: int = 20_000,
    seed: int = 0,
    on_progress: Callable[[str, int, int], None] | None = None,
) -> Planned:
    """Try targets of the autoscaler on the traffic, and take the cheapest that keeps the objective.

    Args:
        service: one replica, as measured.
        traffic: what comes.
        objective: its terms on latency and errors count.
        hosting: start, waits, costs.
        least, most: replicas.
        target: try only this one, requests a second a replica.
        samples: requests simulated at each rate of one replica.
        seed: the same one draws the same.
        on_progress: told what is done, how much of how much.

    Raises:
        ServerError: not even one request alone keeps the objective, or there is nothing in it to keep.
    """
    percents = [term.percent for term in objective.terms if term.percent is not None]
    if not any(term.latency for term in objective.terms):
        raise ServerError("can't plan for this objective", why="it bounds no latency", mend="write it as in p99<50ms")
    percent = max(percents, default=99.0)
    tell = on_progress or (lambda _what, _done, _all: None)
    curve = simulate_curve(service, samples=samples, seed=seed, on_progress=lambda a, b: tell("one replica", a, b))
    rate = curve.highest(lambda weights: keeps(objective, weights))
    if rate <= 0:
        fastest = curve.percentile_ms(0.0, percent)
        raise ServerError(
            f"no number of replicas keeps {objective}",
            why=f"one request alone takes {fastest:.3g} ms at p{percent:g}",
            mend="make the model faster (`compress export`, `serve tune`), or the objective weaker",
        )
    highest = float(traffic.steps(Scaling(1.0).period_s).max())
    targets = [fill * rate for fill in FILLS] if target is None else [target]
    tried: list[tuple[Candidate, Course]] = []
    for number, each in enumerate(targets):
        scaling = Scaling(each, least=least, most=most or max(math.ceil(3 * highest / each), least))
        course = run_fluid(curve, traffic, scaling, hosting, percent)
        tried.append((_judged(scaling, course, objective, percent), course))
        tell("the fleet", number + 1, len(targets))
    good = [each for each in tried if each[0].kept]
    chosen, course = min(good, key=lambda each: each[0].replica_hours) if good else min(tried, key=_misses)
    if most is None:
        # What the traffic took, with half as much again for a day that is busier; the course never came near it.
        scaling = replace(chosen.scaling, most=max(math.ceil(1.5 * float(course.replicas.max())), least))
        chosen = replace(chosen, scaling=scaling)
    if traffic.requests <= FEW_REQUESTS:
        course = run_exact(service, traffic, chosen.scaling, hosting, curve.peak, percent=percent, seed=seed)
        chosen = _judged(chosen.scaling, course, objective, percent)
    needed = max(math.ceil(highest / rate), least)
    return Planned(
        service, curve, objective, hosting, percent, rate, tuple(each for each, _ in tried), chosen, chosen.kept,
        course, (needed, needed * traffic.seconds / 3600),
    )  # fmt: skip


def _judged(scaling: Scaling, course: Course, objective: Objective, percent: float) -> Candidate:
    return Candidate(
        scaling,
        keeps(objective, course.weights, course.refused_share),
        course.replica_hours,
        course.percentile_ms(percent),
        course.refused_share,
    )


def _misses(tried: tuple[Candidate, Course]) -> tuple[float, float]:
    return tried[0].refused_share, tried[0].slow_ms
