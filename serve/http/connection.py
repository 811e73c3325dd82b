"""One keep-alive HTTP/1.1 connection on an asyncio protocol, its responses read by httptools."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import cast

import httptools

from serve.http.body import GrowingBody
from serve.http.message import ExchangeError, Held, Response

__all__ = ["LEFT", "Connection", "Done", "Leaving"]

Done = Callable[[Response | None, Exception | None], None]
"""Told once of how an exchange ended: one of the two is None."""

MAX_HEAD_BYTES = 64 * 1024
SHORT_BYTES = 64 * 1024
STALL_S = 0.25  # how long a server is kept waiting for a body that comes in parts
_ONE_WRITE_BYTES = 16 * 1024  # below this, joining head and body costs less than a second write
_LONGEST_KNOWN, _MOST_KNOWN = 1024, 32


@dataclass(frozen=True, slots=True)
class _Head:
    """What the parser made of the bytes of a head, which it would make of them again.

    Attributes:
        text: these bytes, which end with the first empty line in them.
        length: of the body, which such a response came with.
    """

    text: bytes
    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    length: int


class Leaving:
    """Gets a request's exchanges that are given up, each as `Connection.leave` leaves it, until it is `over`.

    Attributes:
        aside: of exchanges inside that keep none of its connections, when the server is through with each.
    """

    __slots__ = ("aside", "connections", "over")

    def __init__(self) -> None:
        self.connections: list[Connection] = []
        self.aside: list[asyncio.Future[bool]] = []
        self.over = False

    @property
    def ended(self) -> list[asyncio.Future[bool]]:
        """Of each, `Connection.ended`."""
        return [each.ended for each in self.connections if each.ended is not None]

    @property
    def through(self) -> list[asyncio.Future[bool]]:
        """When the server is through with each, those inside among them."""
        return [*(each.through for each in self.connections if each.through is not None), *self.aside]

    def linger(self) -> None:
        """They did not answer in time: see `Connection.linger`."""
        for each in self.connections:
            each.linger()

    def close(self) -> None:
        """Close all of them."""
        for each in self.connections:
            each.close()


LEFT: ContextVar[Leaving | None] = ContextVar("left", default=None)
"""Of the request that a task is about; None: what is given up is closed."""


def _told(waiter: asyncio.Future[Response], answer: Response | None, error: Exception | None) -> None:
    if waiter.done():
        return
    if answer is not None:
        waiter.set_result(answer)
    elif error is not None:
        waiter.set_exception(error)


class Connection(asyncio.Protocol):
    """One keep-alive connection with one request in flight.

    The head of a response is nearly always one that came before: it is looked up, and the parser not asked.

    Args:
        max_response_bytes: longest body that is accepted.
        hold: makes what counts a long body's bytes for whoever asked; what it raises ends the exchange.
        patience_s: how long what was left is waited for as by its client.
        lingers_s: how long after that the connection stays open, to know when the server is through.

    Attributes:
        ended: of an exchange that was left, whether the server answered it, once it has or never will, or is waited for
            no longer; else None.
        through: the same, once it has or never will.
        usable: open, idle and in step with the server.
        used: a whole response has been read from it.
        deadline: of the request in flight, where it is for others to watch; on the loop's clock.
    """

    def __init__(
        self,
        max_response_bytes: int,
        hold: Callable[[str], Held] | None = None,
        patience_s: float = 30.0,
        lingers_s: float = 0.0,
    ) -> None:
        self._hold = hold
        self._patience_s = patience_s
        self._lingers_s = lingers_s
        self._patience: asyncio.TimerHandle | None = None
        self.ended: asyncio.Future[bool] | None = None
        self.through: asyncio.Future[bool] | None = None
        self._who = ""
        self.usable = False
        self.used = False
        self._max_bytes = max_response_bytes
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self.deadline = math.inf
        self._done: Done | None = None
        self._answer: Response | None = None
        self._known: dict[bytes, _Head] = {}
        self._latest: _Head | None = None  # of these
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
        self._length: int | None = None

    def send(self, head: bytes, body: bytes, deadline: float, done: Done, who: str = "") -> None:
        """Send a request, and have `done` called with its response; for a connection that is usable.

        Args:
            head: from `encode_head`.
            body: of the length that the head says.
            deadline: on the loop's clock; whoever sends has to look after it, by `expire`.
            done: gets the response, or what `exchange` would raise.
            who: asks, for `hold`.
        """
        self._start(done, who)
        self.deadline = deadline
        self._write(head, body)

    async def exchange(self, head: bytes, body: bytes | GrowingBody, deadline: float, who: str = "") -> Response:
        """Send a request and read its response.

        A cancelled exchange closes the connection, as does a time-out, or leaves it where `LEFT` says so: what the
        server still sends belongs to nobody.

        Args:
            head: from `encode_head`.
            body: of the length that the head says; sent as it comes, where it is still coming.
            deadline: on the loop's clock.
            who: asks, for `hold`.

        Raises:
            ExchangeError: "closed", "timeout", "stalled", "malformed" or "too_large".
        """
        if not self.usable or self._transport is None:
            raise ExchangeError("closed", "the connection is closed", unanswered=True)
        waiter: asyncio.Future[Response] = self._loop.create_future()
        done = partial(_told, waiter)
        self._start(done, who)
        timer = self._loop.call_at(deadline, self._late)
        stall: asyncio.TimerHandle | None = None
        if isinstance(body, GrowingBody):
            self._transport.write(head)
            body.attach(self._transport.write)
            stall = self._loop.call_later(STALL_S, self._stalled, body)
        else:
            self._write(head, body)
        try:
            return await waiter
        except asyncio.CancelledError:
            self._give_up()
            raise
        finally:
            del waiter, done  # it may hold an error that holds this frame, and with it the body
            timer.cancel()
            self._done = None
            if stall is not None and isinstance(body, GrowingBody):
                stall.cancel()
                body.detach()
                if not body.whole:
                    self.close()  # the server waits for the rest

    def _start(self, done: Done, who: str) -> None:
        self.usable = False
        self._who = who
        if self._wire_bytes:
            self._begin()
        self._done = done

    def _write(self, head: bytes, body: bytes) -> None:
        if self._transport is None:
            return
        if len(body) < _ONE_WRITE_BYTES:
            self._transport.write(head + body)
        else:
            self._transport.write(head)
            self._transport.write(body)

    def close(self) -> None:
        """Close at once; what was not yet sent is dropped."""
        self.usable = False
        if self._transport is not None:
            self._transport.abort()

    def cancel(self) -> None:
        """Give up what was sent, and close; nobody is told."""
        self._done = None
        self.close()

    def leave(self) -> asyncio.Future[bool]:
        """Give up what was sent, and stay open until the server is through with it; nobody is told.

        A server that is asked over HTTP does not hear of a client that left: it is at work all the same. `ended` tells
        when it is through, or has had as long as it may take; `through` waits on, as `linger` says.
        """
        if self.ended is not None:
            return self.ended
        over, self._done = self._done is None, None  # its answer may have come already
        self.usable = False
        self.ended, self.through = self._loop.create_future(), self._loop.create_future()
        if over or self._transport is None or self._transport.is_closing() or self._wire_bytes:
            self._end_left(answered=False)
            self.close()
        else:
            self._patience = self._loop.call_later(self._patience_s, self.linger)
        return self.ended

    def linger(self) -> None:
        """What was left has had its time, and stands in nobody's way; the connection stays open until it is answered.

        It is closed at once where the server does not have all of the request.
        """
        if self.ended is None or self.ended.done():
            return
        self.ended.set_result(False)
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
        if not self._lingers_s or self._transport is None or self._transport.get_write_buffer_size():
            self.close()
        else:
            self._patience = self._loop.call_later(self._lingers_s, self.close)

    def _give_up(self) -> None:
        left = LEFT.get()
        if left is None or left.over:
            self.close()
        elif self.ended is None:
            self.leave()
            left.connections.append(self)

    def _end_left(self, *, answered: bool) -> None:
        for each in (self.ended, self.through):
            if each is not None and not each.done():
                each.set_result(answered)
        if self._patience is not None:
            self._patience.cancel()  # it would hold all of this for so long
            self._patience = None

    def _late(self) -> None:
        done = self._done
        if done is None or self._wire_bytes or (left := LEFT.get()) is None or left.over:
            self.expire()
        else:
            self._give_up()
            done(None, ExchangeError("timeout", "no whole response in time"))

    def lapse(self) -> None:
        """As `expire`; but where nothing of an answer has come, the connection lingers."""
        self._leave_with(ExchangeError("timeout", "no whole response in time"))

    def abort(self) -> None:
        """End the exchange that is under way, with an ExchangeError of kind "closed"; else as `lapse`."""
        self._leave_with(ExchangeError("closed", "given up: the server does not answer"))

    def _leave_with(self, error: ExchangeError) -> None:
        done = self._done
        if done is None or self._wire_bytes or not self._lingers_s:
            self._fail(error)
        else:
            self.leave()
            self.linger()
            error.through = self.through
            done(None, error)

    def expire(self) -> None:
        """End the exchange that is under way, with an ExchangeError of kind "timeout"."""
        self._fail(ExchangeError("timeout", "no whole response in time"))

    def _stalled(self, body: GrowingBody) -> None:
        if not body.whole:
            self._fail(ExchangeError("stalled", "the request's body comes too slowly to be sent as it comes"))

    def _fail(self, error: Exception) -> None:
        self.close()
        self._chunks = []
        if self._held is not None:
            self._held.close()  # its bytes are gone, though an error that is kept may have it
            self._held = None
        if self._answer is None:
            self._deliver(None, error)

    def _deliver(self, answer: Response | None, error: Exception | None) -> None:
        done, self._done = self._done, None
        self.deadline = math.inf
        if done is not None:
            done(answer, error)

    # asyncio calls these.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are no subclasses
        self.usable = True

    def data_received(self, data: bytes) -> None:
        if self._done is None:
            self._end_left(answered=data[9:12] == b"200")  # as those that are waited for: no other says what one takes
            self.close()  # bytes that no request asked for: the stream is out of step
            return
        fresh = not self._wire_bytes
        if fresh and (answer := self._recognized(data)) is not None:
            self.usable = True
            self._deliver(answer, None)
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
        self._answered(data if fresh else b"")

    def _answered(self, data: bytes) -> None:
        """Hand over the response that was read, if one was.

        Args:
            data: what it came in, where that is all of it.
        """
        answer, self._answer = self._answer, None
        if answer is not None:
            if data and self.usable:
                self._remember(data, answer)
            self._deliver(answer, None)

    def _recognized(self, data: bytes) -> Response | None:
        """The response that these bytes are, where one with the same head and length came before."""
        head = self._latest
        if head is None or not data.startswith(head.text):
            head = self._latest = self._known.get(data[: data.find(b"\r\n\r\n", 0, _LONGEST_KNOWN) + 4])
            if head is None:
                return None
        end = len(head.text)
        if len(data) - end != head.length:
            return None
        return Response(head.status, list(head.headers), data[end:], len(data))

    def _remember(self, data: bytes, answer: Response) -> None:
        end = data.find(b"\r\n\r\n", 0, _LONGEST_KNOWN) + 4
        # No more than the head and the body that it announces: so this is where the parser, too, saw the head's end.
        length = len(answer.body)
        if end < 4 or length > SHORT_BYTES or not len(data) - end == length == self._length:
            return
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        self._known[data[:end]] = _Head(data[:end], answer.status, tuple(answer.headers), len(answer.body))

    def eof_received(self) -> bool:
        self.usable = False
        return False  # the transport closes itself, and connection_lost follows

    def connection_lost(self, exc: Exception | None) -> None:
        self.usable = False
        try:
            self._lost(exc)
        finally:  # each holds this, and the transport also the context of the request that opened it
            self._transport = None
            del self._parser

    def _lost(self, exc: Exception | None) -> None:
        if self._done is None:
            self._end_left(answered=False)
            return
        if exc is None and self._head_done and not self._framed:
            self._complete(keep_alive=False)  # a body without a length ends with the connection
            self._answered(b"")
            return
        unanswered = self._wire_bytes == 0
        at = "before a response" if unanswered else "in the middle of the response"
        self._fail(ExchangeError("closed", f"the server closed the connection {at}", unanswered=unanswered))

    # httptools calls these.

    def on_message_begin(self) -> None:
        if self._done is None or self._answer is not None:
            raise ValueError("a second response to one request")

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        self._headers.append((name, value))
        if name == b"content-length" or (name == b"transfer-encoding" and b"chunked" in value.lower()):
            self._framed = True
        if name == b"content-length" and value.isdigit():
            self._length = int(value)
            if self._length > self._max_bytes:
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

    def _count(self, hold: Callable[[str], Held], size: int) -> None:
        if self._held is None:
            self._held = hold(self._who)
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
        status = self._parser.get_status_code()
        self._answer = Response(status, self._headers, body, self._wire_bytes, self._held)
        self._chunks = []
        self._held = None
        self.used = True
        if keep_alive:
            self.usable = True
        else:
            self.close()
