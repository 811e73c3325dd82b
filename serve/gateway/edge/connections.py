"""Clients' connections: uvicorn's protocol, with some things added.

It waits for the rest of a request for so long only. An endpoint that holds its whole answer can give it in one piece
(RESPOND): ASGI's two messages are checked and written one by one, which costs an eighth of the inference path. It is
told at once when its client leaves (LEAVING), without a task that waits for it. And it gets a body in one piece (BODY):
by ASGI's messages, each 64 KiB of it would be copied twice and stop the socket; or while it still comes (GROWING).
What it holds is counted, and an answer waits for its reader for so long only.

A request that may go the short way (`direct`) is held back until it is whole, and gets no task, scope or cycle. A
connection's requests mostly begin with the same head: the parser is asked once what it says.

What can't be read, or does not come in time, is refused once what came before it is answered.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import httptools
import orjson
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from serve.gateway.access.addresses import bounded_by
from serve.gateway.access.memory import CONNECTION_BYTES, Memory, MemoryFullError, Share
from serve.gateway.edge.asked import Asked
from serve.gateway.edge.direct import Direct
from serve.gateway.edge.extensions import BODY, DROP, GROWING, LEAVING, RESPOND
from serve.gateway.edge.parsing import BEGINNING, FREE_CALLS, SLICE_LINES, Flow, Parsing, slice_end
from serve.gateway.edge.records import MOST_RECORDS, Records
from serve.gateway.edge.request_body import Body
from serve.gateway.edge.rounds import Rounds
from serve.gateway.edge.until_closed import UntilClosed

__all__ = ["MOST_PIPELINED", "PIPELINED_BYTES", "connection_class"]

SLOWEST_BYTES = 256 * 1024  # that a client has to read in a second
MAX_HEAD_BYTES = 64 * 1024
MAX_HEAD_FIELDS = 128
FIELD_BYTES = 128  # that a header of a few bytes takes
KNOWN_HEAD_BYTES = 2048
MOST_PIPELINED = 64  # requests that wait for their turn on one connection
PIPELINED_BYTES = 4096  # that one of them takes, besides its body
MOST_CHUNKS = 4096  # of a body whose chunks have fewer than FEW_BYTES on average
FEW_BYTES = 8
FEW_BYTES_ANSWERED = 256  # the same, once it has its answer
MOST_THROWN = 1024 * 1024  # bytes, that are read after the last request
LINGER_S = 1.0  # in which what a client still sends is read, and thrown away, so that it gets its answer
JOINED_BYTES = 16 * 1024  # below this, one write of a copy costs less than two writes


def _refusal(told: bytes) -> bytes:
    body = b'{"error":"%b"}' % told
    head = (
        b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nconnection: close\r\nretry-after: 1\r\n"
    )
    return b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body)


LONG_HEAD = "The request's head is too long."
LONG_FRAME = "There is too much between two parts of the request's body, or after it."
_TINY = {
    "error": f"the body comes in over {MOST_CHUNKS} chunks of fewer than {FEW_BYTES} bytes each",
    "why": "each costs the gateway as much as one of 64 KiB",
    "mend": "gather what you write before you send it, or send the body with a Content-Length",
}
FULL = _refusal(b"the gateway has as many clients as it may")
TOO_MANY = _refusal(b"the gateway has as many connections of this address as it may")


class _FullError(Exception):
    """As many requests wait on a connection as may."""


class _LongHeadError(Exception):
    """A head has more than may be."""


class _TinyChunksError(Exception):
    """A body comes in more, and smaller, chunks than may be."""


class Leaver(Protocol):
    """Who is told that a client leaves."""

    def left(self) -> None:
        """Its connection is closed."""


def connection_class(
    head_timeout_s: float,
    body_timeout_s: float,
    write_timeout_s: float,
    memory: Memory,
    stopping: asyncio.Event,
    direct: Direct | None = None,
    rounds: Rounds | None = None,
) -> type[HttpToolsProtocol]:
    """The class of a gateway's connections.

    Args:
        head_timeout_s: for a request's head, and for the first byte of a fresh connection, in seconds.
        body_timeout_s: for a request's body, in seconds.
        write_timeout_s: for reading an answer, in seconds, besides a second for each SLOWEST_BYTES of it.
        memory: holds connections, and answers that wait for their readers.
        stopping: once it is set, each answer is its connection's last: clients come back to whoever listens then.
        direct: the short way, if there is one.
        rounds: says when a request begins that goes the long way; None for at once.
    """

    parsing = Parsing(memory)
    decrypting = Parsing(memory, MOST_RECORDS)

    class Connection(HttpToolsProtocol):
        _timer: asyncio.TimerHandle | None = None
        _timed = ""  # what the timer is for: "head", "body" or nothing
        _part = ""  # the part of a request that is being read
        _offers = False  # the head that was read asks for another protocol
        _head_bytes = 0  # that came since a request began, or since there was some of its body
        _named_bytes = 0  # of the head's headers
        _heading: Share | None = None  # of a long head
        _leaving: Callable[[], None] | None = None
        _body: Body | None = None
        _writer: asyncio.TimerHandle | None = None  # runs while an answer waits for its reader
        _ending: asyncio.TimerHandle | None = None  # runs while the last answer of a closed connection does
        _waiting: Share | None = None
        _who = ""  # the key that an answer on the short way is for
        _full = False  # no further request is taken
        _queued: Share | None = None  # of the requests that wait for their turn
        _counted = False
        _from = ""  # what its address is bounded by
        _asked: Asked | None = None  # by the request that is held back, or went directly
        _held: bytes | None = None  # what has come of its body
        _known: _Known | None = None  # one such as the next will most likely be
        _call: Leaver | None = None  # on the short way
        _idle_from = 0.0
        _running: RequestResponseCycle | None = None  # the one that has its turn; uvicorn knows the last that came
        _reading: RequestResponseCycle | None = None  # the one whose body comes
        _last_words: Callable[[], None] | None = None  # said after the answers to what came
        flow: Flow
        _thrown = 0  # bytes that were read after the last request
        _unparsed = b""  # what was read, and waits for its turn at the parser
        _parsed = 0  # bytes of it that had theirs
        _calls = 0  # from the parser
        _free_until = 0  # as many, whoever waits
        _length_left = 0  # bytes of its body that are to come, where its head says how many
        _chunks = _chunk_bytes = 0  # of a body of unknown length
        address = ""
        _records: Records | None = None  # over TLS

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.flow = Flow(transport)
            self.address = self.client[0] if self.client else ""
            self._short = _Short()
            self._from = bounded_by(self.address)
            tls = transport.get_extra_info("ssl_object")
            if isinstance(tls, Records):
                self._records = tls
                tls.bind(decrypting, self._from, transport)
            fair = memory.connect_from(self._from)
            self._counted = fair and memory.connect()
            if not self._counted:
                if fair:
                    memory.disconnect_from(self._from)
                transport.write(FULL if fair else TOO_MANY)
                transport.close()
                return
            self._time("head")

        def connection_lost(self, exc: Exception | None) -> None:
            self._time("")
            self._read_it()
            if self._records is not None:
                self._records.leave()
            if self._ending is not None:
                self._ending.cancel()
            if self._counted:
                self._counted = False
                memory.disconnect()
                memory.disconnect_from(self._from)
            if rounds is not None:
                rounds.leave(self._from, self)
            parsing.leave(self._from, self)
            self._unparsed = b""
            super().connection_lost(exc)
            if self._running is not None and not self._running.response_complete:
                self._running.disconnected = True
                self._running.message_event.set()
            for waiting, _ in self.pipeline:
                _part(waiting.scope)
            self.pipeline.clear()
            for share in (self._queued, self._heading):
                if share is not None:
                    share.close()
            if self._leaving is not None:
                self._leaving()
            if self._call is not None:
                self._call.left()
                self._call = None
            if self._body is not None:
                self._body.lost()

        # More than the transport's 64 KiB wait for the client to read them.
        def pause_writing(self) -> None:
            super().pause_writing()
            if self._waiting is None:
                self._waiting = Share(memory, self._who or _key_of(self._running))
                size = self.transport.get_write_buffer_size()
                self._waiting.hold(size)
                self._writer = self.loop.call_later(write_timeout_s + size / SLOWEST_BYTES, self.transport.abort)

        def resume_writing(self) -> None:
            self._read_it()
            self._end_in_time()
            super().resume_writing()

        def _read_it(self) -> None:
            if self._waiting is not None:
                self._waiting.close()
                self._waiting = None
            if self._writer is not None:
                self._writer.cancel()
                self._writer = None

        def _end_in_time(self) -> None:
            """To follow each close: that waits, for ever, until the client has read what is left for it.

            More than the transport's 64 KiB have a timer already (`pause_writing`).
            """
            transport = self.transport
            if self._ending is None and self._writer is None and transport.is_closing():
                self._ending = self.loop.call_later(write_timeout_s, transport.abort)

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._say_last_words()
            self._end_in_time()

        def send_400_response(self, msg: str) -> None:
            self._refuse(partial(super().send_400_response, msg))

        def _refuse(self, say: Callable[[], None]) -> None:
            """Read no more, say why, and close: in its turn (RFC 9112, 9.3.2), or a client would take it for the answer
            to what came before."""
            cut, self._reading = self._reading, None
            self._full, self._part = True, ""
            self._last_words = say
            if cut is not None and self.pipeline and self.pipeline[0][0] is cut:
                self.pipeline.popleft()
                before = self._short if self._call is not None else self._running
                self.cycle = self.pipeline[0][0] if self.pipeline else before  # type: ignore[assignment]
            elif cut is not None and cut.response_started:
                self._last_words = self._linger if say == self._say_tiny else self.transport.close  # it has its answer
            elif cut is not None:
                cut.disconnected = cut.response_complete = True  # this is its answer
            self._say_last_words()

        def _say_last_words(self) -> None:
            idle = self.cycle is None or self.cycle.response_complete
            if self._last_words is not None and idle and not self.transport.is_closing():
                self._last_words()
                self._end_in_time()

        @property
        def is_fresh(self) -> bool:
            """Whether nothing has come on it yet."""
            return self._timed == "head" and not self._head_bytes and self.cycle is None

        def shutdown(self) -> None:
            super().shutdown()
            self._end_in_time()

        # A request that comes in one piece, as nearly all do, sets no timer.
        def data_received(self, data: bytes) -> None:
            if not self._counted or self._full:
                self._thrown += len(data)
                if self._thrown > MOST_THROWN:
                    self.flow.hold()
                return
            if self._unparsed:  # read before the transport stopped
                self._wait_to_parse(self._unparsed[self._parsed :] + data, 0)
                return
            between = not self._part
            known = self._known
            if known is not None and len(data) == known.bytes and between and data.startswith(known.head):
                if self._timed:
                    self._time("")
                if self._may_go_directly() and self._goes_directly(known.asked, data[len(known.head) :]):
                    return
            if between and not self.pipeline:
                self._free_until = self._calls + FREE_CALLS
            self._asked = None
            if self._length_left < len(data) and (self._calls > self._free_until or data.count(b"\n") > SLICE_LINES):
                self._parse_in_slices(data, 0)
                return
            before = self._calls
            self._take(data)
            parsing.spend(self._calls - before)
            if self._held is None and self._asked is not None and between:
                self._remember(data, self._asked)
            self._taken()

        def _parse_in_slices(self, data: bytes, at: int, *, turn: bool = False) -> None:
            """As far as may be now; what is left waits for its turn.

            Args:
                data: what was read.
                at: how much of it is parsed.
                turn: whether it is the connection's turn, for one slice.
            """
            while at < len(data) and not (self._full or self.transport.is_closing()):
                end = at + self._length_left
                if end > at:
                    self._take(data[at:end])
                elif turn or parsing.free or (self._calls < self._free_until and not self.pipeline):
                    end, turn, before = slice_end(data, at), False, self._calls
                    self._take(data[at:end])
                    self._calls += 1
                    parsing.spend(self._calls - before)
                else:
                    self._wait_to_parse(data, at)
                    break
                at = end
            self._taken()

        def _wait_to_parse(self, data: bytes, at: int) -> None:
            self._unparsed, self._parsed = data, at
            self.flow.hold()
            if not parsing.wait(self._from, self, len(data), self._parse_on):
                self._unparsed = b""
                self.transport.abort()

        def _parse_on(self) -> None:
            data, self._unparsed = self._unparsed, b""
            self._parse_in_slices(data, self._parsed, turn=True)
            if not self._unparsed:
                parsing.leave(self._from, self)
                self.flow.go_on()

        def _take(self, data: bytes) -> None:
            if self._full or self.transport.is_closing():
                return
            self._head_bytes += len(data)
            self._parse(data)
            if self._part and self._head_bytes > MAX_HEAD_BYTES:
                self.send_400_response(LONG_HEAD if self._part == "head" else LONG_FRAME)

        def _taken(self) -> None:
            """To follow what was parsed of one read."""
            if self._held is not None:
                self._go_the_long_way()
            if self.pipeline:
                self._count_queued()
            # Line breaks before a request begin none, and stop uvicorn's own timer: they have no more time than a head.
            idle = self.cycle is None or self.cycle.response_complete
            part = self._part or ("head" if idle else "")
            if part != self._timed:
                self._time(part)
            if self._part == "head" and (size := max(self._head_bytes, self._named_bytes)) > CONNECTION_BYTES:
                self._count_head(size)

        def _parse(self, data: bytes) -> None:
            self._unset_keepalive_if_required()
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserError as err:
                if isinstance(err.__context__, _FullError):
                    self._take_no_more()
                elif isinstance(err.__context__, _LongHeadError):
                    self.send_400_response(LONG_HEAD)
                elif isinstance(err.__context__, _TinyChunksError):
                    memory.refused_frames += 1
                    self._refuse(self._say_tiny)
                else:
                    self.send_400_response("Invalid HTTP request received.")
            except httptools.HttpParserUpgrade as err:
                self._parse_without_offer(data[err.args[0] :])

        def _parse_without_offer(self, rest: bytes) -> None:
            """A request that offers another protocol (Upgrade) is one like others, as none is taken up (RFC 9110, 7.8).

            The parser leaves its body out, and would take that for the next request: it is asked anew, without the
            offer.
            """
            method, self._offers = self.parser.get_method(), False
            if method == b"CONNECT":
                self.send_400_response("There is nothing to connect to.")
                return
            lines = [b"%b %b HTTP/%b" % (method, self.url, self.parser.get_http_version().encode())]
            lines += [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
            self._parse(b"\r\n".join((*lines, b"", rest)))

        def on_message_begin(self) -> None:
            self._part = "head"
            self._head_bytes = self._named_bytes = self._length_left = self._chunks = self._chunk_bytes = 0
            self._calls += BEGINNING
            if self._heading is not None:
                self._heading.close()
                self._heading = None
            self._reading = None
            self.url, self.headers, self.expect_100_continue = b"", [], False

        def on_header(self, name: bytes, value: bytes) -> None:
            self._calls += 1
            if self._part != "head":
                return  # a trailer: what was authorized is what stood in the head (RFC 9110, 6.5.1)
            self._named_bytes += len(name) + len(value)
            if len(self.headers) >= MAX_HEAD_FIELDS or self._named_bytes > MAX_HEAD_BYTES:
                raise _LongHeadError
            super().on_header(name, value)

        def on_headers_complete(self) -> None:
            if len(self.url) > MAX_HEAD_BYTES:
                raise _LongHeadError
            self._part, self._head_bytes = "body", 0
            if self._named_bytes > CONNECTION_BYTES:
                self._count_head(self._named_bytes)
            if self.parser.should_upgrade():
                self._offers = True
                return
            self._length_left = next((int(value) for name, value in self.headers if name == b"content-length"), 0)
            if direct is not None and self._may_go_directly() and self._is_plain():
                self._asked = direct.read(self.url, self.headers)
                if self._asked is not None:
                    self._held = b""
                    return
            self._begin_cycle()

        def _is_plain(self) -> bool:
            """Whether the head asks for nothing special of the connection."""
            parser = self.parser
            return (
                parser.get_method() == b"POST"
                and parser.get_http_version() == "1.1"
                and parser.should_keep_alive()
                and not self.expect_100_continue
                and not any(name == b"transfer-encoding" for name, _ in self.headers)
            )

        def _take_no_more(self) -> None:
            """What came is answered, and the connection closed: a client sends anew what it has no answer to."""
            self._full, self._part = True, ""
            self.pipeline[0][0].keep_alive = False  # the last of them

        def _count_queued(self) -> None:
            """What waits is held for as long as the client makes the first ones last, with nobody who counts it."""
            self._queued = self._grown(self._queued, self._queued_bytes())

        def _count_head(self, size: int) -> None:
            """A head over what is counted for each connection is held until the next one begins."""
            self._heading = self._grown(self._heading, size)

        def _grown(self, share: Share | None, size: int) -> Share:
            """At least this much held; where there is no memory for it, the connection ends."""
            if share is None:
                share = Share(memory)
            try:
                share.take(max(0, size - share.size))
            except MemoryFullError:
                self.transport.abort()
            return share

        def _queued_bytes(self) -> int:
            return sum(_held_by(cycle) for cycle, _ in self.pipeline)

        def _begin_cycle(self) -> None:
            """As uvicorn does: a scope, and a task."""
            if len(self.pipeline) >= MOST_PIPELINED:
                raise _FullError
            url, headers, expects = self.url, self.headers, self.expect_100_continue
            super().on_message_begin()
            self.url, self.headers, self.expect_100_continue = url, headers, expects
            self.scope["headers"] = headers
            super().on_headers_complete()
            if stopping.is_set():
                self.cycle.keep_alive = False
            # Its task has not begun yet.
            cycle = self._reading = self.cycle
            if self.scope["http_version"] == "1.0":
                cycle.send = UntilClosed(cycle)  # type: ignore[method-assign]
            self._body = Body(cycle)
            extensions: dict[str, Any] = {
                RESPOND: partial(self._respond, cycle),
                LEAVING: self._on_leaving,
                BODY: self._body.whole,
                GROWING: self._body.growing,
                DROP: self._body.drop,
            }
            self.scope["extensions"] = extensions

        def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
            self._running = cycle
            if self._queued is not None:
                self._queued.resize(self._queued_bytes())
            app = partial(_parted, app)
            if rounds is None:
                super()._start_asgi_task(cycle, app)
            else:
                scope: Any = cycle.scope
                rounds.begin(self._from, self, scope, partial(self._begin_task, cycle, app))

        def _begin_task(self, cycle: RequestResponseCycle, app: Any) -> None:
            if not (cycle.disconnected or self.transport.is_closing()):
                super()._start_asgi_task(cycle, app)

        def _may_go_directly(self) -> bool:
            """Whether the connection has nothing else to do, and the server takes requests."""
            return not (
                (self.cycle is not None and not self.cycle.response_complete)
                or stopping.is_set()
                or self.flow.write_paused
                or (self.limit_concurrency is not None and len(self.connections) >= self.limit_concurrency)
                or self.transport.is_closing()
            )

        def _goes_directly(self, asked: Asked, body: bytes) -> bool:
            """Whether a whole request is on the short way now."""
            if direct is None or not direct.begin(self, asked, body):
                return False
            self._short.begin()
            self.cycle = self._short  # type: ignore[assignment]  # all of it that uvicorn asks for
            return True

        def _go_the_long_way(self) -> None:
            """With what has been held back."""
            body, self._held, self._asked = self._held, None, None
            if self.parser is None or self.transport.is_closing():
                return
            self._begin_cycle()
            if body:
                self.on_body(body)

        def _remember(self, data: bytes, asked: Asked) -> None:
            """These bytes were one request: such as begin with its head, and are as long, need not be parsed."""
            end = data.find(b"\r\n\r\n", 0, KNOWN_HEAD_BYTES) + 4
            head = data[:end]
            # The parser ends a head, too, at the first empty line where no line ends in another way.
            breaks = head.count(b"\r\n")
            if end > 4 and len(data) - end == asked.length and head.count(b"\r") == head.count(b"\n") == breaks:
                self._known = _Known(head, len(data), asked)

        def when_leaving(self, call: Leaver | None) -> None:
            self._call = call

        def answer(self, status: int, head: bytes, body: bytes, *, last: bool, who: str) -> None:
            """Answer the request on the short way; see `Client`."""
            short, transport = self._short, self.transport
            short.response_started = short.response_complete = True
            self.server_state.total_requests += 1
            if transport.is_closing():
                return
            last = last or not short.keep_alive
            self._who = who
            self._write_answer(status, head, body, last=last)
            self._who = ""
            if last:
                transport.close()
                self._end_in_time()
                return
            self.flow.resume_reading()
            if self.pipeline:
                self._start_asgi_task(*self.pipeline.pop())
                return
            self._say_last_words()
            self._idle_from = time.monotonic()
            if self.timeout_keep_alive_task is None:
                self._watch_idle(self.timeout_keep_alive)

        def _watch_idle(self, seconds: float) -> None:
            self.timeout_keep_alive_task = self.loop.call_later(seconds, self.timeout_keep_alive_handler)

        def timeout_keep_alive_handler(self) -> None:
            """One timer for all the pauses between requests, whichever way those go: each is looked at when it could
            be over. A request on the short way does not stop it, uvicorn's own included."""
            self.timeout_keep_alive_task = None
            if self._part or self.transport.is_closing() or not self.cycle.response_complete:
                return
            left = self._idle_from + self.timeout_keep_alive - time.monotonic()
            if left > 0:
                self._watch_idle(left)
            else:
                super().timeout_keep_alive_handler()
                self._end_in_time()

        def _write_answer(self, status: int, head: bytes, body: bytes, *, last: bool) -> None:
            close = b"connection: close\r\n" if last else b""
            length = b"content-length: %d\r\n\r\n" % len(body)
            if len(body) < JOINED_BYTES:
                self.transport.write(b"".join((STATUS_LINE[status], head, close, length, body)))
            else:
                self.transport.write(b"".join((STATUS_LINE[status], head, close, length)))
                self.transport.write(body)

        def on_body(self, body: bytes) -> None:
            self._head_bytes = 0
            self._calls += 1
            if self._length_left:
                self._length_left -= len(body)
            else:
                self._count_chunk(len(body))
            if self._held is not None:
                self._held += body
            elif self._body is None or not self._body.took(body):
                self._keep(body)

        def _count_chunk(self, size: int) -> None:
            self._chunks += 1
            self._chunk_bytes += size
            if self._chunks > MOST_CHUNKS:
                few = FEW_BYTES_ANSWERED if self.cycle.response_complete else FEW_BYTES
                if self._chunk_bytes < few * self._chunks:
                    raise _TinyChunksError

        def _keep(self, body: bytes) -> None:
            """As uvicorn does, without asking the parser each time whether it is to be another protocol's."""
            cycle = self.cycle
            if not cycle.response_complete:
                cycle.body += body
                if len(cycle.body) > HIGH_WATER_LIMIT:
                    self.flow.pause_reading()
                cycle.message_event.set()

        def on_message_complete(self) -> None:
            if self._offers:
                return  # it is parsed anew
            self._part = ""
            if self._held is not None and self._asked is not None:
                body, self._held = self._held, None
                if self._goes_directly(self._asked, body):
                    return
                self._held = body
                self._go_the_long_way()
            if self._body is not None:
                self._body.complete()
            super().on_message_complete()
            self._reading = None

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
                self._write_answer(status, head, body, last=not cycle.keep_alive)
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
                if self._running is not None and not self._running.response_complete:
                    self._running.disconnected = True  # or uvicorn, not told yet, would log an error
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
            if not self._part:
                self.transport.close()
                self._end_in_time()
            elif self.flow.read_paused or self._unparsed:  # nothing can come while what came before waits for its turn
                self._time(self._part)
            else:
                self._refuse(partial(self._say_slow, self._part))

        def _say_tiny(self) -> None:
            self.transport.write(_last_answer(400, _TINY))
            self._linger()

        def _linger(self) -> None:
            """Close a little later: what has come unread would else take the answer from its client."""
            self._last_words = None
            if self._ending is None:
                self._ending = self.loop.call_later(LINGER_S, self._end)

        def _end(self) -> None:
            self._ending = None
            self.transport.close()
            self._end_in_time()

        def _say_slow(self, part: str) -> None:
            self.transport.write(_answer(part))
            self.transport.close()

    return Connection


def _held_by(cycle: RequestResponseCycle) -> int:
    """Bytes that a request holds while it waits for its turn."""
    headers: Any = cycle.scope["headers"]
    return max(PIPELINED_BYTES, FIELD_BYTES * len(headers)) + len(cycle.body)


def _part(scope: Any) -> None:
    """A request from what it is answered by, which has it, too: where that waited, no collector sees it for long."""
    scope.get("extensions", {}).clear()


async def _parted(app: Any, scope: Any, receive: Any, send: Any) -> None:
    """A request, from which what it is answered by is taken when it is over; see `_part`."""
    try:
        await app(scope, receive, send)
    finally:
        _part(scope)


def _key_of(cycle: RequestResponseCycle | None) -> str:
    """The id of the key whose request is being answered, "" for none."""
    identity = None if cycle is None else cycle.scope["state"].get("identity")
    return "" if identity is None else identity.id


class _Known(NamedTuple):
    """A head that was parsed, the bytes of a request that begins with it, and what it says."""

    head: bytes
    bytes: int
    asked: Asked


class _Nobody:
    """For uvicorn, which wakes whoever waits for more of a request."""

    def set(self) -> None:
        """There is nobody."""


class _Short:
    """What uvicorn asks of the cycle of a request, for those on the short way."""

    __slots__ = ("disconnected", "keep_alive", "response_complete", "response_started")
    message_event = _Nobody()

    def begin(self) -> None:
        self.disconnected = self.response_complete = self.response_started = False
        self.keep_alive = True


def _answer(part: str) -> bytes:
    return _last_answer(408, {"error": f"the request's {part} did not come in time", "mend": "send it faster, or less"})


def _last_answer(status: int, told: dict[str, str]) -> bytes:
    body = orjson.dumps(told)
    head = STATUS_LINE[status] + b"content-type: application/json\r\nconnection: close\r\n"
    return b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body)
