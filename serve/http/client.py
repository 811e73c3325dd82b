"""A lean HTTP/1.1 client on asyncio protocols: the gateway's way to Triton, and the load tester's to both.

One request at a time on a connection, keep-alive, no redirects, no cookies, no TLS. Everything that can go wrong
between two sockets is one exception, `ExchangeError`, told apart by its `kind`.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable

from serve.http.body import GrowingBody
from serve.http.connection import Connection, Done
from serve.http.message import Address, ExchangeError, Held, Kind, Response, encode_head

__all__ = ["Address", "Connection", "ExchangeError", "Kind", "Pool", "Response", "encode_head"]

LOOK_S = 0.1  # how often deadlines of requests are looked after that have no timer of their own


class Pool:
    """A bounded set of connections to one server; the last one used is the first to be used again.

    A request that meets a reused connection which the server had closed meanwhile, with no byte of a response,
    is sent once more on a fresh connection, unless its caller says that it may be sent only once.

    Args:
        address: the server.
        max_connections: bound on open connections; further requests wait for their turn, in order.
        timeout_s: for a whole exchange: the wait for a connection, connecting, sending, reading.
        max_response_bytes: longest response body that is accepted.
        hold: makes what counts a long response's bytes for whoever asked; None to count none.

    Attributes:
        resent: requests that were sent once more.
    """

    def __init__(
        self,
        address: Address,
        *,
        max_connections: int = 64,
        timeout_s: float = 30.0,
        max_response_bytes: int = 1 << 30,
        hold: Callable[[str], Held] | None = None,
    ) -> None:
        self.address = address
        self.timeout_s = timeout_s
        self._max_connections = max_connections
        self._max_response_bytes = max_response_bytes
        self._hold = hold
        self._idle: list[Connection] = []
        self._busy: set[Connection] = set()
        self._left: set[Connection] = set()  # by who asked; they hold no slot
        self._waiters: deque[asyncio.Future[Connection | None]] = deque()
        self._open = 0
        self._closed = False
        self._look: asyncio.TimerHandle | None = None
        self.resent = 0

    async def request(
        self,
        method: bytes,
        target: bytes,
        headers: Iterable[tuple[bytes, bytes]] = (),
        body: bytes | GrowingBody = b"",
        *,
        timeout_s: float | None = None,
        repeatable: bool = True,
        who: str = "",
    ) -> Response:
        """Send one request and read its response, whatever its status.

        Args:
            repeatable: whether it may be sent a second time, on a fresh connection.
            who: asks, for `hold`.

        Raises:
            ExchangeError: no whole response came back.
            ValueError: the request can't be written as HTTP (see `encode_head`).
        """
        head = encode_head(method, target, self.address, headers, len(body))
        return await self.exchange(head, body, timeout_s, repeatable=repeatable, who=who)

    async def exchange(
        self,
        head: bytes,
        body: bytes | GrowingBody = b"",
        timeout_s: float | None = None,
        *,
        repeatable: bool = True,
        who: str = "",
    ) -> Response:
        """Like `request`, with a head that was encoded before."""
        deadline = time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s)  # the clock of event loops
        connection: Connection | None = self._idle.pop() if self._idle else await self._acquire(deadline)
        if connection is None or not connection.usable:  # an idle one may have been closed meanwhile
            return await self._fresh(head, body, deadline, who)
        self._busy.add(connection)
        try:
            answer = await connection.exchange(head, body, deadline, who)
        except ExchangeError as err:
            if connection.used and err.unanswered and repeatable:
                return await self.again(connection, err, head, body, deadline, who)
            self.give(connection)
            raise
        except BaseException:
            self.give(connection)
            raise
        self.give(connection)
        return answer

    def take(self) -> Connection | None:
        """A connection at hand, which `give` or `again` must give back; None where one would have to be waited for."""
        if not self._idle or not self._idle[-1].usable:
            return None
        connection = self._idle.pop()
        self._busy.add(connection)
        return connection

    def send(
        self, connection: Connection, head: bytes, body: bytes, deadline: float, done: Done, who: str = ""
    ) -> None:
        """`Connection.send`, with the deadline looked after: coarsely, and without a timer for each request."""
        if self._look is None:
            self._look = asyncio.get_running_loop().call_later(LOOK_S, self._look_after)
        connection.send(head, body, deadline, done, who)

    def _look_after(self) -> None:
        now = time.monotonic()
        for connection in [each for each in self._busy if each.deadline <= now]:
            connection.expire()
        self._look = asyncio.get_running_loop().call_later(LOOK_S, self._look_after) if self._busy else None

    def give(self, connection: Connection) -> None:
        """Give a connection back that was taken."""
        self._busy.discard(connection)
        if connection.usable and not self._waiters and not self._closed:  # as nearly always
            self._idle.append(connection)
        else:
            self._release(connection)

    async def again(
        self,
        connection: Connection,
        lost: ExchangeError,
        head: bytes,
        body: bytes | GrowingBody,
        deadline: float,
        who: str = "",
    ) -> Response:
        """Send a request once more, on a fresh connection in the place of one that was closed with no response.

        Raises:
            ExchangeError: `lost` where there is nothing to connect to any more: the server died with the request, and
                it was no idle connection that had been closed.
        """
        self.resent += 1
        self._busy.discard(connection)
        connection.close()
        return await self._fresh(head, body, deadline, who, lost)

    async def _fresh(
        self, head: bytes, body: bytes | GrowingBody, deadline: float, who: str, lost: ExchangeError | None = None
    ) -> Response:
        """Over a connection of its own, for a slot that is held, and is given back."""
        connection: Connection | None = None
        try:
            try:
                connection = await self._connect(deadline)
            except ExchangeError as err:
                if lost is not None:
                    raise lost from err
                raise
            self._busy.add(connection)
            return await connection.exchange(head, body, deadline, who)
        finally:
            if connection is not None:
                self._busy.discard(connection)
            self._release(connection)

    def _part(self, connection: Connection) -> None:
        """Close it, or wait until the server is through with what was left on it."""
        ended = connection.ended
        if ended is None or ended.done() or self._closed:
            connection.close()
            return
        self._left.add(connection)
        ended.add_done_callback(lambda _: self._left.discard(connection))

    async def close(self) -> None:
        """Close every idle connection, and each of the others when its request ends."""
        self._closed = True
        for connection in (*self._idle, *self._left):
            connection.close()
        self._open -= len(self._idle)
        self._idle.clear()

    def abort(self) -> None:
        """End every exchange that is under way, with an ExchangeError of kind "closed"."""
        for connection in list(self._busy):
            connection.abort()
        for connection in list(self._left):
            connection.close()

    async def _acquire(self, deadline: float) -> Connection | None:
        """A slot, when no connection is idle; with a connection that was given back meanwhile, where it had to wait."""
        if self._closed:
            raise ExchangeError("refused", "the pool is closed")
        if self._open < self._max_connections:
            self._open += 1
            return None
        waiter: asyncio.Future[Connection | None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            async with asyncio.timeout_at(deadline):
                try:
                    return await waiter
                except asyncio.CancelledError:
                    if waiter.done() and not waiter.cancelled():
                        self._release(waiter.result())  # the slot came too late for us: pass it on
                    raise
        except TimeoutError:
            message = f"all {self._max_connections} connections to {self.address} were in use"
            raise ExchangeError("busy", message) from None

    async def _connect(self, deadline: float) -> Connection:
        loop = asyncio.get_running_loop()
        address = self.address
        try:
            async with asyncio.timeout_at(deadline):
                _, connection = await loop.create_connection(
                    lambda: Connection(self._max_response_bytes, self._hold, self.timeout_s), address.host, address.port
                )
        except TimeoutError:
            raise ExchangeError("timeout", f"no connection to {address} in time") from None
        except OSError as err:
            raise ExchangeError("refused", f"no connection to {address}: {err.strerror or err}") from err
        return connection

    def _release(self, connection: Connection | None) -> None:
        """Give a slot back, to whoever waits longest."""
        kept = connection if connection is not None and connection.usable and not self._closed else None
        if kept is None and connection is not None:
            self._part(connection)
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(kept)
                return
        if kept is None:
            self._open -= 1
        else:
            self._idle.append(kept)
