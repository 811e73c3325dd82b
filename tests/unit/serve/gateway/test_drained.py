"""Models in use that make way for a key with none: whose turn it is, and that nobody's request is lost by it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from serve.gateway.on_demand import loads as loads_module
from serve.gateway.on_demand import residency as residency_module
from serve.gateway.on_demand import room as room_module
from serve.gateway.on_demand.lease import Lease
from serve.gateway.on_demand.loads import LoadingError
from serve.gateway.on_demand.residency import Residency
from serve.gateway.on_demand.resident import TURN_S
from serve.gateway.on_demand.turns import SEQUENCES_S
from tests.serve_http import in_loop
from tests.unit.serve.gateway.test_on_demand import KNOWN, MIB, Host, ask, one, served, used


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room_module, "SETTLE_S", 0.0)
    monkeypatch.setattr(residency_module, "ROOM_S", 0.3)
    monkeypatch.setattr(residency_module, "BACK_S", 0.0)
    monkeypatch.setattr(loads_module, "BACK_S", 0.0)


def aged(residency: Residency, *models: str, seconds: float = TURN_S + 1) -> None:
    """They have been there for so long; the first for longest."""
    for number, model in enumerate(models or [*residency.resident]):
        residency.resident[model].loaded = time.monotonic() - seconds - 1 + 0.1 * number


@asynccontextmanager
async def busy(residency: Residency, *models: str, who: str = "greedy") -> AsyncIterator[list[Lease]]:
    """Models that a key holds with a request each."""
    leases = [await ask(residency, model, who=who) for model in models]
    aged(residency)
    try:
        yield leases
    finally:
        for lease in leases:
            lease.close()


async def soon(model: str, residency: Residency, who: str, wait_s: float = 5.0) -> asyncio.Task[Lease]:
    """A request that waits for a model, once others have had the time to see it."""
    task = asyncio.ensure_future(ask(residency, model, who=who, wait_s=wait_s))
    await asyncio.sleep(0.15)
    return task


async def ended(*tasks: asyncio.Task[Lease]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@in_loop
async def test_what_has_been_there_for_longest_goes_once_it_has_answered_what_it_has() -> None:
    host = Host()
    residency = served(host)
    async with busy(residency, "a", "b") as (first, _):
        waiting = await soon("c", residency, "poor")
        assert set(residency.draining) == {"a"}
        assert host.there == {"a", "b"}
        assert not waiting.done()
        first.close()
        (await waiting).close()
        assert set(residency.resident) == {"b", "c"}
    assert residency.went == {("a", "drained"): 1}
    assert host.most <= residency.budget


@in_loop
async def test_a_request_of_a_model_that_is_drained_waits_as_if_it_were_cold_and_is_answered_by_its_turn() -> None:
    host = Host()
    residency = served(host)
    async with busy(residency, "a", "b") as leases:
        waiting = await soon("c", residency, "poor")
        assert not residency.at_hand("a", "greedy")
        back = await soon("a", residency, "other")
        leases[0].close()
        (await waiting).close()
        assert not back.done()
        aged(residency)
        leases[1].close()
        (await back).close()
    assert host.loads == ["a", "b", "c", "a"]
    assert host.most <= residency.budget


@in_loop
async def test_one_that_holds_a_model_asks_it_again_while_it_is_drained() -> None:
    residency = served(Host())
    async with busy(residency, "a", "b") as (first, _):
        waiting = await soon("c", residency, "poor")
        await asyncio.wait_for(first.need(["a"], "greedy", time.monotonic() + 5), 0.1)
        first.close()
        (await waiting).close()


@pytest.mark.parametrize("leaves", ["closes its connection", "has no more time"])
@in_loop
async def test_a_drain_that_nobody_waits_for_any_more_is_called_off(leaves: str) -> None:
    host = Host()
    residency = served(host)
    async with busy(residency, "a", "b"):
        waiting = await soon("c", residency, "poor", wait_s=5.0 if leaves.startswith("closes") else 0.3)
        before = residency.draining["a"]
        also = await soon("a", residency, "greedy")
        if leaves.startswith("closes"):
            waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        (await asyncio.wait_for(also, 2)).close()  # what waited goes on with what was there
        assert residency.resident["a"] is before
        assert residency.counts["spared", "a"] == 1
        again = await soon("c", residency, "poor")  # it has had its turn
        assert not residency.draining
        with pytest.raises(LoadingError) as caught:
            await again
        assert int(dict(caught.value.headers)[b"retry-after"]) > TURN_S - 5
    assert host.loads == ["a", "b"]


@in_loop
async def test_who_cannot_wait_and_comes_back_has_its_turn_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residency_module, "BACK_S", 1.0)
    residency = served(Host())
    residency.estimates.saw_seconds("c", 3.0)
    async with busy(residency, "a", "b") as (first, _):
        with pytest.raises(LoadingError):
            await ask(residency, "c", who="poor", wait_s=0.1)
        await asyncio.sleep(0.15)
        first.close()
        (await asyncio.wait_for(ask(residency, "c", who="poor"), 2)).close()


@in_loop
async def test_what_does_not_end_in_time_stays_and_another_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residency_module, "DRAIN_S", 0.3)
    residency = served(Host())
    async with busy(residency, "a", "b") as (_, second):
        waiting = await soon("c", residency, "poor")
        assert set(residency.draining) == {"a"}
        await asyncio.sleep(0.4)
        assert set(residency.draining) == {"b"}
        second.close()
        (await waiting).close()
        assert set(residency.resident) == {"a", "c"}


@in_loop
async def test_none_is_drained_for_a_key_that_has_a_model_or_has_had_its_turn_or_before_thirty_seconds() -> None:
    residency = served(Host(), models=3)
    async with busy(residency, "a", "b"), busy(residency, "c", who="has"):
        with pytest.raises(LoadingError):
            await ask(residency, "d", who="has")
        aged(residency, seconds=TURN_S / 2)
        with pytest.raises(LoadingError):
            await ask(residency, "d", who="poor")
        aged(residency)
        with pytest.raises(LoadingError):
            await ask(residency, "d", who="")  # without keys, all are one
        assert not residency.counts["spared", "a"]
        waiting = await soon("d", residency, "poor")
        assert set(residency.draining) == {"a"}
        second = await soon("e", residency, "poor")
        assert set(residency.draining) == {"a"}
        await ended(waiting, second)


@in_loop
async def test_a_key_that_asks_first_for_a_model_that_it_may_not_have_loaded_is_not_in_anothers_way() -> None:
    residency = served(Host())
    async with busy(residency, "a", "b") as (first, _):
        greedy = await soon("c", residency, "greedy")
        assert not residency.draining
        poor = await soon("c", residency, "poor")
        assert set(residency.draining) == {"a"}
        first.close()
        for lease in await asyncio.gather(greedy, poor):
            lease.close()


@in_loop
async def test_of_two_that_have_nothing_the_one_that_had_a_model_last_comes_last() -> None:
    host = Host()
    residency = served(host)
    await used(residency, "d", who="second")  # which goes for the next
    residency.resident["d"].used -= TURN_S + 1
    async with busy(residency, "a", "b") as (first, _):
        aged(residency, seconds=0)
        later = await soon("c", residency, "second")
        sooner = await soon("e", residency, "first")
        aged(residency)
        residency.resident["b"].loaded = time.monotonic()
        await asyncio.sleep(0.1)
        first.close()
        (await sooner).close()
        assert "c" not in residency.resident
        await ended(later)


@in_loop
async def test_what_is_pinned_or_needed_by_a_rollout_is_not_drained_and_one_that_comes_to_be_needed_stays() -> None:
    residency = served(Host(), models=2, pins=("a",))
    needed = {"b"}
    residency.stays = needed.__contains__
    async with busy(residency, "a", "b"):
        with pytest.raises(LoadingError):
            await ask(residency, "c", who="poor")
        needed.clear()
        waiting = await soon("c", residency, "poor")
        assert set(residency.draining) == {"b"}
        needed.add("b")
        await asyncio.sleep(0.15)
        assert not residency.draining
        await ended(waiting)


@in_loop
async def test_a_triton_that_dies_while_a_model_is_drained_ends_it() -> None:
    host = Host()
    residency = served(host)
    async with busy(residency, "a", "b"):
        waiting = await soon("c", residency, "poor")
        host.there.clear()
        residency.started()
        await residency.keep()
        (await waiting).close()
    assert set(residency.resident) == {"c"}
    assert not residency.draining


@in_loop
async def test_a_model_that_is_removed_while_it_is_drained_is_gone() -> None:
    residency = served(Host())
    async with busy(residency, "a", "b"):
        waiting = await soon("c", residency, "poor")
        known = {name: each for name, each in KNOWN.items() if name not in ("a", "whole")}
        await residency.changed("a", known)
        (await waiting).close()
    assert set(residency.resident) == {"b", "c"}


@in_loop
async def test_an_ensemble_that_is_drained_goes_with_its_steps_while_others_wait_for_it() -> None:
    host = Host()
    residency = served(host)
    async with busy(residency, "whole") as (first,):
        waiting = await soon("c", residency, "poor")
        back = await soon("whole", residency, "greedy")
        first.close()
        (await waiting).close()
        assert "c" in host.there
        assert not {"a", "whole"} & host.there
        await ended(back)


@in_loop
async def test_keys_that_want_more_than_fits_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("turns", "residency", "resident"):
        monkeypatch.setattr(f"serve.gateway.on_demand.{module}.TURN_S", 0.5)
    host = Host()
    residency = served(host)
    answered = dict.fromkeys("abc", 0)
    until = time.monotonic() + 8

    async def keep_busy(model: str) -> None:
        while time.monotonic() < until:
            try:
                lease = await ask(residency, model, who=f"key of {model}", wait_s=2.0)
            except LoadingError:
                await asyncio.sleep(0.1)
                continue
            await asyncio.sleep(0.05)
            lease.close()
            answered[model] += 1

    await asyncio.gather(*(keep_busy(model) for model in "abc" for _ in range(2)))
    assert min(answered.values()) > 0.3 * max(answered.values()), answered
    assert len(host.loads) <= 2 * 8 / 0.5 + 3  # each has its time
    assert host.most <= residency.budget


@in_loop
async def test_a_model_that_may_have_sequences_is_left_to_them_for_longer() -> None:
    host = Host()
    residency = Residency(host, KNOWN | {"s": one("s", idle_s=60.0)}, 160 * MIB, (), lambda _: None)
    await used(residency, "s", who="greedy")
    aged(residency, seconds=SEQUENCES_S / 2)
    with pytest.raises(LoadingError):
        await ask(residency, "c", who="poor")
    aged(residency, seconds=SEQUENCES_S + 1)
    await used(residency, "c", who="poor")
    assert host.there == {"c"}
