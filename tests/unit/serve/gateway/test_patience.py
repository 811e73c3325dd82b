"""How long a candidate may keep a request to itself, and how many it gets while it answers none."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable

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
    """Two models that take so many seconds, the baseline more `after` the candidate, and what they were asked."""

    def __init__(
        self,
        *,
        candidate_s: Callable[[int], float],
        baseline_s: float = 0.0,
        after_s: float | None = None,
        fallback: bool = True,
    ) -> None:
        plan = Plan(steps=(50.0,), shadow=0.0, step_s=0.0, fallback=fallback)
        self.release = Release(1, "m", BASELINE, CANDIDATE, plan, Course(plan, time.monotonic()))
        self.candidate_s, self.baseline_s = candidate_s, baseline_s
        self.after_s = baseline_s if after_s is None else after_s
        self.asked: Counter[str] = Counter()
        self.at_once = self.most = self.taken_back = 0

    async def ask(self, target: Target) -> tuple[Grade, str]:
        if target == BASELINE:
            await asyncio.sleep(self.after_s if self.taken_back else self.baseline_s)
            return Grade.GOOD, "m"
        self.asked["n"] += 1
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        try:
            await asyncio.sleep(self.candidate_s(self.asked["n"]))
        finally:
            self.at_once -= 1
        return Grade.GOOD, "n"

    async def answer(self, number: int = 0) -> str:
        def taken_back() -> None:
            self.taken_back += 1

        key = f"k{number % 3}"
        return (await self.release.ask(None, self.ask, movable=True, key=key, taken_back=taken_back)).answer


@in_loop
async def test_what_a_candidate_does_not_answer_the_baseline_does_and_that_is_a_failure() -> None:
    world = World(candidate_s=lambda _: 60.0)
    async with asyncio.timeout(30):
        while world.release.running:
            assert {await world.answer(number) for number in range(20)} == {"m"}
    assert world.release.asked["candidate", Grade.LATE] == world.taken_back == world.release.fallbacks > 5


@in_loop
async def test_until_it_answers_one_it_has_one_at_a_time() -> None:
    world = World(candidate_s=lambda number: 60.0 if number < 12 else 0.0)
    await asyncio.gather(*(world.answer(number) for number in range(20)))
    assert (had := world.most) > 1
    world.most = 0
    while world.asked["n"] < 12:
        await asyncio.gather(*(world.answer(number) for number in range(20)))
    assert world.most == 1 or had >= 12
    world.most = 0
    await asyncio.gather(*(world.answer(number) for number in range(40)))
    assert world.most > 1


@in_loop
async def test_it_may_take_ten_times_as_long_as_the_longest_answer_of_either() -> None:
    world = World(candidate_s=lambda _: 0.3, baseline_s=0.05)
    await world.release._ask_kept(world.ask, BASELINE)
    answers = await asyncio.gather(*(world.answer(number) for number in range(20)))
    assert "n" in answers
    assert not world.taken_back


@in_loop
async def test_where_the_baseline_takes_long_for_it_too_it_is_no_failure() -> None:
    world = World(candidate_s=lambda _: 60.0, after_s=0.2)
    await asyncio.gather(*(world.answer(number) for number in range(20)))
    assert world.taken_back
    assert not world.release.asked["candidate", Grade.LATE]
    assert world.release.asked["candidate", Grade.CUT] == world.taken_back


@in_loop
async def test_without_fallback_nothing_is_taken_back() -> None:
    world = World(candidate_s=lambda _: 0.3, fallback=False)
    answers = await asyncio.gather(*(world.answer(number) for number in range(20)))
    assert "n" in answers
    assert not world.taken_back


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
