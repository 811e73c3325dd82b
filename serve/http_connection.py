"""One keep-alive HTTP/1.1 connection on an asyncio protocol, its responses read by httptools."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import httptools

from serve.http_body import GrowingBody
from serve.http_message import ExchangeError, Held, Response

__all__ = ["Connection"]

MAX_HEAD_BYTES = 64 * 1024
SHORT_BYTES = 64 * 1024
STALL_S = 0.25  # how long a server is kept waiting for a body that comes in parts
_ONE_WRITE_BYTES = 16 * 1024  # below this, joining head and body costs less than a second write


class Connection(asyncio.Protocol):
    """One keep-alive connection with one request in flight.

    Args:
        max_response_bytes: longest body that is accepted.
        hold: makes what counts a long body's bytes; what it raises ends the exchange.

    Attributes:
        usable: open, idle and in step with the server.
        used: a whole response has been read from it.
    """

    def __init__(self, max_response_bytes: int, hold: Callable[[], Held] | None = None) -> None:
        self._hold = hold
        self.usable = False
        self.used = False
        self._max_bytes = max_response_bytes
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._waiter: asyncio.Future[Response] | None = None
        self._failure: Exception | None = None
        self._begin()

    def _begin(self) -> None:
        self._headers: list[tuple[bytes, bytes]] = []
        self._chunks: list[bytes] = []
        self._body_bytes = 0
        self._held: Held | None = None
        self._wire_bytes = 0
        self._head_done = False
        self._framed = False

    async def exchange(self, head: bytes, body: bytes | GrowingBody, deadline: float) -> Response:
        """Send a request and read its response.

        A cancelled exchange closes the connection: what the server still sends belongs to nobody.

        Args:
            head: from `encode_head`.
            body: of the length that the head says; sent as it comes, where it is still coming.
            deadline: on the loop's clock.

        Raises:
            ExchangeError: "closed", "timeout", "stalled", "malformed" or "too_large".
        """
        if not self.usable or self._transport is None:
            raise ExchangeError("closed", "the connection is closed", unanswered=True)
        self.usable = False
        self._begin()
        waiter = self._waiter = self._loop.create_future()
        timer = self._loop.call_at(deadline, self._expire)
        stall: asyncio.TimerHandle | None = None
        if isinstance(body, GrowingBody):
            self._transport.write(head)
            body.attach(self._transport.write)
            stall = self._loop.call_later(STALL_S, self._stalled, body)
        elif len(body) < _ONE_WRITE_BYTES:
            self._transport.write(head + body)
        else:
            self._transport.write(head)
            self._transport.write(body)
        try:
            response: Response = await waiter
            return response
        except asyncio.CancelledError:
            self.close()
            raise
        finally:
            timer.cancel()
            self._waiter = None
            if stall is not None and isinstance(body, GrowingBody):
                stall.cancel()
                body.detach()
                if not body.whole:
                    self.close()  # the server waits for the rest

    def close(self) -> None:
        """Close at once; what was not yet sent is dropped."""
        self.usable = False
        if self._transport is not None:
            self._transport.abort()

    def abort(self) -> None:
        """End the exchange that is under way, with an ExchangeError of kind "closed"."""
        self._fail(ExchangeError("closed", "given up: the server does not answer"))

    def _expire(self) -> None:
        self._fail(ExchangeError("timeout", "no whole response in time"))

    def _stalled(self, body: GrowingBody) -> None:
        if not body.whole:
            self._fail(ExchangeError("stalled", "the request's body comes too slowly to be sent as it comes"))

    def _fail(self, error: Exception) -> None:
        self.close()
        self._chunks = []
        self._held = None
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(error)

    # asyncio calls these.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are no subclasses
        self.usable = True

    def data_received(self, data: bytes) -> None:
        if self._waiter is None or self._waiter.done():
            self.close()  # bytes that no request asked for: the stream is out of step
            return
        self._wire_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._fail(ExchangeError("malformed", "the server switched protocols"))
        except httptools.HttpParserError as err:
            self._fail(self._failure or ExchangeError("malformed", f"the response is not HTTP: {err}"))
        else:
            if not self._head_done and self._wire_bytes > MAX_HEAD_BYTES:
                self._fail(ExchangeError("too_large", f"the response's head is over {MAX_HEAD_BYTES} bytes"))

    def eof_received(self) -> bool:
        self.usable = False
        return False  # the transport closes itself, and connection_lost follows

    def connection_lost(self, exc: Exception | None) -> None:
        self.usable = False
        if self._waiter is None or self._waiter.done():
            return
        if exc is None and self._head_done and not self._framed:
            self._complete(keep_alive=False)  # a body without a length ends with the connection
            return
        unanswered = self._wire_bytes == 0
        at = "before a response" if unanswered else "in the middle of the response"
        self._fail(ExchangeError("closed", f"the server closed the connection {at}", unanswered=unanswered))

    # httptools calls these.

    def on_message_begin(self) -> None:
        if self._waiter is None or self._waiter.done():
            raise ValueError("a second response to one request")

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        self._headers.append((name, value))
        if name == b"content-length" or (name == b"transfer-encoding" and b"chunked" in value.lower()):
            self._framed = True
        if name == b"content-length" and value.isdigit() and int(value) > self._max_bytes:
            self._too_large()

    def on_headers_complete(self) -> None:
        self._head_done = True

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        if self._body_bytes > self._max_bytes:
            self._too_large()
        if self._hold is not None and self._body_bytes > SHORT_BYTES:
            self._count(self._hold, len(body))
        self._chunks.append(body)

    def on_message_complete(self) -> None:
        if 100 <= self._parser.get_status_code() < 200:
            wire_bytes = self._wire_bytes
            self._begin()  # "100 Continue" and its kind announce the response, they are not it
            self._wire_bytes = wire_bytes
            return
        self._complete(keep_alive=self._parser.should_keep_alive())

    def _count(self, hold: Callable[[], Held], size: int) -> None:
        if self._held is None:
            self._held = hold()
            size = self._body_bytes
        try:
            self._held.take(size)
        except Exception as err:
            self._failure = err
            raise

    def _too_large(self) -> None:
        self._failure = ExchangeError("too_large", f"the response's body is over {self._max_bytes} bytes")
        raise self._failure

    def _complete(self, *, keep_alive: bool) -> None:
        body = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
        if self._waiter is not None and not self._waiter.done():
            status = self._parser.get_status_code()
            self._waiter.set_result(Response(status, self._headers, body, self._wire_bytes, self._held))
        self._chunks = []
        self._held = None
        self.used = True
        if keep_alive:
            self.usable = True
        else:
            self.close()
