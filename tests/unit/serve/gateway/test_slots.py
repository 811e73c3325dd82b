"""Slots of a sequence batcher are shared fairly by keys, and a key that has more than its share gives some back."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from serve.gateway.access.slots import Batcher, HasItsShareError, SequenceEndedError, Slots, Turn
from serve.gateway.errors import GatewayError, RateLimitedError
from serve.gateway.oip.sequence import Named
from serve.rollout.plan import Target

MODEL, COUNTS = Target("counts"), Target("counts", "1")
WAIT_S = 0.02


class Server:
    """Slots of a clock that is set by hand, with what ends a sequence."""

    def __init__(self, slots: int = 4, idle_s: float = 600.0, wait_s: float = WAIT_S) -> None:
        self.now = 0.0
        self.batcher = Batcher("counts", "1", slots, idle_s)
        self.ended: list[int | str] = []
        self.hears = True
        self.slots = Slots(wait_s, lambda: self.now)
        self.slots.follow(self.end)

    async def end(self, target: Target, batcher: Batcher, sequence: int | str) -> bool:
        assert (target, batcher) == (MODEL, self.batcher)
        self.ended.append(sequence)
        if self.hears is None:
            raise GatewayError("Triton is away")
        return self.hears

    def asked(self, who: str, sequence: int, *, start: bool = False, end: bool = False) -> Turn:
        turn = self.slots.asked(self.batcher, MODEL, Named(sequence, sequence, start, end), who)
        assert turn is not None
        turn.sends()
        return turn

    def held(self, who: str, *sequences: int) -> None:
        """The key has begun these, and was answered."""
        for sequence in sequences:
            self.asked(who, sequence, start=True).leave(200)


def running(test: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    def run() -> None:
        asyncio.run(test())  # type: ignore[arg-type]

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


async def until(told: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not told():  # noqa: ASYNC110 - what is waited for is no event
            await asyncio.sleep(0.005)


@running
async def test_a_key_that_holds_all_slots_gives_half_to_one_that_waits() -> None:
    server = Server()
    server.held("bad", 1, 2, 3, 4)
    waiting = server.asked("good", 50, start=True)
    await until(lambda: server.ended)
    assert server.ended == [3, 4], "the newest go, those that have run for long stay"
    waiting.leave(200)
    for sequence in (3, 4):
        with pytest.raises(SequenceEndedError, match="was ended"):
            server.asked("bad", sequence)
    server.asked("bad", 1).leave(200)
    server.now += 1.0
    server.asked("bad", 3, start=True).leave(None)  # it may begin anew, and waits like all


@running
async def test_what_was_freed_for_a_key_stays_free_for_its_next_sequences() -> None:
    """A key that opens and never ends beside one whose sequences are short: that one waits once, and not each time."""
    server = Server()
    server.held("bad", 1, 2, 3, 4)
    waiting = server.asked("good", 50, start=True)
    await until(lambda: server.ended)
    waiting.leave(200)
    server.asked("good", 50, end=True).leave(200)
    for number in range(51, 101):
        server.now += WAIT_S
        with pytest.raises(HasItsShareError, match="can't begin now"):
            server.asked("bad", 3, start=True)
        server.asked("bad", 1).leave(200)
        server.held("good", number)
        server.asked("good", number, end=True).leave(200)
    assert server.ended == [3, 4]
    server.asked("good", 101, start=True).leave(200)
    server.asked("bad", 1, end=True).leave(200)
    server.held("bad", 5)  # its share stays its own
    server.now += 2 * WAIT_S
    server.held("bad", 6)  # nothing is kept for a key that begins nothing


@running
async def test_each_key_that_waits_comes_to_a_slot() -> None:
    server = Server()
    server.held("bad", 1, 2, 3, 4)
    for number, who in enumerate(("a", "b", "c"), 50):
        waiting = server.asked(who, number, start=True)
        await until(lambda: len(server.slots._shared[COUNTS].sequences) <= 4)
        waiting.leave(200)
    assert server.ended == [3, 4, 2]
    waiting = server.asked("d", 60, start=True)
    await asyncio.sleep(5 * WAIT_S)
    assert server.ended == [3, 4, 2], "one each: nobody has more than a share"
    server.now += 301.0
    await until(lambda: len(server.ended) == 4)
    assert server.ended[-1] == 1, "for ever keeps nobody the last slot"
    waiting.leave(200)


@pytest.mark.parametrize("mine", [1, 2])
def test_nothing_is_ended_for_a_key_that_has_its_share(mine: int) -> None:
    @running
    async def run() -> None:
        server = Server()
        server.held("one", *range(4 - mine))
        server.held("two", *range(10, 10 + mine))
        waiting = server.asked("two" if mine == 2 else "one", 50, start=True)
        await asyncio.sleep(5 * WAIT_S)
        assert server.ended == []
        waiting.leave(200)

    run()


@running
async def test_nothing_is_ended_while_a_slot_is_free() -> None:
    """Then it is the model that is slow."""
    server = Server()
    server.held("one", 1, 2, 3)
    waiting = server.asked("two", 50, start=True)
    await asyncio.sleep(5 * WAIT_S)
    assert server.ended == []
    waiting.leave(200)


@running
async def test_what_ended_or_was_idle_holds_no_slot() -> None:
    server = Server(idle_s=10.0)
    server.held("one", 1, 2, 3, 4)
    server.asked("one", 1, end=True).leave(200)
    waiting = server.asked("two", 50, start=True)
    await asyncio.sleep(5 * WAIT_S)
    waiting.leave(200)
    server.held("two", 60)
    server.now += 11.0
    server.asked("two", 61, start=True)
    await asyncio.sleep(5 * WAIT_S)
    assert server.ended == []


@pytest.mark.parametrize(("status", "holds"), [(200, True), (500, True), (503, True), (400, False), (404, False)])
def test_a_first_request_that_the_model_failed_holds_a_slot_and_one_that_was_refused_does_not(
    status: int, holds: bool
) -> None:
    @running
    async def run() -> None:
        server = Server(slots=2)
        for sequence in (1, 2):
            server.asked("bad", sequence, start=True).leave(status)
        waiting = server.asked("good", 50, start=True)
        await asyncio.sleep(5 * WAIT_S)
        assert server.ended == ([2] if holds else [])
        waiting.leave(200)

    run()


@running
async def test_what_was_begun_and_left_is_ended_so_that_nobody_s_slot_is_nobody_s() -> None:
    server = Server()
    server.asked("bad", 1, start=True).leave(None)
    await until(lambda: server.ended == [1])
    turn = server.slots.asked(server.batcher, MODEL, Named(2, 2, start=True), "bad")
    assert turn is not None
    turn.leave(None)  # it had not been sent
    await asyncio.sleep(0)
    assert server.ended == [1]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_it_is_ended_whichever_of_its_requests_leaves_last(order: tuple[int, ...]) -> None:
    @running
    async def run() -> None:
        server = Server()
        turns = [server.asked("bad", 1, start=True), server.asked("bad", 1), server.asked("bad", 1)]
        for number in order:
            assert server.ended == []
            turns[number].leave(None)
        await until(lambda: server.ended == [1])

    run()


@running
async def test_one_whose_first_request_was_refused_is_nobody_s_however_it_goes_on() -> None:
    server = Server()
    first, second = server.asked("bad", 1, start=True), server.asked("bad", 1)
    first.leave(400)
    second.leave(None)
    await asyncio.sleep(0)
    assert server.ended == []
    assert not server.slots._shared[COUNTS].sequences


@running
async def test_a_key_has_so_many_waiting_at_most() -> None:
    server = Server(slots=2)
    waiting = [server.asked("bad", number, start=True) for number in range(4)]
    with pytest.raises(RateLimitedError, match="too many sequences of this key wait"):
        server.asked("bad", 4, start=True)
    server.asked("good", 50, start=True).leave(200)
    waiting[0].leave(200)
    server.asked("bad", 5, start=True).leave(200)
    for turn in waiting[1:]:
        turn.leave(200)


@pytest.mark.parametrize("hears", [False, None])
def test_what_triton_can_t_be_told_of_is_refused_until_it_is_idle(hears: bool | None) -> None:
    @running
    async def run() -> None:
        server = Server(slots=2, idle_s=0.05)
        server.held("bad", 1, 2)
        server.hears = hears  # type: ignore[assignment]
        waiting = server.asked("good", 50, start=True)
        await until(lambda: server.ended)
        await asyncio.sleep(0.01)
        with pytest.raises(SequenceEndedError):  # not even anew: that would keep its slot
            server.asked("bad", 2, start=True)
        await until(lambda: 2 not in server.slots._shared[COUNTS].sequences)
        server.now += 1.0
        server.asked("bad", 2, start=True).leave(200)
        waiting.leave(200)

    run()


@running
async def test_sequences_that_were_begun_elsewhere_count_too() -> None:
    server = Server(slots=2)
    for sequence in (1, 2):
        server.asked("bad", sequence).leave(200)
    waiting = server.asked("good", 50, start=True)
    await until(lambda: server.ended == [2])
    waiting.leave(200)


@running
async def test_versions_have_slots_and_sequences_of_their_own() -> None:
    server = Server()
    ended: list[tuple[Target, Batcher, int | str]] = []

    async def end(*sequence: Any) -> bool:
        ended.append(sequence)
        return True

    server.slots.follow(end)
    two = replace(server.batcher, version="2")
    server.held("bad", 1, 2, 3, 4)

    def begun(who: str, sequence: int) -> Turn:
        turn = server.slots.asked(two, MODEL, Named(sequence, sequence, start=True), who)
        assert turn is not None
        assert turn._sequence is not None
        assert turn._sequence.waits, "the same id is another sequence"
        turn.sends()
        return turn

    waiting = begun("good", 1)
    await asyncio.sleep(5 * WAIT_S)
    assert ended == [], "the other version's are in nobody's way"
    waiting.leave(200)
    for sequence in (2, 3, 4):
        begun("bad", sequence).leave(200)
    waiting = begun("good", 5)
    await until(lambda: ended)
    assert ended == [(MODEL, two, 4)], "where it is"
    waiting.leave(200)
    server.asked("bad", 4).leave(200)  # of the other version


@running
async def test_batchers_of_versions_that_are_gone_are_forgotten() -> None:
    server = Server(idle_s=10.0)
    for number in range(100):
        server.batcher = replace(server.batcher, version=str(number))
        server.held("one", 1)
        server.now += 100.0
    assert len(server.slots._shared) == 1


@running
async def test_nothing_is_remembered_of_requests_that_triton_refused() -> None:
    server = Server()
    for sequence in range(1000):
        server.asked("bad", sequence).leave(400)
        server.asked("bad", sequence, start=True).leave(400)
        server.asked("bad", sequence, start=True, end=True).leave(200)
    assert server.slots._shared[COUNTS].sequences == {}


def test_without_a_batcher_nobody_is_counted() -> None:
    assert Server().slots.asked(None, MODEL, Named(1, 1, start=True), "one") is None


@running
async def test_with_no_wait_it_is_known_who_waits_and_nothing_is_ended_or_refused_for_it() -> None:
    server = Server(slots=2, wait_s=0.0)
    server.held("bad", 1, 2)
    waiting = [server.asked("good", 50, start=True), server.asked("bad", 3, start=True)]
    assert [each.waits for each in waiting] == [True, True]
    assert server.slots.longest_s == math.inf
    await asyncio.sleep(5 * WAIT_S)
    assert server.ended == []
    for turn in waiting:
        turn.leave(200)


@running
async def test_a_key_begins_no_more_than_its_share_from_when_another_first_waits() -> None:
    """Not only once that one has waited so long that sequences are ended for it."""
    server = Server(wait_s=1000.0)
    server.held("bad", 1, 2, 3, 4)
    queued = server.asked("bad", 5, start=True)  # alone, it may wait for as many as there are
    waiting = server.asked("good", 50, start=True)
    for _ in range(3):
        with pytest.raises(HasItsShareError, match="can't begin now"):
            server.asked("bad", 6, start=True)
    more = server.asked("good", 51, start=True)  # within its share
    server.now += 3.0
    for turn in (waiting, more):
        turn.leave(200)
    for sequence in (50, 51):
        server.asked("good", sequence, end=True).leave(200)
    server.now += 2 * 3.0 - 0.1
    with pytest.raises(HasItsShareError):  # twice as long as the other has waited
        server.asked("bad", 6, start=True)
    server.now += 0.2
    server.held("bad", 6)
    assert server.ended == []
    queued.leave(200)


@running
async def test_what_a_key_has_in_the_queue_before_another_is_ended_with_its_slots_beyond_its_share() -> None:
    """Else each slot that is freed goes to the next of that key's, and the other waits once for each two of them."""
    server = Server()
    server.held("bad", 1, 2, 3, 4)
    queued = [server.asked("bad", number, start=True) for number in range(5, 12)]
    waiting = server.asked("good", 50, start=True)
    await until(lambda: server.ended)
    assert server.ended == [3, 4, *range(5, 12)]
    waiting.leave(200)
    for turn in queued:
        turn.leave(200)
    with pytest.raises(SequenceEndedError):
        server.asked("bad", 5)


@running
async def test_keys_that_have_their_share_wait_for_one_another_as_before() -> None:
    server = Server(wait_s=1000.0)
    server.held("one", 1, 2)
    server.held("two", 11, 12)
    turns = [server.asked(who, number, start=True) for who, number in (("one", 3), ("two", 13), ("one", 4))]
    for turn in turns:
        turn.leave(200)


@running
async def test_where_one_queues_no_slot_is_free_for_those_behind_it() -> None:
    """Another gateway's sequences have them: what has been learnt of one is true of all."""
    server = Server(slots=8)
    server.held("one", 1)
    told: list[int] = []
    turns = [server.asked(who, number, start=True) for number, who in enumerate(("a", "b", "c"), 10)]
    for number, turn in enumerate(turns):
        assert not turn.waits
        turn.on_wait(partial(told.append, number))
        turn.on_wait(partial(told.append, number))  # each who is concerned
    turns[0].waited()
    assert told == [0, 0, 1, 1, 2, 2]
    assert server.asked("d", 20, start=True).waits
    server.asked("one", 1, end=True).leave(200)
    for turn in turns:
        turn.leave(200)
    server.slots._shared[COUNTS].sequences.pop(20)
    assert not server.asked("e", 21, start=True).waits, "nobody queues"
