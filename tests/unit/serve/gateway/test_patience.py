"""How long a candidate may keep a request to itself, and how many it gets while it answers none."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from serve.gateway.release import patience
from serve.gateway.release.patience import Patience
from serve.gateway.release.release import Grade, Release
from serve.rollout.course import Course
from serve.rollout.plan import Plan, Target
from tests.serve_http import in_loop

BASELINE, CANDIDATE = Target("m"), Target("n")


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "LEAST_S", 0.1)


class World:
    """Two models that take so many seconds, and what they were asked."""

    def __init__(self, *, candidate_s: Callable[[int], float], baseline_s: float = 0.0, fallback: bool = True) -> None:
        plan = Plan(steps=(50.0,), shadow=0.0, step_s=0.0, fallback=fallback)
        self.release = Release(1, "m", BASELINE, CANDIDATE, plan, Course(plan, time.monotonic()))
        self.candidate_s, self.baseline_s = candidate_s, baseline_s
        self.grades = {BASELINE: Grade.GOOD, CANDIDATE: Grade.GOOD}
        self.asked: Counter[str] = Counter()
        self.going_on: list[asyncio.Task[Any]] = []

    async def ask(self, target: Target) -> tuple[Grade, str]:
        self.asked[target.model] += 1
        if target == BASELINE:
            await asyncio.sleep(self.baseline_s)
        else:
            await asyncio.sleep(self.candidate_s(self.asked["n"]))
        return self.grades[target], target.model

    async def answer(self, number: int = 0) -> str:
        key = f"k{number % 3}"
        return (await self.release.ask(None, self.ask, movable=True, key=key, goes_on=self.going_on.append)).answer

    async def answers(self, count: int = 20) -> Counter[str]:
        return Counter(await asyncio.gather(*(self.answer(number) for number in range(count))))

    async def ends(self) -> None:
        for task in self.going_on:
            task.cancel()
        await asyncio.gather(*self.going_on, return_exceptions=True)


@in_loop
async def test_of_what_a_candidate_does_not_answer_clients_have_the_baseline_s_answer() -> None:
    world = World(candidate_s=lambda _: 60.0)
    assert await world.answers() == {"m": 20}
    assert len(world.going_on) == world.release.fallbacks > 0
    assert world.release.running
    await world.ends()


@pytest.mark.parametrize(("grade", "aborted"), [(Grade.LATE, True), (Grade.FAILED, True), (Grade.GOOD, False)])
@in_loop
async def test_it_counts_by_what_becomes_of_it(grade: Grade, aborted: bool) -> None:
    world = World(candidate_s=lambda number: 0.25 if grade is not Grade.GOOD or number <= 20 else 0.0)
    world.grades[CANDIDATE] = grade
    for _ in range(20):
        await world.answers()
        await asyncio.gather(*world.going_on)
    await asyncio.sleep(0)
    assert world.release.asked["candidate", grade] >= len(world.going_on) > 0
    assert world.release.running is not aborted


@in_loop
async def test_until_it_answers_one_it_is_asked_one_at_a_time_and_has_few() -> None:
    hangs = True
    world = World(candidate_s=lambda _: 60.0 if hangs else 0.0)
    await world.answers()
    first = world.asked["n"]
    for _ in range(patience.MOST):
        before = world.asked["n"]
        await world.answers()
        assert world.asked["n"] - before <= 1
    assert world.asked["n"] == max(first, patience.MOST)
    await world.ends()
    hangs = False
    await world.answers()
    assert (await world.answers())["n"] > 1


@in_loop
async def test_it_may_take_twice_as_long_as_the_longest_answer_of_either() -> None:
    world = World(candidate_s=lambda _: 0.3, baseline_s=0.2)
    await world.release._ask_kept(world.ask, BASELINE)
    assert (await world.answers())["n"] > 1
    assert not world.going_on


@in_loop
async def test_without_fallback_clients_wait() -> None:
    world = World(candidate_s=lambda _: 0.3, fallback=False)
    assert (await world.answers())["n"] > 1
    assert not world.going_on


@in_loop
async def test_where_the_baseline_fails_the_candidate_is_waited_for() -> None:
    world = World(candidate_s=lambda _: 0.25)
    world.grades[BASELINE] = Grade.FAILED
    assert (await world.release._ask_candidate(world.ask, "k", world.going_on.append, movable=True)).answer == "n"
    assert len(world.going_on) == 1


@pytest.mark.parametrize("grade", [Grade.LATE, Grade.CUT, Grade.CLIENT])
@in_loop
async def test_an_answer_of_the_candidate_that_is_there_goes_before_what_the_baseline_has_none_for(
    grade: Grade,
) -> None:
    world = World(candidate_s=lambda _: 0.2, baseline_s=0.3)
    world.grades[BASELINE] = grade
    assert (await world.release._ask_candidate(world.ask, "k", world.going_on.append, movable=True)).answer == "n"


@in_loop
async def test_who_is_blamed_by_the_baseline_does_not_wait_for_a_candidate_that_hangs() -> None:
    world = World(candidate_s=lambda _: 60.0)
    world.grades[BASELINE] = Grade.CLIENT
    async with asyncio.timeout(10):
        assert (await world.release._ask_candidate(world.ask, "k", world.going_on.append, movable=True)).answer == "m"
    await world.ends()


@pytest.mark.parametrize("grade", [Grade.FAILED, Grade.LATE])
@in_loop
async def test_what_a_client_leaves_that_takes_both_long_is_no_failure(grade: Grade) -> None:
    world = World(candidate_s=lambda _: 0.4, baseline_s=0.4)
    world.grades = {BASELINE: grade, CANDIDATE: grade}
    for _ in range(15):
        asked = [asyncio.create_task(world.answer(number)) for number in range(6)]
        await asyncio.wait(asked, timeout=0.2)
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
    assert world.going_on
    assert all(task.cancelled() for task in world.going_on)
    assert world.release.asked["candidate", Grade.CUT] > 8
    assert not world.release.asked["candidate", grade]
    assert world.release.running


@in_loop
async def test_many_that_go_on_are_enough_though_others_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "MOST_GOING_ON", 5)
    world = World(candidate_s=lambda number: 60.0 if number % 2 else 0.0)
    for _ in range(10):
        await world.answers()
    going_on = len(world.going_on)
    assert 5 <= going_on < 30
    assert await world.answers() == {"m": 20}
    await world.ends()


@in_loop
async def test_an_answer_that_came_while_the_event_loop_stood_still_counts() -> None:
    async def answer() -> str:
        await asyncio.sleep(0.05)
        time.sleep(0.3)  # noqa: ASYNC251  as other work of the loop may
        await asyncio.sleep(0.001)
        return "n"

    assert await Patience().bear(answer()) == "n"


@in_loop
async def test_a_client_that_leaves_takes_its_request_with_it() -> None:
    cancelled = asyncio.Event()

    async def answer() -> None:
        try:
            await asyncio.sleep(60.0)
        finally:
            cancelled.set()

    task = asyncio.create_task(Patience().bear(answer()))
    await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert cancelled.is_set()
