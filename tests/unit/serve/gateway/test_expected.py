"""How many messages of one caller's streams are with Triton: as many as their answers have room, as far as known."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from serve.gateway.errors import ClientGoneError
from serve.gateway.grpc.expected import UNSEEN, Expected, Expecting
from tests.serve_http import in_loop

ROOM = 1000
Entering = asyncio.Task[Callable[[], None]]


async def entered(expected: Expected, count: int, model: str = "m", caller: str = "alice") -> list[Entering]:
    """So many that would like to, after those that may have done so."""
    found = [asyncio.create_task(expected.enter(caller, model)) for _ in range(count)]
    for _ in range(2 * count):
        await asyncio.sleep(0)
    return found


def inside(entering: list[Entering]) -> list[bool]:
    return [each.done() for each in entering]


@pytest.mark.parametrize(
    ("seen", "fit"), [((), UNSEEN), ((100,), 10), ((300, 600), 1), ((5000,), 1), ((1,), 12), ((100, 0), 11)]
)
@in_loop
async def test_as_many_go_as_their_answers_have_room(seen: tuple[int, ...], fit: int) -> None:
    expected = Expected(ROOM, 12)
    for size in seen:
        expected.seen("alice", "m", size, whole=True)
    entering = await entered(expected, 20)
    assert inside(entering) == [True] * fit + [False] * (20 - fit)
    assert inside(await entered(expected, 1, caller="bob")) == [True]
    entering[0].result()()
    await asyncio.sleep(0)
    assert sum(inside(entering)) == fit + 1
    for each in entering:
        each.cancel()


@in_loop
async def test_what_is_with_triton_counts_for_what_is_known_since() -> None:
    expected = Expected(ROOM, 12)
    entering = await entered(expected, 12)
    assert sum(inside(entering)) == UNSEEN
    expected.seen("alice", "m", 1, whole=False)
    await asyncio.gather(*entering)
    for each in entering:
        each.result()()
    assert not expected._asked


@in_loop
async def test_who_waits_no_longer_keeps_nobody_from_its_turn() -> None:
    expected = Expected(ROOM, 12)
    expected.seen("alice", "m", ROOM, whole=True)
    first, second, third = await entered(expected, 3)
    second.cancel()
    await asyncio.sleep(0)
    first.result()()
    (await third)()
    assert not expected._asked
    assert not expected._waiting


@in_loop
async def test_a_stream_that_ends_gives_back_what_it_has_and_waits_no_longer() -> None:
    expected = Expected(ROOM, 12)
    stream, other = Expecting(expected, "alice"), Expecting(expected, "alice")
    await stream.enter("m")
    stream.came(600, last=False)
    stream.came(600, last=True)
    waiting = asyncio.ensure_future(other.enter("m"))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    other.end(None)
    with pytest.raises(ClientGoneError):
        await waiting
    drained: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    stream.end(drained)
    assert expected._asked, "Triton is not done with it"
    drained.set_result(None)
    await asyncio.sleep(0)
    assert not expected._asked
    assert not expected._waiting
