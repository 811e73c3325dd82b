"""A model that is down for a moment, as after a request that ended it, has not failed those that it was not asked."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import pytest

from serve.gateway.access.memory import MemoryFullError
from serve.gateway.errors import GatewayError
from serve.gateway.health import outages
from serve.gateway.health.outages import ModelDownError, Outages
from serve.gateway.release.grades import Grade
from serve.gateway.release.release import Release
from serve.rollout.analysis import Outcome
from serve.rollout.course import Course
from serve.rollout.plan import Plan, Target
from tests.serve_http import in_loop

BASELINE, CANDIDATE = Target("m"), Target("n")
REQUESTS = 300


def release() -> Release:
    plan = Plan(steps=(50.0,), shadow=0.0, step_s=0.0, max_error_increase=0.1)
    return Release(1, "m", BASELINE, CANDIDATE, plan, Course(plan, time.monotonic()))


async def asked(
    released: Release, grades: dict[Target, Grade], errors: dict[Target, GatewayError] | None = None
) -> Counter[Any]:
    """The answers of so many requests, where each model answers so."""

    async def ask(target: Target) -> tuple[Grade, Any]:
        return grades[target], (errors or {}).get(target, f"{target.model}: {grades[target].value}")

    found: Counter[Any] = Counter()
    for number in range(REQUESTS):
        found[(await released.ask(None, ask, movable=True, key=f"k{number % 2}")).answer] += 1
    return found


@in_loop
async def test_a_candidate_that_is_down_is_not_refused_and_its_clients_get_the_baseline_s_answers() -> None:
    released = release()

    assert await asked(released, {BASELINE: Grade.GOOD, CANDIDATE: Grade.DOWN}) == {"m: good": REQUESTS}

    assert released.running
    assert not released.events
    assert 0 < released.asked["candidate", Grade.DOWN] == released.fallbacks


@pytest.mark.parametrize(
    ("error", "holds"), [(ModelDownError("n", "its process has died"), True), (MemoryFullError(1), False)]
)
@in_loop
async def test_what_it_would_have_been_asked_while_it_had_no_process_holds_its_step(
    error: GatewayError, holds: bool
) -> None:
    """Else one whose process dies at some requests is judged by the time between; what had no room says nothing."""
    released = release()
    await asked(released, {BASELINE: Grade.GOOD, CANDIDATE: Grade.DOWN}, {CANDIDATE: error})
    assert released.course is not None
    analysis = released.course.analysis
    analysis.required = ["errors"]
    assert ("had no process" in analysis.evidence()["errors"].get("waits", "")) is holds
    for _ in range(500):
        analysis.candidate(Outcome(False, None))
        analysis.baseline(Outcome(False, None))
    assert analysis.proven() is not holds


@in_loop
async def test_a_candidate_that_fails_is_refused() -> None:
    released = release()

    await asked(released, {BASELINE: Grade.GOOD, CANDIDATE: Grade.FAILED})

    assert not released.running


@in_loop
async def test_where_the_other_is_down_nobody_says_whose_the_failure_is() -> None:
    released = release()

    await asked(released, {BASELINE: Grade.DOWN, CANDIDATE: Grade.FAILED})

    assert released.running
    assert not released.events


def test_who_stays_down_has_not_been_loaded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    known = Outages()
    known.begin("n", ["n"], "it died")
    assert known.fresh("n")
    assert not known.fresh("m")

    monkeypatch.setattr(outages, "FRESH_S", 0.0)

    assert not known.fresh("n")
