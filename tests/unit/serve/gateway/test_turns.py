"""A request that ends a model is found among the traffic of others, on the shipped class and a simulated clock."""

from __future__ import annotations

import asyncio
import importlib
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from serve.gateway.errors import OverloadedError
from serve.gateway.health.barred import DEATHS_OF_KEY, BarredError
from serve.gateway.health.flights import Flight
from serve.gateway.health.suspects import PoisonError, Suspects
from serve.gateway.health.turns import MOST_WAITING, OVERRUN_S, REST, BusyTurnError, Turns

sys.path.insert(0, str(Path(__file__).parents[4] / "benchmarks"))
simulated: Callable[[Coroutine[Any, Any, Any]], Any] = importlib.import_module("simulated_time").simulated
DOWN_S = 0.5
ENDED, ANSWERED, LATER, REFUSED = "ended", "answered", "later", "refused"


def now() -> float:
    """By the clock that is simulated when it is asked."""
    return time.monotonic()


class Model:
    """One that dies of what begins with "die", a while after it was asked, and is back after `DOWN_S`.

    Attributes:
        told: how often each key got which answer.
        deaths: number of them.
    """

    def __init__(self) -> None:
        self.suspects = Suspects(now)
        self.told: Counter[tuple[str, str]] = Counter()
        self.deaths = 0
        self._process = asyncio.Event()
        self._up = True

    async def ask(self, key: str, body: bytes, seconds: float, leaves_s: float = 60.0) -> str:
        """As the gateway asks: look, wait for the turn, fly, land."""
        told = await self._ask(key, body, seconds, leaves_s)
        self.told[key, told] += 1
        return told

    async def _ask(self, key: str, body: bytes, seconds: float, leaves_s: float) -> str:
        flight = Flight(key, "m", body)
        answered = False
        try:
            if not self._up:
                return LATER
            if self.suspects.watches(key, "m"):
                await self.suspects.examine(flight, 30.0)
            if not self._up:
                return LATER
            self.suspects.take_off(flight)
            process = self._process
            work = asyncio.ensure_future(self._work(process, body, seconds))
            done, _ = await asyncio.wait((work,), timeout=leaves_s)
            if not done:
                flight.left = True
                return LATER  # the client left, the model goes on
            answered = work.result()
            return ANSWERED if answered else ENDED
        except (PoisonError, BarredError):
            return REFUSED
        except OverloadedError:
            return LATER
        finally:
            self.suspects.land(flight, answered=answered)

    async def _work(self, process: asyncio.Event, body: bytes, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await process.wait()
            return False
        except TimeoutError:
            if body.startswith(b"die") and not process.is_set():
                await self._die()
            return not process.is_set()

    async def _die(self) -> None:
        self.deaths += 1
        self._up = False
        self._process.set()
        await self.suspects.died(["m"])
        self._process = asyncio.Event()

        def back() -> None:
            self._up = True
            self.suspects.began(["m"])

        asyncio.get_running_loop().call_later(DOWN_S, back)


async def client(
    model: Model, key: str, rate: float, seconds: float, until: float, chance: random.Random, *, same: bool
) -> None:
    """Asks at times of its own, whatever becomes of the requests before."""
    asked = []
    number = 0
    while time.monotonic() < until:
        number += 1
        body = b"the same" if same else b"%d" % number
        asked.append(asyncio.ensure_future(model.ask(key, body, seconds)))
        await asyncio.sleep(chance.expovariate(rate))
    await asyncio.gather(*asked)


@settings(max_examples=15, deadline=None)
@example(seed=0, others=[(8.0, 0.25, False), (8.0, 0.25, False), (1.0, 0.25, False)], kills_after_s=0.25, every_s=12.0)
@given(
    seed=st.integers(0, 2**32),
    others=st.lists(st.tuples(st.floats(1, 8), st.floats(0.001, 0.4), st.booleans()), min_size=1, max_size=3),
    kills_after_s=st.floats(0.001, 0.5),
    every_s=st.sampled_from((0.3, 2.0, 6.0, 12.0)),
)
def test_a_poison_request_is_found_among_steady_traffic_and_nobody_else_is_refused(
    seed: int, others: list[tuple[float, float, bool]], kills_after_s: float, every_s: float
) -> None:
    async def main() -> tuple[int, Model]:
        model, chance = Model(), random.Random(seed)
        clients = [
            asyncio.ensure_future(client(model, f"good {n}", rate, seconds, 1e9, chance, same=same))
            for n, (rate, seconds, same) in enumerate(others)
        ]
        for _ in range(40):
            if await model.ask("bad", b"die", kills_after_s) == REFUSED:
                break
            await asyncio.sleep(chance.expovariate(1 / every_s))
        for each in clients:
            each.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
        return model.deaths, model

    deaths, model = simulated(main())
    assert model.told["bad", REFUSED] == 1, "it was found"
    assert deaths <= 4
    assert sum(count for (key, told), count in model.told.items() if key != "bad" and told == REFUSED) == 0


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 2**32), leaves=st.booleans(), rate=st.floats(0.5, 20.0), kills_after_s=st.floats(0.001, 3.0))
def test_a_hostile_key_has_no_other_refused_and_does_not_hold_the_model_down(
    seed: int, leaves: bool, rate: float, kills_after_s: float
) -> None:
    """It never says the same twice, and may leave before the model dies of it."""

    async def main() -> Model:
        model, chance = Model(), random.Random(seed)
        good = [
            asyncio.ensure_future(client(model, key, 5.0, 0.02, 120.0, chance, same=same))
            for key, same in (("good", True), ("other", False))
        ]
        asked, number = [], 0
        while time.monotonic() < 110.0:
            number += 1
            left_s = 0.01 if leaves else 60.0
            asked.append(asyncio.ensure_future(model.ask("bad", b"die %d" % number, kills_after_s, left_s)))
            await asyncio.sleep(chance.expovariate(rate))
        await asyncio.gather(*asked, *good)
        return model

    model = simulated(main())
    for key in ("good", "other"):
        assert model.told[key, REFUSED] == 0
        asked = sum(count for (whose, _), count in model.told.items() if whose == key)
        assert model.told[key, ANSWERED] > 0.7 * asked
    assert model.deaths < 25
    assert model.told["bad", REFUSED] > 0


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 2**32), number=st.integers(1, 6))
def test_without_keys_it_is_found_by_what_it_says(seed: int, number: int) -> None:
    async def main() -> Model:
        model, chance = Model(), random.Random(seed)
        good = [
            asyncio.ensure_future(client(model, "", 10.0, 0.05, 60.0, chance, same=bool(n % 2))) for n in range(number)
        ]
        for _ in range(20):
            if await model.ask("", b"die", 0.02) == REFUSED:
                break
            await asyncio.sleep(chance.expovariate(0.5))
        await asyncio.gather(*good)
        return model

    model = simulated(main())
    assert model.told["", REFUSED] == 1
    assert model.deaths <= 4


@pytest.mark.parametrize(("seconds", "leaves_s"), [(0.1, 60.0), (5.0, 0.01), (5.0, 0.5), (30.0, 2.0)])
def test_a_suspect_whose_client_leaves_does_not_keep_the_model_in_turns(seconds: float, leaves_s: float) -> None:
    async def main() -> float:
        model, chance = Model(), random.Random(1)
        tasks = [
            asyncio.ensure_future(client(model, key, 5.0, 0.05, 1e9, chance, same=False)) for key in ("good", "other")
        ]
        for number in range(2):  # deaths that it shares
            beside = asyncio.ensure_future(model.ask("bad", b"the same", 0.5))
            await asyncio.sleep(0.01)
            await model.ask("worse", b"die %d" % number, 0.05)
            await beside
            await asyncio.sleep(15.0)
        assert model.deaths == 2

        async def again() -> None:
            while True:
                await model.ask("bad", b"the same", seconds, leaves_s)
                await asyncio.sleep(0.01)

        tasks += [asyncio.ensure_future(again()) for _ in range(8)]
        seen = []
        for _ in range(2400):
            await asyncio.sleep(0.05)
            seen.append(model.suspects._turns.taken)
        for each in tasks:
            each.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return sum(seen) / len(seen)

    assert simulated(main()) < 0.3


def test_a_request_left_at_work_that_kills_later_convicts_nobody_else() -> None:
    async def main() -> Model:
        model = Model()
        for number in range(6):
            hidden = asyncio.ensure_future(model.ask("bad", b"die %d" % number, 5.0, leaves_s=0.01))
            await asyncio.sleep(4.9)
            await model.ask("good", b"the same", 0.5)
            await hidden
            await asyncio.sleep(2.0)
        assert await model.ask("good", b"the same", 0.1) == ANSWERED
        return model

    model: Model = simulated(main())
    assert model.told["good", REFUSED] == 0


@pytest.mark.parametrize("leavers", [0, 1, 2])
def test_a_key_that_leaves_is_no_cover_for_another_that_kills(leavers: int) -> None:
    """Before each request that kills, another key has left one that the model may be at work on."""

    async def main() -> Model:
        model, chance = Model(), random.Random(0)
        good = [
            asyncio.ensure_future(client(model, key, 5.0, 0.02, 240.0, chance, same=False)) for key in ("good", "other")
        ]
        number = 0
        while time.monotonic() < 240.0:
            number += 1
            if leavers and model._up:
                await model.ask(f"leaver {number % leavers}", b"%d" % number, 5.0, leaves_s=0.01)
            if model._up:
                await model.ask("bad", b"die %d" % number, 0.02)
            await asyncio.sleep(0.05)
        await asyncio.gather(*good)
        return model

    model = simulated(main())
    for key in ("good", "other"):
        assert model.told[key, REFUSED] == 0
        asked = sum(count for (whose, _), count in model.told.items() if whose == key)
        assert model.told[key, ANSWERED] > 0.8 * asked
    assert model.deaths < 60
    assert model.told["bad", REFUSED] > 0


def test_a_key_that_ends_it_again_and_again_is_refused_for_a_while() -> None:
    async def main() -> None:
        model = Model()
        for number in range(DEATHS_OF_KEY):
            assert await model.ask("bad", b"die %d" % number, 0.01) == ENDED
            await asyncio.sleep(1.0)
        assert await model.ask("bad", b"fine", 0.01) == REFUSED
        assert await model.ask("good", b"fine", 0.01) == ANSWERED
        await asyncio.sleep(15.0)
        assert await model.ask("bad", b"fine", 0.01) == ANSWERED

    simulated(main())


def test_one_that_does_not_end_keeps_the_next_waiting_for_so_long() -> None:
    async def main() -> None:
        turns = Turns(lambda *_: False, now)
        turns.begin(["m"], 60.0)
        assert await turns.take("a", "m", 30.0)
        assert not await turns.take("b", "n", 30.0), "another model is not concerned"
        began = time.monotonic()
        assert await turns.take("b", "m", 30.0)
        assert time.monotonic() - began == pytest.approx(OVERRUN_S, abs=0.1)
        turns.leave("a")
        turns.leave("b")
        assert not turns.holding

    simulated(main())


@pytest.mark.parametrize("died", [(["slow"], ["fast"]), (["slow", "fast"],), (["fast"], ["slow"], ["slow"])])
def test_each_model_that_died_takes_turns_once_it_is_back(died: tuple[list[str], ...]) -> None:
    async def main() -> None:
        turns = Turns(lambda *_: False, now)
        for models in died:
            turns.suspend(models)
        await asyncio.sleep(1.0)
        turns.resume(["fast"], 10.0)
        assert turns.covers("fast")
        await asyncio.sleep(20.0)
        assert not turns.covers("fast")
        turns.resume(["slow"], 10.0)
        assert turns.covers("slow")
        assert not turns.covers("fast")
        await asyncio.sleep(10.5)
        turns.resume(["slow", "fast"], 10.0)
        assert not turns.taken, "nothing had died"

    simulated(main())


def test_a_server_that_is_back_has_all_its_models_back() -> None:
    async def main() -> None:
        turns = Turns(lambda *_: False, now)
        for died, back in ((None, None), (["m"], None)):
            turns.suspend(died)
            await asyncio.sleep(1.0)
            turns.resume(back, 10.0)
            assert turns.covers("m")
            await asyncio.sleep(10.5)
            turns.resume(None, 10.0)
            assert not turns.taken

    simulated(main())


def test_they_wait_within_bounds() -> None:
    async def main() -> None:
        turns = Turns(lambda *_: True, now)
        turns.begin(["m"], 60.0)
        waiting = [asyncio.ensure_future(turns.take("a", "m", 1e6)) for _ in range(MOST_WAITING)]
        await asyncio.sleep(0)
        with pytest.raises(BusyTurnError):
            await turns.take("b", "m", 1e6)
        assert await asyncio.gather(*waiting) == [True] * MOST_WAITING
        assert time.monotonic() == pytest.approx(OVERRUN_S, abs=0.1)
        with pytest.raises(BusyTurnError):
            await turns.take("c", "m", 0.5)
        turns.overrun_s = 1000.0
        began = time.monotonic()
        turns.begin(["m"], 3000.0)
        assert await turns.take("c", "m", 1e6)
        assert time.monotonic() - began == pytest.approx(1000.0, abs=0.1)

    simulated(main())


def test_turns_for_one_suspect_are_a_share_of_the_time_only() -> None:
    async def main() -> None:
        turns = Turns(lambda *_: False, now)
        assert turns.invite(["m"])
        assert await turns.take("a", "m", 1.0)
        await asyncio.sleep(1.0)
        turns.leave("a")
        turns.excuse()
        assert not turns.taken
        assert not turns.invite(["m"])
        await asyncio.sleep(REST)
        assert turns.invite(["m"])

    simulated(main())
