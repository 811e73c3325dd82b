"""Requests that take longer than they may: what counts for their keys, and for others, once they are over for clients.

On the shipped classes, and a clock and server that are simulated; by a connection, a real one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.gateway.access.admission import Admission, Bounds
from serve.gateway.access.at_server import BATCH_S
from serve.gateway.access.fairness import BESIDE_S, LOOK_S, Fairness
from serve.gateway.access.left_behind import OVERDUE_S
from serve.gateway.errors import OverloadedError
from serve.gateway.health.flights import NOWHERE, At
from serve.http.client import Connection, ExchangeError, Pool, Response, encode_head
from serve.http.connection import LEFT, Leaving
from tests.serve_http import Received, answer, in_loop, scripted_server
from tests.unit.serve.gateway.test_fairness import LIGHT_S, Server, simulated

TIMEOUT_S, LONG_S = 3.0, 20.0
LIGHT = ("one", "two", "three")


def a_model(instances: int = 1, *, in_order: bool = True) -> Admission:
    """Its places, where three keys have sent light requests by now."""
    places = Admission("m", Bounds(), time.monotonic)
    fairness = places.fairness
    fairness.instances, fairness.most_together = instances, 1
    if in_order:
        fairness.waits_s = 0.0
    return places


async def light_requests(places: Admission, count: int = 8) -> None:
    for _ in range(count):
        for who in LIGHT:
            assert places.try_enter(who)
            await asyncio.sleep(LIGHT_S)
            places.leave(LIGHT_S, who=who)


async def waits(places: Admission, seconds: float) -> None:
    """The others want to ask all the while."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        for who in LIGHT:
            places.fairness.of(who, 5, time.monotonic())
        await asyncio.sleep(min(left, 2 * LOOK_S))


def counted(fairness: Fairness) -> list[object]:
    """All that is counted of what is with the server; nothing of it is left once all is quiet."""
    every = [*fairness.queues]
    return [
        fairness.heavy,
        fairness._in_flight,
        fairness._there,
        sum(fairness._there_of.values()),
        sum(sum(each.at_work_of.values()) for each in every),
        sum(fairness._heavy_of.values()),
        sum(fairness._guards.values()),
        len(fairness.queues.at_work),
        len(fairness._overdue),
        sum(len(waiting) for each in every for waiting in each.next.values()),
        sum(each.in_flight + each.overdue for each in fairness._accounts.values()),
    ]


def nothing(fairness: Fairness) -> list[object]:
    return [0] * len(counted(fairness))


async def times_out(places: Admission, who: str) -> asyncio.Future[bool]:
    """A request that the server is at work on still when its client is told that it took too long."""
    through = asyncio.get_running_loop().create_future()
    assert places.try_enter(who)
    await waits(places, TIMEOUT_S)
    places.outlast(TIMEOUT_S, 100, who, [through])
    return through


def in_time(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def run() -> None:
        simulated(test())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@in_time
async def test_a_key_pays_for_all_the_time_that_its_request_takes() -> None:
    places = a_model()
    await light_requests(places)
    through = await times_out(places, "greedy")
    await waits(places, LONG_S - TIMEOUT_S)
    through.set_result(True)
    await asyncio.sleep(0)
    of = places.fairness.of
    assert of("greedy", 5, time.monotonic()).cost == pytest.approx(LONG_S)
    assert of("greedy", 5, time.monotonic()).heavy
    await light_requests(places)
    assert {of(who, 5, time.monotonic()).heavy for who in LIGHT} == {False}
    assert max(of(who, 5, time.monotonic()).met_s for who in LIGHT) < 2 * LIGHT_S
    assert counted(places.fairness) == nothing(places.fairness)


@in_time
async def test_no_more_of_its_requests_are_sent_before_the_server_is_through() -> None:
    places = a_model()
    await light_requests(places)
    through = await times_out(places, "greedy")
    for _ in range(100):
        await waits(places, 0.1)
        assert not places.try_enter("greedy")
    through.set_result(True)
    await asyncio.sleep(BESIDE_S + 60)  # alone again
    assert places.try_enter("greedy")


@pytest.mark.parametrize("answers", [0, 1, 3, 8], ids="{} light answers".format)
@pytest.mark.parametrize("together", [1, 8], ids=["no batches", "batches of light ones"])
def test_a_key_is_heavy_while_one_is_overdue_whatever_it_sent_before(answers: int, together: int) -> None:
    """And so are its next ones, of which none is sent as one of a batch."""

    async def main() -> None:
        places = a_model()
        places.fairness.most_together = together
        await light_requests(places)
        for _ in range(answers):
            entered = places.try_enter("greedy")
            beside = [who for who in LIGHT if places.try_enter(who)]
            await waits(places, LIGHT_S)
            for who in [*beside, *["greedy"] * entered]:  # answered together
                places.leave(LIGHT_S, who=who)
        await waits(places, 1)
        through = await times_out(places, "greedy")
        for _ in range(20):
            await waits(places, 0.3)
            assert places.fairness.of("greedy", 5, time.monotonic()).heavy
            assert not places.try_enter("greedy")
        through.set_result(True)
        await asyncio.sleep(0)
        assert counted(places.fairness) == nothing(places.fairness)

    simulated(main())


@in_time
async def test_its_place_is_others() -> None:
    """Neither the number of places nor how many are with the server for all keys together goes by it."""
    places = a_model()
    await light_requests(places)
    before = [places.in_flight, places.left, places.awaited]
    through = await times_out(places, "greedy")
    assert [places.in_flight, places.left, places.awaited] == before
    assert [places.try_enter(who) for who in LIGHT] == [True, True, True]
    for who in LIGHT:
        places.leave(None, who=who)
    through.set_result(True)
    await asyncio.sleep(0)
    assert counted(places.fairness) == nothing(places.fairness)


@in_time
async def test_who_waits_behind_it_and_times_out_pays_for_nothing() -> None:
    places = a_model()
    await light_requests(places)
    long = await times_out(places, "greedy")
    waited = [await times_out(places, who) for who in LIGHT]
    long.set_result(True)
    for each in waited:
        each.set_result(True)
    await asyncio.sleep(0)
    now = time.monotonic()
    assert max(places.fairness.of(who, 5, now).met_s for who in LIGHT) <= 1.1 * LIGHT_S
    assert places.fairness.of("greedy", 5, now).cost == pytest.approx(4 * TIMEOUT_S)
    assert counted(places.fairness) == nothing(places.fairness)


@in_time
async def test_a_request_that_waited_behind_it_and_is_answered_pays_for_its_own_time() -> None:
    places = a_model()
    await light_requests(places)
    long = await times_out(places, "greedy")
    assert places.try_enter("one")
    await asyncio.sleep(LONG_S)
    long.set_result(True)
    await asyncio.sleep(LIGHT_S)
    places.leave(LONG_S, who="one")
    await light_requests(places)
    account = places.fairness.of("one", 5, time.monotonic())
    assert account.met_s < 2 * LIGHT_S
    assert not account.heavy


@in_time
async def test_one_that_is_never_answered_counts_for_a_while_only() -> None:
    places = a_model()
    await light_requests(places)
    begun = time.monotonic()
    await times_out(places, "greedy")
    await asyncio.sleep(OVERDUE_S - 1)
    assert places.fairness.of("greedy", 5, time.monotonic()).in_flight == 1
    await asyncio.sleep(2)
    account = places.fairness.of("greedy", 5, time.monotonic())
    assert account.in_flight == 0
    assert account.cost == pytest.approx(TIMEOUT_S + OVERDUE_S, abs=0.1), time.monotonic() - begun
    assert counted(places.fairness) == nothing(places.fairness)


@in_time
async def test_an_answer_that_comes_past_it_shows_that_it_is_with_no_instance() -> None:
    """As where its model was loaded anew: what is asked now is with the new one."""
    places = a_model()
    await light_requests(places)
    await times_out(places, "greedy")
    await light_requests(places, 2)
    assert places.fairness.of("greedy", 5, time.monotonic()).in_flight == 0
    await light_requests(places)
    for who in LIGHT:
        assert places.fairness.of(who, 5, time.monotonic()).cost == pytest.approx(LIGHT_S, rel=0.5)
    assert counted(places.fairness) == nothing(places.fairness)


@in_time
async def test_what_an_answer_has_shown_to_be_over_is_ended_once() -> None:
    """Its own answer comes right after the one that came past it."""
    places = a_model()
    await light_requests(places)
    through = await times_out(places, "greedy")
    assert places.try_enter("one")
    await asyncio.sleep(LIGHT_S)
    places.leave(LIGHT_S, who="one")
    await asyncio.sleep(2 * BATCH_S)
    through.set_result(True)
    await asyncio.sleep(0)
    assert counted(places.fairness) == nothing(places.fairness)


async def is_odd_once(places: Admission, who: str) -> None:
    """A request that the model answers after LONG_S, of a key whose others are light."""
    through = await times_out(places, who)
    await waits(places, LONG_S - TIMEOUT_S)
    through.set_result(True)
    await waits(places, 2 * LOOK_S)


@pytest.mark.parametrize("instances", [1, 2])
def test_one_odd_request_of_a_key_with_light_ones_keeps_it_back_no_longer(instances: int) -> None:
    """A model that hung, or another's request that was in its way."""

    async def main() -> None:
        places = a_model(instances, in_order=instances == 1)
        await light_requests(places)
        used = places.fairness.of("one", 5, time.monotonic()).used
        await is_odd_once(places, "one")
        account = places.fairness.of("one", 5, time.monotonic())
        assert not account.heavy
        assert account.cost == pytest.approx(LIGHT_S, rel=0.5)
        assert account.used - used < 1
        await light_requests(places)

    simulated(main())


@in_time
async def test_the_second_within_a_while_is_believed() -> None:
    places = a_model()
    await light_requests(places)
    await is_odd_once(places, "one")
    await light_requests(places)
    await is_odd_once(places, "one")
    assert places.fairness.of("one", 5, time.monotonic()).heavy


@pytest.mark.parametrize("alone", [True, False])
def test_a_key_that_gets_no_answer_piles_up_no_requests(alone: bool) -> None:
    """What it sends behind its overdue one would be overdue, too, for as long as it likes."""

    async def main() -> None:
        places, sent = a_model(), 0
        if not alone:
            await light_requests(places)
            await times_out(places, "greedy")
        loop = asyncio.get_running_loop()
        for _ in range(10):
            entered = places.try_enter("piles")
            sent += entered
            await (asyncio.sleep(TIMEOUT_S) if alone else waits(places, TIMEOUT_S))
            if entered:
                places.outlast(TIMEOUT_S, 100, "piles", [loop.create_future()])
        assert sent <= 2

    simulated(main())


@in_time
async def test_an_error_shows_nothing_of_the_instances() -> None:
    places = a_model()
    await light_requests(places)
    await times_out(places, "greedy")
    for who in LIGHT * 2:
        assert places.try_enter(who)
        await asyncio.sleep(LIGHT_S)
        places.leave(None, who=who)
    assert places.fairness.of("greedy", 5, time.monotonic()).in_flight == 1


@in_time
async def test_an_answer_by_another_instance_shows_nothing_of_one() -> None:
    places = a_model(2)
    await light_requests(places)
    await times_out(places, "greedy")
    await light_requests(places, 4)
    assert places.fairness.of("greedy", 5, time.monotonic()).in_flight == 1


@in_time
async def test_what_a_client_left_counts_after_its_place_was_given_back() -> None:
    places = a_model()
    await light_requests(places)
    loop = asyncio.get_running_loop()
    ended, through = loop.create_future(), loop.create_future()
    assert places.try_enter("greedy")
    await asyncio.sleep(0.1)
    places.leave_after([ended], time.monotonic() - 0.1, 100, None, "greedy", [through])
    assert (places.in_flight, places.left) == (1, 1)
    await asyncio.sleep(TIMEOUT_S)
    ended.set_result(False)
    await asyncio.sleep(LONG_S)
    assert (places.in_flight, places.left) == (0, 0)
    assert places.fairness.of("greedy", 5, time.monotonic()).in_flight == 1
    through.set_result(True)
    await asyncio.sleep(0)
    assert places.fairness.of("greedy", 5, time.monotonic()).cost > LONG_S
    assert counted(places.fairness) == nothing(places.fairness)


@in_time
async def test_who_waits_at_one_of_several_servers_behind_an_overdue_request_pays_nothing_for_it() -> None:
    places = a_model(2, in_order=False)
    fairness = places.fairness
    fairness.servers = 2
    await light_requests(places)
    loop = asyncio.get_running_loop()
    first, behind = loop.create_future(), loop.create_future()
    assert places.try_enter("greedy")
    places.sent("greedy", NOWHERE, at := At("a", "m"))
    await asyncio.sleep(LIGHT_S)
    assert places.try_enter("one")
    places.sent("one", NOWHERE, at)  # at the same server, as the other one answers the others all the while
    for _ in range(int(TIMEOUT_S / LIGHT_S)):
        assert places.try_enter("two")
        await asyncio.sleep(LIGHT_S)
        places.leave(LIGHT_S, who="two")
    places.outlast(TIMEOUT_S, 100, "greedy", [first], at)
    places.outlast(TIMEOUT_S, 100, "one", [behind], at)
    await waits(places, LONG_S - TIMEOUT_S)
    one = fairness.of("one", 5, time.monotonic())
    assert not one.heavy
    assert one.cost < 2 * LIGHT_S
    assert fairness.may(one, places.limit, time.monotonic(), "m")
    assert fairness.of("greedy", 5, time.monotonic()).heavy
    first.set_result(True)
    await asyncio.sleep(LIGHT_S)
    behind.set_result(True)
    await asyncio.sleep(0)
    assert one.cost < 2 * LIGHT_S
    assert one.odd_until < time.monotonic()  # nothing had to be forgiven
    assert counted(fairness) == nothing(fairness)


@in_time
async def test_what_comes_next_of_what_is_overdue_at_a_server_is_charged_from_then_on() -> None:
    places = a_model(2, in_order=False)
    fairness = places.fairness
    fairness.servers = 2
    await light_requests(places)
    loop = asyncio.get_running_loop()
    through = [loop.create_future() for _ in range(2)]
    at = At("a", "m")
    for who in ("greedy", "another"):
        assert places.try_enter(who)
        places.sent(who, NOWHERE, at)
    await waits(places, TIMEOUT_S)
    for who, each in zip(("greedy", "another"), through, strict=True):
        places.outlast(TIMEOUT_S, 100, who, [each], at)
    await waits(places, LONG_S - TIMEOUT_S)
    through[0].set_result(True)
    await waits(places, LONG_S)
    through[1].set_result(True)
    await asyncio.sleep(0)
    costs = [fairness.of(who, 5, time.monotonic()).cost for who in ("greedy", "another")]
    assert costs == pytest.approx([LONG_S / 2, LONG_S / 2], rel=0.05)  # of the time of both servers


@pytest.mark.parametrize("connections", [1, 4])
@pytest.mark.parametrize("instances", [1, 2])
def test_others_are_answered_for_most_of_the_time_beside_requests_that_time_out(
    instances: int, connections: int
) -> None:
    until, took, sent = 100.0, list[float](), list[float]()

    async def main() -> None:
        places, server = a_model(instances), Server(instances)

        async def client(who: str, seconds: float, pause_s: float) -> None:
            while time.monotonic() < until:
                try:
                    if not places.try_enter(who):
                        await places.enter(5, TIMEOUT_S, who)
                except OverloadedError:
                    await asyncio.sleep(max(pause_s, 0.1))
                    continue
                begun = time.monotonic()
                if who == "greedy":
                    sent.append(begun)
                answer = asyncio.ensure_future(server.answer(seconds))
                await asyncio.wait((answer,), timeout=TIMEOUT_S)
                if answer.done():
                    places.leave(time.monotonic() - begun, 100, who)
                    if who != "greedy":
                        took.append(time.monotonic() - begun)
                else:
                    places.outlast(TIMEOUT_S, 100, who, [answer])
                await asyncio.sleep(pause_s)

        clients = [asyncio.ensure_future(client(who, LIGHT_S, 0.1)) for who in LIGHT]
        await asyncio.sleep(3)
        clients += [asyncio.ensure_future(client("greedy", LONG_S, 0.0)) for _ in range(connections)]
        await asyncio.gather(*clients)
        await asyncio.sleep(10 * LONG_S)
        assert counted(places.fairness) == nothing(places.fairness)

    simulated(main())
    # A request of each key each 0.11 s is some 2,700. Where they counted until they timed out, it was 81, the first.
    assert len(took) > 0.6 * 2700, (len(took), len(sent))
    assert len(sent) * LONG_S < (0.5 * until + LONG_S) * instances


@settings(deadline=None, max_examples=60)
@given(
    instances=st.integers(1, 3),
    in_order=st.booleans(),
    asked=st.lists(
        st.tuples(
            st.sampled_from(["one", "two", "three", "greedy"]),
            st.floats(0, 2),  # from the one before
            st.sampled_from([0.01, 0.5, 5.0, 30.0]),
            st.sampled_from(["answered", "late", "left", "never answered"]),
        ),
        max_size=20,
    ),
)
def test_nothing_is_left_of_what_was_counted(
    instances: int, in_order: bool, asked: list[tuple[str, float, float, str]]
) -> None:
    async def main() -> None:
        places, server = a_model(instances, in_order=in_order), Server(instances)
        loop = asyncio.get_running_loop()

        async def client(who: str, seconds: float, how: str) -> None:
            try:
                if not places.try_enter(who):
                    await places.enter(5, TIMEOUT_S, who)
            except OverloadedError:
                return
            begun = time.monotonic()
            answer: asyncio.Future[Any] = asyncio.ensure_future(server.answer(seconds))
            await asyncio.wait((answer,), timeout=0.1 if how == "left" else TIMEOUT_S)
            if how == "never answered":
                answer = loop.create_future()
            if answer.done():
                places.leave(time.monotonic() - begun, 100, who)
            elif how == "left":
                ended = loop.create_future()

                def end(_: object = None) -> None:
                    if not ended.done():
                        ended.set_result(answer.done())

                answer.add_done_callback(end)
                loop.call_later(TIMEOUT_S, end)
                places.leave_after([ended], begun, 100, None, who, [answer])
            else:
                places.outlast(TIMEOUT_S, 100, who, [answer])

        clients = []
        for who, pause_s, seconds, how in asked:
            await asyncio.sleep(pause_s)
            clients.append(asyncio.ensure_future(client(who, seconds, how)))
        await asyncio.gather(*clients)
        await asyncio.sleep(OVERDUE_S + 30 * len(asked))
        assert counted(places.fairness) == nothing(places.fairness)
        assert (places.in_flight, places.left, places.waiting) == (0, 0, 0)

    simulated(main())


async def warmed(pool: Pool) -> Connection:
    """A connection that has a request which the server answers late, sent on the short way."""
    await pool.request(b"GET", b"/warm", whose=("m", "key"))
    connection = pool.take(("m", "key"))
    assert connection is not None
    return connection


def ask(pool: Pool, connection: Connection, failed: list[Exception | None]) -> asyncio.Event:
    told = asyncio.Event()

    def done(_answer: Response | None, error: Exception | None) -> None:
        failed.append(error)
        pool.give(connection)
        told.set()

    head = encode_head(b"POST", b"/late", pool.address, [], 2)
    pool.send(connection, head, b"{}", time.monotonic() + 0.1, done, "key")
    return told


def responds(
    answers: asyncio.Event, closes: asyncio.Event | None = None
) -> Callable[[Received, asyncio.StreamWriter], Coroutine[Any, Any, None]]:
    async def respond(asked: Received, writer: asyncio.StreamWriter) -> None:
        if asked.target == "/late":
            await answers.wait()
            if closes is not None and closes.is_set():
                writer.close()
                return
        writer.write(answer(b"{}"))

    return respond


ENDS = {
    "answered": True,
    "the server closes": False,
    "the pool closes": False,
    "the server falls silent, and answers when it is back": True,
    "the server is taken out of service": False,
    "its time is over": False,
}


@pytest.mark.parametrize(("end", "by_answer"), ENDS.items())
@pytest.mark.parametrize("short", [True, False], ids=["the short way", "the long way"])
@in_loop
async def test_a_connection_tells_when_the_server_is_through_with_what_was_late(
    end: str, by_answer: bool, short: bool
) -> None:
    answers, closes = asyncio.Event(), asyncio.Event()
    async with scripted_server(responds(answers, closes)) as server:
        pool = Pool(server.address, lingers_s=0.2 if end == "its time is over" else 60.0)
        failed: list[Exception | None] = []
        if short:
            connection = await warmed(pool)
            told = ask(pool, connection, failed)
            async with asyncio.timeout(5):
                await told.wait()
        else:
            leaving = Leaving()
            above = LEFT.set(leaving)
            with pytest.raises(ExchangeError) as raised:
                await pool.request(b"POST", b"/late", body=b"{}", timeout_s=0.1, whose=("m", "key"))
            LEFT.reset(above)
            failed.append(raised.value)
            leaving.linger()
            (connection,) = leaving.connections
        assert isinstance(failed[0], ExchangeError)
        assert failed[0].kind == "timeout"
        await asyncio.sleep(0.05)
        assert pool._slots.used == 0
        ended, through = connection.ended, connection.through
        assert ended is not None
        assert through is not None
        assert (ended.result(), through.done()) == (False, False)
        assert list(pool._lingering) == [connection]
        match end:
            case "answered":
                answers.set()
            case "the server closes":
                closes.set()
                answers.set()
            case "the pool closes":
                await pool.close()
            case "the server falls silent, and answers when it is back":
                pool.abort()
                await asyncio.sleep(0.05)
                assert not through.done()
                answers.set()
            case "the server is taken out of service":
                pool.let_go()
        assert await asyncio.wait_for(through, 5) is by_answer
        await asyncio.sleep(0)
        assert not pool._lingering
        answers.set()
        await pool.close()


@pytest.mark.parametrize(("end", "by_answer"), [("it answers", True), ("its port is closed", False)])
@in_loop
async def test_what_is_asked_of_another_server_is_with_the_silent_one_until_that_is_through(
    end: str, by_answer: bool
) -> None:
    answers = asyncio.Event()
    async with scripted_server(responds(answers)) as server:
        pool = Pool(server.address, lingers_s=60.0)
        asked = asyncio.ensure_future(pool.request(b"POST", b"/late", body=b"{}", timeout_s=30.0, whose=("m", "key")))
        await asyncio.sleep(0.05)
        pool.abort()
        with pytest.raises(ExchangeError) as raised:
            await asked
        through = raised.value.through
        assert raised.value.kind == "closed"
        assert through is not None
        await asyncio.sleep(0.05)
        assert not through.done()
        assert pool._slots.used == 0
        if end == "it answers":
            answers.set()
        else:
            pool.let_go()
        assert await asyncio.wait_for(through, 5) is by_answer
        assert not pool._lingering
        answers.set()
        await pool.close()


@in_loop
async def test_connections_that_linger_are_few_and_of_a_key() -> None:
    answers = asyncio.Event()

    async def late(pool: Pool, who: str, model: str = "m") -> asyncio.Future[bool]:
        leaving = Leaving()
        above = LEFT.set(leaving)
        with pytest.raises(ExchangeError):
            await pool.request(b"POST", b"/late", body=b"{}", timeout_s=0.05, whose=(model, who))
        LEFT.reset(above)
        leaving.linger()
        await asyncio.sleep(0.01)
        (through,) = leaving.through
        return through

    async with scripted_server(responds(answers)) as server:
        pool = Pool(server.address, max_connections=32, lingers_s=60.0)
        assert (await late(pool, "")).done()  # nobody's
        mine = [await late(pool, "mine") for _ in range(4)]
        assert [each.done() for each in mine] == [False, False, True, True]
        others = [await late(pool, f"other{n}") for n in range(8)]
        assert [each.done() for each in others] == [False] * 6 + [True] * 2
        answers.set()
        await asyncio.gather(*mine, *others)
        answers.clear()
        many = [await late(pool, "mine", f"m{n}") for n in range(6)]  # of many models, half of them
        assert [each.done() for each in many] == [False] * 4 + [True] * 2
        answers.set()
        await asyncio.gather(*many)
        assert pool._slots.used == 0
        await pool.close()
