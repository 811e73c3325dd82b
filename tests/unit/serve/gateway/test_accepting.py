"""How connections are taken: many in a round of the event loop, by address in turns."""

from __future__ import annotations

import asyncio
import errno
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest

from serve.gateway.access.memory import Memory
from serve.gateway.edge import accepting
from serve.gateway.edge.accepting import Acceptor
from serve.gateway.settings import Settings
from serve.http.client import Address
from tests.serve_http import gateway, in_loop
from tests.unit.serve.gateway.test_connections import PATIENCE_S, noting_connections, until


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses of the connections that have begun, in their order."""
    found: list[str] = []
    noting_connections(monkeypatch, connection_made=lambda connection: found.append(connection.address))
    return found


@pytest.fixture
def clients() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def connect(clients: ExitStack, address: Address, source: str, count: int) -> list[socket.socket]:
    """Connections that the system has made before the gateway's event loop goes on."""
    place = (address.host, address.port)
    return [clients.enter_context(socket.create_connection(place, source_address=(source, 0))) for _ in range(count)]


@in_loop
async def test_many_are_taken_in_a_round(made: list[str], clients: ExitStack) -> None:
    async with gateway(Settings(upstream=("http://127.0.0.1:1",), port=0)) as address:
        connect(clients, address, "127.0.0.2", 300)
        rounds = 0
        while len(made) < 300:
            await asyncio.sleep(0)
            rounds += 1
        assert rounds < 150  # where each round is long, eight begin in one


@in_loop
async def test_an_address_waits_for_no_other(
    monkeypatch: pytest.MonkeyPatch, made: list[str], clients: ExitStack
) -> None:
    monkeypatch.setattr(accepting, "TAKE", 1000)  # so that all are taken in the first round
    async with gateway(Settings(upstream=("http://127.0.0.1:1",), port=0)) as address:
        connect(clients, address, "127.0.0.2", 300)
        connect(clients, address, "127.0.0.3", 1)
        await until(lambda: len(made) == 301)
        assert "127.0.0.3" in made[:2]


@in_loop
async def test_where_more_wait_than_may_who_has_most_loses_its_latest(
    monkeypatch: pytest.MonkeyPatch, made: list[str], clients: ExitStack
) -> None:
    monkeypatch.setattr(accepting, "TAKE", 1000)
    monkeypatch.setattr(accepting, "MOST_WAITING", 20)
    async with gateway(Settings(upstream=("http://127.0.0.1:1",), port=0)) as address:
        many = connect(clients, address, "127.0.0.2", 60)
        connect(clients, address, "127.0.0.3", 3)
        await until(lambda: len(made) == 20)
        assert made.count("127.0.0.3") == 3
        closed = 0
        for each in many:
            each.settimeout(0.01)
            with suppress(TimeoutError):
                closed += each.recv(1) == b""
        assert closed == 43


@in_loop
async def test_who_has_left_before_its_turn_costs_no_turn(made: list[str], clients: ExitStack) -> None:
    async with gateway(Settings(upstream=("http://127.0.0.1:1",), port=0)) as address:
        for each in connect(clients, address, "127.0.0.2", 20):
            each.sendall(b"GET /healthz HTTP/1.1\r\nhost: a\r\n\r\n")
            each.close()
        connect(clients, address, "127.0.0.3", 1)
        await until(lambda: "127.0.0.3" in made)
        assert made == ["127.0.0.3"]


@in_loop
async def test_who_has_reset_its_connection_costs_no_turn(made: list[str], clients: ExitStack) -> None:
    async with gateway(Settings(upstream=("http://127.0.0.1:1",), port=0)) as address:
        for each in connect(clients, address, "127.0.0.2", 20):
            each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            each.close()
        connect(clients, address, "127.0.0.3", 1)
        await until(lambda: "127.0.0.3" in made)
        assert made == ["127.0.0.3"]


@pytest.mark.parametrize("busy", [False, True])
@in_loop
async def test_while_requests_are_under_way_a_flood_has_a_quarter_of_the_time(
    clients: ExitStack, *, busy: bool
) -> None:
    """Counted in begun connections, each of which is booked as what it costs."""
    begun = 0

    class Protocol(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            nonlocal begun
            begun += 1
            transport.close()

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        acceptor = Acceptor(listener, Protocol, Memory(1 << 20), backlog=1000, busy=lambda: busy)
        connect(clients, Address(*listener.getsockname()), "127.0.0.2", 400)
        since = time.monotonic()
        await until(lambda: begun == 400)
        took = time.monotonic() - since
        acceptor.close()
    least = 400 * accepting.BEGIN_S / accepting.SHARE - accepting.ROUND_S
    assert not busy or took > 0.8 * least


class Full(socket.socket):
    """A listening socket of a process that has no file left for the first that comes."""

    full = True

    def accept(self) -> Any:
        if self.full:
            self.full = False
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


@in_loop
async def test_for_want_of_files_those_that_wait_are_closed_and_the_next_are_taken() -> None:
    loop = asyncio.get_running_loop()
    came: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    class Protocol(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            transport.close()
            came.set_result(None)

    with Full() as listener:
        listener.bind(("127.0.0.1", 0))
        acceptor = Acceptor(listener, Protocol, Memory(1 << 20), backlog=10)
        async with asyncio.timeout(PATIENCE_S):
            with socket.create_connection(listener.getsockname()) as shed:
                shed.setblocking(False)
                assert await loop.sock_recv(shed, 1) == b""
            assert not came.done()
            with socket.create_connection(listener.getsockname()):
                await came
        acceptor.close()
        acceptor.close()


class Noting(asyncio.Protocol):
    """Counts the connections that there are."""

    open = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        type(self).open += 1

    def connection_lost(self, exc: Exception | None) -> None:
        type(self).open -= 1


@in_loop
async def test_who_begins_while_it_is_closed_is_not_kept_for_ever(clients: ExitStack) -> None:
    listener = clients.enter_context(socket.create_server(("127.0.0.1", 0)))
    acceptor = Acceptor(listener, Noting, Memory(1 << 20), backlog=100)
    client = clients.enter_context(socket.create_connection(listener.getsockname()))
    client.setblocking(False)
    for _ in range(1000):
        if acceptor._beginning:
            break
        await asyncio.sleep(0)
    assert acceptor._beginning
    acceptor.close()
    async with asyncio.timeout(PATIENCE_S):
        assert await asyncio.get_running_loop().sock_recv(client, 1) == b""
    await until(lambda: not Noting.open)


@pytest.mark.parametrize("kept", [0.0, 0.1], ids=["in the system", "begun, and not read"])
@in_loop
async def test_requests_that_have_come_as_it_ends_are_answered(
    monkeypatch: pytest.MonkeyPatch, clients: ExitStack, kept: float
) -> None:
    loop = asyncio.get_running_loop()
    if not kept:
        monkeypatch.setattr(Acceptor, "_round", lambda _: None)  # takes none
    async with gateway(Settings(upstream=("http://127.0.0.1:1",), port=0)) as address:
        many = connect(clients, address, "127.0.0.2", 40)
        if kept:
            await asyncio.sleep(kept)
        for each in many:
            each.sendall(b"GET /healthz HTTP/1.1\r\nhost: a\r\n\r\n")
            each.setblocking(False)
    answers = [await asyncio.wait_for(loop.sock_recv(each, 100), PATIENCE_S) for each in many]
    assert [answer[:12] for answer in answers] == [b"HTTP/1.1 200"] * 40
