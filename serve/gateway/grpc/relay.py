"""The way to Triton of one client's stream whose answers may be long: each is counted as it begins to come.

The library shows a message when it is whole, and gives no sign before. So such a stream has a connection of its own,
which passes through here: of HTTP/2's frames only lengths and kinds are read (RFC 9113, section 4.1), and of their data
the length that stands before each message (gRPC over HTTP/2, Length-Prefixed-Message). What there is no room for is not
let on to the library; what nobody waits for any more is thrown away as it comes.
"""

from __future__ import annotations

import asyncio
import os
import resource
import secrets
import socket
import struct
import sys
from collections import Counter
from collections.abc import Callable

import grpc

from serve.gateway.access.memory import MemoryFullError, Share
from serve.gateway.grpc.clients import TooManyCallsError

__all__ = ["RELAY_BYTES", "Begun", "Relay", "Relays", "most_relays"]

LOCAL_PEERPID = 2  # of macOS, sys/un.h
OF_FILES = 16  # one relay, which has three (the library's end, ours, Triton's), for so many that the process may have
RELAY_BYTES = 32 * 1024  # that a relay may hold itself
READ_BYTES = 16 * 1024
HEAD_BYTES, DATA, HEADERS, RESET, WINDOW_UPDATE, PADDED, END_STREAM = 9, 0, 1, 3, 8, 8, 1
PREFACE_BYTES = 24  # what a client's side begins with
PREFIX_BYTES = 5  # before each message: whether it is packed, and its length
MORE_BYTES = 1024 * 1024  # let come once all is thrown away: the library may have left its window closed
OPTIONS = (
    ("grpc.http2.max_frame_size", READ_BYTES),
    ("grpc.compression_enabled_algorithms_bitset", 1),  # none: what is packed would be counted as that
    ("grpc.use_local_subchannel_pool", 1),
)


class Relays:
    """Those that there are, by whom they count for.

    Args:
        most: at a time; one key, or address without one, may have a quarter of them.
        longest: message that the library takes, in bytes.
    """

    def __init__(self, most: int, longest: int) -> None:
        self._most = most
        self._longest = longest
        self._by_caller: Counter[str] = Counter()

    async def open(self, address: str, share: Share) -> Relay:
        """A relay to a Triton, to be closed with `close`.

        Args:
            address: its gRPC endpoint.
            share: counts the answers, and is closed with it.

        Raises:
            TooManyCallsError, MemoryFullError: there is no room for it.
            grpc.aio.AioRpcError: Triton is not reached.
        """
        most = max(1, self._most // 4)
        if self._by_caller[share.key] >= most or self._by_caller.total() >= self._most:
            raise TooManyCallsError(most)
        share.take(RELAY_BYTES)
        relay = Relay(share, self._longest, lambda: self._gone(share.key))
        self._by_caller[share.key] += 1
        try:
            await relay.open(address)
        except BaseException:
            await relay.close()
            raise
        return relay

    def _gone(self, caller: str) -> None:
        self._by_caller[caller] -= 1
        if not self._by_caller[caller]:
            del self._by_caller[caller]


class Relay:
    """One of them; see `Relays.open`.

    Args:
        share, longest: as for `Relays`.
        on_close: is called once it is over.

    Attributes:
        target: where the library finds it.
        full: done, with MemoryFullError, once there was no room for an answer.
        thrown: bytes that came and that nobody waited for.
    """

    def __init__(self, share: Share, longest: int, on_close: Callable[[], None]) -> None:
        self._share = share
        self._longest = longest
        self._on_close = on_close
        name = f"gateway-{secrets.token_hex(16)}"  # of Linux' abstract names: there is no file to be left behind
        self._path, self.target = f"\0{name}", f"unix-abstract:{name}"
        self.full: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.thrown = 0
        self._discards = asyncio.Event()
        self._begun: dict[bytes, Begun] = {}  # by number of the stream, of those that are open
        self._thrown_of: Counter[bytes] = Counter()  # bytes, by number of the stream, that Triton was not told of yet
        self._server: asyncio.Server | None = None
        self._carrying: asyncio.Task[None] | None = None
        self._upward: asyncio.StreamWriter | None = None

    async def open(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        try:
            source, self._upward = await asyncio.open_connection(host.strip("[]"), int(port), limit=READ_BYTES)
        except OSError as err:
            none = grpc.aio.Metadata()
            told = f"failed to connect to all addresses; {address}: {err}"
            raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, none, none, told) from None
        sink = self._upward

        def taken(asks: asyncio.StreamReader, answers: asyncio.StreamWriter) -> None:
            if self._carrying is None and _own(answers.get_extra_info("socket")):
                self._carrying = asyncio.ensure_future(self._carry(source, answers, asks, sink))
                if self._server is not None:
                    self._server.close()
            else:
                answers.close()

        self._server = await asyncio.start_unix_server(taken, self._path, limit=READ_BYTES)

    def taken(self, size: int) -> None:
        """Somebody has an answer of so many bytes, and counts it, or has no more of it."""
        self._share.resize(max(0, self._share.size - size))

    def discard(self) -> None:
        """Throw away what still comes, so that Triton can end the stream; nothing of it is held."""
        if self._discards.is_set() or self._upward is None:
            return
        self._discards.set()
        for number in (bytes(4), *self._begun):
            self._upward.write(_more(number, MORE_BYTES))
        self._share.close()

    async def close(self) -> None:
        """End both sides."""
        if self._carrying is not None:
            self._carrying.cancel()
            await asyncio.gather(self._carrying, return_exceptions=True)
        if self._server is not None:
            self._server.close()
        if self._upward is not None:
            self._upward.close()
        self.full.cancel()
        self._share.close()
        self._on_close()
        self._on_close = lambda: None

    async def _carry(
        self,
        source: asyncio.StreamReader,
        answers: asyncio.StreamWriter,
        asks: asyncio.StreamReader,
        sink: asyncio.StreamWriter,
    ) -> None:
        answers.transport.set_write_buffer_limits(READ_BYTES)
        sink.transport.set_write_buffer_limits(READ_BYTES)
        both = [asyncio.ensure_future(self._ask(asks, sink)), asyncio.ensure_future(self._answer(source, answers))]
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in both:
                each.cancel()
            await asyncio.gather(*both, return_exceptions=True)
            answers.close()
            sink.close()

    async def _ask(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        """What the library sends, frame by frame: others may be written between them."""
        sink.write(await source.readexactly(PREFACE_BYTES))
        while True:
            frame = await _frame(source)
            sink.write(frame)
            await sink.drain()

    async def _answer(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        """What Triton sends: all that is there at once, since a short answer would cost as much as all of these."""
        part = b""
        while come := await source.read(READ_BYTES):
            passed: list[bytes] = []
            frames, part = _frames(part + come)
            for frame in frames:
                if frame[3] == DATA and not all(self._room(size) for size in self._begins(frame)):
                    sink.write(b"".join(passed))
                    passed.clear()
                    await self._discards.wait()
                if frame[3] == DATA and self._discards.is_set():
                    self._throw(frame)
                    continue
                if frame[3] == RESET or (frame[3] == HEADERS and frame[4] & END_STREAM):  # so end those of a server
                    self._begun.pop(frame[5:HEAD_BYTES], None)
                passed.append(frame)
            sink.write(b"".join(passed))
            self._let_more_come()
            await sink.drain()
            await asyncio.sleep(0)  # others' turn: of a stream that is fast, there is always more

    def _begins(self, frame: bytes) -> list[int]:
        """The lengths of the messages that begin in a frame of data."""
        padded = bool(frame[4] & PADDED)
        end = len(frame) - frame[HEAD_BYTES] if padded else len(frame)
        return self._begun.setdefault(frame[5:HEAD_BYTES], Begun()).read(frame[HEAD_BYTES + padded : end])

    def _room(self, size: int) -> bool:
        """Count a message that has begun; where there is no room, it is to wait until it is thrown away."""
        if size > self._longest or self._discards.is_set():
            return True  # the library refuses it by its length, before any of it
        try:
            self._share.take(size)
        except MemoryFullError as err:
            if not self.full.done():
                self.full.set_exception(err)
                self.full.exception()  # whoever reads may not wait for it any more
            return False
        return True

    def _throw(self, frame: bytes) -> None:
        size = len(frame) - HEAD_BYTES
        self.thrown += size
        if size:
            self._thrown_of[frame[5:HEAD_BYTES]] += size

    def _let_more_come(self) -> None:
        """As much as was thrown away."""
        if self._thrown_of and self._upward is not None:
            self._thrown_of[bytes(4)] = self._thrown_of.total()  # of the connection
            self._upward.write(b"".join(_more(number, size) for number, size in self._thrown_of.items()))
            self._thrown_of.clear()


class Begun:
    """Where messages begin in the data of a stream."""

    def __init__(self) -> None:
        self._left = 0
        self._prefix = b""

    def read(self, data: bytes) -> list[int]:
        """The lengths of those that begin in what comes next."""
        found, at = [], 0
        while at < len(data):
            if self._left:
                step = min(self._left, len(data) - at)
                self._left -= step
            else:
                step = min(PREFIX_BYTES - len(self._prefix), len(data) - at)
                self._prefix += data[at : at + step]
                if len(self._prefix) == PREFIX_BYTES:
                    self._left = int.from_bytes(self._prefix[1:], "big")
                    self._prefix = b""
                    found.append(self._left)
            at += step
        return found


def most_relays() -> int:
    """How many there may be, by the files that the process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(4, (65536 if soft == resource.RLIM_INFINITY else soft) // OF_FILES)


def _own(sock: socket.socket) -> bool:
    """Whether it is this process that has connected, and no other of the machine's."""
    if sys.platform == "darwin":
        return struct.unpack("i", sock.getsockopt(0, LOCAL_PEERPID, struct.calcsize("i"))) == (os.getpid(),)
    pid, _, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return bool(pid == os.getpid())


def _frames(data: bytes) -> tuple[list[bytes], bytes]:
    """Those that are whole, and what of the next one is there."""
    found, at = [], 0
    while len(data) - at >= HEAD_BYTES:
        end = at + HEAD_BYTES + int.from_bytes(data[at : at + 3], "big")
        if end > len(data):
            break
        found.append(data[at:end])
        at = end
    return found, data[at:]


async def _frame(source: asyncio.StreamReader) -> bytes:
    head = await source.readexactly(HEAD_BYTES)
    return head + await source.readexactly(int.from_bytes(head[:3], "big"))


def _more(number: bytes, size: int) -> bytes:
    """A frame that lets so many bytes more come."""
    return b"\0\0\4" + bytes((WINDOW_UPDATE, 0)) + number + size.to_bytes(4, "big")
