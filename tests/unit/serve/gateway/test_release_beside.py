"""What asks a candidate by its own name loads it, and then its time says nothing of it beside the baseline."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from serve.gateway.errors import UnknownModelError
from serve.gateway.release.beside import Besides
from serve.gateway.release.grades import Grade
from serve.gateway.release.release import Release
from serve.gateway.release.releases import Releases
from serve.gateway.upstream.upstream import Upstream
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
    assert "asked it by another name" in analysis.evidence()["latency"]["waits"]
    assert analysis.decisive()["latency"] == "bad"


@pytest.mark.parametrize("leaves", [False, True])
@in_loop
async def test_a_slow_candidate_is_refused_where_nobody_does(leaves: bool) -> None:
    released = release()

    await asked(released, lambda: None, leaves=leaves)

    assert not released.running


@pytest.mark.parametrize(
    ("candidate", "asked", "met"),
    [
        (Target("n"), Target("n"), True),
        (Target("n"), Target("n", "1"), True),
        (Target("m", "2"), Target("m", "2"), True),
        (Target("m", "2"), Target("m", "002"), True),
        (Target("m", "2"), Target("m"), True),
        (Target("m", "2"), Target("m", "1"), False),
        (Target("m", "2"), Target("m", "20"), False),
        (Target("n"), Target("m"), False),
        (Target("n"), Target("n_network"), True),
        (Target("n"), Target("n_network", "3"), True),
        (Target("n"), Target("n_post", "2"), False),
    ],
)
def test_a_version_is_the_candidate_s_however_its_number_is_written(
    tmp_path: Path, candidate: Target, asked: Target, met: bool
) -> None:
    upstream = cast("Upstream", SimpleNamespace())
    releases = Releases(tmp_path / "none.db", upstream)
    one = release()
    one.candidate = candidate
    one.steps = Target("n_network"), Target("n_post", "1")
    releases._by_model["m"] = one

    assert (releases.beside(asked) == Besides((one.beside,))) is met
    assert releases.beside(asked, one) is None


@pytest.mark.parametrize(
    ("settled", "met"), [("promoted", True), ("aborted", False), ("running", True), ("running elsewhere", True)]
)
def test_a_candidate_is_met_by_what_another_release_sends_there(tmp_path: Path, settled: str, met: bool) -> None:
    releases = Releases(tmp_path / "none.db", cast("Upstream", SimpleNamespace()))
    judged, other = release(), release()
    judged.candidate, other.candidate, other.baseline = Target("n", "2"), Target("n", "2"), Target("n", "1")
    if settled == "running elsewhere":
        other.course, other._weight = None, 0.1
    elif settled != "running":
        assert other.course is not None
        other.course.end("promoted" if settled == "promoted" else "aborted", "")
    releases._by_model |= {"m": judged, "n": other}

    assert (releases.beside(Target("n"), other) == Besides((judged.beside,))) is met


def test_a_step_of_two_candidates_is_told_to_both(tmp_path: Path) -> None:
    releases = Releases(tmp_path / "none.db", cast("Upstream", SimpleNamespace()))
    one, other = release(), release()
    one.candidate, other.candidate = Target("a"), Target("b")
    one.steps = other.steps = (Target("network"),)
    releases._by_model |= {"m": one, "n": other}

    found = releases.beside(Target("network"))

    assert found == Besides((one.beside, other.beside))
    found.enter("bad")
    assert (one.beside.now, other.beside.now, other.beside.key) == (1, 1, "bad")
    found.leave()
    assert (one.beside.now, other.beside.now) == (0, 0)


@in_loop
async def test_a_model_that_asks_the_candidate_loads_it_too(tmp_path: Path) -> None:
    steps = {"whole": (("n", "2"),), "other": (("x", None),), "n": (), "x": (), "m": (("n", "1"),)}

    async def metadata(model: str, version: str | None) -> Any:
        return SimpleNamespace(steps=steps[model], network="")

    async def loaded() -> list[str]:
        return sorted(steps)

    upstream = cast("Upstream", SimpleNamespace(metadata=metadata, loaded=loaded, forget=lambda *_: None))
    releases = Releases(tmp_path / "none.db", upstream)
    one = release()
    one.candidate = Target("n", "2")
    one.askers = await releases._askers(one, set())
    releases._by_model["m"] = one

    assert one.askers == {"whole"}
    assert releases.beside(Target("whole", "1")) is not None
    assert releases.beside(Target("other")) is None


@in_loop
async def test_the_steps_of_an_ensemble_are_those_of_ensembles_and_pipelines_in_it_too(tmp_path: Path) -> None:
    steps = {
        "whole": (("inner", None), ("post", "2")), "inner": (("pipeline", None), ("whole", None)), "post": (),
        "pipeline": (), "network": (),
    }  # fmt: skip
    networks = {"pipeline": "network", "post": "no model of Triton's"}

    async def metadata(model: str, version: str | None) -> Any:
        if model not in steps:
            raise UnknownModelError("there is none")
        return SimpleNamespace(steps=steps[model], network=networks.get(model, ""))

    upstream = cast("Upstream", SimpleNamespace(metadata=metadata, forget=lambda *_: None))
    releases = Releases(tmp_path / "none.db", upstream)

    found = await releases._steps(Target("whole"))

    assert found >= {Target("inner"), Target("post", "2"), Target("pipeline"), Target("network"), Target("whole")}


@pytest.mark.parametrize("busy", [False, True])
def test_copies_that_are_not_made_are_told_with_the_key_that_keeps_the_candidate_busy(busy: bool) -> None:
    plan = Plan(steps=(50.0,), shadow=100.0, step_s=0.0)
    one = Release(1, "m", BASELINE, CANDIDATE, plan, Course(plan, time.monotonic()))
    if busy:
        one.beside.enter("bad")
    for _ in range(3):
        one.drops()

    assert one.course is not None
    waits = one.course.analysis.evidence()["errors"]["waits"]
    assert "3 requests were not copied to the candidate" in waits
    assert ("by another name" in waits) is busy
    assert one.course.analysis.decisive() == ({"errors": "bad", "disagreement": "bad"} if busy else {})


def lies(one: Release, number: int) -> None:
    """One key says of the candidate alone that it is wrong, where another may speak, too."""
    for _ in range(number):
        one.reported("candidate", wrong=True, key="liar")
        one.reported("baseline", wrong=False, key="liar")


def test_after_a_restart_one_of_several_keys_decides_as_little_as_before() -> None:
    before = release()
    before.may_speak("honest")
    before.may_speak("liar")
    lies(before, 200)
    assert before.running

    after = release()
    after.restore(1.0, json.loads(json.dumps(before.snapshot())))
    lies(after, 200)

    assert after.running
    alone = release()
    alone.may_speak("liar")
    lies(alone, 200)
    assert not alone.running, "a key that has the gateway to itself decides"


@in_loop
async def test_that_another_key_has_asked_is_known_after_a_restart() -> None:
    before = release()
    for key in ("one", "two"):
        await before.ask(None, answered, movable=True, key=key)

    after = release()
    after.restore(1.0, json.loads(json.dumps(before.snapshot())))

    assert before.course is not None
    assert after.course is not None
    assert (before.course.joined, after.course.joined, release().course.joined) == (True, True, False)  # type: ignore[union-attr]


async def answered(target: Target) -> tuple[Grade, str]:
    return Grade.GOOD, target.model


@in_loop
async def test_who_left_is_met_until_the_server_is_through() -> None:
    beside, ended = release().beside, asyncio.get_running_loop().create_future()

    beside.enter("bad")
    beside.leave([ended])
    assert beside.now == 1

    ended.set_result(True)
    await asyncio.sleep(0)
    assert beside.now == 0
