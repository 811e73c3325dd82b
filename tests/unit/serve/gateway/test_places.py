"""Messages of streams among the places of their models: whose get one, and when it is free again."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from serve.gateway.access.gate import Gate
from serve.gateway.access.slots import MOST_WAITING, Turn
from serve.gateway.errors import ClientGoneError, OverloadedError
from serve.gateway.grpc.placed import Placed
from serve.gateway.grpc.places import Places
from serve.gateway.settings import ModelSettings, Settings
from tests.serve_http import in_loop

LIMIT = 8
SHARE = 6  # of one caller's streams


@dataclass(eq=False)
class Slot:
    """What a turn says of its sequence."""

    waits: bool
    begins: bool = False
    told: list[Callable[[], object]] = field(default_factory=list)

    def on_wait(self, then: Callable[[], object]) -> None:
        self.told.append(then)

    def waited(self) -> None:
        self.waits = True
        for each in self.told:
            each()


def places(patience_s: float = 60.0, **models: int) -> Places:
    limits = {name: ModelSettings(max_in_flight=limit) for name, limit in ({"m": LIMIT} | models).items()}
    return Places(Gate(Settings(models=limits)), patience_s)


async def settle() -> None:
    for _ in range(500):
        await asyncio.sleep(0)


async def enter(
    stream: Placed, model: str = "m", *, waits: bool | None = None, decoupled: bool | None = None, count: int = 1
) -> list[asyncio.Task[None]]:
    """One message after the other, as a stream has them; `waits` for those of a sequence."""
    identity = cast(Any, stream)._places.gate.keys.identify({})
    turn = None if waits is None else cast(Turn, Slot(waits))

    async def one(before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait((before,))
        await stream.enter(identity, model, 100, turn, of_sequence=waits is not None, decoupled=decoupled)

    found: list[asyncio.Task[None]] = []
    for _ in range(count):
        found.append(asyncio.ensure_future(one(found[-1] if found else None)))
    await settle()
    return found


def inside(entering: list[asyncio.Task[None]]) -> int:
    return sum(each.done() and each.exception() is None for each in entering)


async def over(entering: list[asyncio.Task[None]]) -> None:
    for each in entering:
        each.cancel()
    await asyncio.gather(*entering, return_exceptions=True)


@in_loop
async def test_one_callers_streams_leave_a_part_to_others() -> None:
    all_ = places()
    of_model = all_.gate.places("m")
    streams = [Placed(all_, "alice") for _ in range(3)]
    entering = [await enter(stream, count=5) for stream in streams]
    assert sum(map(inside, entering)) == of_model.in_flight == SHARE
    assert of_model.free, "others need not even wait"
    assert inside(await enter(Placed(all_, "bob"), count=5)) == LIMIT - SHARE
    streams[0].answered("m", good=True)
    await settle()
    assert of_model.in_flight == LIMIT
    for each in entering:
        await over(each)


@pytest.mark.parametrize("limit", [1, 2, 3])
@in_loop
async def test_one_has_a_place_at_least(limit: int) -> None:
    all_ = places(few=limit)
    entering = await enter(Placed(all_, "alice"), "few", count=5)
    assert inside(entering) == max(1, limit - 1)
    await over(entering)


@in_loop
async def test_a_place_is_kept_until_the_last_answer_of_its_own_model() -> None:
    all_ = places(other=LIMIT)
    stream = Placed(all_, "alice")
    for model in ("m", "other", "m"):
        await enter(stream, model)
    stream.answered("other", good=True)  # before the older one: both are decoupled
    assert (all_.gate.places("m").in_flight, all_.gate.places("other").in_flight) == (2, 0)
    stream.answered("", good=False)
    assert all_.gate.places("m").in_flight == 1
    stream.end(None)
    assert all_.gate.places("m").in_flight == 0


@in_loop
async def test_a_stream_that_was_left_keeps_them_until_its_call_ends() -> None:
    all_ = places()
    stream = Placed(all_, "alice")
    entering = await enter(stream, count=SHARE + 1)
    ending: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
    stream.end(ending)
    await settle()
    assert isinstance(entering[-1].exception(), ClientGoneError), "what waited is not sent any more"
    assert all_.gate.places("m").in_flight == SHARE
    assert not all_.gate.holds("m"), "nobody waits for them"
    beside = Placed(all_, "bob")
    await enter(beside)
    assert all_.gate.holds("m")
    beside.end(None)
    ending.set_result(None)
    await settle()
    assert all_.gate.places("m").in_flight == all_.gate.places("m").left == 0
    assert not all_._lines


@in_loop
async def test_who_waits_longer_than_the_time_out_is_refused_like_others() -> None:
    all_ = places(0.05)
    entering = await enter(Placed(all_, "alice"), count=SHARE + 1)
    with pytest.raises(OverloadedError, match="more requests than it can answer"):
        await entering[-1]
    assert all_.gate.places("m").shed == 1
    among_others = places(0.05)
    for _ in range(LIMIT):
        among_others.gate.places("m").take()
    with pytest.raises(OverloadedError, match="more requests than it can answer"):
        await (await enter(Placed(among_others, "alice")))[0]


@in_loop
async def test_what_waits_behind_a_sequences_messages_has_a_place_when_they_have_given_up_theirs() -> None:
    """Who came at the same time as they did, too: a sequence that is not ended has its slot for good."""
    all_ = places(0.05)
    entering = [await enter(Placed(all_, "alice"), waits=False, count=SHARE) for _ in range(3)]
    assert list(map(inside, entering)) == [SHARE, 0, 0]
    await asyncio.gather(*itertools.chain(*entering))
    assert all_.gate.places("m").shed == 0


@pytest.mark.parametrize("known", ["told", "after a while"])
@in_loop
async def test_one_that_begins_and_waits_for_its_slot_all_the_same_gives_its_place_back(known: str) -> None:
    """It found a slot free, which was another's: its wait says nothing of its key, nor keeps what ends another out."""
    all_ = places()
    of_model = all_.gate.places("m")
    stream, slot = Placed(all_, "alice"), Slot(waits=False, begins=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("serve.gateway.grpc.placed.SLOT_S", 0.05 if known == "after a while" else 60.0)
        identity = all_.gate.keys.identify({})
        await stream.enter(identity, "m", 100, cast(Turn, slot), of_sequence=True, decoupled=False)
    assert of_model.in_flight == 1
    if known == "told":
        for each in slot.told:
            each()
    while of_model.in_flight:  # noqa: ASYNC110 - what is waited for is no event
        await asyncio.sleep(0.01)
    account = of_model.fairness.of("", 5, of_model.now)
    assert (account.answers, account.in_flight) == (0, 0)
    stream.answered("m", good=True)
    assert of_model.in_flight == 0
    assert not all_._lines


@in_loop
async def test_what_waits_for_its_slot_has_no_place_and_counts_apart() -> None:
    all_ = places()
    waiting = await enter(Placed(all_, "alice"), waits=True, count=MOST_WAITING + 1)
    assert inside(waiting) == MOST_WAITING
    assert all_.gate.places("m").in_flight == 0
    going_on = await enter(Placed(all_, "alice"), waits=False, count=SHARE + 1)
    assert inside(going_on) == SHARE
    await over(waiting)
    await over(going_on)


@in_loop
async def test_a_sequences_message_keeps_its_place_no_longer_than_the_time_out() -> None:
    all_ = places(0.05)
    stream = Placed(all_, "alice")
    await enter(stream, waits=False, count=2)
    await enter(stream)
    await asyncio.sleep(0.2)
    assert all_.gate.places("m").in_flight == 1, "that of a single request is kept"
    for _ in range(3):
        stream.answered("m", good=True)
    assert all_.gate.places("m").in_flight == 0
    assert not all_._lines


@pytest.mark.parametrize(
    ("how", "learns"),
    [
        ("plain", True),
        ("decoupled", False),
        ("goes on", False),
        ("failed", False),
        ("sequence", False),
        ("unread", False),
    ],
)
@in_loop
async def test_answers_tell_how_busy_a_model_is_where_nothing_else_takes_time(
    how: str, learns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    all_ = places()
    told: list[float | None] = []
    monkeypatch.setattr(all_.gate.places("m"), "leave", lambda s, *_: told.append(s))
    stream = Placed(all_, "alice")
    await enter(stream, waits=False if how == "sequence" else None, decoupled=how == "decoupled" or None)
    if how == "goes on":
        stream.goes_on("m")
    if how == "unread":
        stream.took(1.0)
    stream.answered("m", good=how != "failed")
    assert [seconds is not None for seconds in told] == [learns]


@in_loop
async def test_an_answer_behind_another_models_tells_nothing_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    all_ = places(other=LIMIT)
    told: list[float | None] = []
    monkeypatch.setattr(all_.gate.places("other"), "leave", lambda s, *_: told.append(s))
    stream = Placed(all_, "alice")
    await enter(stream)
    await enter(stream, "other")
    stream.answered("m", good=True)
    stream.answered("other", good=True)
    assert told == [None]


@pytest.mark.parametrize("told", ["by its metadata", "by its answers"])
@in_loop
async def test_a_decoupled_model_has_as_many_places_as_may_be(told: str) -> None:
    all_ = places(large=1000)
    assert all_.gate.places("large").limit < 100
    stream = Placed(all_, "alice")
    await enter(stream, "large", decoupled=True if told == "by its metadata" else None)
    stream.goes_on("large")
    assert inside(await enter(stream, "large", count=100)) == 100
    assert all_.gate.places("large").in_flight == 101


@in_loop
async def test_what_triton_has_does_not_share_places_with_what_nobody_knows() -> None:
    all_ = places()
    stream = Placed(all_, "alice")
    await enter(stream, "unknown")
    assert all_.gate.places("another").in_flight == 1
    await enter(stream, "new", decoupled=False)
    assert all_.gate.places("new").in_flight == 1
