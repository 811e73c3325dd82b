"""What asks a candidate by its own name loads it, and then its time says nothing of it beside the baseline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from serve.gateway.release.release import Grade, Release
from serve.rollout.course import Course
from serve.rollout.plan import Plan, Target
from tests.serve_http import in_loop

BASELINE, CANDIDATE = Target("m"), Target("n")
MOST = 2000


def release() -> Release:
    plan = Plan(steps=(50.0,), shadow=0.0, step_s=3600.0)
    return Release(1, "m", BASELINE, CANDIDATE, plan, Course(plan, time.monotonic()))


async def asked(released: Release, between: Callable[[], None], *, leaves: bool = False) -> None:
    """Requests until a decision, whose answers the candidate takes longer for; clients leave, where they do."""

    async def ask(target: Target) -> tuple[Grade, str]:
        between()
        if target == CANDIDATE:
            await asyncio.sleep(0.001)
            if leaves:
                raise asyncio.CancelledError
        return Grade.GOOD, target.model

    for number in range(MOST):
        try:
            await released.ask(None, ask, movable=True, key=f"k{number % 2}")
        except asyncio.CancelledError:
            assert leaves
        if not released.running:
            return


def before_and_during(released: Release) -> None:
    if not released.beside.now:
        released.beside.enter("bad")


def during_alone(released: Release) -> None:
    released.beside.enter("bad")
    released.beside.leave()


@pytest.mark.parametrize("leaves", [False, True])
@pytest.mark.parametrize("met", [before_and_during, during_alone])
@in_loop
async def test_times_do_not_count_while_others_ask_the_candidate(met: Callable[[Release], None], leaves: bool) -> None:
    released = release()

    await asked(released, lambda: met(released), leaves=leaves)

    assert released.running
    assert released.course is not None
    analysis = released.course.analysis
    assert analysis.measures["latency"].count == 0
    assert "asked it by its own name" in analysis.evidence()["latency"]["waits"]
    assert analysis.decisive()["latency"] == "bad"


@pytest.mark.parametrize("leaves", [False, True])
@in_loop
async def test_a_slow_candidate_is_refused_where_nobody_does(leaves: bool) -> None:
    released = release()

    await asked(released, lambda: None, leaves=leaves)

    assert not released.running


@in_loop
async def test_who_left_is_met_until_the_server_is_through() -> None:
    beside, ended = release().beside, asyncio.get_running_loop().create_future()

    beside.enter("bad")
    beside.leave([ended])
    assert beside.now == 1

    ended.set_result(True)
    await asyncio.sleep(0)
    assert beside.now == 0
