"""What was left of streams, and whom it keeps from a model's instances."""

from __future__ import annotations

import asyncio
import time

import pytest

from serve.gateway.access.admission import Admission
from serve.gateway.access.gate import Gate
from serve.gateway.access.left_streams import AGAIN_S, LONGEST_S, MANY_S, SETTLES_S, LeftStreams
from serve.gateway.errors import OverloadedError
from serve.gateway.settings import ModelSettings, Settings
from tests.serve_http import in_loop

WAIT_S = 0.05


def of_model(instances: int = 1) -> tuple[LeftStreams, Admission]:
    """What was left counts at once."""
    gate = Gate(Settings(models={"m": ModelSettings()}))
    gate.works("m", instances)
    return LeftStreams(0.0), gate.places("m")


@in_loop
async def test_nobody_is_kept_from_a_model_with_an_instance_that_is_free() -> None:
    left, places = of_model(2)
    assert await left.enter(places, WAIT_S) is None
    since = left.begin(places)
    assert await left.enter(places, WAIT_S) is None
    left.begin(places)
    assert await left.enter(places, WAIT_S) is not None
    left.end(places, since, stuck=False)
    assert await left.enter(places, WAIT_S) is None
    assert list(left) == [(places, 1)]


@in_loop
async def test_what_was_left_a_moment_ago_is_waited_for() -> None:
    _, places = of_model()
    left = LeftStreams(0.1)
    left.begin(places)
    assert await left.enter(places, WAIT_S) is None
    await asyncio.sleep(0.2)
    assert await left.enter(places, WAIT_S) is not None


@in_loop
async def test_one_is_tried_at_a_time_and_after_one_in_vain_none() -> None:
    left, places = of_model()
    since = left.begin(places)
    trial = await left.enter(places, WAIT_S)
    assert trial is not None
    with pytest.raises(OverloadedError) as refused:
        await left.enter(places, WAIT_S)
    assert dict(refused.value.headers)[b"retry-after"]
    waiting = asyncio.ensure_future(left.enter(places, 60.0))
    await asyncio.sleep(0)
    trial.patience_s = 1e-9
    trial.over(unanswered=True)
    with pytest.raises(OverloadedError):
        await waiting
    with pytest.raises(OverloadedError):
        await left.enter(places, 60.0)
    left.begin(places)  # the one that was tried
    left.end(places, since, stuck=False)
    assert await left.enter(places, WAIT_S) is not None, "one has ended: there may be room"


@in_loop
async def test_a_trial_that_was_not_sent_or_failed_says_nothing() -> None:
    left, places = of_model()
    left.begin(places)
    first = await left.enter(places, WAIT_S)
    assert first is not None
    first.over()
    assert await left.enter(places, WAIT_S) is not None


@in_loop
async def test_a_trial_whose_client_leaves_early_says_nothing() -> None:
    left, places = of_model()
    left.answered_first(places, 0.3)
    left.begin(places)
    for _ in range(3):
        trial = await left.enter(places, WAIT_S)
        assert trial is not None, "others have their turn to try it"
        trial.over(unanswered=True)


@in_loop
async def test_after_one_in_vain_another_is_tried_ever_more_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    left, places = of_model()
    left.begin(places)
    now = time.monotonic()
    monkeypatch.setattr("serve.gateway.access.left_streams.time.monotonic", lambda: now)
    for pause_s in (AGAIN_S, 2 * AGAIN_S, 4 * AGAIN_S):
        trial = await left.enter(places, WAIT_S)
        assert trial is not None
        now += LONGEST_S
        trial.over(unanswered=True)
        now += pause_s - 0.1
        with pytest.raises(OverloadedError):
            await left.enter(places, WAIT_S)
        now += 0.1


@in_loop
async def test_a_model_that_answers_beside_what_was_left_is_asked_by_all_from_then_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For ten minutes: it may be another by then, and one that was shown by mistake would hold others up for ever."""
    left, places = of_model()
    since = left.begin(places)
    trial = await left.enter(places, WAIT_S)
    assert trial is not None
    others = [asyncio.ensure_future(left.enter(places, 60.0)) for _ in range(3)]
    await asyncio.sleep(0)
    trial.answered()
    assert await asyncio.gather(*others) == [None] * 3
    left.end(places, since, stuck=False)
    left.begin(places)
    assert await left.enter(places, WAIT_S) is None
    now = time.monotonic() + MANY_S
    monkeypatch.setattr("serve.gateway.access.left_streams.time.monotonic", lambda: now)
    assert await left.enter(places, WAIT_S) is not None


@pytest.mark.parametrize("end_first", [True, False])
@in_loop
async def test_a_trial_that_found_what_was_left_ended_does_not_show_that_the_model_works_on_many(
    end_first: bool,
) -> None:
    left, places = of_model()
    since = left.begin(places)
    trial = await left.enter(places, WAIT_S)
    assert trial is not None
    if end_first:
        left.end(places, since, stuck=False)
    trial.answered()
    left.begin(places)
    if not end_first:  # Triton was through with it, which is known a moment later
        left.end(places, since, stuck=False)
    await asyncio.sleep(2 * SETTLES_S)
    assert await left.enter(places, WAIT_S) is not None


@pytest.mark.parametrize(("first_s", "patience_s"), [(None, None), (0.01, 1.0), (2.0, 8.0)])
@in_loop
async def test_a_trial_waits_longer_than_first_answers_take(first_s: float | None, patience_s: float | None) -> None:
    left, places = of_model()
    if first_s is not None:
        left.answered_first(places, first_s)
    left.begin(places)
    trial = await left.enter(places, WAIT_S)
    assert trial is not None
    assert trial.patience_s == patience_s


@in_loop
async def test_how_long_first_answers_take_is_not_learnt_beside_what_was_left() -> None:
    left, places = of_model()
    left.answered_first(places, 0.5)
    since = left.begin(places)
    left.answered_first(places, 20.0)  # it waited for that
    trial = await left.enter(places, WAIT_S)
    assert trial is not None
    assert trial.patience_s == 2.0
    left.end(places, since, stuck=False)


@in_loop
async def test_what_does_not_end_is_told(caplog: pytest.LogCaptureFixture) -> None:
    left, places = of_model()
    left.end(places, left.begin(places), stuck=True)
    assert left.stuck == {places: 1}
    assert "'m' does not end a message" in caplog.text
    assert await left.enter(places, WAIT_S) is None
