"""Several model servers: who is asked, who is left alone, and what is asked again."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest
import uvloop

from serve.gateway.access.keys import add_key
from serve.gateway.health.flights import ABOARD, Flight, Needs
from serve.gateway.settings import Settings
from serve.gateway.upstream.balancer import CONNECT_S, Attempt, Balancer
from serve.gateway.upstream.node import ODD_S
from serve.gateway.upstream.outliers import Verdict
from serve.gateway.upstream.scopes import BUDGET_MOST
from serve.gateway.upstream.verdicts import is_leaving, verdict_of
from serve.http.client import Address, ExchangeError, Response
from serve.http.connection import LEFT, Leaving
from tests.serve_http import Received, Respond, Scripted, answer, gateway, scripted_server
from tests.unit.serve.gateway.test_upstream import INFER, ask, dead, metric

pytestmark = pytest.mark.clock


async def fine(request: Received, writer: asyncio.StreamWriter) -> None:
    writer.write(answer(b"ok"))


async def silent(request: Received, writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(30)


async def half(request: Received, writer: asyncio.StreamWriter) -> None:
    writer.write(answer(b"x" * 100)[:-50])
    writer.close()


async def stopping(request: Received, writer: asyncio.StreamWriter) -> None:
    writer.write(answer(b'{"error":"Server is not ready"}', "503 Service Unavailable"))


async def emptied(request: Received, writer: asyncio.StreamWriter) -> None:
    writer.write(answer(b'{"error":"Request for unknown model: \'m\' is not found"}', "400 Bad Request"))


async def full(request: Received, writer: asyncio.StreamWriter) -> None:
    writer.write(answer(b'{"error":"Exceeds maximum queue size"}', "503 Service Unavailable"))


def between(
    responds: list[Respond], check: Callable[[Balancer, list[Scripted]], Awaitable[Any]], timeout_s: float = 2.0
) -> None:
    """Run `check` with a balancer of scripted servers."""

    async def main() -> None:
        async with AsyncExitStack() as stack:
            servers = [await stack.enter_async_context(scripted_server(respond)) for respond in responds]
            balancer = Balancer([server.address for server in servers], max_connections=64, timeout_s=timeout_s)
            try:
                await check(balancer, servers)
            finally:
                await balancer.close()

    uvloop.run(main())


def inferences(server: Scripted) -> int:
    return sum(request.method == "POST" for request in server.requests)


def test_the_least_busy_is_asked() -> None:
    async def slowly(request: Received, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.2)
        writer.write(answer(b"ok"))

    async def check(balancer: Balancer, servers: list[Scripted]) -> None:
        async def client() -> None:
            for _ in range(10):
                await balancer.exchange(b"POST", INFER)

        await asyncio.wait_for(asyncio.gather(client(), client()), 10)
        assert inferences(servers[0]) < 0.4 * inferences(servers[1])

    between([slowly, fine], check)


def test_equals_are_asked_in_turn() -> None:
    async def check(balancer: Balancer, servers: list[Scripted]) -> None:
        for _ in range(30):
            await balancer.exchange(b"POST", INFER)
        assert [inferences(server) for server in servers] == [10, 10, 10]

    between([fine, fine, fine], check)


@pytest.mark.parametrize("lost", [half, stopping, emptied])
def test_what_one_server_loses_is_asked_of_another(lost: Respond) -> None:
    async def check(balancer: Balancer, servers: list[Scripted]) -> None:
        answers = [await balancer.exchange(b"POST", INFER, body=b"{}") for _ in range(10)]
        assert {each.body for each in answers} == {b"ok"}
        assert inferences(servers[1]) == 10

    between([lost, fine], check)


def test_a_request_that_ends_servers_ends_two_at_most_and_one_more_each_time_it_comes_again() -> None:
    async def main() -> None:
        ended: list[int] = []

        async def begin(number: int) -> asyncio.Server:
            async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                writers.append(writer)
                while b"die" not in await reader.readuntil(b"}"):
                    writer.write(answer(b"ok"))
                ended.append(number)
                server.close()
                for each in writers:
                    each.transport.abort()

            writers: list[asyncio.StreamWriter] = []
            server = await asyncio.start_server(serve, "127.0.0.1", 0)
            return server

        servers = [await begin(number) for number in range(5)]
        addresses = [Address("127.0.0.1", server.sockets[0].getsockname()[1]) for server in servers]
        balancer = Balancer(addresses, max_connections=4, timeout_s=20.0)
        for _ in range(10):  # each has a connection that is kept
            assert (await balancer.exchange(b"POST", INFER, body=b"{}")).body == b"ok"
        for most in (2, 3, 4):
            with pytest.raises(ExchangeError):
                await balancer.exchange(b"POST", INFER, body=b"{die}")
            assert len(ended) <= most
        assert (await balancer.exchange(b"POST", INFER, body=b"{}")).body == b"ok"
        await balancer.close()
        for server in servers:
            server.close()

    uvloop.run(main())


class Mortal:
    """A server that answers until it dies with its connections, and may live again at the same port."""

    def __init__(self) -> None:
        self.address = Address("127.0.0.1", 0)
        self.held = False
        self.asked: list[asyncio.StreamWriter] = []
        """Connections with a request that is held."""
        self._writers: list[asyncio.StreamWriter] = []
        self._server: asyncio.Server | None = None

    async def live(self) -> None:
        self.held = False
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.address.port)
        self.address = Address("127.0.0.1", self._server.sockets[0].getsockname()[1])

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        try:
            while await reader.readuntil(b"}"):
                if self._server is None:
                    writer.transport.abort()
                elif self.held:
                    self.asked.append(writer)
                else:
                    writer.write(answer(b"ok"))
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    def go_on(self) -> None:
        """Answer what is held."""
        self.held = False
        for writer in self.asked:
            writer.write(answer(b"ok"))
        self.asked.clear()

    def die(self, *, first: bool = False) -> None:
        """Lose what is asked; connections that are kept close with it, or after it where only it is `first`."""
        if self._server is not None:
            self._server.close()
        self._server = None
        for writer in self.asked if first else self._writers:
            writer.transport.abort()
        self.asked.clear()
        if not first:
            self._writers.clear()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110  # nobody tells
            await asyncio.sleep(0)


def with_mortals(count: int, check: Callable[[Balancer, list[Mortal]], Awaitable[None]]) -> None:
    """Run `check` with a balancer of servers that may die, each of which has eight connections that are kept."""

    async def main() -> None:
        servers = [Mortal() for _ in range(count)]
        for server in servers:
            await server.live()
        balancer = Balancer([server.address for server in servers], max_connections=64, timeout_s=20.0)
        try:
            async with asyncio.timeout(60):
                while any(len(node.pool._idle) < 8 for node in balancer.nodes):
                    await asyncio.gather(*(balancer.exchange(b"POST", INFER, body=b"{}") for _ in range(8 * count)))
                await check(balancer, servers)
        finally:
            await balancer.close()
            for server in servers:
                server.die()

    uvloop.run(main())


def test_requests_that_say_the_same_and_are_lost_with_one_server_are_all_asked_of_another() -> None:
    """They are lost together: that is one death, not one for each."""

    async def check(balancer: Balancer, servers: list[Mortal]) -> None:
        servers[0].held = True
        asking = asyncio.gather(*(balancer.exchange(b"POST", INFER, body=b"{}") for _ in range(8)))
        await until(lambda: len(servers[0].asked) == 4)
        servers[0].die()
        assert {each.body for each in await asking} == {b"ok"}

    with_mortals(2, check)


def test_a_kept_connection_to_a_server_that_has_died_is_of_the_same_death() -> None:
    async def check(balancer: Balancer, servers: list[Mortal]) -> None:
        dying, other = servers
        dying.held = other.held = True
        asking = [asyncio.ensure_future(balancer.exchange(b"POST", INFER, body=b"{}")) for _ in range(2)]
        await until(lambda: bool(dying.asked))
        dying.die(first=True)
        for _ in range(2):  # they meet the other connections, which nobody has closed yet
            asking.append(asyncio.ensure_future(balancer.exchange(b"POST", INFER, body=b"{}")))
            await until(lambda: len(other.asked) == len(asking) or any(each.done() for each in asking))
        other.go_on()
        assert {each.body for each in await asyncio.gather(*asking)} == {b"ok"}

    with_mortals(2, check)


def test_a_request_that_was_lost_with_one_server_and_answered_by_another_is_no_suspect_of_later_deaths() -> None:
    async def check(balancer: Balancer, servers: list[Mortal]) -> None:
        for dying in (servers[0], servers[1], servers[0]):
            dying.held = True
            asking = []
            while not dying.asked:
                asking.append(asyncio.ensure_future(balancer.exchange(b"POST", INFER, body=b"{}")))
                await asyncio.sleep(0.01)
            dying.die()
            assert {each.body for each in await asyncio.gather(*asking)} == {b"ok"}
            await dying.live()

    with_mortals(2, check)


@pytest.mark.parametrize("verdict", [full])
def test_a_refusal_that_is_meant_goes_to_the_client(verdict: Respond) -> None:
    async def check(balancer: Balancer, servers: list[Scripted]) -> None:
        statuses = [(await balancer.exchange(b"POST", INFER)).status for _ in range(10)]
        assert statuses.count(503) == inferences(servers[0]) > 0

    between([verdict, fine], check)


def test_a_request_that_changes_what_a_server_remembers_is_not_done_twice() -> None:
    async def check(balancer: Balancer, servers: list[Scripted]) -> None:
        outcomes = []
        for number in range(16):
            try:
                outcomes.append((await balancer.exchange(b"POST", INFER, sequence=b"%d" % number)).body)
            except ExchangeError as err:
                outcomes.append(err.kind.encode())
        assert set(outcomes) == {b"ok", b"closed"}

    between([half, fine], check)


def test_a_request_that_ran_out_of_time_is_not_asked_again() -> None:
    async def check(balancer: Balancer, servers: list[Scripted]) -> None:
        with pytest.raises(ExchangeError, match="in time"):
            await balancer.exchange(b"POST", INFER, timeout_s=0.1)
        assert sum(map(inferences, servers)) == 1

    between([silent, silent], check)


def test_retries_end_with_their_budget() -> None:
    async def check(balancer: Balancer, servers: list[Scripted]) -> None:
        failed = 0
        for _ in range(400):
            try:
                await balancer.exchange(b"POST", INFER)
            except ExchangeError:
                failed += 1
        assert failed == 400
        assert sum(map(inferences, servers)) < 400 * 1.2 + BUDGET_MOST

    between([half, half], check)


def test_a_server_that_fails_is_left_alone_then_tried_once_and_taken_back() -> None:
    broken = True

    async def sometimes(request: Received, writer: asyncio.StreamWriter) -> None:
        await (half if broken else fine)(request, writer)

    async def check(balancer: Balancer, servers: list[Scripted]) -> None:
        nonlocal broken
        for _ in range(40):
            await balancer.exchange(b"POST", INFER)
        assert inferences(servers[0]) == 3
        await asyncio.sleep(1.05)
        for _ in range(10):
            await balancer.exchange(b"POST", INFER)
        assert inferences(servers[0]) == 4  # on trial, and failed: two seconds more
        broken = False
        await asyncio.sleep(2.05)
        await balancer.exchange(b"POST", INFER)
        assert inferences(servers[0]) == 5  # on trial again, and well
        assert not balancer.ejected()

    between([sometimes, fine], check)


def test_a_server_that_is_not_ready_is_not_asked() -> None:
    ready = False

    async def loading(request: Received, writer: asyncio.StreamWriter) -> None:
        await (fine if ready or request.method == "POST" else full)(request, writer)

    async def check(balancer: Balancer, servers: list[Scripted]) -> None:
        nonlocal ready
        watching = asyncio.create_task(balancer.watch(0.05))
        await asyncio.sleep(0.1)
        for _ in range(10):
            await balancer.exchange(b"POST", INFER)
        assert inferences(servers[0]) == 0
        ready = True
        await asyncio.sleep(0.2)
        while not inferences(servers[0]):  # it has a small share at first
            await balancer.exchange(b"POST", INFER)
        watching.cancel()

    between([loading, fine], check)


def test_what_a_frozen_server_holds_is_asked_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve.gateway.upstream.node.PROBE_TIMEOUT_S", 0.2)

    async def check(balancer: Balancer, servers: list[Scripted]) -> None:
        watching = asyncio.create_task(balancer.watch(0.05))
        answers = await asyncio.gather(*(balancer.exchange(b"POST", INFER, timeout_s=5) for _ in range(10)))
        assert {each.body for each in answers} == {b"ok"}
        assert inferences(servers[0]) == 5
        watching.cancel()

    between([silent, fine], check)


def test_what_a_server_is_at_work_on_for_nobody_counts_until_it_is_through() -> None:
    """Else the one that computes for who has left would look the least busy."""

    async def works(request: Received, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(1.0 if b"long" in request.body else 0.0)
        writer.write(answer(b"ok"))

    async def check(balancer: Balancer, servers: list[Scripted]) -> None:
        above = LEFT.set(Leaving())
        try:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(balancer.exchange(b"POST", INFER, body=b"long"), 0.1)
        finally:
            LEFT.reset(above)
        (busy,) = [server for server in servers if inferences(server)]
        for _ in range(10):
            await balancer.exchange(b"POST", INFER, body=b"short")
        assert inferences(busy) == 1
        await asyncio.sleep(1.2)
        assert [node.in_flight for node in balancer.nodes] == [0, 0]
        for _ in range(10):
            await balancer.exchange(b"POST", INFER, body=b"short")
        assert inferences(busy) == 6

    between([works, works], check)


def sent(
    balancer: Balancer, *, long: bool = False, instances: int = 1, model: bytes = b"m", needs: Needs | None = None
) -> Attempt:
    """A request begins that needs the instances of a model, of which each server has so many."""
    flight = Flight("key", model.decode(), b"")
    flight.needs = Needs({model.decode(): instances}, long=long) if needs is None else needs
    aboard = ABOARD.set(flight)
    try:
        return balancer.begin(balancer.scope(b"/v2/models/" + model))
    finally:
        ABOARD.reset(aboard)


@pytest.mark.parametrize("instances", [1, 2])
def test_one_with_an_instance_free_of_what_takes_long_is_asked_however_busy_it_is(instances: int) -> None:
    async def check(balancer: Balancer, _: list[Scripted]) -> None:
        first, second = balancer.nodes
        long = [sent(balancer, long=True, instances=instances) for _ in range(2 * instances - 1)]
        taken = first if sum(each.node is first for each in long) == instances else second
        assert {sent(balancer, instances=instances).node for _ in range(20)} == {first, second} - {taken}
        others = [sent(balancer, model=b"other") for _ in range(20)]
        assert taken in {each.node for each in others}  # its instances of another model are free
        for each in [*long, *others]:
            each.end(Verdict.NOTHING, Verdict.NOTHING)
        assert sent(balancer, instances=instances).node is taken  # it is the less busy one now

    between([fine, fine], check)


def test_one_that_has_just_come_is_asked_rather_than_one_that_is_with_what_takes_long() -> None:
    async def check(balancer: Balancer, _: list[Scripted]) -> None:
        first, second = balancer.nodes
        long = sent(balancer, long=True)
        taken, other = (first, second) if long.node is first else (second, first)
        balancer._came(other)
        assert balancer._servers.of(other).weight(time.monotonic(), "") < 0.2
        assert {sent(balancer).node for _ in range(20)} == {other}
        long.end(Verdict.NOTHING, Verdict.NOTHING)
        assert taken in {sent(balancer).node for _ in range(5)}

    between([fine, fine], check)


ENSEMBLE = {"ensemble": 1, "first": 1, "second": 1}


@pytest.mark.parametrize("asked", [b"first", b"second", b"ensemble"])
def test_a_long_request_to_an_ensemble_keeps_only_the_ensemble_from_others(asked: bytes) -> None:
    """Nobody knows with which of its models it is."""

    async def check(balancer: Balancer, _: list[Scripted]) -> None:
        long = sent(balancer, model=b"ensemble", needs=Needs(ENSEMBLE, all_of_them=True, long=True))
        alone = {asked.decode(): 1}
        needs = Needs(ENSEMBLE, all_of_them=True) if asked == b"ensemble" else Needs(alone)
        nodes = {sent(balancer, model=asked, needs=needs).node for _ in range(4)}
        assert (long.node in nodes) is (asked != b"ensemble")

    between([fine, fine], check)


def test_a_long_request_to_one_of_its_models_keeps_an_ensemble_from_the_server() -> None:
    async def check(balancer: Balancer, _: list[Scripted]) -> None:
        long = sent(balancer, model=b"second", long=True)
        needs = Needs(ENSEMBLE, all_of_them=True)
        assert long.node not in {sent(balancer, model=b"ensemble", needs=needs).node for _ in range(4)}

    between([fine, fine], check)


def test_a_candidate_that_is_with_a_long_request_keeps_nobody_from_the_baseline() -> None:
    async def check(balancer: Balancer, _: list[Scripted]) -> None:
        either = Needs({"m": 1, "m-2": 1})
        long = sent(balancer, model=b"m-2", needs=Needs(either.instances, long=True))
        assert long.node in {sent(balancer, needs=either).node for _ in range(4)}
        assert long.node not in {sent(balancer, model=b"m-2", needs=either).node for _ in range(2)}

    between([fine, fine], check)


def test_a_version_with_instances_of_its_own_is_kept_from_nobody_by_another() -> None:
    async def check(balancer: Balancer, _: list[Scripted]) -> None:
        long = sent(balancer, model=b"m/versions/1", needs=Needs({"m": 1}, by_version=True, long=True))
        of_two, of_one = Needs({"m": 1}, by_version=True), Needs({"m": 1})
        assert long.node in {sent(balancer, model=b"m/versions/2", needs=of_two).node for _ in range(4)}
        assert long.node not in {sent(balancer, model=b"m/versions/1", needs=of_two).node for _ in range(2)}
        alone = sent(balancer, model=b"n/versions/1", needs=Needs({"n": 1}, long=True))
        assert alone.node not in {sent(balancer, model=b"n", needs=Needs({"n": 1})).node for _ in range(8)}
        assert of_one.place("m", "m/versions/1") == "m"

    between([fine, fine], check)


def test_nothing_is_left_of_what_was_counted_of_a_server() -> None:
    async def check(balancer: Balancer, _: list[Scripted]) -> None:
        attempts = [sent(balancer, long=long, model=model) for long in (True, False) for model in (b"a", b"b") * 3]
        for each in attempts:
            each.end(Verdict.NOTHING, Verdict.NOTHING)
        assert [(node.in_flight, len(node.occupied)) for node in balancer.nodes] == [(0, 0)] * 2

    between([fine, fine], check)


def test_what_is_there_for_much_longer_than_usual_takes_an_instance_too() -> None:
    async def check(balancer: Balancer, _: list[Scripted]) -> None:
        odd = sent(balancer)
        await asyncio.sleep(2 * ODD_S)
        assert odd.node not in {sent(balancer).node for _ in range(10)}

    between([fine, fine], check)


def test_what_waited_behind_a_long_request_has_nobody_eject_the_server_and_is_no_trial_of_it() -> None:
    async def check(balancer: Balancer, _servers: list[Scripted]) -> None:
        long, *behind = (sent(balancer, long=True), *(sent(balancer) for _ in range(10)))
        assert not long.was_behind
        assert [each.was_behind for each in behind] == [each.node is long.node for each in behind]
        for _ in range(5):
            sent(balancer).end(Verdict.GOOD, Verdict.GOOD)
        outliers = balancer.scope(b"/v2/models/m").outliers
        for who in ("one", "two", "three"):
            failed = Attempt(balancer, long.node, long.scope, time.monotonic(), who=who, trial=False, needs=long.needs)
            failed.end(Verdict.NOTHING, Verdict.GATEWAY_FAILURE)
        assert outliers.of(long.node).ejected(time.monotonic())
        await asyncio.sleep(1.1)  # its trial is due
        assert long.node not in {sent(balancer).node for _ in range(10)}
        long.end(Verdict.NOTHING, Verdict.NOTHING)
        assert sent(balancer).node is long.node

    between([fine, fine], check)


@pytest.mark.parametrize("is_behind", [False, True])
def test_a_time_out_tells_of_a_server_where_the_request_waited_for_no_other(is_behind: bool) -> None:
    async def check(balancer: Balancer, servers: list[Scripted]) -> None:
        for _ in range(2):  # at both
            sent(balancer, long=True) if is_behind else None
        flight = Flight("key", "m", b"")
        flight.needs = Needs({"m": 1})
        aboard = ABOARD.set(flight)
        try:
            for who in ("one", "two", "three", "one", "two", "three"):
                with pytest.raises(ExchangeError):
                    await balancer.exchange(b"POST", INFER, timeout_s=balancer.timeout_s, who=who)
        finally:
            ABOARD.reset(aboard)
        assert bool(balancer.ejected()) is not is_behind
        assert all(inferences(server) for server in servers)

    between([silent, silent], check, timeout_s=0.2)


def test_a_server_that_falls_silent_is_doubted_by_what_waits_for_it_and_others_are_asked() -> None:
    well = asyncio.Event()

    async def freezes(request: Received, writer: asyncio.StreamWriter) -> None:
        await well.wait()
        writer.write(answer(b"ok"))

    async def check(balancer: Balancer, servers: list[Scripted]) -> None:
        well.set()
        watching = asyncio.create_task(balancer.watch(60.0))  # it looks no second time
        begun = time.monotonic()
        took: list[tuple[float, float]] = []

        async def one() -> None:
            since = time.monotonic()
            assert (await balancer.exchange(b"POST", INFER, timeout_s=20)).status == 200
            took.append((since - begun, time.monotonic() - since))

        asking = [asyncio.create_task(one()) for _ in range(4)]
        await asyncio.sleep(0.2)
        well.clear()
        for _ in range(200):
            asking.append(asyncio.create_task(one()))
            await asyncio.sleep(0.02)
        await asyncio.gather(*asking)
        assert max(seconds for since, seconds in took if since > 1.5) < 1.0
        assert max(seconds for _, seconds in took) < 4.0
        assert not balancer.nodes[0].ready
        watching.cancel()

    between([freezes, fine], check)


def test_a_server_that_works_long_is_not_doubted() -> None:
    async def works(request: Received, writer: asyncio.StreamWriter) -> None:
        if request.method == "POST":
            await asyncio.sleep(1.5)
        writer.write(answer(b"ok"))

    async def check(balancer: Balancer, servers: list[Scripted]) -> None:
        balancer.timeout_s = 5.0
        asking = []
        for _ in range(20):
            asking.append(asyncio.create_task(balancer.exchange(b"POST", INFER)))
            await asyncio.sleep(0.1)
        await asyncio.gather(*asking)
        assert [inferences(server) for server in servers] == [10, 10]

    between([works, works], check)


def test_a_gateway_answers_while_one_of_its_servers_is_gone() -> None:
    async def main() -> None:
        async with scripted_server(fine) as triton:
            settings = Settings(upstream=(dead(), triton.url), port=0, health_interval_s=0.1)
            async with gateway(settings) as address:
                answers = await asyncio.gather(*(ask(address, INFER, b"{}") for _ in range(20)))
                assert {each.status for each in answers} == {200}
                assert (await ask(address, b"/readyz")).status == 200
                assert await metric(address, "gateway_upstream_up", upstream=str(triton.address)) == 1
                assert await metric(address, "gateway_upstream_up") == 1

    uvloop.run(main())


def test_all_servers_are_told_what_an_administrator_says(tmp_path: Path) -> None:
    secret, _ = add_key(tmp_path / "keys.json", "admin", admin=True)

    async def main() -> None:
        async with scripted_server(fine) as one, scripted_server(fine) as two:
            settings = Settings(upstream=(one.url, two.url), port=0, keys=tmp_path / "keys.json")
            async with gateway(settings) as address:
                key = (b"authorization", f"Bearer {secret}".encode())
                assert (await ask(address, b"/v2/repository/models/m/load", b"{}", key)).status == 200
                assert [inferences(server) for server in (one, two)] == [1, 1]

    uvloop.run(main())


def test_a_lone_server_that_is_gone_for_long_is_still_asked() -> None:
    async def main() -> None:
        balancer = Balancer([Address.parse(dead())], max_connections=4, timeout_s=1.0)
        for _ in range(3200):  # ever longer ejections may not overflow
            with pytest.raises(ExchangeError, match="no connection"):
                await balancer.exchange(b"POST", INFER)
        await balancer.close()

    uvloop.run(main())


class Names:
    """What a name stands for, in place of a name server."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.hosts: list[str] | None = []
        monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", self.getaddrinfo)

    async def getaddrinfo(self, host: str, port: int, **_: Any) -> list[Any]:
        if self.hosts is None:
            raise OSError("no such name")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port)) for each in self.hosts]


def discovering(monkeypatch: pytest.MonkeyPatch, check: Callable[[Balancer, Names], Awaitable[Any]]) -> None:
    """Run `check` with a balancer that looks servers up by name; uvloop resolves names out of Python's reach."""

    async def main() -> None:
        names = Names(monkeypatch)
        async with scripted_server(fine) as server:
            address = Address("tritons", server.address.port)
            balancer = Balancer([address], max_connections=4, timeout_s=2.0, discover=True)
            try:
                await check(balancer, names)
            finally:
                await balancer.close()

    asyncio.run(main())


def hosts(balancer: Balancer) -> list[str]:
    return [node.address.host for node in balancer.nodes]


@contextmanager
def gone() -> Iterator[Address]:
    """An address that answers nobody who connects, as that of a pod that is gone: its queue is full."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listening, ExitStack() as kept:
        for _ in range(4):
            waiting = kept.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listening.getsockname())
        yield Address(*listening.getsockname())


def test_an_address_that_is_gone_keeps_nobody_waiting() -> None:
    """Connecting to it takes as long as there is time, so what is asked of it is asked of another before."""

    async def main() -> None:
        async with scripted_server(fine) as server:
            with gone() as away:
                balancer = Balancer([away, server.address], max_connections=4, timeout_s=20.0)
                async with asyncio.timeout(15):
                    answers = await asyncio.gather(*(balancer.exchange(b"POST", INFER, body=b"{}") for _ in range(8)))
                    assert {each.body for each in answers} == {b"ok"}
                    assert [each.address for each, _ in balancer.ejected()] == [away]
                await balancer.close()

    uvloop.run(main())


def test_a_loop_that_is_kept_busy_takes_no_server_for_one_that_is_gone() -> None:
    """Those who answered meanwhile are looked at before the time is told."""

    async def main() -> None:
        async with scripted_server(fine) as one, scripted_server(fine) as two:
            balancer = Balancer([one.address, two.address], max_connections=64, timeout_s=20.0)
            asking = [asyncio.ensure_future(balancer.exchange(b"POST", INFER, body=b"{}")) for _ in range(8)]
            await asyncio.sleep(0)  # they have begun to connect
            time.sleep(2 * CONNECT_S)  # noqa: ASYNC251  as work of the gateway's own, or a machine that stands still
            assert {each.body for each in await asyncio.gather(*asking)} == {b"ok"}
            assert not balancer.ejected()
            assert inferences(one) + inferences(two) == 8
            await balancer.close()

    uvloop.run(main())


def test_a_lone_server_is_waited_for() -> None:
    """There is nobody else to be asked: it may be that too many connect at once."""

    async def main() -> None:
        with gone() as away:
            balancer = Balancer([away], max_connections=4, timeout_s=2.5)
            with pytest.raises(ExchangeError, match="in time") as caught:
                await balancer.exchange(b"POST", INFER)
            assert caught.value.kind == "timeout"
            await balancer.close()

    uvloop.run(main())


def test_servers_come_and_go_as_their_name_says(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(balancer: Balancer, names: Names) -> None:
        names.hosts = ["127.0.0.1", "127.0.0.2"]
        await balancer.look_up()
        assert hosts(balancer) == ["127.0.0.1", "127.0.0.2"]
        stays = balancer.nodes[0]
        names.hosts = ["127.0.0.3", "127.0.0.1"]
        await balancer.look_up()
        assert hosts(balancer) == ["127.0.0.1", "127.0.0.3"]
        assert balancer.nodes[0] is stays
        names.hosts = ["127.0.0.1"]
        await balancer.look_up()
        assert (await balancer.exchange(b"POST", INFER)).status == 200

    discovering(monkeypatch, check)


@pytest.mark.parametrize("told", [None, []])
def test_a_name_that_stands_for_nothing_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, told: list[str] | None
) -> None:
    async def check(balancer: Balancer, names: Names) -> None:
        names.hosts = ["127.0.0.1"]
        await balancer.look_up()
        names.hosts = told
        await balancer.look_up()
        assert hosts(balancer) == ["127.0.0.1"]

    discovering(monkeypatch, check)


@pytest.mark.parametrize("name", ["models..example", f"{'m' * 64}.example", "\u0130.example"])
def test_a_name_that_nobody_can_have_is_told_once(name: str, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        balancer = Balancer([Address(name, 1)], max_connections=1, timeout_s=1.0, discover=True)
        for _ in range(3):
            await balancer.look_up()
        assert not any(node.answers for node in balancer.nodes)
        await balancer.close()

    asyncio.run(main())
    assert [name in record.getMessage() for record in caplog.records] == [True]


def test_one_that_goes_still_answers_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(balancer: Balancer, names: Names) -> None:
        names.hosts = ["127.0.0.1"]
        await balancer.look_up()
        leaving = balancer.nodes[0]
        under_way = asyncio.create_task(balancer.exchange(b"POST", INFER))
        await asyncio.sleep(0)
        assert leaving.in_flight == 1
        names.hosts = ["127.0.0.9"]
        await balancer.look_up()
        assert hosts(balancer) == ["127.0.0.9"]
        assert (await under_way).status == 200

    discovering(monkeypatch, check)


def test_a_gateway_discovers_by_itself() -> None:
    """With a real lookup: localhost."""

    async def main() -> None:
        async with scripted_server(fine) as server:
            settings = Settings(upstream=(f"http://localhost:{server.address.port}",), port=0, discover=True)
            async with gateway(settings) as address:
                assert (await ask(address, INFER, b"{}")).status == 200

    uvloop.run(main())


@pytest.mark.parametrize(
    ("status", "said", "leaving"),
    [
        (503, "Server is not ready", True),
        (503, "Server is stopping, scheduler for model has stopped accepting new inference requests", True),
        (400, "Request for unknown model: 'm' is not found", True),
        (404, "Request for unknown model: 'm' has no available versions", True),
        (400, "Request for unknown model: 'm' version 1 is not at ready state", True),
        (503, "in ensemble 'e', Request for unknown model: 'm' version 1 is not at ready state", True),
        (500, "Server is not ready", False),
        (400, "the text 'unavailable' is not one of ours", False),
        (400, "your words: Server is not ready", False),
        (400, "Request for unknown model: 'm' is not found, said the client", False),
        (503, "exiting", False),
    ],
)
def test_only_tritons_own_sentences_tell_that_it_stops(status: int, said: str, leaving: bool) -> None:
    for body in (orjson.dumps({"error": said}), said.encode()):
        assert is_leaving(Response(status, [], body, len(body))) is leaving


EXPIRED = b'{"error":"Request timeout expired"}'
OF_ENSEMBLE = b"""{"error":"in ensemble 'm', Request timeout expired"}"""


@pytest.mark.parametrize(
    ("status", "told", "asked", "verdict"),
    [
        (503, EXPIRED, b'{"parameters":{"timeout":1}}', Verdict.NOTHING),
        (503, OF_ENSEMBLE, b'{"parameters":{"timeout":1}}', Verdict.NOTHING),
        (503, EXPIRED, b'{"parameters":{}}', Verdict.GATEWAY_FAILURE),  # the model's own configuration says how long
        (503, EXPIRED, b'{"inputs":[{"name":"x","data":["timeout"]}]}', Verdict.GATEWAY_FAILURE),
        (503, EXPIRED, b'{"inputs":[{"name":"x","data":["\\"timeout\\":"]}]}', Verdict.GATEWAY_FAILURE),
        (503, b'{"error":"Exceeds maximum queue size"}', b'{"parameters":{"timeout":1}}', Verdict.GATEWAY_FAILURE),
        (500, EXPIRED, b'{"parameters":{"timeout":1}}', Verdict.SERVER_ERROR),
    ],
)
def test_a_client_s_own_time_in_the_queue_says_nothing_of_the_server(
    status: int, told: bytes, asked: bytes, verdict: Verdict
) -> None:
    assert verdict_of(Response(status, [], told, len(told)), asked) is verdict
