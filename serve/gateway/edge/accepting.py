"""Taking connections: many in a round of the event loop, in a quarter of its time, and none of one address before
another's first.

uvloop's own servers take one in a round. Where the connections that there are make a round long, those that come would
wait for as long as that goes on. To take one is cheap, and so is to close it; what begins with it (its protocol, its
handshake, its first requests) is not. So as many are taken as a round has time for, and of those that were taken only
so many begin that it stays short, by address in turns. While requests are under way, the next round comes after three
times as long. Where more wait than may, the address with the most of them loses its latest.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import ssl
import sys
import time
from collections import OrderedDict, deque
from collections.abc import Callable

from serve.gateway.access.addresses import bounded_by
from serve.gateway.access.handshakes import Handshakes
from serve.gateway.access.memory import Memory

__all__ = ["MOST_WAITING", "Acceptor"]

MOST_SHED = 512  # at once, where there is no file for them
MOST_WAITING = 512  # taken, and not begun
ROUND_S, LONGEST_S = 0.003, 0.01  # that a round may take; the second where others make the loop's rounds long
TAKE = 2 / 3  # of which it may take connections
BEGIN_S = 0.00015  # that one takes which begins in the clear
SHARE = 0.25  # of the event loop's time, while requests are under way
TICK_S = 0.001  # of the loop's timers: what is due sooner is due now
REST_S = 0.1  # before it tries again, where the system has no room for a connection
CLOSE, CLOSE_WAIT = 7, 8  # among the states of a connection that Linux tells: it was reset, or its client's half closed
NO_FILES = (errno.EMFILE, errno.ENFILE)
NO_ROOM = (*NO_FILES, errno.ENOBUFS, errno.ENOMEM)


class Acceptor:
    """Takes the connections of a listening socket; what uvicorn asks of a server.

    Args:
        listener: bound; it is made to listen.
        protocol: makes the protocol of a connection.
        memory: counts those that are refused.
        backlog: connections that may wait in the system.
        tls: None for connections in the clear.
        handshakes: bounds those of TLS; None for no bound.
        greeting_s: that one may take, in seconds.
        busy: whether requests are under way, for which it leaves time.
    """

    def __init__(
        self,
        listener: socket.socket,
        protocol: Callable[[], asyncio.Protocol],
        memory: Memory,
        *,
        backlog: int,
        tls: ssl.SSLContext | None = None,
        handshakes: Handshakes | None = None,
        greeting_s: float = 60.0,
        busy: Callable[[], bool] = lambda: False,
    ) -> None:
        self._listener = listener
        self._protocol = protocol
        self._memory = memory
        self._tls = tls
        self._handshakes = handshakes
        self._greeting_s = greeting_s
        self._begin_s = BEGIN_S if handshakes is None else max(BEGIN_S, handshakes.cost_s)
        self._busy = busy
        self._loop = asyncio.get_running_loop()
        self._waiting: OrderedDict[str, deque[socket.socket]] = OrderedDict()
        self._count = 0
        self._last = time.monotonic()  # round
        self._due = 0.0  # when what was spent is a quarter of the time that has gone by
        self._next: asyncio.Handle | None = None  # round, where one is to come by itself
        self._beginning: set[asyncio.Task[None]] = set()
        self._resting: asyncio.TimerHandle | None = None
        self._spare = os.open(os.devnull, os.O_RDONLY)
        self._stopped = self._closed = False
        listener.setblocking(False)
        listener.listen(backlog)
        self._loop.add_reader(listener, self._round)

    @property
    def beginning(self) -> int:
        """Connections that are taken, and not made yet."""
        return len(self._beginning)

    def take_the_rest(self) -> None:
        """Begin all that the system holds, and listen no more: it would reset them, and their requests were lost."""
        if self._stopped:
            return
        self._stop()
        until = time.monotonic() + REST_S
        while self._take_some(0.0) and time.monotonic() < until:  # one by one
            if self._count >= MOST_WAITING:
                self._begin_some(self._count)
        self._listener.close()
        self._begin_some(self._count)

    def _stop(self) -> None:
        self._stopped = True
        self._loop.remove_reader(self._listener)
        for handle in (self._resting, self._next):
            if handle is not None:
                handle.cancel()
        self._resting = None

    def close(self) -> None:
        """Take no more; those that have begun stay."""
        if self._closed:
            return
        self._closed = True
        if not self._stopped:
            self._stop()
        if self._tls is not None:  # in the clear they end by themselves: uvloop keeps for ever what is cancelled there
            for task in self._beginning:
                task.cancel()
        for waiting in self._waiting.values():
            for connection in waiting:
                connection.close()
        self._waiting.clear()
        if self._spare >= 0:
            os.close(self._spare)

    async def wait_closed(self) -> None:
        """Nothing is left to wait for: connections are their protocols' affair."""

    def _round(self) -> None:
        """Take some, begin some, and come again when it may."""
        now = time.monotonic()
        may = min(LONGEST_S, max(ROUND_S, SHARE * (now - self._last)))
        more = self._take_some(now + TAKE * may)
        self._last = taken = time.monotonic()
        begun = self._begin_some(max(1, int((now + may - taken) / self._begin_s)))
        spent = time.monotonic() - now + begun * self._begin_s
        self._due = max(self._due, now) + spent / SHARE
        rest = self._due - taken
        if not self._busy():
            self._due = taken
        elif rest > TICK_S:
            self._loop.remove_reader(self._listener)
            if self._next is None:
                self._next = self._loop.call_later(rest, self._again)
            return
        if self._waiting and not more and self._next is None:
            self._next = self._loop.call_soon(self._again)

    def _again(self) -> None:
        self._next = None
        if self._stopped:
            return
        if self._resting is None:
            self._loop.add_reader(self._listener, self._round)
        self._round()

    def _take_some(self, until: float) -> bool:
        """Take those that wait in the system, for some time; whether there may be more."""
        if self._resting is not None:
            return False
        while True:
            try:
                connection, peer = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return False
            except OSError as err:
                if err.errno in NO_ROOM:
                    self._shed(err.errno)
                    return False
                continue  # it left before it was taken
            if _has_left(connection) or (self._handshakes is not None and not self._handshakes.may(peer[0])):
                connection.close()
            else:
                self._hold(connection, bounded_by(peer[0]))
            if time.monotonic() >= until:
                return True

    def _hold(self, connection: socket.socket, address: str) -> None:
        self._waiting.setdefault(address, deque()).append(connection)
        self._count += 1
        if self._count > MOST_WAITING:
            most = max(self._waiting, key=lambda each: len(self._waiting[each]))
            self._waiting[most].pop().close()
            if not self._waiting[most]:
                del self._waiting[most]
            self._count -= 1
            self._memory.refused_addresses += 1

    def _begin_some(self, most: int) -> int:
        """Begin so many of those that wait, the first of each address before another's next; how many have begun."""
        begun = 0
        while self._waiting and begun < most:
            address, connections = self._waiting.popitem(last=False)
            connection = connections.popleft()
            self._count -= 1
            if _has_left(connection):
                connection.close()
            else:
                begun += 1
                task = self._loop.create_task(self._begin(connection))
                self._beginning.add(task)
                task.add_done_callback(self._beginning.discard)
            if connections:
                self._waiting[address] = connections
        return begun

    async def _begin(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        # One that leaves, or greets wrongly, is nobody's failure.
        with contextlib.suppress(OSError, ssl.SSLError, asyncio.CancelledError):
            transport, _ = await self._loop.connect_accepted_socket(
                self._protocol,
                connection,
                ssl=self._tls,
                ssl_handshake_timeout=None if self._tls is None else self._greeting_s,
            )
            if self._closed:  # whoever closed it knows nothing of this one
                transport.abort()

    def _shed(self, why: int | None) -> None:
        """The process has no file for those that wait: they are closed by means of one that is kept for it."""
        if why in NO_FILES and self._spare >= 0:
            os.close(self._spare)
            self._spare = -1
            with contextlib.suppress(OSError):
                for _ in range(MOST_SHED):
                    self._listener.accept()[0].close()
            with contextlib.suppress(OSError):
                self._spare = os.open(os.devnull, os.O_RDONLY)
        self._loop.remove_reader(self._listener)
        self._resting = self._loop.call_later(REST_S, self._try_again)

    def _try_again(self) -> None:
        if self._stopped:
            return
        self._resting = None
        if self._spare < 0:
            with contextlib.suppress(OSError):
                self._spare = os.open(os.devnull, os.O_RDONLY)
        self._loop.add_reader(self._listener, self._round)


def _has_left(connection: socket.socket) -> bool:
    """Whether the client has closed its half already, or all: it gets no answer. False where no system tells."""
    if sys.platform != "linux":
        return False
    try:
        return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] in (CLOSE, CLOSE_WAIT)
    except OSError:
        return True
