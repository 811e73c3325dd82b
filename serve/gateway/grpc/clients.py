"""Who is connected over gRPC: how much one address may have, and the end of connections whose answers nobody reads.

gRPC's library takes connections itself, and lets nobody refuse, reset or close one (nor does TLS, over HTTP, before its
handshake is over). So the process looks once a second at the sockets that it has, and shuts down those that are too
many from one address, or were given up.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
from collections import Counter, defaultdict
from collections.abc import Iterator
from urllib.parse import unquote

from serve.gateway.access.addresses import bounded_by, plain
from serve.gateway.errors import GatewayError

__all__ = ["Clients", "TooManyCallsError", "TooManyLeftError", "address_of", "client_of"]

LOOK_S = 1.0
MOST_LEFT = 64  # streams of one caller that go on though it has left them
Client = tuple[str, int]


class TooManyCallsError(GatewayError):
    """One client has as many calls under way as it may."""

    status = 429

    def __init__(self, most: int) -> None:
        super().__init__(
            "too many calls are under way", why=f"a key, or an address without one, may have {most} at a time",
            mend="end some of them first",
        )  # fmt: skip


class TooManyLeftError(GatewayError):
    """One client has left as many streams as it may."""

    status = 429

    def __init__(self) -> None:
        super().__init__(
            "too many streams were left before their end",
            why=f"the model goes on with them, and a key, or an address without one, may have {MOST_LEFT} of these",
            mend="read streams to their end, or wait for those that were left",
        )  # fmt: skip


class Clients:
    """The connections and calls of a gateway's clients over gRPC.

    Args:
        most_connections: of one address (of IPv6: of one network of 64 bits).
        most_calls: of one key, or of one address without a key.
    """

    def __init__(self, most_connections: int, most_calls: int) -> None:
        self._most_connections = most_connections
        self._most_calls = most_calls
        self._calls: Counter[str] = Counter()
        self._left: Counter[str] = Counter()
        self._given_up: set[Client] = set()
        self._known: set[Client] = set()

    def enter(self, caller: str) -> None:
        """A call begins; `leave` must follow. Raises TooManyCallsError.

        Args:
            caller: a key's id, or an address.
        """
        if self._calls[caller] >= self._most_calls:
            raise TooManyCallsError(self._most_calls)
        self._calls[caller] += 1

    def leave(self, caller: str) -> None:
        """A call is over."""
        self._calls[caller] -= 1
        if not self._calls[caller]:
            del self._calls[caller]

    def check_left(self, caller: str) -> None:
        """Whether it may begin a stream; raises TooManyLeftError."""
        if self._left[caller] >= MOST_LEFT:
            raise TooManyLeftError

    def left(self, caller: str, by: int) -> None:
        """So many more of its streams (fewer where below 0) go on without it."""
        self._left[caller] += by
        if not self._left[caller]:
            del self._left[caller]

    def give_up(self, peer: str) -> None:
        """Have a connection shut down, as gRPC names it."""
        if (client := client_of(peer)) is not None:
            self._given_up.add(client)

    async def watch(self, port: int) -> None:
        """Look until cancelled.

        Args:
            port: that clients connect to.
        """
        while True:
            await asyncio.sleep(LOOK_S)
            with contextlib.suppress(OSError):  # no file is left to look with: some will be
                await asyncio.to_thread(self.look, port)

    def look(self, port: int) -> int:
        """Shut down what has to be; how many connections that were. Of one address the latest are too many."""
        given_up = frozenset(self._given_up)
        there: dict[str, list[tuple[bool, Client, int]]] = defaultdict(list)
        for client, number in _sockets(port):
            there[address_of(client)].append((client not in self._known, client, number))
        self._known = {client for found in there.values() for _, client, _ in found}
        ended = 0
        for found in there.values():
            found.sort(key=lambda each: each[0])
            for place, (_, client, number) in enumerate(found):
                if place >= self._most_connections or client in given_up:
                    ended += _shut_down(number, client)
        self._given_up -= given_up
        return ended


def client_of(peer: str) -> Client | None:
    """Address and port of what gRPC names, as in ipv4:10.0.0.1:4711 and ipv6:%5B::1%5D:4711; None for other kinds."""
    kind, _, rest = peer.partition(":")
    host, _, port = unquote(rest).rpartition(":")
    if kind not in ("ipv4", "ipv6") or not port.isdecimal():
        return None
    return plain(host.strip("[]")), int(port)


def address_of(client: Client | None) -> str:
    """What one client is bounded by; "" for what has no address."""
    return "" if client is None else bounded_by(client[0])


def _sockets(port: int) -> Iterator[tuple[Client, int]]:
    """The clients that are connected to a port of this process, and the numbers of their sockets."""
    for name in os.listdir("/dev/fd"):  # noqa: PTH208  # numbers, not paths
        number = int(name)
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(number).st_mode) and (client := _client(number, port)) is not None:
                yield client, number


def _client(number: int, port: int) -> Client | None:
    # The library may close it at any time, and its number become another's: looked at by a number of our own.
    with socket.socket(fileno=os.dup(number)) as held:
        if held.family not in (socket.AF_INET, socket.AF_INET6) or held.type != socket.SOCK_STREAM:
            return None
        if held.getsockname()[1] != port:
            return None
        host, of_client, *_ = held.getpeername()
        return plain(host), of_client


def _shut_down(number: int, client: Client) -> bool:
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as held:
        host, port, *_ = held.getpeername()
        if (plain(host), port) == client:
            held.shutdown(socket.SHUT_RDWR)
            return True
    return False
