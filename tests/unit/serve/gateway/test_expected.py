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
    await asyncio.sleep(0.01)
    assert sum(inside(entering)) == UNSEEN, "what has come so far says nothing of what is still to come"
    expected.seen("alice", "m", 1, whole=True)
    await asyncio.gather(*entering)
    for each in entering:
        each.result()()
    assert not expected._asked


@in_loop
async def test_of_a_model_that_computes_ahead_as_many_go_as_have_ended_and_one() -> None:
    expected = Expected(ROOM, 12)
    entering = [asyncio.create_task(expected.enter("alice", "m", ahead=True)) for _ in range(20)]
    other = asyncio.create_task(expected.enter("bob", "m", ahead=True))
    for count in (1, 2, 4, 8, 12):  # those that were with Triton end, one after the other
        await asyncio.sleep(0.01)
        now = [each for each in entering if each.done()]
        assert len(now) == min(count, 12, len(entering))
        for each in now:
            expected.seen("alice", "m", 10, whole=False)
            expected.seen("alice", "m", 20, whole=True)
            entering.remove(each)
        for each in now:
            each.result()()
    assert other.done()
    other.result()()
    assert not expected._asked


@in_loop
async def test_the_most_that_was_seen_of_one_message_counts_for_each() -> None:
    expected = Expected(ROOM, 12)
    for _ in range(12):
        expected.seen("alice", "m", 10, whole=True)
    expected.seen("alice", "m", 400, whole=False)
    assert sum(inside(await entered(expected, 12))) == 2


@in_loop
async def test_messages_whose_reader_stopped_take_a_quarter_of_the_room_each() -> None:
    expected = Expected(ROOM, 12)
    expected.seen("alice", "m", 1, whole=True)
    streams = [Expecting(expected, "alice") for _ in range(4)]
    for stream in streams:
        await stream.enter("m")
        stream.came(1, last=False)
        stream.stops()
    entering = await entered(expected, 2)
    assert inside(entering) == [False, False]
    assert inside(await entered(expected, 1, caller="bob")) == [True]
    streams[0].read()
    await asyncio.gather(*entering)
    for stream in streams:
        stream.end(None)
    for each in entering:
        each.result()()
    assert not expected._stopped
    assert set(expected._asked) == {"bob"}


@in_loop
async def test_a_message_whose_answers_are_read_as_they_come_keeps_no_other_back() -> None:
    expected = Expected(ROOM, 12)
    streams = [Expecting(expected, "alice") for _ in range(6)]
    for stream in streams:
        await stream.enter("m", ahead=True)
        stream.came(1, last=False)
        stream.waits()
    streams[0].came(1, last=False)
    waiting = asyncio.ensure_future(Expecting(expected, "alice").enter("m", ahead=True))
    await asyncio.sleep(0.01)
    assert not waiting.done(), "of one there may be more now"
    streams[0].waits()
    await waiting
    for stream in streams:
        stream.end(None)
    assert not expected._idle


@pytest.mark.parametrize(("thrown", "fit"), [(None, 1), (2000, 1), (980, 2), (0, UNSEEN)])
@in_loop
async def test_what_is_thrown_away_is_learnt_of_too(thrown: int | None, fit: int) -> None:
    """Two messages were left: after ten bytes, or what came later is not known as Triton took too long."""
    expected = Expected(ROOM, 12)
    stream = Expecting(expected, "alice")
    await stream.enter("m")
    await stream.enter("m")
    stream.came(10, last=False)
    left: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
    stream.end(left)
    left.set_result(thrown)
    await asyncio.sleep(0)
    assert sum(inside(await entered(expected, 12))) == fit


@in_loop
async def test_answers_count_for_the_model_that_they_name() -> None:
    expected = Expected(ROOM, 12)
    stream = Expecting(expected, "alice")
    await stream.enter("a")
    await stream.enter("b")
    stream.came(600, last=False, model="b")
    stream.came(1, last=True, model="a")
    stream.taken("a")
    stream.came(100, last=True, model="b")
    assert expected._size("alice", "a") == 1
    assert expected._size("alice", "b") == 700
    assert expected._asked == {"alice": {"b": 1}}
    stream.taken("b")
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
    drained: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
    stream.end(drained)
    assert expected._asked, "Triton is not done with it"
    drained.set_result(0)
    await asyncio.sleep(0)
    assert not expected._asked
    assert not expected._waiting
