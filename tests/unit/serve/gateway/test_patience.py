"""How long a candidate may keep a request to itself, and how many it gets while it answers none."""

from __future__ import annotations

import asyncio
import gc
import itertools
import math
import time
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest

from serve.gateway.release import patience
from serve.gateway.release.grades import Grade
from serve.gateway.release.patience import InLine, Patience
from serve.gateway.release.release import Answered, Ask, Asked, Release
from serve.rollout.analysis import Outcome
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

    async def answer(self, number: int = 0, left_s: float = math.inf) -> str:
        key, goes_on = f"k{number % 3}", self.going_on.append
        return (await self.release.ask(None, self.ask, movable=True, key=key, goes_on=goes_on, left_s=left_s)).answer

    async def answers(self, count: int = 20, left_s: float = math.inf) -> Counter[str]:
        return Counter(await asyncio.gather(*(self.answer(number, left_s) for number in range(count))))

    async def asks_candidate(self, ask: Ask[Any] | None = None, left_s: float = math.inf) -> Answered[Any]:
        asked, goes_on = Asked("candidate", "k"), self.going_on.append
        return await self.release._ask_candidate(ask or self.ask, asked, goes_on, movable=True, left_s=left_s)

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


@pytest.mark.parametrize("grade", [Grade.CLIENT, Grade.FAILED])
@in_loop
async def test_who_is_blamed_is_asked_of_a_candidate_that_hangs_for_as_long_as_any_answer(
    monkeypatch: pytest.MonkeyPatch, grade: Grade
) -> None:
    world = World(candidate_s=lambda _: 60.0)
    monkeypatch.setattr(world.release, "place", lambda _: 1.0)  # nobody meets the candidate first
    world.grades[BASELINE] = grade
    async with asyncio.timeout(10):
        for _ in range(3):
            assert await world.answers() == {"m": 20}
    assert 0 < world.asked["n"] == len(world.going_on) < 30
    assert world.release.asked["baseline", grade] == 60 - len(world.going_on)
    await world.ends()
    await asyncio.sleep(0)
    assert world.release.asked["baseline", grade] == 60


@pytest.mark.parametrize("answers", [Grade.GOOD, Grade.FAILED])
@in_loop
async def test_what_the_candidate_says_late_of_who_is_blamed_counts_as_what_it_says_at_once(
    monkeypatch: pytest.MonkeyPatch, answers: Grade
) -> None:
    seen = []
    for seconds in (0.0, 0.5):
        world = World(candidate_s=lambda _, seconds=seconds: seconds)  # type: ignore[misc]
        monkeypatch.setattr(world.release, "place", lambda _: 1.0)
        world.grades = {BASELINE: Grade.CLIENT, CANDIDATE: answers}
        await world.answer()
        await asyncio.gather(*world.going_on)
        await asyncio.sleep(0)
        seen.append((dict(world.release.asked), len(world.going_on)))
    (at_once, none), (late, one) = seen
    assert at_once == late
    assert (none, one) == (0, 1)
    assert at_once == {("baseline", Grade.FAILED if answers is Grade.GOOD else Grade.CLIENT): 1}


@pytest.mark.parametrize("takes_s", [0.0, 0.3], ids=["at once", "late"])
@in_loop
async def test_what_fails_counts_as_not_answered_until_the_baseline_has_answered_it(
    monkeypatch: pytest.MonkeyPatch, takes_s: float
) -> None:
    world = World(candidate_s=lambda _: takes_s, baseline_s=1.0)
    monkeypatch.setattr(world.release, "place", lambda _: 0.0)
    world.grades[CANDIDATE] = Grade.FAILED
    assert world.release.course is not None
    analysis = world.release.course.analysis
    answers = asyncio.create_task(world.answers(12))
    await asyncio.sleep(0.7)
    world.release.look()
    assert analysis.going_on == 12
    assert await answers == {"m": 12}
    await asyncio.sleep(0)
    world.release.look()
    assert (analysis.going_on, analysis._unknown) == (0, 12)  # they wait for one that the baseline is asked


@pytest.mark.parametrize("leave", [False, True])
@in_loop
async def test_what_fails_all_at_once_is_weighed_each_beside_what_was_asked_with_it(
    monkeypatch: pytest.MonkeyPatch, leave: bool
) -> None:
    places = itertools.cycle((0.0, 1.0))
    world = World(candidate_s=lambda _: 0.5)
    monkeypatch.setattr(world.release, "place", lambda _: next(places))
    world.grades[CANDIDATE] = Grade.FAILED
    assert world.release.course is not None
    analysis = world.release.course.analysis
    answers = asyncio.create_task(world.answers(32))
    if leave:
        await asyncio.sleep(0.05)
        answers.cancel()
        await asyncio.gather(answers, return_exceptions=True)
    else:
        assert await answers == {"m": 32}
        await asyncio.gather(*world.going_on)
    await asyncio.sleep(0)
    if leave:
        assert analysis.measures["errors"].count == 0
        assert not analysis._heard["errors"]._open
    else:
        assert analysis.measures["errors"].count > 10
        assert world.release.course.state == "aborted"


@pytest.mark.parametrize("answers", [Grade.GOOD, Grade.FAILED])
@in_loop
async def test_what_is_kept_from_a_candidate_that_answers_none_holds_a_step(
    monkeypatch: pytest.MonkeyPatch, answers: Grade
) -> None:
    """Unless the baseline does not answer it either: who sends what neither answers holds nobody's release."""
    world = World(candidate_s=lambda _: 60.0)
    monkeypatch.setattr(world.release, "place", lambda _: 0.0)
    world.grades[BASELINE] = answers
    assert world.release.course is not None
    analysis = world.release.course.analysis
    for _ in range(3):
        await world.answers(left_s=2.0)
    held = 60 - len(world.going_on) if answers is Grade.GOOD else 0
    assert analysis._withheld == held
    await world.ends()
    await asyncio.sleep(0)
    world.release.look()
    analysis.required = ["errors"]
    pairs = 0
    while not analysis.proven() and pairs < 2000:
        analysis.candidate(Outcome(False, None))
        analysis.baseline(Outcome(False, None))
        pairs += 1
    assert (pairs == 2000) is (answers is Grade.GOOD), "at 1%, forty of them take four thousand pairs"
    told = analysis.evidence()["errors"].get("waits", "")
    assert ("were kept from the candidate" in told) is (answers is Grade.GOOD)


@in_loop
async def test_of_a_client_s_answer_nothing_is_kept_while_a_candidate_hangs() -> None:
    class Answer:
        """Something that may be forgotten."""

    async def ask(target: Target) -> tuple[Grade, Answer]:
        if target == CANDIDATE:
            await asyncio.sleep(60.0)
        return Grade.GOOD, Answer()

    world = World(candidate_s=lambda _: 60.0)
    found = await world.asks_candidate(ask)
    kept = weakref.ref(found.answer)
    del found
    gc.collect()
    assert len(world.going_on) == 1
    assert kept() is None
    await world.ends()


@pytest.mark.parametrize(
    ("longest_s", "left_s", "waits_s"),
    [
        (0.0, math.inf, 1.0),
        (0.02, 0.5, 0.25),
        (10.0, 30.0, 15.0),
        (20.0, 30.0, 24.0),
        (16.0, 30.0, 20.0),
        (0.4, 0.5, 0.4),
        (0.0, -1.0, 0.0),
        (3.0, 30.0, 6.0),
    ],
)
@in_loop
async def test_a_client_waits_for_half_of_its_time_or_what_its_models_take(
    monkeypatch: pytest.MonkeyPatch, longest_s: float, left_s: float, waits_s: float
) -> None:
    monkeypatch.setattr(patience, "LEAST_S", 1.0)
    mine = Patience()
    mine.saw(longest_s)
    assert mine.seconds(left_s) == waits_s


@pytest.mark.parametrize("left_s", [-1.0, 0.0, 0.001, 0.004])
@in_loop
async def test_who_has_no_time_left_does_not_wait(left_s: float) -> None:
    async with asyncio.timeout(1.0):
        task = await Patience().bear(asyncio.sleep(60.0), left_s)
    assert isinstance(task, asyncio.Task)
    task.cancel()


@pytest.mark.parametrize(
    ("second", "running"), [(Grade.DOWN, True), (Grade.REFUSED, True), (Grade.CUT, False), (Grade.GOOD, False)]
)
@in_loop
async def test_an_answer_beside_one_that_the_gateway_did_not_ask_for_is_no_evidence(
    second: Grade, running: bool
) -> None:
    world = World(candidate_s=lambda _: 0.0)
    met: list[Target] = []

    async def ask(target: Target) -> tuple[Grade, str]:
        met.append(target)
        if target == CANDIDATE:
            return Grade.FAILED, "n"
        return (second if CANDIDATE in met else Grade.GOOD), "m"

    for number in range(400):
        met.clear()
        await world.release.ask(None, ask, movable=True, key=f"k{number % 3}")
    assert world.release.running is running
    assert world.release.asked["candidate", Grade.FAILED] > (100 if running else 5)


@in_loop
async def test_where_the_baseline_fails_the_candidate_is_waited_for_no_longer_than_its_client_has() -> None:
    world = World(candidate_s=lambda _: 60.0)
    world.grades[BASELINE] = Grade.FAILED
    async with asyncio.timeout(5.0):
        found = await world.asks_candidate(left_s=0.3)
    assert found.answer == "m"
    await world.ends()


@in_loop
async def test_clients_in_a_hurry_have_the_baseline_s_answers_and_the_candidate_few_of_them() -> None:
    world = World(candidate_s=lambda _: 60.0)
    for _ in range(20):
        async with asyncio.timeout(0.2):
            assert await world.answers(left_s=0.1) == {"m": 20}
    assert world.asked["n"] == len(world.going_on) < 40
    await world.ends()


@in_loop
async def test_of_a_good_candidate_those_who_have_no_time_at_all_say_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "LEAST_S", 10.0)
    world = World(candidate_s=lambda _: 0.03)
    for _ in range(5):
        await world.answers(left_s=0.002)
        await asyncio.gather(*world.going_on)
    assert not world.release._patience.is_spent("k0")
    assert (await world.answers())["n"] > 1
    await world.ends()


@in_loop
async def test_clients_that_leave_lose_a_few_answers_and_not_all() -> None:
    world = World(candidate_s=lambda _: 60.0)

    async def leaves(number: int) -> int:
        try:
            async with asyncio.timeout(0.06):
                await world.answer(number)
        except TimeoutError:
            return 1
        return 0

    lost = [sum(await asyncio.gather(*map(leaves, range(20)))) for _ in range(10)]
    assert lost[0] > 1
    assert sum(lost[1:]) < 5
    await world.ends()


@pytest.mark.parametrize("candidate", [Grade.LATE, Grade.FAILED, Grade.CLIENT])
@pytest.mark.parametrize("baseline", [Grade.CUT, Grade.LATE, Grade.REFUSED, Grade.DOWN])
@in_loop
async def test_what_neither_answers_in_a_client_s_own_time_is_no_failure_of_the_one_that_goes_on(
    baseline: Grade, candidate: Grade
) -> None:
    world = World(candidate_s=lambda _: 0.3)
    world.grades = {BASELINE: baseline, CANDIDATE: candidate}
    for _ in range(10):
        await world.answers(left_s=0.1)
        await asyncio.gather(*world.going_on)
    assert len(world.going_on) > 10
    assert world.release.running
    assert world.release.course is not None
    assert world.release.course.analysis.evidence()["errors"]["candidate"] in (None, 0.0)
    await world.ends()


@pytest.mark.parametrize(
    ("grade", "seconds", "fails"),
    [(Grade.LATE, 0.205, True), (Grade.LATE, 0.4, False), (Grade.FAILED, 0.205, False), (Grade.FAILED, 0.15, True)],
)
@in_loop
async def test_of_one_that_had_the_gateway_s_own_time_a_time_out_is_a_failure(
    grade: Grade, seconds: float, fails: bool
) -> None:
    world = World(candidate_s=lambda _: 0.0)
    first: asyncio.Future[Answered[str]] = asyncio.get_running_loop().create_future()
    first.set_result(Answered("n", grade, CANDIDATE, seconds))
    world.release._note_later(Grade.CUT, Asked("candidate", "k"), 0.2, cast("asyncio.Task[Answered[str]]", first))
    assert world.release.asked["candidate", grade] == fails
    assert world.release.asked["candidate", Grade.CUT] == (not fails)


@in_loop
async def test_what_it_answers_after_a_client_s_own_time_does_not_count_by_its_time() -> None:
    world = World(candidate_s=lambda number: 0.3 if number % 3 == 0 else 0.0)
    for _ in range(20):
        await world.answers(left_s=0.1)
    await asyncio.gather(*world.going_on)
    await asyncio.sleep(0)
    assert world.going_on
    assert world.release._patience.seconds() < 0.3
    assert world.release.asked["candidate", Grade.GOOD] > len(world.going_on)
    await world.ends()


@in_loop
async def test_the_answer_that_is_there_first_is_the_client_s() -> None:
    world = World(candidate_s=lambda _: 0.15, baseline_s=60.0)
    async with asyncio.timeout(5.0):
        found = await world.asks_candidate()
    assert found.answer == "n"
    await asyncio.sleep(0)
    assert world.release.asked["candidate", Grade.GOOD] == 1


@in_loop
async def test_one_key_s_slow_requests_leave_the_candidate_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "LEAST_S", 10.0)
    world = World(candidate_s=lambda _: 0.0)
    for _ in range(patience.MOST):
        await world.release.bear(asyncio.sleep(60.0), 0.001, "slow")
        await world.answers()
    assert world.release._patience.is_spent("slow")
    assert not world.release._patience.is_spent("k0")
    assert (await world.answers())["n"] > 1


@in_loop
async def test_nothing_is_decided_once_what_goes_on_is_given_up() -> None:
    world = World(candidate_s=lambda _: 60.0)
    await world.answers()
    assert world.release.course is not None
    count = world.release.course.analysis.going_on
    assert count > 0
    world.release.rests = True
    await world.ends()
    world.release.look()
    assert world.release.course.analysis.going_on == count
    assert world.release.course.snapshot()["unanswered"] == count


@in_loop
async def test_the_evidence_tells_how_many_are_unanswered() -> None:
    stuck = [True] * 5
    world = World(candidate_s=lambda _: 60.0 if stuck and stuck.pop() else 0.0)
    await world.answers(40)
    await world.answers()
    assert world.release.course is not None
    assert world.release.course.analysis.going_on == len(world.going_on) == 5
    assert "has not answered 5 requests yet" in world.release.course.analysis.evidence()["errors"]["waits"]
    await world.ends()


@in_loop
async def test_a_candidate_that_answers_no_copy_gets_few_and_they_say_so() -> None:
    world = World(candidate_s=lambda _: 60.0)
    world.release.course = Course(Plan(steps=(50.0,), shadow=100.0), time.monotonic())
    copies: list[asyncio.Task[Any]] = []
    for _ in range(patience.MOST + 5):
        if world.release.wants_copy(1, "k"):
            found = await world.release.bear(world.ask(CANDIDATE), 30.0, "k")
            assert isinstance(found, asyncio.Task)
            copies.append(found)
    assert len(copies) == patience.MOST
    world.going_on = copies
    await world.ends()
    good = Answered("m", Grade.GOOD, BASELINE, 0.01)
    for _ in copies:
        world.release.copied(replace(good, grade=Grade.LATE, by=CANDIDATE), good)
    assert not world.release.running


@in_loop
async def test_without_fallback_clients_wait() -> None:
    world = World(candidate_s=lambda _: 0.3, fallback=False)
    assert (await world.answers())["n"] > 1
    assert not world.going_on


@in_loop
async def test_where_the_baseline_fails_the_candidate_is_waited_for() -> None:
    world = World(candidate_s=lambda _: 0.25)
    world.grades[BASELINE] = Grade.FAILED
    assert (await world.asks_candidate()).answer == "n"
    assert len(world.going_on) == 1


@pytest.mark.parametrize("grade", [Grade.LATE, Grade.CUT, Grade.CLIENT])
@in_loop
async def test_an_answer_of_the_candidate_that_is_there_goes_before_what_the_baseline_has_none_for(
    grade: Grade,
) -> None:
    world = World(candidate_s=lambda _: 0.2, baseline_s=0.3)
    world.grades[BASELINE] = grade
    assert (await world.asks_candidate()).answer == "n"


@in_loop
async def test_who_is_blamed_by_the_baseline_does_not_wait_for_a_candidate_that_hangs() -> None:
    world = World(candidate_s=lambda _: 60.0)
    world.grades[BASELINE] = Grade.CLIENT
    async with asyncio.timeout(10):
        assert (await world.asks_candidate()).answer == "m"
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


@in_loop
async def test_a_wait_for_its_own_turn_as_a_suspect_is_none_for_the_candidate() -> None:
    patience = Patience()

    async def in_line() -> str:
        with InLine.watched() as line:
            line.enter()
            await asyncio.sleep(0.3)
            line.leave()
        return "n"

    task = await patience.bear(in_line(), key="a")
    assert isinstance(task, asyncio.Task), "its client has the baseline's answer meanwhile"
    assert not patience.in_vain
    assert await task == "n"
    hung = await patience.bear(asyncio.sleep(60.0), key="a")
    assert isinstance(hung, asyncio.Task)
    assert patience.in_vain
    hung.cancel()
