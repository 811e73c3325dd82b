"""Who is connected over gRPC: how much one address may have, and the end of connections whose answers nobody reads.

gRPC's library takes connections itself, and lets nobody refuse, reset or close one (nor does TLS, over HTTP, before its
handshake is over). So the process looks once a second at the sockets that it has, and shuts down those that are too
many from one address, were given up, or bring much that belongs to no call.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
import struct
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator

from serve.gateway.access.addresses import bounded_by, plain
from serve.gateway.errors import GatewayError
from serve.gateway.grpc.brought import Brought, Client, client_of
from serve.gateway.grpc.coming import Coming

__all__ = ["Clients", "Greetings", "TooManyCallsError", "TooManyLeftError", "address_of", "client_of"]

LOOK_S = 1.0
COUNT_S, RARELY = 0.1, 10  # what comes is counted so often, or each time so many times as long as it takes
MOST_LEFT = 64  # streams of one caller that go on though it has left them
OF_RECEIVED = 128  # where Linux' struct tcp_info has the bytes that came, a number of 64 bits


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


class Greetings:
    """Connections that have not finished their TLS handshake, of which the server itself tells nobody.

    Args:
        greeted: those that have.
        most: of the others, of all addresses together. Beyond that, the oldest of the addresses with the most of them
            are too many: nobody's handshake is cut for those of another address that has more.
        seconds: that a handshake may take.
    """

    def __init__(self, greeted: Callable[[], set[Client]], most: int, seconds: float) -> None:
        self._ask = greeted
        self._most = most
        self._seconds = seconds
        self._greeted: set[Client] = set()
        self._since: dict[Client, float] = {}

    def renew(self) -> None:
        """Take down who has greeted by now."""
        self._greeted = self._ask()

    def over(self, connected: set[Client]) -> set[Client]:
        """Those to shut down, of all that are connected."""
        now = time.monotonic()
        silent = connected - self._greeted
        self._since = {client: self._since.get(client, now) for client in silent}
        oldest = sorted(self._since, key=self._since.__getitem__)
        late = {client for client in oldest if now - self._since[client] > self._seconds}
        of_address: dict[str, list[Client]] = defaultdict(list)
        for client in oldest:
            if client not in late:
                of_address[bounded_by(client[0])].append(client)
        share = max(1, _share([len(clients) for clients in of_address.values()], self._most))
        stay = {client for clients in of_address.values() for client in clients[-share:]}
        many = [client for client in oldest if client in stay][: max(0, len(stay) - self._most)]
        return (silent - stay) | set(many)


def _share(wanted: list[int], most: int) -> int:
    """What each may have at most, such that all together have no more than `most`: max-min fair."""
    if sum(wanted) <= most:
        return max(wanted, default=0)
    left = most
    for served, count in enumerate(sorted(wanted)):
        if count * (len(wanted) - served) > left:
            return left // (len(wanted) - served)
        left -= count
    return left


class Clients:
    """The connections and calls of a gateway's clients over gRPC.

    Args:
        most_connections: of one address (of IPv6: of one network of 64 bits).
        most_calls: of one key, or of one address without a key.
        brought: counts what connections bring beyond calls; None where nothing tells of those.
        greetings: bounds connections that have not greeted yet; None where nothing tells which have.
        coming: counts what nobody has read; None where nothing tells of calls.
    """

    def __init__(
        self,
        most_connections: int,
        most_calls: int,
        brought: Brought | None = None,
        greetings: Greetings | None = None,
        coming: Coming | None = None,
    ) -> None:
        self.brought = brought
        self.coming = coming
        self._greetings = greetings
        self._looked = time.monotonic()
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
            if self.coming is None:
                await asyncio.sleep(LOOK_S)
            else:
                await self._count(port, self.coming)
            if self._greetings is not None:
                self._greetings.renew()
            with contextlib.suppress(OSError):  # no file is left to look with: some will be
                await asyncio.to_thread(self.look, port)
                if self.brought is not None:
                    self.brought.forget()

    async def _count(self, port: int, coming: Coming) -> None:
        """Count what comes until it is time to look, or somebody has brought too much."""
        until = time.monotonic() + LOOK_S
        took, over = 0.0, set[Client]()
        while not over and time.monotonic() < until:
            await asyncio.sleep(max(COUNT_S, RARELY * took))
            if coming.some or time.monotonic() >= until:
                began = time.monotonic()
                with contextlib.suppress(OSError):
                    over = coming.count(await asyncio.to_thread(_brought, port))
                took = time.monotonic() - began
        self._given_up |= over

    def look(self, port: int) -> int:
        """Shut down what has to be; how many connections that were. Of one address the latest are too many."""
        given_up = frozenset(self._given_up)
        there: dict[str, list[tuple[bool, Client, int]]] = defaultdict(list)
        received = {}
        for client, number, size in _sockets(port):
            there[address_of(client)].append((client not in self._known, client, number))
            received[client] = size
        if self.brought is not None:
            since, self._looked = self._looked, time.monotonic()
            given_up |= self.brought.over(received, self._looked - since)
        self._known = {client for found in there.values() for _, client, _ in found}
        if self._greetings is not None:
            given_up |= self._greetings.over(self._known)
        ended = 0
        for found in there.values():
            found.sort(key=lambda each: each[0])
            for place, (_, client, number) in enumerate(found):
                if place >= self._most_connections or client in given_up:
                    ended += _shut_down(number, client)
        self._given_up -= given_up
        return ended


def address_of(client: Client | None) -> str:
    """What one client is bounded by; "" for what has no address."""
    return "" if client is None else bounded_by(client[0])


def _sockets(port: int) -> Iterator[tuple[Client, int, int]]:
    """The clients that are connected to a port of this process, the numbers of their sockets, and the bytes of each."""
    for name in os.listdir("/dev/fd"):  # noqa: PTH208  # numbers, not paths
        number = int(name)
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(number).st_mode) and (found := _client(number, port)) is not None:
                yield found[0], number, found[1]


def _brought(port: int) -> dict[Client, int]:
    return {client: size for client, _, size in _sockets(port)}


def _client(number: int, port: int) -> tuple[Client, int] | None:
    # The library may close it at any time, and its number become another's: looked at by a number of our own.
    with socket.socket(fileno=os.dup(number)) as held:
        if held.family not in (socket.AF_INET, socket.AF_INET6) or held.type != socket.SOCK_STREAM:
            return None
        if held.getsockname()[1] != port:
            return None
        host, of_client, *_ = held.getpeername()
        return (plain(host), of_client), _received(held)


def _received(held: socket.socket) -> int:
    """Bytes that a connection has brought; 0 where the system does not tell."""
    if sys.platform != "linux":
        return 0
    told = held.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, OF_RECEIVED + 8)
    return int(struct.unpack_from("<Q", told, OF_RECEIVED)[0]) if len(told) >= OF_RECEIVED + 8 else 0


def _shut_down(number: int, client: Client) -> bool:
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as held:
        host, port, *_ = held.getpeername()
        if (plain(host), port) == client:
            held.shutdown(socket.SHUT_RDWR)
            return True
    return False
