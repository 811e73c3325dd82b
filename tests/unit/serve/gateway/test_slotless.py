"""A request whose sequence waits for a slot holds no place of its model, and teaches nothing of how busy it is."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any, cast

import pytest

from serve.gateway.access.admission import Admission, Bounds
from serve.gateway.access.gate import Gate
from serve.gateway.access.slotless import Waiting
from serve.gateway.access.slots import MOST_WAITING, Batcher, Turn
from serve.gateway.edge.asking import ask_model
from serve.gateway.edge.extensions import LEAVING
from serve.gateway.errors import ClientGoneError, OverloadedError, RateLimitedError
from serve.gateway.oip.sequence import Named
from serve.gateway.settings import Settings
from serve.http.client import Response
from serve.rollout.plan import Target
from tests.serve_http import in_loop

HOUR_S = 3600.0


class World:
    """A gate before a model with four slots, on a clock that is set by hand."""

    def __init__(self, slots: int = 4) -> None:
        self.now = 0.0
        self.gate = Gate(Settings(upstream=("http://127.0.0.1:1",), sequence_wait_s=HOUR_S))
        self.places = self.gate._places["m"] = Admission("m", Bounds(), lambda: self.now)
        self.batcher = Batcher("m", "1", slots, HOUR_S)

        async def end(*_: object) -> bool:
            return True

        self.gate.slots.follow(end)

    def turn(self, who: str, sequence: int, *, start: bool = False) -> Turn:
        turn = self.gate.slots.asked(self.batcher, Target("m"), Named(sequence, sequence, start), who)
        assert turn is not None
        turn.sends()
        return turn

    def fill(self) -> None:
        """All slots that are free have sequences of another key."""
        for number in range(self.batcher.slots - len(self.gate.slots._shared[self.batcher.target].sequences)):
            self.turn("holder", 1000 + number, start=True).leave(200)

    def stand(self, who: str, turn: Turn | None) -> Any:
        found = self.gate.among("m", who, turn)
        return found if found.try_enter() else None

    def passes(self, who: str, turn: Turn, seconds: float) -> None:
        """Answered after so long."""
        place = self.stand(who, turn)
        self.now += seconds
        place.leave(seconds)
        turn.leave(200)

    async def asks(self, turn: Turn | None, answer: asyncio.Future[Response], leave: list[Any] | None = None) -> None:
        scope = {"extensions": {LEAVING: lambda call: (leave if leave is not None else []).append(call)}}
        deadline = asyncio.get_running_loop().time() + HOUR_S
        identity = self.gate.keys.identify({})

        async def ask() -> Response:
            return await answer

        await ask_model(self.gate, identity, "m", ask, scope, cast("Any", None), deadline, b"", turn=turn)


@in_loop
async def test_sequences_that_wait_for_slots_leave_the_limit_where_it_is() -> None:
    world = World()
    running = world.turn("bob", 1, start=True)
    world.passes("bob", running, 0.002)
    world.fill()
    for sequence in range(10, 210):
        waiting = world.turn("alice", sequence, start=True)
        world.passes("alice", waiting, 5.0)
        world.passes("bob", world.turn("bob", 1), 0.002)
    assert world.places.limit == 32.0
    assert world.places.in_flight == 0


@in_loop
async def test_they_take_no_place_from_a_sequence_that_runs() -> None:
    world = World(slots=64)
    world.places.limit = 2.0
    world.passes("bob", world.turn("bob", 1, start=True), 0.002)
    world.fill()
    for sequence in range(10, 10 + MOST_WAITING):
        assert world.stand("alice", world.turn("alice", sequence, start=True)) is not None
    for _ in range(20):
        world.passes("bob", world.turn("bob", 1), 0.002)
    assert world.stand("carol", None) is not None, "nor from who asks without one"


@in_loop
async def test_a_key_has_a_bounded_number_of_them_whatever_sequences_they_are_of() -> None:
    world = World(slots=64)
    world.passes("holder", world.turn("holder", 1, start=True), 0.002)
    world.fill()
    standing = [world.stand("alice", world.turn("alice", 10, start=number == 0)) for number in range(MOST_WAITING - 1)]
    last = world.turn("alice", 10, start=True)
    standing.append(world.stand("alice", last))
    with pytest.raises(RateLimitedError, match="wait for their sequences to begin"):
        world.stand("alice", world.turn("alice", 11, start=True))
    assert world.stand("bob", world.turn("bob", 20, start=True)) is not None
    standing.pop().leave(None)
    assert world.stand("alice", world.turn("alice", 12, start=True)) is not None


@in_loop
async def test_over_http_one_waits_beside_the_places_and_one_that_runs_in_one_of_them() -> None:
    world = World()
    answer: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
    world.passes("holder", world.turn("holder", 2, start=True), 0.002)
    world.fill()
    first = world.turn("", 1, start=True)
    waiting = asyncio.ensure_future(world.asks(first, answer))
    await asyncio.sleep(0)
    assert world.places.in_flight == 0
    answer.set_result(Response(200, [], b"", 0))
    await waiting
    first.leave(200)
    later: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
    runs = asyncio.ensure_future(world.asks(world.turn("", 1), later))
    await asyncio.sleep(0)
    assert world.places.in_flight == 1
    later.set_result(Response(200, [], b"", 0))
    await runs
    assert world.places.in_flight == 0
    assert not world.gate.waiting.counts


@in_loop
async def test_one_that_begins_while_a_slot_is_free_has_a_place_as_any_other() -> None:
    world = World()
    for number in range(4):
        assert world.stand("alice", world.turn("alice", number, start=True))
    assert world.places.in_flight == 4
    assert world.stand("alice", world.turn("alice", 4, start=True))
    assert world.places.in_flight == 4


@in_loop
async def test_one_whose_slot_was_another_s_gives_its_place_back_and_says_nothing_of_its_key() -> None:
    """It was sent first, and Triton had another's before it."""
    world = World()
    overtaken = world.turn("alice", 1, start=True)
    place = world.stand("alice", overtaken)
    others = [world.turn("bob", 10 + number, start=True) for number in range(4)]
    for other in others[:3]:
        other.leave(200)
    assert world.places.in_flight == 1
    others[3].leave(200)
    assert overtaken.waits
    assert world.places.in_flight == 0, "four slots, and four that have one"
    world.now += 60.0
    place.leave(60.0)
    overtaken.leave(200)
    account = world.places.fairness.of("alice", 5, world.now)
    assert (account.answers, account.in_flight, account.used) == (0, 0, 0.0)
    assert not world.gate.waiting.counts


@in_loop
async def test_one_that_is_not_answered_for_long_gives_its_place_back_for_what_it_may_wait_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of sequences of another gateway, which may have the slots, nothing is known."""
    monkeypatch.setattr("serve.gateway.access.seated.SLOT_S", 0.05)
    world = World()
    turn = world.turn("alice", 1, start=True)
    place = world.stand("alice", turn)
    assert world.places.in_flight == 1
    while not world.gate.waiting.counts:  # noqa: ASYNC110 - what is waited for is no event
        await asyncio.sleep(0.01)
    place.leave(60.0)
    turn.leave(200)
    assert not world.gate.waiting.counts
    runs = world.stand("alice", world.turn("alice", 1))
    await asyncio.sleep(0.1)
    assert world.places.in_flight == 1, "one of a sequence that has its slot keeps it"
    runs.leave(0.1)


@in_loop
async def test_a_slot_that_looked_free_is_whose_first_request_is_sent_first() -> None:
    """One that waits for its place of the model among others has not been sent."""
    world = World(slots=1)
    asked = partial(world.gate.slots.asked, world.batcher, Target("m"))
    first, second = (asked(Named(sequence, sequence, start=True), "alice") for sequence in (1, 2))
    assert first is not None
    assert second is not None
    assert (first.waits, second.waits) == (False, True)
    second.sends()
    assert (first.waits, second.waits) == (True, False)
    told: list[bool] = []
    first.on_wait(lambda: told.append(True))
    assert told == [True], "where it gets its place later"


@pytest.mark.parametrize("ends", [False, True])
@in_loop
async def test_what_is_asked_of_a_sequence_with_a_slot_is_not_refused_for_having_to_wait(*, ends: bool) -> None:
    """However long the others are expected to take, and above all not its end."""
    world = World()
    world.turn("", 1, start=True).leave(200)
    world.places.bounds = Bounds(wait_s=0.5)
    world.places.limit, world.places.latency = 1.0, 100.0
    identity = world.gate.keys.identify({})
    assert world.places.try_enter()
    with pytest.raises(OverloadedError):
        world.gate.check("m", identity, HOUR_S, {"another, of which it has no sequence"})
    world.gate.check("m", identity, HOUR_S, {"m"})
    turn = world.gate.slots.asked(world.batcher, Target("m"), Named(1, 1, end=ends), "")
    answer: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
    asking = asyncio.ensure_future(world.asks(turn, answer))
    await asyncio.sleep(0.01)
    assert world.places.waiting == 1
    world.places.leave(None)
    answer.set_result(Response(200, [], b"", 0))
    await asking


@in_loop
async def test_who_leaves_while_it_waits_stands_there_no_more() -> None:
    world = World()
    leave: list[Any] = []
    turn = world.turn("", 1, start=True)
    waiting = asyncio.ensure_future(world.asks(turn, asyncio.get_running_loop().create_future(), leave))
    await asyncio.sleep(0)
    next(call for call in leave if call is not None)()
    with pytest.raises(ClientGoneError):
        await waiting
    assert not world.gate.waiting.counts


@pytest.mark.parametrize("aside", [True, False])
@in_loop
async def test_one_that_is_left_holds_no_model_loaded_whether_or_not_it_keeps_its_place(*, aside: bool) -> None:
    world = World()
    turn = world.turn("alice", 1, start=True)
    place = world.stand("alice", turn)
    assert world.gate.holds("m")
    ending: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    place.leave_after([ending], 0.0, who="alice")
    assert (world.places.in_flight, world.gate.holds("m")) == (1, False)
    if aside:
        turn.waited()
    ending.set_result(False)
    await asyncio.sleep(0)
    assert (world.places.in_flight, world.places.left) == (0, 0)


@in_loop
async def test_what_was_left_before_it_began_keeps_no_running_sequence_out() -> None:
    """However few places there are."""
    world = World()
    world.places.limit = 2.0
    asides = world.gate.asides
    under_way: list[asyncio.Future[Any]] = [asyncio.get_running_loop().create_future() for _ in range(MOST_WAITING)]
    for each in under_way:
        asides.check(world.places, "/v2/models/m", "alice", waits=True)
        asides.keep("/v2/models/m", "alice", [each], 10, waits=True)
    asides.check(world.places, "/v2/models/m", "alice")
    with pytest.raises(OverloadedError):
        asides.check(world.places, "/v2/models/m", "alice", waits=True)
    for each in under_way:
        each.set_result(None)
    await asyncio.sleep(0)
    asides.check(world.places, "/v2/models/m", "alice", waits=True)


def test_all_keys_together_leave_connections_to_what_runs_and_something_to_who_comes_next() -> None:
    waiting, found = Waiting(8), {}
    for who in ("a", "b", "c", "d"):
        while waiting.counts["m", who] < waiting.most_of("m"):
            waiting.of("m", who).try_enter()
        with pytest.raises(RateLimitedError, match="too many requests of this key wait"):
            waiting.of("m", who).try_enter()
        found[who] = waiting.counts["m", who]
    assert found == {"a": 4, "b": 2, "c": 1, "d": 1}
    assert waiting.of("other", "a").try_enter()
    for who, count in found.items():
        for _ in range(count):
            waiting.of("m", who).leave(None)
    assert dict(waiting.counts) == {("other", "a"): 1}
