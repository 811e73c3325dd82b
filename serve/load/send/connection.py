"""One keep-alive connection of the generator, with one request in flight: no task, no future, no timer of its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol, cast

import httptools

from serve.load.ask.check import Answer

__all__ = ["Connection", "Flight", "HttpConnection"]

_HEADER_LENGTH = b"inference-header-content-length"
_RETRY_AFTER = b"retry-after"
clock = time.perf_counter_ns


class Flight:
    """A request under way: its number, and times of `perf_counter_ns`.

    Attributes:
        due_ns: when it was to be sent.
        taken_ns: when the generator came to it.
        sent_ns: when a connection was free for it.
    """

    __slots__ = ("due_ns", "number", "sent_ns", "taken_ns")

    def __init__(self, number: int, due_ns: int, taken_ns: int) -> None:
        self.number = number
        self.due_ns = due_ns
        self.taken_ns = taken_ns
        self.sent_ns = 0


class Connection(Protocol):
    """Carries one request at a time, and tells `ended` how it came out.

    Attributes:
        flight: what it carries; None while it is free.
        kind: how the last one came out; "" for an answer of status 200.
        wire_bytes: of the last answer.
        answer: the last one, where answers are kept.
        retry_after_s: what the last one asked for; None where it did not, or answers are not kept.
        refusals: how often it was turned away since it was last served; its user counts.
    """

    flight: Flight | None
    kind: str
    wire_bytes: int
    answer: Answer | None
    retry_after_s: float | None
    refusals: int

    def send(self, flight: Flight, wire: bytes) -> None: ...

    def fail(self, kind: str) -> None: ...

    def close(self) -> None: ...


class HttpConnection(asyncio.Protocol):
    """Over HTTP/1.1.

    Each request is sent once. One whose connection the server closes with no byte of an answer has failed ("closed"),
    also where the connection was used before: sent again in silence, a server that drops requests would look well.

    Args:
        host, port: the server.
        ended: called when the request that it carried has ended; the connection is free then.
        keep: whether answers are kept.
    """

    def __init__(self, host: str, port: int, ended: Callable[[Connection], None], *, keep: bool) -> None:
        self.flight: Flight | None = None
        self.kind = ""
        self.wire_bytes = 0
        self.answer: Answer | None = None
        self.retry_after_s: float | None = None
        self.refusals = 0
        self._host = host
        self._port = port
        self._ended = ended
        self._keep = keep
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._parser: Any = None
        self._wire = b""
        self._first = b""
        self._whole = self._keep_alive = False
        self._chunks: list[bytes] = []
        self._header_length: int | None = None
        if keep:  # httptools asks for these only where they are, which spares time where they are not
            self.on_body = self._chunks_append
            self.on_header = self._on_header

    async def open(self) -> None:
        """Connect ahead of the first request; a refusal shows when that is sent."""
        with suppress(OSError):
            await self._loop.create_connection(lambda: self, self._host, self._port)

    def send(self, flight: Flight, wire: bytes) -> None:
        """Send a request; `ended` is called later, never from here."""
        self.flight = flight
        self.kind = ""
        self.wire_bytes = 0
        self._wire = wire
        if self._keep:
            self.answer = self.retry_after_s = None
            self._chunks.clear()
            self._header_length = None
        flight.sent_ns = clock()
        if self._transport is not None:
            self._transport.write(wire)
        else:
            self._connecting = self._loop.create_task(self._connect())

    def fail(self, kind: str) -> None:
        """End the request that is under way, and the connection: what the server still sends belongs to nobody."""
        self.close()
        if self.flight is not None:
            self.kind = kind
            self._ended(self)

    def close(self) -> None:
        transport, self._transport = self._transport, None
        if self._connecting is not None:
            self._connecting.cancel()
            self._connecting = None
        if transport is not None:
            transport.abort()

    async def _connect(self) -> None:
        try:
            await self._loop.create_connection(lambda: self, self._host, self._port)
        except OSError:
            self._connecting = None
            self.fail("refused")
            return
        self._connecting = None
        if self._transport is not None:
            self._transport.write(self._wire)

    # The event loop calls these.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are no subclasses
        self._parser = httptools.HttpResponseParser(self)

    def data_received(self, data: bytes) -> None:
        if self.flight is None:
            self.close()  # bytes that no request asked for: the stream is out of step
            return
        if self.wire_bytes == 0:
            self._first = data
        self.wire_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self.fail("malformed")
            return
        if self._whole:
            self._whole = False
            self._finish(keep_alive=self._keep_alive)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._transport is None:
            return  # closed by us
        self._transport = None
        if self.flight is None:
            return
        if exc is None and b"\r\n\r\n" in self._first:
            head = self._first.partition(b"\r\n\r\n")[0].lower()
            if b"\r\ncontent-length:" not in head and b"chunked" not in head:
                self._finish(keep_alive=False)  # a body without a length ends with the connection
                return
        self.fail("closed")

    def _finish(self, *, keep_alive: bool) -> None:
        status = self._parser.get_status_code()
        if status != 200:
            self.kind = f"status {status}"
        elif self._keep:
            self.answer = Answer(b"".join(self._chunks), self._header_length)
        if not keep_alive:
            self.close()
        self._ended(self)

    # httptools calls these.

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() >= 200:  # "100 Continue" and its kind announce the response, they are not it
            self._whole = True
            self._keep_alive = self._parser.should_keep_alive()  # the parser forgets it with the next message

    def _chunks_append(self, body: bytes) -> None:
        self._chunks.append(body)

    def _on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == _HEADER_LENGTH and value.isdigit():
            self._header_length = int(value)
        elif name == _RETRY_AFTER and value.isdigit():
            self.retry_after_s = float(value)
