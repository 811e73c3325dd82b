"""Taking connections: as many in a round of the event loop as wait, and none of one address before another's first.

uvloop's own servers take one in a round. Where the connections that there are make a round long, those that come would
wait for as long as that goes on. To take one is cheap; what begins with it (its protocol, its first requests) is not,
so of those that were taken only so many begin in a round that it stays short, by address in turns. Where more wait than
may, the address with the most of them loses its latest.
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

__all__ = ["MOST_BEGUN", "MOST_WAITING", "Acceptor"]

MOST_TAKEN = 512  # in a round; each takes about 0.01 ms
FEWEST_BEGUN, MOST_BEGUN = 8, 64  # in a round; each takes about 0.1 ms, and what its first requests take
MOST_WAITING = 512  # taken, and not begun
ROUND_S = 0.02  # a longer round is one in which too many began
REST_S = 0.1  # before it tries again, where the system has no room for a connection
CLOSE_WAIT = 8  # among the states of a connection that Linux tells
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
    ) -> None:
        self._listener = listener
        self._protocol = protocol
        self._memory = memory
        self._tls = tls
        self._handshakes = handshakes
        self._greeting_s = greeting_s
        self._most = MOST_BEGUN if handshakes is None else min(MOST_BEGUN, handshakes.most_at_once)
        self._may_begin = self._most
        self._loop = asyncio.get_running_loop()
        self._waiting: OrderedDict[str, deque[socket.socket]] = OrderedDict()
        self._count = 0
        self._turned: float | None = None  # the time of the last turn, while one follows another
        self._beginning: set[asyncio.Task[None]] = set()
        self._resting: asyncio.TimerHandle | None = None
        self._spare = os.open(os.devnull, os.O_RDONLY)
        self._closed = False
        listener.setblocking(False)
        listener.listen(backlog)
        self._loop.add_reader(listener, self._take_some)

    def close(self) -> None:
        """Take no more; those that have begun stay."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._listener)
        if self._resting is not None:
            self._resting.cancel()
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

    def _take_some(self) -> None:
        for _ in range(MOST_TAKEN):
            try:
                connection, peer = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                break
            except OSError as err:
                if err.errno in NO_ROOM:
                    self._shed(err.errno)
                    break
                continue  # it left before it was taken
            if self._handshakes is not None and not self._handshakes.may(peer[0]):
                connection.close()
            else:
                self._hold(connection, bounded_by(peer[0]))
        if self._turned is None:
            self._turn()

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

    def _turn(self) -> None:
        """Begin some of those that wait, the first of each address before another's next."""
        if self._closed:
            return
        now = time.monotonic()
        if self._turned is not None:
            slow = now - self._turned > ROUND_S
            self._may_begin = max(FEWEST_BEGUN, self._may_begin // 2) if slow else self._may_begin + FEWEST_BEGUN
        self._may_begin = min(self._may_begin, self._most)
        begun = 0
        while self._waiting and begun < self._may_begin:
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
        self._turned = now if begun else None
        if begun:  # also where none waits now: this round was no rest
            self._loop.call_soon(self._turn)

    async def _begin(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        # One that leaves, or greets wrongly, is nobody's failure.
        with contextlib.suppress(OSError, ssl.SSLError, asyncio.CancelledError):
            await self._loop.connect_accepted_socket(
                self._protocol,
                connection,
                ssl=self._tls,
                ssl_handshake_timeout=None if self._tls is None else self._greeting_s,
            )

    def _shed(self, why: int | None) -> None:
        """The process has no file for those that wait: they are closed by means of one that is kept for it."""
        if why in NO_FILES and self._spare >= 0:
            os.close(self._spare)
            self._spare = -1
            with contextlib.suppress(OSError):
                for _ in range(MOST_TAKEN):
                    self._listener.accept()[0].close()
            with contextlib.suppress(OSError):
                self._spare = os.open(os.devnull, os.O_RDONLY)
        self._loop.remove_reader(self._listener)
        self._resting = self._loop.call_later(REST_S, self._try_again)

    def _try_again(self) -> None:
        if self._spare < 0:
            with contextlib.suppress(OSError):
                self._spare = os.open(os.devnull, os.O_RDONLY)
        self._loop.add_reader(self._listener, self._take_some)


def _has_left(connection: socket.socket) -> bool:
    """Whether the client has closed its half already: it gets no answer. False where the system does not tell."""
    if sys.platform != "linux":
        return False
    try:
        return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == CLOSE_WAIT
    except OSError:
        return True
