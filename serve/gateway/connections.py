"""Clients' connections: uvicorn's protocol, with five things added.

It waits for the rest of a request for so long only. An endpoint that holds its whole answer can give it in one piece
(RESPOND): ASGI's two messages are checked and written one by one, which costs an eighth of the inference path. It is
told at once when its client leaves (LEAVING), without a task that waits for it. And it gets a body in one piece (BODY):
by ASGI's messages, each 64 KiB of it would be copied twice and stop the socket; or while it still comes (GROWING).
What it holds is counted, and an answer waits for its reader for so long only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import orjson
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from serve.gateway.errors import BodyTooLargeError, ClientGoneError, GatewayError
from serve.gateway.memory import Memory, MemoryFullError, Share
from serve.gateway.protocol import SEQUENCE
from serve.http_body import GrowingBody

__all__ = ["BODY", "GROWING", "LEAVING", "RESPOND", "connection_class"]

SLOWEST_BYTES = 256 * 1024  # that a client has to read in a second
FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nconnection: close\r\nretry-after: 1\r\n"
    b'content-length: 55\r\n\r\n{"error":"the gateway has as many clients as it may"}  '
)
RESPOND, LEAVING, BODY, GROWING = "serve.respond", "serve.leaving", "serve.body", "serve.growing"
MAX_HEAD_BYTES = 64 * 1024
EAGER_BYTES = 32 * 1024  # a client that has sent so much at once will send the rest soon
JOINED_BYTES = 16 * 1024  # below this, one write of a copy costs less than two writes


def connection_class(
    head_timeout_s: float, body_timeout_s: float, write_timeout_s: float, memory: Memory, stopping: asyncio.Event
) -> type[HttpToolsProtocol]:
    """The class of a gateway's connections.

    Args:
        head_timeout_s: for a request's head, and for the first byte of a fresh connection, in seconds.
        body_timeout_s: for a request's body, in seconds.
        write_timeout_s: for reading an answer, in seconds, besides a second for each SLOWEST_BYTES of it.
        memory: holds connections, and answers that wait for their readers.
        stopping: once it is set, each answer is its connection's last: clients come back to whoever listens then.
    """

    class Connection(HttpToolsProtocol):
        _timer: asyncio.TimerHandle | None = None
        _timed = ""  # what the timer is for: "head", "body" or nothing
        _part = ""  # the part of a request that is being read
        _head_bytes = 0
        _leaving: Callable[[], None] | None = None
        _body: _Body | None = None
        _writer: asyncio.TimerHandle | None = None  # runs while an answer waits for its reader
        _waiting: Share | None = None
        _counted = False

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._counted = memory.connect()
            if not self._counted:
                transport.write(FULL)
                transport.close()
                return
            self._time("head")

        def connection_lost(self, exc: Exception | None) -> None:
            self._time("")
            self._read_it()
            if self._counted:
                self._counted = False
                memory.disconnect()
            super().connection_lost(exc)
            if self._leaving is not None:
                self._leaving()
            if self._body is not None:
                self._body.lost()

        # More than the transport's 64 KiB wait for the client to read them.
        def pause_writing(self) -> None:
            super().pause_writing()
            if self._waiting is None:
                self._waiting = Share(memory)
                size = self.transport.get_write_buffer_size()
                self._waiting.resize(size)
                self._writer = self.loop.call_later(write_timeout_s + size / SLOWEST_BYTES, self.transport.abort)

        def resume_writing(self) -> None:
            self._read_it()
            super().resume_writing()

        def _read_it(self) -> None:
            if self._waiting is not None:
                self._waiting.close()
                self._waiting = None
            if self._writer is not None:
                self._writer.cancel()
                self._writer = None

        # A request that comes in one piece, as nearly all do, sets no timer.
        def data_received(self, data: bytes) -> None:
            if not self._counted:
                return
            self._head_bytes += len(data)
            super().data_received(data)
            # Line breaks before a request begin none, and stop uvicorn's own timer: they have no more time than a head.
            idle = self.cycle is None or self.cycle.response_complete
            part = self._part or ("head" if idle else "")
            if part != self._timed:
                self._time(part)
            if self._part == "head" and self._head_bytes > MAX_HEAD_BYTES:
                self.send_400_response("The request's head is too long.")

        def on_message_begin(self) -> None:
            self._part = "head"
            self._head_bytes = 0
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            self._part = "body"
            super().on_headers_complete()
            if stopping.is_set():
                self.cycle.keep_alive = False
            # Its task has not begun yet.
            cycle = self.cycle
            self._body = _Body(cycle)
            extensions: dict[str, Any] = {
                RESPOND: partial(self._respond, cycle),
                LEAVING: self._on_leaving,
                BODY: self._body.whole,
                GROWING: self._body.growing,
            }
            self.scope["extensions"] = extensions

        def on_body(self, body: bytes) -> None:
            if self._body is None or not self._body.took(body):
                super().on_body(body)

        def on_message_complete(self) -> None:
            self._part = ""
            if self._body is not None:
                self._body.complete()
            super().on_message_complete()

        def _respond(self, cycle: RequestResponseCycle, status: int, head: bytes, body: bytes) -> bool:
            """Answer a request; False where it has to be done by ASGI's messages.

            Args:
                status: of the answer.
                head: lines of its headers without a length, each with its line break; nothing that a client chose.
                body: whole.
            """
            if cycle.response_started or self.flow.write_paused:
                return False
            if not cycle.disconnected:
                close = b"" if cycle.keep_alive else b"connection: close\r\n"
                length = b"content-length: %d\r\n\r\n" % len(body)
                if len(body) < JOINED_BYTES:
                    self.transport.write(b"".join((STATUS_LINE[status], head, close, length, body)))
                else:
                    self.transport.write(b"".join((STATUS_LINE[status], head, close, length)))
                    self.transport.write(body)
            cycle.response_started = cycle.response_complete = True
            cycle.message_event.set()
            cycle.scope["extensions"].clear()  # they hold the cycle, and the cycle them
            if not cycle.keep_alive:
                self.transport.close()
            cycle.on_response()
            return True

        def _on_leaving(self, call: Callable[[], None] | None) -> None:
            """Have something called when the client leaves, or has left already; None for nothing more."""
            self._leaving = call
            if call is not None and self.transport.is_closing():
                call()

        def _time(self, part: str) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            self._timed = part
            if part and not self.transport.is_closing():
                seconds = head_timeout_s if part == "head" else body_timeout_s
                self._timer = self.loop.call_later(seconds, self._slow)

        def _slow(self) -> None:
            self._timer = None
            if self.transport.is_closing():
                return
            if self._part and (self.cycle is None or not self.cycle.response_started or self._part == "head"):
                self.transport.write(_answer(self._part))
            self.transport.close()

    return Connection


class _Body:
    """The body of one request, kept for an endpoint that has asked for all of it.

    Args:
        cycle: uvicorn's of this request; it has what came before the endpoint asked.
    """

    __slots__ = ("_chunks", "_cycle", "_growing", "_limit", "_share", "_size", "_whole")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._growing: GrowingBody | None = None
        self._chunks: list[bytes] = []
        self._size = 0
        self._limit = 0
        self._share: Share
        self._whole: asyncio.Future[bytes] | None = None

    async def whole(self, limit: int, share: Share) -> bytes:
        """All of it.

        Args:
            limit: bytes at most.
            share: counts it.

        Raises:
            BodyTooLargeError: it is longer; the rest was not read.
            MemoryFullError: there is no room for it; the rest was not read.
            ClientGoneError: the client left before its end.
        """
        cycle = self._cycle
        if cycle.disconnected:
            raise ClientGoneError
        first = bytes(cycle.body)
        cycle.body = bytearray()
        if len(first) > limit:
            raise BodyTooLargeError(limit)
        share.take(len(first))
        if not cycle.more_body:
            return first
        if cycle.waiting_for_100_continue:
            cycle.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            cycle.waiting_for_100_continue = False
        self._limit = limit
        self._share = share
        self._chunks.append(first)
        self._size = len(first)
        self._whole = asyncio.get_running_loop().create_future()
        cycle.flow.resume_reading()
        try:
            return await self._whole
        finally:
            self._chunks.clear()
            self._whole = None  # it holds the body, and would hold it until the garbage collector comes

    def growing(self, length: int, header_length: int, share: Share) -> GrowingBody | None:
        """The body while it comes; None where it has come, or not much of it, or where it belongs to a sequence.

        Args:
            length: as the head says.
            header_length: of the JSON that it begins with.
            share: counts it.
        """
        cycle = self._cycle
        if cycle.disconnected or not cycle.more_body or len(cycle.body) < max(EAGER_BYTES, header_length):
            return None
        if SEQUENCE in cycle.body[:header_length]:
            return None  # must not be asked twice
        share.take(len(cycle.body))
        self._share = share
        self._growing = GrowingBody(bytes(cycle.body), length)
        cycle.body = bytearray()
        cycle.flow.resume_reading()
        return self._growing

    def took(self, body: bytes) -> bool:
        """Keep a part; False where nobody has asked for the whole."""
        if self._growing is not None:
            if not self._growing.failed:
                try:
                    self._share.take(len(body))
                except MemoryFullError as err:
                    self._growing.fail(err)
                else:
                    self._growing.add(body)
            return True
        if self._whole is None:
            return False
        if not self._whole.done():
            self._size += len(body)
            try:
                if self._size > self._limit:
                    raise BodyTooLargeError(self._limit)
                self._share.take(len(body))
            except GatewayError as err:
                self._chunks.clear()
                self._whole.set_exception(err)
            else:
                self._chunks.append(body)
        return True

    def complete(self) -> None:
        if self._whole is not None and not self._whole.done():
            self._whole.set_result(b"".join(self._chunks))
            self._chunks.clear()

    def lost(self) -> None:
        if self._growing is not None:
            self._growing.fail(ClientGoneError())
        if self._whole is not None and not self._whole.done():
            self._whole.set_exception(ClientGoneError())


def _answer(part: str) -> bytes:
    told = {"error": f"the request's {part} did not come in time", "mend": "send it faster, or less of it"}
    body = orjson.dumps(told)
    head = b"HTTP/1.1 408 Request Timeout\r\ncontent-type: application/json\r\nconnection: close\r\n"
    return b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body)
