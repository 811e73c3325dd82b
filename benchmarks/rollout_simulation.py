"""How often a rollout rolls back a good candidate or lets a bad one pass, and how fast it decides: simulated.

    python benchmarks/rollout_simulation.py [--runs 300] [--rate 100] [--plot FILE.svg]

The gateway's own classes, from the choice of who is asked to the decision, run on a simulated clock in front of two
synthetic models. Traffic: Poisson arrivals, lognormal latencies that drift together (a busy
machine hits both models), failures at random. Beside it, on the same kind of traffic, two common ways: thresholds
checked every 10 s with four failed checks forgiven (as canary controllers are set up by default), and significance
tests at 1% repeated every 10 s.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import multiprocessing
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from simulated_time import simulated

from serve.gateway.access.gate import Gate
from serve.gateway.access.identity import Identity
from serve.gateway.access.keys import Key
from serve.gateway.oip.metadata import ModelMetadata
from serve.gateway.release.release import Release
from serve.gateway.release.released import Released
from serve.gateway.release.releases import LOOK_S
from serve.gateway.settings import Settings
from serve.http.client import Response
from serve.rollout.analysis import Outcome
from serve.rollout.course import Course
from serve.rollout.plan import Plan, Target

LONGEST_S = 3600.0
CHECK_S = 10.0
FAILURE_S = 0.01
POISON = b"poison"
ANSWER, OTHER_ANSWER = (
    b'{"model_name":"m","outputs":[{"name":"y","datatype":"INT64","shape":[1,1],"data":[%d]}]}' % label
    for label in (1, 2)
)


@dataclass(frozen=True)
class World:
    """What is true of the two models.

    Attributes:
        errors, base_errors: shares of requests that fail.
        slower: the candidate's latency over the baseline's.
        tail: share of the candidate's answers that take five times as long.
        disagreement: share of items with another answer.
        from_s: when the candidate's faults begin.
        storms: whether both models fail together for 5 s of each minute (30% of requests).
        drift: standard deviation of the common factor of latencies.
        bad: whether the candidate ought to be rolled back.
        poison: share of requests that fail, whoever is asked.
    """

    errors: float = 0.001
    base_errors: float = 0.001
    slower: float = 1.0
    tail: float = 0.0
    disagreement: float = 0.002
    from_s: float = 0.0
    storms: bool = False
    drift: float = 0.3
    bad: bool = False
    poison: float = 0.0


WORLDS = {
    "the same model": World(),
    "no failures at all": World(errors=0, base_errors=0, disagreement=0),
    "both fail at 2%": World(errors=0.02, base_errors=0.02),
    "both fail at the same 2%": World(poison=0.02),
    "both fail in storms": World(storms=True),
    "the old one fails at 2%": World(base_errors=0.02),
    "a third faster": World(slower=0.67),
    "10% slower": World(slower=1.1),
    "fails always": World(errors=1, bad=True),
    "fails at 10%": World(errors=0.1, bad=True),
    "fails at 3%": World(errors=0.03, bad=True),
    "fails always, from 45 s on": World(errors=1, from_s=45, bad=True),
    "fails at 10% from 45 s on": World(errors=0.1, from_s=45, bad=True),
    "fails at 10%, and both fail at the same 30%": World(errors=0.1, poison=0.3, bad=True),
    "twice as slow": World(slower=2, bad=True),
    "50% slower": World(slower=1.5, bad=True),
    "every fifth answer five times slower": World(tail=0.2, bad=True),
    "disagrees on 10%": World(disagreement=0.1, bad=True),
    "disagrees on 4%": World(disagreement=0.04, bad=True),
    "at the bound: fails 1% more": World(errors=0.011, bad=True),
    "at the bound: disagrees on 2%": World(disagreement=0.02, bad=True),
}


class Traffic:
    """Requests one after the other."""

    def __init__(self, world: World, rate: float, seed: int) -> None:
        self.world = world
        self.seed = seed
        self.random = random.Random(seed)  # noqa: S311
        self.rate = rate
        self.now = 0.0
        self._level = 0.0
        self._level_at = 0.0

    def next(self) -> float:
        """The time of the next request."""
        self.now += self.random.expovariate(self.rate)
        while self._level_at < self.now:  # a common factor that wanders, with a memory of some 20 s
            self._level = 0.95 * self._level + self.random.gauss(0, self.world.drift * math.sqrt(1 - 0.95**2))
            self._level_at += 1.0
        return self.now

    def outcome(self, *, candidate: bool, poison: bool = False) -> Outcome:
        world, draw = self.world, self.random
        faulty = candidate and self.now >= world.from_s
        errors = world.errors if faulty else world.base_errors
        if world.storms and self.now % 60 < 5:
            errors = 0.3
        if poison or draw.random() < errors:
            return Outcome(True, None)
        seconds = 0.01 * math.exp(self._level + draw.gauss(0, 0.3))
        if faulty:
            seconds *= world.slower * (5 if draw.random() < world.tail else 1)
        return Outcome(False, seconds)

    def disagrees(self) -> bool:
        return self.now >= self.world.from_s and self.random.random() < self.world.disagreement


class Tritons:
    """Both models, in the place of the gateway's `Upstream`: they answer after as long as the traffic says."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic

    async def infer(
        self,
        path: bytes,
        _headers: object,
        body: bytes,
        _timeout_s: float,
        *,
        who: bytes | None = None,  # noqa: ARG002
        sequence: bytes | None = None,  # noqa: ARG002
    ) -> Response:
        candidate = b"/candidate/" in path
        outcome = self._traffic.outcome(candidate=candidate, poison=body == POISON)
        await asyncio.sleep(outcome.seconds or FAILURE_S)
        if outcome.failed:
            return Response(500, [], b'{"error":"failed"}', 0)
        other = candidate and self._traffic.disagrees()
        return Response(200, [], OTHER_ANSWER if other else ANSWER, 0)


async def follow(traffic: Traffic, plan: Plan) -> tuple[str, float]:
    """The gateway's own classes route, copy, compare and judge; only who is asked, and the clock, are made up."""
    gate = Gate(Settings(upstream=("http://127.0.0.1:1",)))
    released = Released(gate, cast(Any, Tritons(traffic)))
    course = Course(plan, time.monotonic())
    release = Release(traffic.seed, "m", Target("baseline"), Target("candidate"), plan, course)
    release.knows(ModelMetadata("m", ("1",), (), (), batched=True))
    client = Identity(Key(id="c", name="c", digest="0" * 64), None)
    asked: set[asyncio.Task[Response]] = set()

    async def look() -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            release.look()

    failed: list[BaseException] = []

    def over(task: asyncio.Task[Response]) -> None:
        asked.discard(task)
        if (err := task.exception()) is not None:
            failed.append(err)

    looking = asyncio.create_task(look())
    while release.running and (due := traffic.next()) < LONGEST_S:
        await asyncio.sleep(due - time.monotonic())
        body = POISON if traffic.random.random() < traffic.world.poison else b"{}"
        task = asyncio.create_task(released.infer(release, b"/v2/models/m/infer", client, (), (), body, 30.0))
        asked.add(task)
        task.add_done_callback(over)
        if failed:
            raise failed[0]
    ended = time.monotonic()
    looking.cancel()
    await asyncio.gather(*asked)
    await released.close()
    return course.state, ended


def ours(traffic: Traffic, plan: Plan) -> tuple[str, float]:
    """What the rollout decides, and when."""
    random.seed(traffic.seed)  # who meets the candidate, and what is copied
    return simulated(follow(traffic, plan))


def thresholds(traffic: Traffic, plan: Plan) -> tuple[str, float]:
    """Every 10 s: at least 99% of the candidate's answers good, the 99th percentile below twice the usual one; five
    failed checks end it, each other one may go on after the step's time. It compares no answers."""

    def judge(candidate: list[Outcome], _: list[Outcome]) -> bool:
        times = sorted(outcome.seconds for outcome in candidate if outcome.seconds is not None)
        slow = bool(times) and times[min(len(times) - 1, int(0.99 * len(times)))] > 2 * 0.01 * math.exp(2.33 * 0.3)
        return sum(outcome.failed for outcome in candidate) > 0.01 * len(candidate) or slow

    return _checked(traffic, plan, judge, forgiven=4)


def tests(traffic: Traffic, plan: Plan) -> tuple[str, float]:
    """Every 10 s, over all answers of the step: a two-sample test of the failures and one of the logarithms of the
    latencies, each at 1%."""

    def judge(candidate: list[Outcome], baseline: list[Outcome]) -> bool:
        shares = [sum(o.failed for o in each) / len(each) for each in (candidate, baseline)]
        n, m = len(candidate), len(baseline)
        pooled = (shares[0] * n + shares[1] * m) / (n + m)
        error = math.sqrt(pooled * (1 - pooled) * (1 / n + 1 / m))
        if error and (shares[0] - shares[1]) / error > 2.326:
            return True
        logs = [[math.log(o.seconds) for o in each if o.seconds is not None] for each in (candidate, baseline)]
        if min(map(len, logs)) < 2:
            return False
        error = math.sqrt(sum(statistics.variance(each) / len(each) for each in logs))
        return (statistics.fmean(logs[0]) - statistics.fmean(logs[1])) / error > 2.326

    return _checked(traffic, plan, judge, forgiven=0, window=False)


def _checked(
    traffic: Traffic,
    plan: Plan,
    judge: Callable[[list[Outcome], list[Outcome]], bool],
    *,
    forgiven: int,
    window: bool = True,
) -> tuple[str, float]:
    failed = 0
    for weight in plan.weights[1:]:
        candidate: list[Outcome] = []
        baseline: list[Outcome] = []
        began = traffic.now
        check = began + CHECK_S
        while (now := traffic.next()) < check or now - began < plan.step_s:
            is_candidate = traffic.random.random() < weight
            poison = traffic.random.random() < traffic.world.poison
            (candidate if is_candidate else baseline).append(traffic.outcome(candidate=is_candidate, poison=poison))
            if now >= check:
                check += CHECK_S
                if candidate and baseline and judge(candidate, baseline):
                    failed += 1
                    if failed > forgiven:
                        return "aborted", now
                if window:
                    candidate, baseline = [], []
    return "promoted", traffic.now


WAYS = {"this rollout": ours, "thresholds": thresholds, "repeated tests": tests}


def one(task: tuple[str, str, float, int]) -> tuple[str, float]:
    way, world, rate, seed = task
    traffic = Traffic(WORLDS[world], rate, seed)
    state, seconds = WAYS[way](traffic, Plan())
    from_s = WORLDS[world].from_s
    if state == "aborted" and seconds < from_s:
        return "too early", seconds
    return state, seconds - from_s if state == "aborted" else seconds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--rate", type=float, default=100.0, help="requests a second, in all")
    parser.add_argument("--worlds", default="", help="only those whose name holds this")
    parser.add_argument("--ways", default="", help="only those whose name holds this")
    parser.add_argument("--processes", type=int)
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    result: dict[str, dict[str, dict[str, float | None]]] = {}
    print(f"{'':38} {'':15} rolled back  promoted  undecided   median s   95% s")
    with multiprocessing.Pool(arguments.processes) as pool:
        for world in (name for name in WORLDS if arguments.worlds in name):
            for way in (way for way in WAYS if arguments.ways in way):
                tasks = [(way, world, arguments.rate, seed) for seed in range(arguments.runs)]
                found = pool.map(one, tasks, chunksize=4)
                shares = {
                    state: sum(each == state for each, _ in found) / len(found)
                    for state in ("aborted", "promoted", "running", "too early")
                }
                right = "aborted" if WORLDS[world].bad else "promoted"
                times = sorted(seconds for state, seconds in found if state == right)
                median = statistics.median(times) if times else None
                late = times[int(0.95 * len(times))] if times else None
                result.setdefault(world, {})[way] = {**shares, "median_s": median, "p95_s": late}
                shown = "".join(f"{each:>11.1f}" if each is not None else f"{'':>11}" for each in (median, late))
                print(
                    f"{world:38} {way:15} {shares['aborted'] + shares['too early']:>9.1%} {shares['promoted']:>9.1%}"
                    f" {shares['running']:>9.1%} {shown}",
                    flush=True,
                )
    if arguments.plot:
        draw(result, arguments.plot)
    print(json.dumps({"runs": arguments.runs, "rate": arguments.rate, "worlds": result}))


def draw(result: dict[str, dict[str, dict[str, float | None]]], path: Path) -> None:
    """Wrong decisions by world, and how long right ones took."""
    import matplotlib as mpl

    mpl.use("svg")
    import matplotlib.pyplot as plt

    colours = {"this rollout": "#0b6e4f", "thresholds": "#e0a030", "repeated tests": "#b0455a"}
    worlds = list(result)[::-1]
    figure, (wrong, times) = plt.subplots(1, 2, figsize=(11, 0.34 * len(worlds) + 1.4), sharey=True)
    for offset, way in zip((0.27, 0.0, -0.27), WAYS, strict=True):
        at = [index + offset for index in range(len(worlds))]
        mistaken = [
            (result[world][way]["promoted" if WORLDS[world].bad else "aborted"] or 0.0)
            + (result[world][way]["too early"] or 0.0)
            for world in worlds
        ]
        wrong.barh(at, [100 * share for share in mistaken], 0.25, color=colours[way], label=way)
        found = [(y, result[world][way]) for y, world in zip(at, worlds, strict=True)]
        shown = [(y, each["median_s"], each["p95_s"]) for y, each in found if each["median_s"] is not None]
        times.hlines(
            [y for y, *_ in shown], [low or 0 for _, low, _ in shown], [high or 0 for *_, high in shown],
            color=colours[way], lw=2,
        )  # fmt: skip
        times.plot([low or 0 for _, low, _ in shown], [y for y, *_ in shown], "o", color=colours[way], ms=4)
    wrong.set_yticks(range(len(worlds)), worlds)
    wrong.set_xlabel("wrong decisions, % of runs\n(a good one rolled back, a bad one promoted)")
    times.set_xscale("log")
    times.set_xlabel("seconds until the right decision, median and 95%")
    figure.legend(*wrong.get_legend_handles_labels(), loc="upper center", ncols=3, frameon=False)
    for axes in (wrong, times):
        axes.grid(axis="x", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout(rect=(0, 0, 1, 0.95))
    figure.savefig(path)


if __name__ == "__main__":
    main()
