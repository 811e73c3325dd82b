"""Long messages are copied one at a time, keys in turn, and who has none waits for none."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

import pytest

from serve.gateway.access.long_work import LONG_BYTES, LongWork
from tests.serve_http import in_loop

pytestmark = pytest.mark.clock
TOOK_S = 0.03


def message(
    whole: asyncio.Future[None], done: list[str], name: str, size: int = LONG_BYTES
) -> Coroutine[Any, Any, bytes]:
    """As the library reads one: it waits until it is whole, and makes one piece of it."""

    async def read() -> bytes:
        await whole
        done.append(name)
        if size >= LONG_BYTES:
            time.sleep(TOOK_S)  # noqa: ASYNC251  # as the library holds the event loop
        return bytes(size)

    return read()


@in_loop
async def test_others_are_served_between_messages_that_were_whole_at_the_same_time() -> None:
    loop, work, done = asyncio.get_running_loop(), LongWork(), list[str]()
    whole: asyncio.Future[None] = loop.create_future()
    reading = [asyncio.ensure_future(work.steps("a", message(whole, done, "a"))) for _ in range(5)]
    await asyncio.sleep(0)
    whole.set_result(None)
    longest, seen = 0.0, time.perf_counter()
    while not all(each.done() for each in reading):
        await asyncio.sleep(0.001)
        longest, seen = max(longest, time.perf_counter() - seen), time.perf_counter()
    assert longest < 3 * TOOK_S, longest
    assert [len(each.result()) for each in reading] == [LONG_BYTES] * 5


@in_loop
async def test_keys_have_turns_and_who_had_no_long_message_of_late_waits_for_none() -> None:
    loop, work, done = asyncio.get_running_loop(), LongWork(), list[str]()
    whole: asyncio.Future[None] = loop.create_future()
    whole.set_result(None)
    for who in "ab":
        await work.steps(who, message(whole, done, who))
    done.clear()
    reading = [asyncio.ensure_future(work.steps(who, message(whole, done, who))) for who in "aaabb"]
    await asyncio.sleep(0)
    short = asyncio.ensure_future(work.steps("c", message(whole, done, "c", 10)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert short.done()
    await asyncio.gather(*reading)
    assert [each for each in done if each != "c"] == ["a", "b", "a", "b", "a"]


@in_loop
async def test_a_turn_is_given_up_by_who_waits_for_the_network_or_leaves() -> None:
    loop, work, done = asyncio.get_running_loop(), LongWork(), list[str]()
    work.had("a")
    never: asyncio.Future[None] = loop.create_future()
    stuck = asyncio.ensure_future(work.steps("a", message(never, done, "stuck")))
    await asyncio.sleep(0)
    leaves = asyncio.ensure_future(work.steps("a", message(never, done, "leaves")))
    await asyncio.sleep(0)
    leaves.cancel()
    whole: asyncio.Future[None] = loop.create_future()
    whole.set_result(None)
    assert len(await asyncio.wait_for(work.steps("a", message(whole, done, "a", 10)), 5)) == 10
    stuck.cancel()
    await asyncio.gather(stuck, leaves, return_exceptions=True)
    assert done == ["a"]
    turn = await asyncio.wait_for(work.turn("b"), 5)
    turn.end()


@in_loop
async def test_what_fails_is_told_and_what_is_left_while_it_waits_for_its_turn_is_still_freed() -> None:
    loop, work, done = asyncio.get_running_loop(), LongWork(), list[str]()
    lost: asyncio.Future[None] = loop.create_future()
    lost.set_exception(OSError("lost"))
    with pytest.raises(OSError, match="lost"):
        await work.steps("a", message(lost, done, "a"))
    whole: asyncio.Future[None] = loop.create_future()
    reading = asyncio.ensure_future(work.steps("a", message(whole, done, "a")))
    await asyncio.sleep(0)
    work.had("a")
    turn = await work.turn("b")
    whole.set_result(None)
    await asyncio.sleep(0.01)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert done == ["a"], "only its own step frees what the library has"
    turn.end()
