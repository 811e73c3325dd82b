"""Whose turn it is for the connections to one server: models and keys share them."""

from __future__ import annotations

import asyncio
import itertools

import pytest
import uvloop

from serve.http.client import ExchangeError
from serve.http.slots import Slots, Whose
from tests.serve_http import in_loop


def fill(slots: Slots, *whose: Whose) -> list[int]:
    """How many each has when all take what they can, in turns."""
    had = [0] * len(whose)
    before = None
    while before != (before := sum(had)):
        for number, each in enumerate(whose):
            had[number] += slots.take(each)
    return had


@pytest.mark.parametrize(("models", "each"), [(1, 64), (2, 43), (3, 32), (7, 16)])
def test_models_that_take_what_they_can_leave_as_much_as_each_has(models: int, each: int) -> None:
    slots = Slots(128)
    had = fill(slots, *((f"m{number}", f"k{number}") for number in range(models)))
    assert all(abs(count - each) <= 1 for count in had)
    assert slots.most - slots.used >= each - 2
    assert slots.take(("next", "another"))


def test_a_key_has_no_more_than_half_while_another_asks_however_many_models_it_asks() -> None:
    slots = Slots(128)
    assert slots.take(("base", "good"))
    greedy = fill(slots, *((f"m{number}", "greedy") for number in range(10)))
    assert sum(greedy) <= 64
    assert slots.take(("base", "good"))


def test_a_key_that_is_alone_leaves_an_eighth() -> None:
    slots = Slots(128)
    assert sum(fill(slots, *((f"m{number}", "greedy") for number in range(20)))) == 112
    assert all(slots.take(("base", "good")) for _ in range(8))
    assert not slots.take(("m0", "greedy"))


@in_loop
async def test_a_key_that_has_its_share_is_told_so_and_does_not_wait() -> None:
    slots = Slots(128)
    fill(slots, *((f"m{number}", "greedy") for number in range(20)))
    async with asyncio.timeout(5):
        with pytest.raises(ExchangeError) as caught:
            await slots.wait(("base", "greedy"), asyncio.get_running_loop().time() + 30)
    assert caught.value.kind == "share"


@in_loop
async def test_the_model_with_the_fewest_is_served_first_and_within_it_the_key_with_the_fewest() -> None:
    slots = Slots(32)
    nobody = ("", "")
    assert all(slots.take(nobody) for _ in range(32))
    order: list[Whose] = []

    async def one(each: Whose) -> None:
        await slots.wait(each, asyncio.get_running_loop().time() + 5)
        order.append(each)

    waiting = [asyncio.ensure_future(one(each)) for each in (*[("a", "x")] * 3, ("a", "w"), ("b", "y"))]
    await asyncio.sleep(0)
    for _ in range(32):
        slots.give(nobody)
        await asyncio.sleep(0)
    await asyncio.gather(*waiting)
    assert order == [("a", "x"), ("b", "y"), ("a", "w"), ("a", "x"), ("a", "x")]


@pytest.mark.parametrize("late", [False, True])
def test_who_gives_up_waiting_loses_no_slot(*, late: bool) -> None:
    async def main() -> None:
        slots = Slots(1)
        assert slots.take(("a", ""))
        waiting = asyncio.ensure_future(slots.wait(("b", ""), asyncio.get_running_loop().time() + 5))
        await asyncio.sleep(0)
        if late:
            slots.give(("a", ""))  # it has the slot, and does not know yet
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        if not late:
            slots.give(("a", ""))
        assert slots.used == 0
        assert slots.take(("c", ""))

    uvloop.run(main())


@in_loop
async def test_a_few_slots_are_nobodys_share() -> None:
    slots = Slots(4)
    for whose in itertools.repeat(("m", "k"), 4):
        assert slots.take(whose)
    with pytest.raises(ExchangeError) as caught:
        await slots.wait(("m", "k"), asyncio.get_running_loop().time() + 0.01)
    assert caught.value.kind == "busy"
    assert slots.used == 4
