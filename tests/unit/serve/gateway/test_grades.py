"""What a first answer under release says of its model: the table, the requests that it is read for, both protocols."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import time
from collections import Counter
from typing import Any

import pytest

from serve.gateway.release.grades import (
    ANY,
    AWAIT_THE_OTHER,
    BLAMED,
    ROWS,
    Grade,
    Other,
    Says,
    Second,
    is_late,
    of_copy,
    says,
)
from serve.gateway.release.patience import LEAST_S
from serve.gateway.release.release import Answered, Release
from serve.rollout.course import Course
from serve.rollout.plan import Plan, Target
from tests.unit.serve.gateway.test_fairness import simulated
from tests.unit.serve.rollout.two_models import CANDIDATE, Gateway, Models, World

BASELINE = Target("m")
NONE = AWAIT_THE_OTHER  # of which a client waits for the candidate's answer after all
QUICK_S, SLOW_S, LITTLE_S = 0.01, 5.0, 3.0  # LITTLE_S: more than a client waits for a candidate


def a_release(monkeypatch: pytest.MonkeyPatch, first: str) -> Release:
    """One whose next requests are asked of that model first."""
    plan = Plan(steps=(50.0,), shadow=0.0, step_s=3600.0)
    release = Release(1, "m", BASELINE, CANDIDATE, plan, Course(plan, time.monotonic()))
    monkeypatch.setattr(release, "place", lambda _: 0.0 if first == "candidate" else 1.0)
    return release


def test_each_pair_of_answers_has_one_row_which_has_a_reason() -> None:
    met = Counter(each for row in ROWS for each in itertools.product(row.firsts, row.seconds, row.lates))
    assert met == Counter(itertools.product(Grade, ANY, (False, True)))
    assert all(row.why for row in ROWS)
    assert all(says(*each[:2], late=each[2]) for each in met)


@pytest.mark.parametrize("grade", Grade)
def test_what_both_do_alike_with_the_same_request_is_no_failure_of_the_one_but_a_time_out_of_either(
    grade: Grade,
) -> None:
    assert not says(grade, grade, late=True).fails
    assert bool(says(grade, grade).fails) == (grade is Grade.LATE)
    assert of_copy(grade, grade) in (None, (True, True), (False, False))


def test_a_time_out_is_alone_what_it_is_beside_another_s() -> None:
    """The baseline's is alone: its client has no time left for the candidate."""
    assert {says(Grade.LATE, each) for each in ANY} == {Says.FAILED}


async def met_by(
    release: Release, first: str, grades: tuple[Grade, Grade], seconds: tuple[float, float], left_s: float
) -> str:
    """Who answers a client, where the two, the first and the second, have these grades after so long."""
    order = (CANDIDATE, BASELINE) if first == "candidate" else (BASELINE, CANDIDATE)
    by_target = dict(zip(order, zip(grades, seconds, strict=True), strict=True))

    async def ask(target: Target) -> tuple[Grade, str]:
        grade, takes_s = by_target[target]
        await asyncio.sleep(takes_s)
        return grade, target.model

    going_on: list[asyncio.Task[Any]] = []
    answered: Answered[str] = await release.ask(
        None, ask, movable=True, goes_on=going_on.append, key="k", left_s=left_s
    )
    await asyncio.gather(*going_on)
    await asyncio.sleep(0)
    return answered.answer


@pytest.mark.parametrize(
    ("first", "seconds", "left_s"),
    [
        ("candidate", (QUICK_S, QUICK_S), math.inf),
        ("candidate", (SLOW_S, QUICK_S), math.inf),
        ("candidate", (SLOW_S, QUICK_S), LITTLE_S),
        ("baseline", (QUICK_S, QUICK_S), math.inf),
        ("baseline", (QUICK_S, SLOW_S), math.inf),
        ("baseline", (QUICK_S, SLOW_S), LITTLE_S),
    ],
)
def test_requests_count_by_the_table(
    monkeypatch: pytest.MonkeyPatch, first: str, seconds: tuple[float, float], left_s: float
) -> None:
    for grades in itertools.product(Grade, Grade):
        release = a_release(monkeypatch, first)
        by = simulated(met_by(release, first, grades, seconds, left_s))
        late, waited = is_late(grades[0], seconds[0], left_s), seconds[0] > LEAST_S
        second: Second = Grade.CUT if is_late(grades[1], seconds[1], left_s) else grades[1]
        if not waited and grades[0] not in BLAMED:
            second = Other.UNNEEDED
        said = says(grades[0], second, late=late)
        told = Grade.CUT if said is Says.WAITED else grades[0]
        if told is Grade.CLIENT and said is Says.FAILED:
            told = Grade.FAILED
        assert release.asked == {(first, told): 1}, grades
        assert release.course is not None
        counted = [0, 0] if said.fails is None else [1, int(said.fails)]
        counts = [counted, [0, 0]] if first == "candidate" else [[0, 0], counted]
        assert release.course.analysis._counts == counts, grades
        of_first = second is Other.UNNEEDED or (waited and not late and grades[0] is Grade.GOOD and grades[1] in NONE)
        assert by == ("n" if first == "candidate" and of_first else "m"), grades


@pytest.mark.parametrize("protocol", ["HTTP", "gRPC"])
@pytest.mark.parametrize("first", ["candidate", "baseline"])
@pytest.mark.parametrize(
    ("line_s", "left_s", "grade"),
    [(0.0, None, Grade.LATE), (5.0, None, Grade.CUT), (0.0, 20.0, Grade.CUT)],
)
def test_a_hang_of_either_counts_alike_over_both_protocols(
    monkeypatch: pytest.MonkeyPatch,
    protocol: Any,
    first: Any,
    line_s: float,
    left_s: float | None,
    grade: Grade,
) -> None:
    """Whatever waits in line: what neither answers in the gateway's own time, less that, is no failure of the one."""

    async def main() -> Release:
        release = a_release(monkeypatch, first)
        gateway = Gateway(protocol, release, Models(World(), random.Random(1)))
        gateway.full_for(line_s)
        await gateway.ask("hangs", "k", left_s)
        await asyncio.sleep(60.0)
        await gateway.close()
        return release

    assert simulated(main()).asked == {(first, grade): 1}


@pytest.mark.parametrize("seconds", [0.05, 0.6, 1.2, 1.6, 1.9, 2.5])
def test_what_both_fail_after_any_time_counts_alike_for_both(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Whoever is asked first, the other's failure is heard for as long."""

    async def main(first: str) -> list[int]:
        release = a_release(monkeypatch, first)
        due = time.monotonic() + 3.0

        async def failing(target: Target) -> tuple[Grade, bytes]:
            left_s = math.inf if target == CANDIDATE else due - time.monotonic()
            await asyncio.sleep(min(seconds, left_s))
            return Grade.FAILED if seconds <= left_s else Grade.CUT, b""

        await release.ask(None, failing, movable=True, key="k", left_s=3.0)
        await asyncio.sleep(10)
        assert release.course is not None
        return [failures for _, failures in release.course.analysis._counts]

    of_candidate, of_baseline = simulated(main("candidate")), simulated(main("baseline"))
    assert of_candidate == of_baseline[::-1]


def test_a_request_that_never_meets_the_candidate_says_nothing_of_the_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence stays with the baseline: that it fails there would hide as many failures of the candidate's."""

    async def failing(target: Target) -> tuple[Grade, bytes]:
        return Grade.FAILED, b""

    async def main() -> Release:
        release = a_release(monkeypatch, "baseline")
        for _ in range(5):
            await release.ask(None, failing, movable=False, key="k")
        return release

    release = simulated(main())
    assert release.asked["baseline", Grade.FAILED] == 5
    assert release.course is not None
    assert release.course.analysis._counts == [[0, 0], [0, 0]]
