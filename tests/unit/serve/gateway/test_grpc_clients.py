"""Clients over gRPC: what one address may have, and what is counted of a message that is on its way."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any, cast

import pytest

from serve.gateway.access.gate import Gate
from serve.gateway.access.long_work import LongWork
from serve.gateway.access.memory import Memory, MemoryFullError, Share
from serve.gateway.grpc.brought import AHEAD_BYTES, CALL_BYTES, SPARE_BYTES, SPARE_EACH_S, Brought, client_of
from serve.gateway.grpc.clients import Clients, TooManyCallsError, address_of
from serve.gateway.grpc.message import Incoming, SlowMessageError
from serve.gateway.oip.contracts import Contracts
from serve.gateway.release.releases import Releases
from serve.gateway.settings import Settings

MIB = 1024 * 1024
PATIENCE_S = 30


@contextlib.contextmanager
def connected(*hosts: str) -> Iterator[tuple[int, list[socket.socket]]]:
    """A port of this process, and connections to it from these addresses; the server's ends are open, too."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("0.0.0.0", 0)))
        port = listener.getsockname()[1]
        clients = []
        for host in hosts:
            source = (host, 0)
            clients.append(stack.enter_context(socket.create_connection(("127.0.0.1", port), PATIENCE_S, source)))
            stack.enter_context(listener.accept()[0])
        yield port, clients


def ended(client: socket.socket) -> bool:
    client.settimeout(0.05)
    try:
        return client.recv(1) == b""
    except TimeoutError:
        return False


def test_of_an_address_with_too_many_connections_the_latest_are_shut_down() -> None:
    clients = Clients(2, 1)
    with connected("127.0.0.1", "127.0.0.1") as (port, early), socket.socket() as other:
        assert clients.look(port) == 0
        other.bind(("127.0.0.1", 0))  # another socket of the process, which is nobody's connection
        assert not any(map(ended, early))
    with connected("127.0.0.1", "127.0.0.2", "127.0.0.1", "127.0.0.1", "127.0.0.2") as (port, there):
        assert clients.look(port) == 1
        assert [ended(client) for client in there[1::3]] == [False, False]  # those of the other address
        assert sum(map(ended, there)) == 1


def test_who_was_there_before_stays() -> None:
    clients = Clients(1, 1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        with socket.create_connection(address, PATIENCE_S) as first, listener.accept()[0]:
            assert clients.look(address[1]) == 0
            with socket.create_connection(address, PATIENCE_S) as second, listener.accept()[0]:
                assert clients.look(address[1]) == 1
                assert ended(second)
                assert not ended(first)


def test_a_connection_that_was_given_up_is_shut_down_and_no_other() -> None:
    clients = Clients(10, 1)
    with connected("127.0.0.1", "127.0.0.1") as (port, (first, second)):
        clients.give_up(f"ipv4:127.0.0.1:{first.getsockname()[1]}")
        clients.give_up("ipv4:127.0.0.1:1")
        clients.give_up("unix:/tmp/socket")
        assert clients.look(port + 1) == 0  # of another port
        clients.give_up(f"ipv4:127.0.0.1:{first.getsockname()[1]}")
        assert clients.look(port) == 1
        assert ended(first)
        assert not ended(second)
        assert clients.look(port) == 0


@pytest.mark.parametrize(
    ("peer", "client", "address"),
    [
        ("ipv4:10.0.0.1:4711", ("10.0.0.1", 4711), "10.0.0.1"),
        ("ipv6:%5B::1%5D:4711", ("::1", 4711), "::/64"),
        ("ipv6:[2001:db8:1:2:3::4]:5", ("2001:db8:1:2:3::4", 5), "2001:db8:1:2::/64"),
        ("ipv6:%5B::ffff:10.0.0.1%5D:5", ("10.0.0.1", 5), "10.0.0.1"),
        ("ipv6:%5Bfe80::1%25eth0%5D:5", ("fe80::1%eth0", 5), "fe80::/64"),
        ("unix:/tmp/socket", None, ""),
        ("ipv4:10.0.0.1", None, ""),
        ("", None, ""),
    ],
)
def test_a_client_has_one_spelling(peer: str, client: tuple[str, int] | None, address: str) -> None:
    assert client_of(peer) == client
    assert address_of(client) == address


ONE = ("10.0.0.1", 4711)
PEER = "ipv4:10.0.0.1:4711"


def test_a_connection_brings_so_much_beyond_its_calls() -> None:
    brought = Brought(MIB)
    assert brought.over({ONE: SPARE_BYTES}, 0.0) == set()
    assert brought.over({ONE: SPARE_BYTES + 1, ("10.0.0.1", 1): 1}, 0.0) == {ONE}
    assert brought.over({ONE: 1}, 0.0) == set(), "another connection, of the same port"
    for second in range(100):
        assert brought.over({ONE: 1 + second * SPARE_EACH_S}, 1.0) == set()
    assert brought.over({ONE: 99 * SPARE_EACH_S + SPARE_BYTES + 2}, 0.0) == {ONE}, (
        "what was spared before adds up to nothing"
    )


def test_what_calls_bring_is_taken_off() -> None:
    brought = Brought(MIB)
    client = brought.begins(PEER)
    assert client == ONE
    size = CALL_BYTES + SPARE_BYTES + MIB + AHEAD_BYTES
    assert brought.over({ONE: size}, 0.0) == set(), "a message may be on its way"
    assert brought.over({ONE: size + 1}, 0.0) == {ONE}
    brought.message(PEER, size - CALL_BYTES)
    brought.ends(client)
    assert brought.over({ONE: size + SPARE_BYTES}, 0.0) == set()
    assert brought.over({ONE: size + SPARE_BYTES + 1}, 0.0) == {ONE}
    assert brought.begins("unix:/tmp/socket") is None


def test_connections_that_are_gone_are_forgotten() -> None:
    brought = Brought(MIB)
    brought.ends(brought.begins(PEER))
    going_on = brought.begins("ipv4:10.0.0.1:1")
    brought.forget()
    assert brought._accounted, "the look at the sockets may have been before"
    brought.forget()
    assert [*brought._accounted] == [going_on]


def test_each_caller_has_so_many_calls() -> None:
    clients = Clients(1, 2)
    clients.enter("a")
    clients.enter("a")
    clients.enter("b")
    with pytest.raises(TooManyCallsError):
        clients.enter("a")
    clients.leave("a")
    clients.enter("a")


class Silent:
    """A call whose message never comes."""

    async def read(self) -> bytes:
        await asyncio.Event().wait()
        return b""


class Held:
    """As much of a gate as is asked for."""

    def __init__(self, bound: int) -> None:
        self.memory = Memory(bound)
        self.long_work = LongWork()


@pytest.mark.parametrize(("bound", "told"), [(16 * MIB, MemoryFullError), (1024 * MIB, SlowMessageError)])
def test_a_message_on_its_way_is_counted_from_its_first_moment(bound: int, told: type[Exception]) -> None:
    settings = Settings(upstream=("http://127.0.0.1:1",), body_timeout_s=0.5)
    gate = Held(bound)
    incoming = Incoming(settings, cast("Gate", gate), cast("Releases", None), cast("Contracts", None), Clients(1, 1))

    async def read() -> None:
        with Share(gate.memory, "key") as share:
            await incoming.message(cast("Any", Silent()), share)

    with pytest.raises(told):
        asyncio.run(read())
    assert gate.memory.used == 0
