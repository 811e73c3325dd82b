"""A lean HTTP/1.1 client on asyncio protocols: the gateway's way to Triton, and the load tester's to both.

One request at a time on a connection, keep-alive, no redirects, no cookies, no TLS. Everything that can go wrong
between two sockets is one exception, `ExchangeError`, told apart by its `kind`.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable

from serve.http.body import GrowingBody
from serve.http.connection import Connection, Done
from serve.http.message import Address, ExchangeError, Held, Kind, Response, encode_head
from serve.http.slots import Slots, Whose

__all__ = ["Address", "Connection", "ExchangeError", "Kind", "Pool", "Response", "encode_head"]

LATER_S = 0.01  # that the loop may be behind
LOOK_S = 0.1  # how often deadlines of requests are looked after that have no timer of their own
KEPT_IDLE, IDLE_S = 32, 10.0  # of more idle connections those are closed that nobody needed for so long
LINGERING = 4  # one part of so many, as there are slots, may linger, and one part of so many of those for one key
NOBODY: Whose = ("", "")


class Pool:
    """A bounded set of connections to one server; the last one used is the first to be used again.

    Each request has a slot, in which its connection is opened where none is idle. Models and keys share the slots (see
    `Slots`); a request that was left has its slot until the server is through with it, for `timeout_s` at most. After
    that, and of those that were not answered in time, connections that linger have none: a quarter as many in all as
    there are slots, a quarter of these for one key with one model, and none of requests that are nobody's.

    A request that meets a reused connection which the server had closed meanwhile, with no byte of a response,
    is sent once more on a fresh connection, unless its caller says that it may be sent only once.

    Args:
        address: the server.
        max_connections: bound on open connections; further requests wait for their turn, those of a model in order.
        timeout_s: for a whole exchange: the wait for a connection, connecting, sending, reading.
        max_response_bytes: longest response body that is accepted.
        hold: makes what counts a long response's bytes for whoever asked; None to count none.
        connect_s: for connecting, of the whole; a server that is not reached by then counts as one that refuses.
        lingers_s: for which it is waited to know when the server is through with what is over for the client.

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
        connect_s: float = math.inf,
        lingers_s: float = 0.0,
    ) -> None:
        self.address = address
        self.timeout_s = timeout_s
        self._lingers_s = lingers_s
        self._connect_s = connect_s
        self._slots = Slots(max_connections)
        self._max_response_bytes = max_response_bytes
        self._hold = hold
        self._idle: list[Connection] = []
        self._busy: dict[Connection, Whose] = {}
        self._left: set[Connection] = set()  # by who asked
        self._lingering: dict[Connection, Whose] = {}
        self._closed = False
        self._look: asyncio.TimerHandle | None = None
        self._pruning: asyncio.TimerHandle | None = None
        self._fewest_idle = 0  # since the last look at them
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
        whose: Whose = NOBODY,
    ) -> Response:
        """Send one request and read its response, whatever its status.

        Args:
            repeatable: whether it may be sent a second time, on a fresh connection.
            whose: the model that is asked, and the key that asks: for its slot, and for `hold`.

        Raises:
            ExchangeError: no whole response came back.
            ValueError: the request can't be written as HTTP (see `encode_head`).
        """
        head = encode_head(method, target, self.address, headers, len(body))
        return await self.exchange(head, body, timeout_s, repeatable=repeatable, whose=whose)

    async def exchange(
        self,
        head: bytes,
        body: bytes | GrowingBody = b"",
        timeout_s: float | None = None,
        *,
        repeatable: bool = True,
        whose: Whose = NOBODY,
    ) -> Response:
        """Like `request`, with a head that was encoded before."""
        deadline = time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s)  # the clock of event loops
        if self._closed:
            raise ExchangeError("refused", "the pool is closed")
        if not self._slots.take(whose):
            await self._slots.wait(whose, deadline)
        connection = self._pop() if self._idle else None
        if connection is None or not connection.usable:  # an idle one may have been closed meanwhile
            return await self._fresh(head, body, deadline, whose)
        self._busy[connection] = whose
        try:
            answer = await connection.exchange(head, body, deadline, whose[1])
        except ExchangeError as err:
            if connection.used and err.unanswered and repeatable:
                return await self.again(connection, err, head, body, deadline)
            self.give(connection)
            raise
        except BaseException:
            self.give(connection)
            raise
        self.give(connection)
        return answer

    def take(self, whose: Whose = NOBODY) -> Connection | None:
        """A connection at hand, which `give` or `again` must give back; None where one would have to be waited for.

        Args:
            whose: the model that is to be asked, and the key that asks.
        """
        if not self._idle or not self._idle[-1].usable or not self._slots.take(whose):
            return None
        connection = self._pop()
        self._busy[connection] = whose
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
            connection.lapse()
        self._look = asyncio.get_running_loop().call_later(LOOK_S, self._look_after) if self._busy else None

    def give(self, connection: Connection) -> None:
        """Give a connection back that was taken."""
        self._release(connection, self._busy.pop(connection))

    async def again(
        self,
        connection: Connection,
        lost: ExchangeError,
        head: bytes,
        body: bytes | GrowingBody,
        deadline: float,
    ) -> Response:
        """Send a request once more, on a fresh connection in the place of one that was closed with no response.

        Raises:
            ExchangeError: `lost` where there is nothing to connect to any more: the server died with the request, and
                it was no idle connection that had been closed.
        """
        self.resent += 1
        whose = self._busy.pop(connection)
        connection.close()
        return await self._fresh(head, body, deadline, whose, lost)

    async def _fresh(
        self,
        head: bytes,
        body: bytes | GrowingBody,
        deadline: float,
        whose: Whose,
        lost: ExchangeError | None = None,
    ) -> Response:
        """Over a connection of its own, in a slot that is held, and is given back."""
        connection: Connection | None = None
        try:
            try:
                connection = await self._connect(deadline)
            except ExchangeError as err:
                if lost is not None:
                    raise lost from err
                raise
            self._busy[connection] = whose
            return await connection.exchange(head, body, deadline, whose[1])
        finally:
            if connection is not None:
                self._busy.pop(connection, None)
            self._release(connection, whose)

    def _release(self, connection: Connection | None, whose: Whose) -> None:
        """Give a slot back: at once, or when the server is through with what was left on its connection."""
        if connection is not None:
            if connection.usable and not self._closed:  # as nearly always
                self._idle.append(connection)
                if self._pruning is None and len(self._idle) > KEPT_IDLE:
                    self._look_at_idle()
            elif (ended := connection.ended) is None or self._closed:
                connection.close()
            elif ended.done():
                self._linger(connection, whose)
            else:
                self._left.add(connection)
                ended.add_done_callback(lambda _: self._through(connection, whose))
                return
        self._slots.give(whose)

    def _through(self, connection: Connection, whose: Whose) -> None:
        self._left.discard(connection)
        self._slots.give(whose)
        self._linger(connection, whose)

    def _linger(self, connection: Connection, whose: Whose) -> None:
        """Have it open still where somebody's request is on it that the server is not through with, and there is room.

        It was sent in somebody's name: of others, nobody counts what the server does.
        """
        through, most = connection.through, max(1, self._slots.most // LINGERING)
        whoses = self._lingering.values()
        own, of_key = sum(each == whose for each in whoses), sum(each[1] == whose[1] for each in whoses)
        has_room = len(whoses) < most and own < max(1, most // LINGERING) and of_key < max(1, most // 2)
        if through is None or through.done() or self._closed or not whose[1] or not has_room:
            connection.close()
        else:
            self._lingering[connection] = whose
            through.add_done_callback(lambda _: self._lingering.pop(connection, None))

    def let_go(self) -> None:
        """Wait no longer for what lingers."""
        for connection in list(self._lingering):
            connection.close()

    def _pop(self) -> Connection:
        connection = self._idle.pop()
        self._fewest_idle = min(self._fewest_idle, len(self._idle))
        return connection

    def _look_at_idle(self) -> None:
        """Have those closed in a while that are not needed until then, of more than `KEPT_IDLE`: the first ones, as the
        last ones are used first."""
        self._fewest_idle = len(self._idle)
        self._pruning = asyncio.get_running_loop().call_later(IDLE_S, self._prune)

    def _prune(self) -> None:
        self._pruning = None
        surplus = max(0, self._fewest_idle - KEPT_IDLE)
        for connection in self._idle[:surplus]:
            connection.close()
        del self._idle[:surplus]
        if len(self._idle) > KEPT_IDLE:
            self._look_at_idle()

    async def close(self) -> None:
        """Close every idle connection, and each of the others when its request ends."""
        self._closed = True
        for connection in (*self._idle, *self._left, *self._lingering):
            connection.close()
        self._idle.clear()
        if self._pruning is not None:
            self._pruning.cancel()

    def abort(self) -> None:
        """End every exchange that is under way, with an ExchangeError of kind "closed".

        The server may go on with what it has, once it answers again: what tells when it is through stays open.
        """
        for connection in list(self._busy):
            connection.abort()
        for connection in list(self._left):
            connection.linger()

    async def _connect(self, deadline: float) -> Connection:
        address = self.address
        until = min(deadline, time.monotonic() + self._connect_s)
        opening = asyncio.ensure_future(self._open())
        try:
            await asyncio.wait((opening,), timeout=max(0.0, until - time.monotonic()))
            if not opening.done():  # a loop that was kept busy tells the time before it has looked who answered
                await asyncio.wait((opening,), timeout=LATER_S)
            if opening.done():
                return opening.result()
        except OSError as err:
            raise ExchangeError("refused", f"no connection to {address}: {err.strerror or err}") from err
        except asyncio.CancelledError:
            opening.add_done_callback(_unwanted)
            raise
        finally:
            opening.cancel()
        if until < deadline:
            late = f"no connection to {address} within {self._connect_s:g} s"
            raise ExchangeError("refused", late) from TimeoutError()
        raise ExchangeError("timeout", f"no connection to {address} in time")

    async def _open(self) -> Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            lambda: Connection(self._max_response_bytes, self._hold, self.timeout_s, self._lingers_s),
            self.address.host,
            self.address.port,
        )
        return connection


def _unwanted(opening: asyncio.Future[Connection]) -> None:
    """A connection that stood as whoever wanted it had left."""
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()
