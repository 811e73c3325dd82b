"""What is a server's death and what is not, as its connections tell; and who is suspected of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from serve.gateway.health.flights import ABOARD, Flight
from serve.gateway.health.incidents import Incidents
from serve.gateway.upstream import deaths
from serve.gateway.upstream.balancer import Balancer
from serve.gateway.upstream.node import Node
from serve.http.client import Address, ExchangeError
from tests.serve_http import answer, in_loop
from tests.unit.serve.gateway.test_balancer import Mortal, until
from tests.unit.serve.gateway.test_upstream import INFER

pytestmark = pytest.mark.clock


class Fleet:
    """A gateway's balancer of servers that may die, without the gateway."""

    def __init__(self, *addresses: Address) -> None:
        self.incidents = Incidents()
        self.balancer = Balancer(addresses, max_connections=64, timeout_s=20.0)
        self.balancer.follow_deaths(self.incidents)

    @property
    def deaths(self) -> int:
        return self.incidents.outages.deaths[""]

    async def ask(self, key: str, body: bytes = b"{}") -> bytes:
        """As the gateway asks: look, wait for the turn, fly, land."""
        suspects = self.incidents.suspects
        flight = Flight(key, "m", body)
        if suspects.watches(key, "m"):
            await suspects.examine(flight, 20.0)
        suspects.take_off(flight)
        above = ABOARD.set(flight)
        answered = False
        try:
            found = await self.balancer.exchange(b"POST", INFER, body=body)
            answered = True
            return found.body
        finally:
            ABOARD.reset(above)
            suspects.land(flight, answered=answered)

    async def looked(self) -> None:
        """What was lost has been looked after."""
        assert self.balancer.deaths is not None
        await asyncio.gather(*self.balancer.deaths._looking.values())


class Probed(Mortal):
    """One that answers probes, whatever it holds."""

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                if head.startswith(b"GET"):
                    writer.write(answer(b""))
                    continue
                await reader.readuntil(b"}")
                if self.held:
                    self.asked.append(writer)
                else:
                    writer.write(answer(b"ok"))
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()


@asynccontextmanager
async def mortals(count: int) -> AsyncIterator[tuple[Fleet, list[Mortal]]]:
    servers: list[Mortal] = [Probed() for _ in range(count)]
    for server in servers:
        await server.live()
    fleet = Fleet(*(server.address for server in servers))
    try:
        async with asyncio.timeout(60):
            yield fleet, servers
    finally:
        await fleet.balancer.close()
        for server in servers:
            server.die()


@in_loop
async def test_those_with_the_server_that_died_are_suspected_and_no_others() -> None:
    async with mortals(2) as (fleet, servers):
        for server in servers:
            server.held = True
        asking = {key: asyncio.create_task(fleet.ask(key)) for key in "abcd"}
        await until(lambda: all(len(server.asked) == 2 for server in servers))
        servers[0].die()
        await until(lambda: len(servers[1].asked) == 4)  # they are asked of the other one
        await fleet.looked()
        assert fleet.deaths == 1
        assert not fleet.balancer.nodes[0].ready
        suspects = fleet.incidents.suspects
        assert len({suspect.key for suspect in suspects._deaths}) == 2
        assert len(suspects._shared) == 2
        servers[1].go_on()
        assert set(await asyncio.gather(*asking.values())) == {b"ok"}


@in_loop
async def test_one_death_of_a_single_key_refuses_nobody_and_a_second_of_the_same_request_does() -> None:
    async with mortals(1) as (fleet, (server,)):
        for times in (1, 2):
            server.held = True
            asking = asyncio.create_task(fleet.ask("a", b"{die}"))
            await until(lambda: bool(server.asked))
            server.die()
            with pytest.raises(ExchangeError):
                await asking
            await fleet.looked()
            assert fleet.deaths == times
            await server.live()
            await fleet.balancer._probes.all()
            assert fleet.balancer.nodes[0].ready
            assert await fleet.ask("b") == b"ok"
        with pytest.raises(Exception, match="not asked this again"):
            await fleet.ask("a", b"{die}")
        assert await fleet.ask("a") == b"ok"
        assert await fleet.ask("b", b"{die}") == b"ok"


@pytest.mark.parametrize(
    "says", [b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", b"", None], ids=["answers", "stops", "silent"]
)
@in_loop
async def test_a_server_that_does_not_refuse_has_not_died(says: bytes | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """It closes one connection, turns all away as it stops, or says nothing any more."""
    monkeypatch.setattr(deaths, "LOOK_TIMEOUT_S", 0.2)
    knocked: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"GET"):
            knocked.append(head)
            writer.write(says or b"")
            if says != b"":
                with suppress(ConnectionError):
                    await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    fleet = Fleet(Address("127.0.0.1", server.sockets[0].getsockname()[1]))
    with pytest.raises(ExchangeError):
        await fleet.ask("a")
    await fleet.looked()
    assert knocked
    assert fleet.deaths == 0
    assert not fleet.incidents.suspects.apart
    await fleet.balancer.close()
    server.close()


@in_loop
async def test_a_server_that_refuses_and_goes_on_with_what_it_has_is_stopping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deaths, "ENDING_S", 0.2)
    async with mortals(1) as (fleet, (server,)):
        server.held = True
        asking = [asyncio.create_task(fleet.ask(key)) for key in "ab"]
        await until(lambda: len(server.asked) == 2)
        assert server._server is not None
        server._server.close()
        server.asked.pop().transport.abort()
        await until(lambda: any(each.done() for each in asking))
        await fleet.looked()
        assert fleet.deaths == 0
        server.go_on()
        assert sum(isinstance(each, bytes) for each in await asyncio.gather(*asking, return_exceptions=True)) == 1


@in_loop
async def test_one_that_takes_no_more_connections_is_asked_no_more_and_answers_what_it_has() -> None:
    """As most servers stop: its probes are answered still, on the connection that they have."""
    async with mortals(2) as (fleet, (leaves, _)):
        node, _ = fleet.balancer.nodes
        leaves.held = True
        asking = [asyncio.create_task(fleet.ask(key)) for key in "abcd"]
        await until(lambda: len(leaves.asked) == 2)
        await fleet.balancer._probes.all()
        assert node.ready
        assert leaves._server is not None
        leaves._server.close()
        for _ in range(3):
            await fleet.balancer._probes.all()
            assert not node.ready
        others = await asyncio.gather(*(fleet.ask("e") for _ in range(6)))
        assert len(leaves.asked) == 2
        leaves.go_on()
        assert {*others, *await asyncio.gather(*asking)} == {b"ok"}
        assert node.in_flight == 0
        leaves.die()
        await fleet.looked()
        assert fleet.deaths == 0, "nothing was with it"
        await leaves.live()
        await fleet.balancer._probes.all()
        assert node.ready


@in_loop
async def test_keys_that_shared_a_death_take_turns_on_one_server_and_the_others_go_elsewhere() -> None:
    async with mortals(3) as (fleet, servers):
        for server in servers:
            server.held = True
        asking = [asyncio.create_task(fleet.ask(key, b"{%b}" % key.encode())) for key in "abcdef"]
        await until(lambda: all(len(server.asked) == 2 for server in servers))
        servers[0].die()
        await until(lambda: sum(len(server.asked) for server in servers) == 6)
        await fleet.looked()
        suspects = fleet.incidents.suspects
        for server in servers[1:]:
            server.go_on()
        await asyncio.gather(*asking)
        assert suspects.apart
        assert fleet.balancer.deaths is not None
        apart = fleet.balancer.deaths.isolated()
        (isolated,) = (server for server in servers if str(server.address) == apart)
        (other,) = (server for server in servers[1:] if server is not isolated)
        isolated.held = other.held = True
        unsuspected = sorted(set("abcdef") - suspects._shared)
        assert len(unsuspected) == 4
        free = [asyncio.create_task(fleet.ask(key)) for key in unsuspected]
        await until(lambda: len(other.asked) == 4)
        in_turn = asyncio.create_task(fleet.ask(min(suspects._shared)))
        await until(lambda: len(isolated.asked) == 1)
        for server in (isolated, other):
            server.go_on()
        assert set(await asyncio.gather(in_turn, *free)) == {b"ok"}


@in_loop
async def test_one_in_its_turn_that_is_lost_is_asked_of_no_other() -> None:
    async with mortals(3) as (fleet, servers):
        suspects = fleet.incidents.suspects
        suspects._turns.begin(None, 60.0)
        suspects._shared.add("a")
        for server in servers:
            server.held = True
        asking = asyncio.create_task(fleet.ask("a"))
        await until(lambda: any(server.asked for server in servers))
        next(server for server in servers if server.asked).die()
        with suppress(ExchangeError):
            await asking
        assert not any(server.asked for server in servers)
        await fleet.looked()
        assert fleet.deaths == 1
        assert suspects._barred._records["a"][0].count == 1


@in_loop
async def test_turns_that_wait_for_a_server_begin_with_whichever_is_back() -> None:
    """A pod may come back as another, under another address."""
    async with mortals(1) as (fleet, (server,)):
        server.held = True
        asking = [asyncio.create_task(fleet.ask(key, b"{%b}" % key.encode())) for key in "ab"]
        await until(lambda: len(server.asked) == 2)
        server.die()
        await asyncio.gather(*asking, return_exceptions=True)
        await fleet.looked()
        turns = fleet.incidents.suspects._turns
        assert turns._down == {None}
        await server.live()
        address = server.address
        fleet.balancer.nodes = [Node(Address("localhost", address.port), 4, 20.0)]
        await fleet.balancer._probes.all()
        assert not turns._down
        assert turns.lasting


@in_loop
async def test_a_dead_server_that_takes_a_connection_before_it_serves_dies_no_second_time() -> None:
    async with mortals(1) as (fleet, (server,)):
        server.held = True
        asking = asyncio.create_task(fleet.ask("bad", b"{die}"))
        await until(lambda: bool(server.asked))
        server.die()
        await asyncio.gather(asking, return_exceptions=True)
        await fleet.looked()

        async def close(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.close()

        for _ in range(5):
            port = await asyncio.start_server(close, "127.0.0.1", server.address.port)
            closing = asyncio.create_task(fleet.ask("good"))
            await asyncio.sleep(0.01)
            port.close()
            await asyncio.gather(closing, return_exceptions=True)
            await fleet.looked()
        assert fleet.deaths == 1
        assert not fleet.incidents.suspects._barred.known("good", "m")
