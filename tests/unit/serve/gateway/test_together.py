"""Parts of one request, side by side: in order, few at a time, and ended when their client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from functools import partial

import pytest
from starlette.types import Scope

from serve.gateway.edge.asking import unless_client_leaves
from serve.gateway.edge.extensions import LEAVING
from serve.gateway.edge.together import together
from serve.gateway.errors import BadRequestError, ClientGoneError, OverloadedError

Leave = Callable[[], None] | None


async def nothing() -> dict[str, str]:
    await asyncio.sleep(30)
    return {"type": "http.disconnect"}


class Client:
    """A connection that may close."""

    def __init__(self) -> None:
        self.call: Leave = None
        self.scope: Scope = {"extensions": {LEAVING: self.watch}}

    def watch(self, call: Leave) -> None:
        self.call = call

    def leave(self) -> None:
        assert self.call is not None
        self.call()


def test_what_the_parts_give_stands_in_their_order_and_few_are_under_way() -> None:
    running: list[int] = []

    async def part(number: int, scope: Scope) -> int:
        running.append(number)
        assert len(running) <= 2
        await unless_client_leaves(scope, nothing, asyncio.sleep(0.01 * (5 - number)))
        running.remove(number)
        return number

    client = Client()
    assert asyncio.run(together(client.scope, nothing, [partial(part, number) for number in range(5)], 2)) == [
        *range(5)
    ]
    assert client.call is None


def test_a_failure_begins_no_others_and_lets_those_under_way_end() -> None:
    begun, ended = [], []

    async def part(number: int, scope: Scope) -> None:
        begun.append(number)
        if number == 1:
            raise BadRequestError("no")
        await unless_client_leaves(scope, nothing, asyncio.sleep(0.02))
        ended.append(number)

    with pytest.raises(BadRequestError):
        asyncio.run(together(Client().scope, nothing, [partial(part, number) for number in range(9)], 2))
    assert (begun, ended) == ([0, 1], [0])


@pytest.mark.parametrize("most", [2, 9])
def test_who_leaves_ends_all_of_it(most: int) -> None:
    client, gone = Client(), []

    async def part(number: int, scope: Scope) -> None:
        try:
            await unless_client_leaves(scope, nothing, asyncio.sleep(30))
        except ClientGoneError:
            gone.append(number)
            raise

    async def serve() -> None:
        parts: list[Callable[[Scope], Awaitable[None]]] = [partial(part, number) for number in range(4)]
        task = asyncio.create_task(together(client.scope, nothing, parts, most))
        await asyncio.sleep(0.01)
        client.leave()
        client.leave()  # it may be told twice
        with pytest.raises(ClientGoneError):
            await task

    asyncio.run(serve())
    assert gone == [*range(min(most, 4))]


@pytest.mark.parametrize("ends", ["left", "failed"])
def test_what_it_costs_is_what_is_under_way_however_much_was_asked(ends: str) -> None:
    client, taken = Client(), 0

    async def part(number: int, scope: Scope) -> None:
        if ends == "failed" and number == 1:
            raise BadRequestError("no")
        await unless_client_leaves(scope, nothing, asyncio.sleep(30 if ends == "left" else 0.01))

    def parts() -> Iterator[Callable[[Scope], Awaitable[None]]]:
        nonlocal taken
        for number in range(1_000_000):
            taken += 1
            yield partial(part, number)

    async def serve() -> None:
        before = len(asyncio.all_tasks())
        task = asyncio.create_task(together(client.scope, nothing, parts(), 4))
        await asyncio.sleep(0.001)
        assert len(asyncio.all_tasks()) - before <= 1 + 2 * 4
        if ends == "left":
            client.leave()
        with pytest.raises(ClientGoneError if ends == "left" else BadRequestError):
            await task
        assert len(asyncio.all_tasks()) == before

    asyncio.run(serve())
    assert taken <= 5


def test_parts_that_turn_each_other_away_take_turns() -> None:
    running: list[int] = []
    turned_away = 0

    async def part(number: int, scope: Scope) -> int:
        nonlocal turned_away
        if running:
            turned_away += 1
            raise OverloadedError("it would wait")
        running.append(number)
        await unless_client_leaves(scope, nothing, asyncio.sleep(0.01))
        running.remove(number)
        return number

    works = [partial(part, number) for number in range(9)]
    assert asyncio.run(together(Client().scope, nothing, works, 4)) == [*range(9)]
    assert turned_away


def test_parts_that_others_turn_away_fail_together() -> None:
    asked: list[int] = []

    async def part(number: int, scope: Scope) -> None:
        asked.append(number)
        await unless_client_leaves(scope, nothing, asyncio.sleep(0.001 * number))
        if number or len(asked) > 5:
            raise OverloadedError("it would wait")

    with pytest.raises(OverloadedError):
        asyncio.run(together(Client().scope, nothing, [partial(part, number) for number in range(9)], 3))
    assert len(asked) < 20
