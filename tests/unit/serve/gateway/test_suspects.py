"""Who is suspected of a death, who is cleared, and who is refused."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import orjson
import pytest
from tritonclient.grpc import service_pb2 as messages

from serve.gateway.errors import OverloadedError
from serve.gateway.health.barred import DEATHS_OF_KEY, BarredError
from serve.gateway.health.flights import ABOARD, Came, Flight, Needs
from serve.gateway.health.lost import FLIGHT_BYTES, LOST_BYTES
from serve.gateway.health.occupied import Occupied
from serve.gateway.health.one_at_a_time import MOST_WAITING
from serve.gateway.health.outages import ModelDownError, Outages
from serve.gateway.health.stream_flight import StreamFlight
from serve.gateway.health.suspects import PROBATION_S, REMEMBERED, REMEMBERED_S, PoisonError, Suspects
from serve.http.body import GrowingBody
from tests.serve_http import in_loop

pytestmark = pytest.mark.clock


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


async def flown(suspects: Suspects, flight: Flight) -> Flight:
    """On its way, as the gateway sends it."""
    if suspects.watches(flight.key, flight.model):
        await suspects.examine(flight, 5.0)
    suspects.take_off(flight)
    return flight


async def killed(suspects: Suspects, *flights: Flight) -> None:
    """Some requests are in flight, and the process dies."""
    for flight in flights:
        await flown(suspects, flight)
    await suspects.died(None)
    for flight in flights:
        suspects.land(flight, answered=False)


@in_loop
async def test_the_second_death_decides_and_only_for_this_key() -> None:
    suspects = Suspects()
    await killed(suspects, Flight("a", "m", b"poison"))
    await killed(suspects, Flight("a", "m", b"poison"))
    with pytest.raises(PoisonError):
        await suspects.examine(Flight("a", "m", b"poison"), 1.0)
    assert suspects.refused == {"m": 1}
    await suspects.examine(Flight("a", "m", b"other"), 1.0)
    assert not suspects.watches("b", "m")
    assert not suspects.watches("a", "n")


@in_loop
async def test_who_was_only_there_is_cleared_by_an_answer() -> None:
    suspects = Suspects()
    innocent = b"the same each time"
    await killed(suspects, Flight("a", "m", b"poison"), Flight("b", "m", innocent))
    suspects.land(await flown(suspects, Flight("b", "m", innocent)), answered=True)
    assert ("b", "m") not in suspects._watched
    await killed(suspects, Flight("a", "m", b"poison"))
    with pytest.raises(PoisonError):
        await suspects.examine(Flight("a", "m", b"poison"), 1.0)
    assert ("b", "m") not in suspects._watched


def asking(**fields: object) -> bytes:
    return orjson.dumps({"inputs": [{"name": "x", "shape": [1], "datatype": "BYTES", "data": ["die"]}], **fields})


@in_loop
async def test_beside_a_suspect_its_key_s_other_requests_may_be_copied_once_turns_have_ended() -> None:
    clock = Clock()
    suspects = Suspects(clock)
    await killed(suspects, Flight("a", "m", b"poison"), Flight("b", "m", b"one of many"))
    suspects.began(None)
    assert await suspects.suspected("b", "m", b"another")
    clock.now = PROBATION_S + 0.1
    assert not await suspects.suspected("b", "m", b"another")
    assert await suspects.suspected("b", "m", b"one of many")
    assert await suspects.suspected("a", "m", b"poison")
    assert not await suspects.suspected("c", "m", b"one of many")


@contextmanager
def about(flight: Flight) -> Iterator[None]:
    """What is done for this request."""
    above = ABOARD.set(flight)
    try:
        yield
    finally:
        ABOARD.reset(above)


def going_on(suspects: Suspects, flight: Flight) -> asyncio.Future[str | None]:
    """What is done when the version is through that goes on with it; with None where it said nothing."""
    task: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
    with about(flight):
        suspects.goes_on(
            flight.key, flight.model, b"poison", cast("Any", task), lambda answer: Came(answer is not None)
        )
    return task


@pytest.mark.parametrize("key", ["a", ""])
@pytest.mark.parametrize("told_first", [True, False])
@in_loop
async def test_another_version_s_answer_clears_it_of_nothing(key: str, told_first: bool) -> None:
    suspects = Suspects()
    for _ in range(2):
        flight = await flown(suspects, Flight(key, "m", b"poison"))
        task = going_on(suspects, flight)
        if not told_first:
            await suspects.died(["m"])
        suspects.land(flight, answered=True)
        task.set_result(None)
        await asyncio.sleep(0)
        if told_first:
            await suspects.died(["m"])
    with pytest.raises(PoisonError):
        await suspects.examine(Flight(key, "m", b"poison"), 1.0)


@in_loop
async def test_nor_does_it_hide_that_the_other_version_dies_of_it() -> None:
    suspects = Suspects()
    for _ in range(2):
        flight = await flown(suspects, Flight("a", "m", b"poison"))
        task = going_on(suspects, flight)
        suspects.land(flight, answered=False)
        await suspects.died(["m"])
        task.cancel()
        await asyncio.sleep(0)
    with pytest.raises(PoisonError):
        await suspects.examine(Flight("a", "m", b"poison"), 1.0)


@in_loop
async def test_a_key_s_next_suspect_waits_for_one_that_goes_on() -> None:
    suspects = Suspects()
    await killed(suspects, Flight("a", "m", b"poison"), Flight("a", "m", b"innocent"))
    flight = await flown(suspects, Flight("a", "m", b"poison"))
    task = going_on(suspects, flight)
    suspects.land(flight, answered=True)
    innocent = Flight("a", "m", b"innocent")
    waits = asyncio.create_task(suspects.examine(innocent, 5.0))
    await asyncio.sleep(0.02)
    assert not waits.done()
    await suspects.died(["m"])
    task.set_result(None)
    await waits
    suspects.take_off(innocent)
    suspects.land(innocent, answered=True)
    with pytest.raises(PoisonError):
        await suspects.examine(Flight("a", "m", b"poison"), 1.0)
    await suspects.examine(Flight("a", "m", b"innocent"), 1.0)


@in_loop
async def test_a_poison_that_goes_on_keeps_its_turn_and_is_found_beside_others() -> None:
    clock = Clock()
    suspects = Suspects(clock)
    await killed(suspects, Flight("a", "m", b"poison"), Flight("b", "m", b"innocent"))
    suspects.began(None)
    flight = await flown(suspects, Flight("a", "m", b"poison"))
    task = going_on(suspects, flight)
    assert flight.turn, "the other version is asked in its turn, too"
    suspects.land(flight, answered=True)
    waits = asyncio.create_task(flown(suspects, Flight("b", "m", b"innocent")))
    await asyncio.sleep(0.02)
    assert not waits.done()
    await suspects.died(["m"])
    task.set_result(None)
    suspects.land(await waits, answered=True)
    with pytest.raises(PoisonError):
        await suspects.examine(Flight("a", "m", b"poison"), 1.0)


@in_loop
async def test_one_that_is_with_the_other_version_for_longer_keeps_its_turn_until_then() -> None:
    suspects = Suspects()
    await killed(suspects, Flight("a", "m", b"poison"), Flight("b", "m", b"innocent"))
    suspects.began(None)
    flight = await flown(suspects, Flight("a", "m", b"poison"))
    task = going_on(suspects, flight)
    task.set_result(None)
    waits = asyncio.create_task(flown(suspects, Flight("b", "m", b"innocent")))
    await asyncio.sleep(0.02)
    assert not waits.done()
    suspects.land(flight, answered=True)
    suspects.land(await waits, answered=True)


@pytest.mark.parametrize("key", ["a", ""])
@in_loop
async def test_what_is_lost_with_a_server_by_two_of_its_versions_is_one_request(key: str) -> None:
    suspects = Suspects()
    for _ in range(2):
        flight = await flown(suspects, Flight(key, "m", b"poison"))
        flight.server = "A"
        task = going_on(suspects, flight)
        suspects.lose(flight, "A")
        task.set_result(None)
        await asyncio.sleep(0)
        await suspects.died(None, "A")
        suspects.land(flight, answered=False)
    with pytest.raises(PoisonError):
        await suspects.examine(Flight(key, "m", b"poison"), 1.0)


@pytest.mark.parametrize("key", ["a", ""])
@in_loop
async def test_a_request_that_another_model_is_asked_for_is_one(key: str) -> None:
    suspects = Suspects()
    for _ in range(2):
        flight = await flown(suspects, Flight(key, "m", b"poison"))
        with about(flight):
            async with suspects.instead(key, "n", b"poison", 1.0) as other:
                await suspects.died(None)
                other.lost = True
        suspects.land(flight, answered=False)
    with pytest.raises(PoisonError):
        await suspects.examine(Flight(key, "n", b"poison"), 1.0)
    assert not suspects.watches(key, "m"), "that was not asked"


@in_loop
async def test_what_goes_on_is_cleared_by_its_own_answer() -> None:
    suspects = Suspects()
    await killed(suspects, Flight("a", "m", b"poison"))
    flight = await flown(suspects, Flight("a", "m", b"poison"))
    task = going_on(suspects, flight)
    suspects.land(flight, answered=True)
    assert ("a", "m") in suspects._watched
    task.set_result("an answer")
    await asyncio.sleep(0)
    assert ("a", "m") not in suspects._watched


@in_loop
async def test_nothing_is_copied_of_a_key_that_ended_a_process_with_nobody_else_there() -> None:
    clock = Clock()
    suspects = Suspects(clock)
    await killed(suspects, Flight("a", "m", b"poison"))
    suspects.began(None)
    clock.now = PROBATION_S + 0.1
    assert await suspects.suspected("a", "m", b"another")
    assert not await suspects.suspected("b", "m", b"another")


@in_loop
async def test_who_shares_deaths_with_another_key_is_never_convicted() -> None:
    suspects = Suspects()
    for number in range(4):
        poison, victim = Flight("a", "m", b"poison %d" % number), Flight("b", "m", b"the same each time")
        suspects.take_off(poison)  # as those do that were on their way before keys took turns
        suspects.take_off(victim)
        assert len(await suspects.died(["m"])) == 2, "both are told"
        suspects.land(poison, answered=False)
        suspects.land(victim, answered=False)
    suspects.land(await flown(suspects, Flight("b", "m", b"the same each time")), answered=True)
    assert ("b", "m") not in suspects._watched


@in_loop
async def test_another_request_of_the_same_key_is_no_cover() -> None:
    suspects = Suspects()
    for number in range(2):
        await killed(suspects, Flight("a", "m", b"poison"), Flight("a", "m", b"cover %d" % number))
    with pytest.raises(PoisonError):
        await suspects.examine(Flight("a", "m", b"poison"), 1.0)


@in_loop
async def test_a_connection_that_breaks_before_the_death_is_known_changes_nothing() -> None:
    suspects = Suspects()
    for _ in range(2):
        suspects.land(await flown(suspects, Flight("a", "m", b"poison")), answered=False)
        await suspects.died(["m"])
    with pytest.raises(PoisonError):
        await suspects.examine(Flight("a", "m", b"poison"), 1.0)


@in_loop
async def test_who_found_nobody_there_ended_nothing() -> None:
    suspects = Suspects()
    poison, late = Flight("a", "m", b"poison"), Flight("b", "m", b"late")
    suspects.take_off(poison)
    suspects.land(poison, answered=False)
    suspects.take_off(late)
    suspects.land(late, answered=False, sent=False)
    assert [suspect.key for suspect in await suspects.died(None)] == ["a"]


@in_loop
async def test_turns_go_on_after_a_death_that_came_in_one() -> None:
    clock = Clock()
    suspects = Suspects(clock)
    await killed(suspects, Flight("a", "m", b"1"), Flight("b", "m", b"x"))
    for number in range(2, 2 + DEATHS_OF_KEY):
        suspects.began(None)
        clock.now += 1.0
        assert suspects.watches("c", "m"), "it would be with the next one"
        await killed(suspects, Flight("a", "m", b"%d" % number))
        clock.now += PROBATION_S + 1.0  # so long it takes to be started again
    suspects.began(None)
    with pytest.raises(BarredError):
        await suspects.examine(Flight("a", "m", b"another"), 1.0)
    clock.now += PROBATION_S + 1.0
    assert not suspects.watches("c", "m")


@in_loop
async def test_who_ends_a_server_that_has_just_begun_is_suspected() -> None:
    clock = Clock()
    suspects = Suspects(clock)
    old, new = Flight("a", "m", b"old"), Flight("b", "m", b"new")
    suspects.take_off(old)
    suspects.land(old, answered=False)
    clock.now = started = 1.0
    suspects.take_off(new)
    suspects.land(new, answered=False)
    suspects.began(None, started)  # whoever looks after it is told a moment later
    assert [suspect.key for suspect in await suspects.died(None)] == ["b"]


@in_loop
async def test_messages_of_a_stream_are_in_flight_until_answered() -> None:
    suspects = Suspects()
    stream = StreamFlight(suspects)
    for _ in range(3):
        await stream.sent("a", "m", 1.0)
        await killed(suspects, Flight("b", "m", b"the same each time"))
        stream.end()
    await suspects.examine(flight := Flight("b", "m", b"the same each time"), 1.0)
    suspects.land(flight, answered=True)
    await stream.sent("a", "m", 1.0)
    stream.answered()
    assert await suspects.died(["m"]) == []


@pytest.mark.parametrize(
    "again",
    [
        asking(id="2"),
        asking(parameters={"timeout": 5, "priority": 1}),
        asking(parameters={}, other=1),
        b" " + asking(),
    ],
)
@in_loop
async def test_an_id_or_what_queues_read_makes_no_other_request(again: bytes) -> None:
    suspects = Suspects()
    for _ in range(2):
        await killed(suspects, Flight("a", "m", asking(id="1")))
    with pytest.raises(PoisonError):
        await suspects.examine(Flight("a", "m", again), 1.0)
    await suspects.examine(Flight("a", "m", asking(parameters={"mine": 1})), 1.0)
    await suspects.examine(Flight("a", "m", asking() + b"raw"), 1.0)


@in_loop
async def test_over_grpc_an_id_makes_no_other_request() -> None:
    suspects = Suspects()
    first, again = (messages.ModelInferRequest(model_name="m", id=id_).SerializeToString() for id_ in ("1", "2"))
    for _ in range(2):
        await killed(suspects, Flight("a", "m", first))
    with pytest.raises(PoisonError):
        await suspects.examine(Flight("a", "m", again), 1.0)


@in_loop
async def test_only_so_many_wait_and_nobody_else_for_them() -> None:
    suspects = Suspects()
    bodies = [b"%d" % number for number in range(MOST_WAITING + 2)]
    await killed(suspects, *(Flight("a", "m", body) for body in bodies), Flight("b", "m", b"1"), Flight("a", "n", b"1"))
    first = await flown(suspects, Flight("a", "m", bodies[0]))
    waiting = [asyncio.ensure_future(suspects.examine(Flight("a", "m", body), 60.0)) for body in bodies[1:-1]]
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError):
        await suspects.examine(Flight("a", "m", bodies[-1]), 60.0)
    for other in (Flight("b", "m", b"1"), Flight("a", "n", b"1")):
        async with asyncio.timeout(10):
            suspects.land(await flown(suspects, other), answered=True)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    suspects.land(first, answered=True)
    assert not suspects._queues


@in_loop
async def test_suspects_are_asked_one_at_a_time_and_others_beside_them() -> None:
    suspects = Suspects()
    await killed(suspects, Flight("a", "m", b"1"), Flight("a", "m", b"2"))
    first = await flown(suspects, Flight("a", "m", b"1"))
    with pytest.raises(OverloadedError):
        await suspects.examine(Flight("a", "m", b"2"), 0.01)
    other = await flown(suspects, Flight("a", "m", b"3"))
    assert other.suspect is None
    waiting = asyncio.ensure_future(suspects.examine(Flight("a", "m", b"2"), 5.0))
    await asyncio.sleep(0)
    suspects.land(first, answered=True)
    await waiting


@in_loop
async def test_one_that_waits_while_it_is_found_out_is_refused() -> None:
    suspects = Suspects()
    await killed(suspects, Flight("a", "m", b"poison"))
    again = await flown(suspects, Flight("a", "m", b"poison"))
    waiting = asyncio.ensure_future(suspects.examine(Flight("a", "m", b"poison"), 5.0))
    await asyncio.sleep(0)
    await suspects.died(["m"])
    suspects.land(again, answered=False)
    with pytest.raises(PoisonError):
        await waiting
    await suspects.examine(Flight("a", "m", b"another"), 5.0)


@in_loop
async def test_a_client_that_left_before_the_death_is_told_is_suspected_too() -> None:
    suspects = Suspects()
    flight = await flown(suspects, Flight("a", "m", b"poison"))
    suspects.land(flight, answered=False)
    assert [suspect.key for suspect in await suspects.died(None)] == ["a"]
    suspects.land(await flown(suspects, Flight("b", "m", b"fine")), answered=True)
    assert await suspects.died(None) == []


@in_loop
async def test_only_so_many_that_were_lost_are_held_whatever_they_send() -> None:
    """Messages of streams have no bytes to tell them by."""
    suspects = Suspects()
    most = LOST_BYTES // FLIGHT_BYTES
    for body in (b"", bytes(LOST_BYTES // 4)):
        flights = [Flight("a", "m", body) for _ in range(most + 100)]
        for flight in flights:
            suspects.take_off(flight)
            suspects.land(flight, answered=False)
        assert len(suspects._lost) == (4 if body else most)
        assert {str(each) for each in await suspects.died(["m"])} >= {"m (key a, fingerprint unknown)"}
        assert not suspects._lost
        assert not suspects._lost.held_bytes


@in_loop
async def test_only_what_was_with_the_model_is_suspected() -> None:
    suspects = Suspects()
    await flown(suspects, Flight("a", "m", b"1"))
    await flown(suspects, Flight("a", "n", b"1"))
    (found,) = await suspects.died(["m"])
    assert found.model == "m"
    assert "fingerprint" in str(found)
    assert await suspects.died(["m"]) == []


@in_loop
async def test_it_is_forgotten_after_a_time_and_never_more_than_so_many() -> None:
    clock = Clock()
    suspects = Suspects(clock)
    for _ in range(2):
        await killed(suspects, Flight("a", "m", b"poison"))
    clock.now = REMEMBERED_S + 1
    await suspects.examine(Flight("a", "m", b"poison"), 1.0)
    for number in range(REMEMBERED + 8):
        await flown(suspects, Flight(f"b{number}", "m", b"1"))
        await suspects.died(None)
    assert len(suspects._deaths) <= REMEMBERED


@in_loop
async def test_a_body_that_was_still_coming_has_no_fingerprint() -> None:
    suspects = Suspects()
    await flown(suspects, Flight("a", "m", GrowingBody(b"half", 8)))
    (found,) = await suspects.died(None)
    assert found.fingerprint == ""
    assert not suspects.watches("a", "m")


def test_a_model_is_down_until_each_cause_has_ended() -> None:
    outages = Outages()
    outages.check("m")
    outages.begin("one", ["one", "m"], "one died")
    outages.begin("two", ["m"], "two died")
    with pytest.raises(ModelDownError) as caught:
        outages.check("m")
    assert caught.value.why == "one died; two died"
    assert (b"retry-after", b"1") in caught.value.headers
    outages.end("one")
    assert dict(outages) == {"m": "two died"}
    outages.end("two")
    assert dict(outages) == {}
    outages.check("m")


@in_loop
async def test_messages_of_a_stream_keep_instances_at_work_from_when_they_are_sent_until_they_are_answered() -> None:
    occupied = Occupied()
    stream = StreamFlight(Suspects())

    def board(flight: Flight) -> None:
        flight.needs = Needs({"m": 1}, long=True)

    await stream.sent("a", "m", 1.0, board=board)
    stream.take_to("server", occupied)
    await stream.sent("a", "m", 1.0, board=board)
    assert len(occupied) == 2
    now = time.monotonic()
    assert occupied.is_taken([("m", 2)], now, math.inf)
    stream.answered()
    assert not occupied.is_taken([("m", 2)], now, math.inf)
    assert occupied.is_taken([("m", 1)], now, math.inf)
    stream.end()
    assert len(occupied) == 0
