"""How much of the event loop clients' TLS records may have: one byte in a record costs as much as kilobytes in another.

A read brings 256 KiB, which uvloop has decrypted, record by record, before anybody hears of it: 11,000 records of one
byte, or as many that bring nothing at all (new keys, alerts, padding alone). But how long a record is stands before it
in the clear. So OpenSSL is given of what was read only so much as has a few small records; and beyond the first few of
a read, the small records of all connections have so many in a time, by address in turns. While those of a connection
wait, what it sends besides stays in its socket. Records of a usual size wait for nothing.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import Any, cast

from serve.gateway.edge.parsing import Parsing

__all__ = ["FREE_RECORDS", "MOST_GREETING", "MOST_RECORDS", "MOST_SILENT", "SMALL_BYTES", "Records", "RecordsContext"]

HEADER_BYTES = 5
LEAST_BYTES = 22  # that a record has in TLS 1.3, with its header
RECORD_BYTES = 16384  # that a record brings at most
LONGEST_BYTES = RECORD_BYTES + 2048  # that it has without its header, in TLS 1.2
KINDS = range(20, 25)
SMALL_BYTES = 1024  # below it; those that fit into a packet, as some clients begin with, are larger
SLICE_RECORDS = 64
FREE_RECORDS = 8  # small ones of a read that nothing waits before: those of nearly all requests
MOST_RECORDS = 256  # small ones, in a pause; each takes two or three microseconds
MOST_SILENT = 64  # of a connection that bring nothing: clients renew their keys after millions of records, or never
MOST_GREETING = 64  # of a handshake, which takes three


class Records(ssl.SSLObject):
    """The records of one connection; after its handshake none is read before `bind` tells whose they are."""

    _incoming: ssl.MemoryBIO  # what the event loop has read
    _given: ssl.MemoryBIO  # what OpenSSL may decrypt of it
    _data = b""  # taken from the one, from `_at` on to be given to the other
    _at = 0
    _rest = 0  # bytes that are still to be given of a record that was begun
    _begun = _brought = 0  # records, and those of them that brought something
    _may = 1  # small ones that may be given
    _paid = 0  # of which so many are counted already
    _waits = False
    _counted = False  # what waits
    _deaf = False  # what comes is thrown away
    _ended = False  # by the client, as TLS wants it
    _turns: Parsing | None = None
    _transport: asyncio.Transport | None = None
    _address = ""

    def begin(self, incoming: ssl.MemoryBIO, given: ssl.MemoryBIO) -> None:
        """To precede all else: Python makes it without a constructor."""
        self._incoming, self._given = incoming, given

    def bind(self, turns: Parsing, address: str, transport: asyncio.Transport) -> None:
        """Whose they are; `leave` must follow.

        Args:
            turns: of the small records of a gateway.
            address: what the client is bounded by.
            transport: of the connection, decrypted.
        """
        self._turns, self._address, self._transport = turns, address, transport

    def leave(self) -> None:
        """The connection has ended."""
        if self._turns is not None:
            self._turns.leave(self._address, self)
        self._turns = self._transport = None  # which holds this
        self._data, self._at = b"", 0

    def do_handshake(self) -> None:
        while True:
            self._may = 1
            more = self._give()
            if self._begun > MOST_GREETING:
                raise ssl.SSLError(ssl.SSL_ERROR_SSL, "the greeting has too many records")
            try:
                super().do_handshake()
            except ssl.SSLWantReadError:
                if not more:
                    raise
            else:
                self._begun = 0
                return

    def pending(self) -> int:
        if self._ended:
            return 1  # its end is to be read
        left = 0 if self._waits else len(self._data) - self._at
        return super().pending() or self._given.pending or (left if left >= HEADER_BYTES else 0)

    def read(self, most: int = 1024, buffer: Any = None) -> Any:
        """As much as may be read now, in one piece: uvloop would ask for each record."""
        if buffer is not None:
            raise NotImplementedError("the gateway's protocols have no buffers of their own")
        read, given, found, size = super().read, self._given, list[bytes](), 0
        each = min(most, RECORD_BYTES)
        while size + each <= most:
            if given.pending or self._ended or super().pending():
                try:
                    part = read(each)
                except ssl.SSLWantReadError:
                    self._check_silent()
                else:
                    self._brought += 1
                    if not part:
                        self._ended = True
                        break
                    found.append(part)
                    size += len(part)
                    continue
            if not self._go_on():
                if not found:
                    raise ssl.SSLWantReadError(ssl.SSL_ERROR_WANT_READ, "no more may be read now")
                break
        return found[0] if len(found) == 1 else b"".join(found)

    def _check_silent(self) -> None:
        if self._begun - self._brought > MOST_SILENT:
            if self._turns is not None:
                self._turns.refuse()
            raise ssl.SSLError(ssl.SSL_ERROR_SSL, "too many records bring nothing")

    def _go_on(self) -> bool:
        """Give more, if there is more and it may be now; whether it was given."""
        turns, transport = self._turns, self._transport
        if turns is None or transport is None:
            return False
        if not self._waits and len(self._data) - self._at < HEADER_BYTES:
            self._may, self._paid = FREE_RECORDS, 0
        elif not self._waits and not self._may and turns.free:
            self._may = SLICE_RECORDS
        if self._may and not self._waits and not self._deaf:
            return self._give()
        if transport.is_closing():  # nothing is to come of it, and nothing else bounds it
            turns.leave(self._address, self)
            self._deaf, self._data, self._at = True, b"", 0
            self._incoming.read()
        elif not self._waits:
            self._waits = self._counted = True
            if not turns.wait(self._address, self, self._size() + self._incoming.pending, self._have_turn):
                raise ssl.SSLError(ssl.SSL_ERROR_SSL, "too much waits to be decrypted")
        return False

    def _have_turn(self) -> None:
        self._waits = False
        if self._turns is not None and self._transport is not None:
            self._may = self._paid = min(SLICE_RECORDS, self._size() // LEAST_BYTES + 1)
            self._turns.spend(self._paid)
            if self._transport.is_reading():  # or whoever has stopped it goes on himself
                self._transport.pause_reading()
                self._transport.resume_reading()

    def _size(self) -> int:
        return len(self._data) - self._at

    def _give(self) -> bool:
        """What has come, up to the last of the small records that may be given."""
        if self._size() < HEADER_BYTES:
            self._data, self._at = self._data[self._at :] + self._incoming.read(), 0
        data, end, small = self._data, len(self._data), 0
        at = self._at + self._rest
        while end - at >= HEADER_BYTES and small < self._may:
            size = data[at + 3] << 8 | data[at + 4]
            if data[at] not in KINDS or size > LONGEST_BYTES:
                raise ssl.SSLError(ssl.SSL_ERROR_SSL, "what came is no record")
            self._begun += 1
            small += size < SMALL_BYTES
            at += HEADER_BYTES + size
        self._rest, at = max(0, at - end), min(at, end)
        given = at > self._at
        if given:
            self._given.write(memoryview(data)[self._at : at])
        self._at = at
        self._count(small)
        return given

    def _count(self, small: int) -> None:
        paid = min(self._paid, small)
        self._may -= small
        self._paid -= paid
        if self._turns is not None:
            if small > paid:
                self._turns.spend(small - paid)
            if self._counted and self._size() < HEADER_BYTES:
                self._counted = False
                self._turns.leave(self._address, self)


class RecordsContext(ssl.SSLContext):
    """A server's context, whose connections have `Records`."""

    sslobject_class = Records

    def wrap_bio(self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, *args: Any, **more: Any) -> Records:
        given = ssl.MemoryBIO()
        made = cast(Records, super().wrap_bio(given, outgoing, *args, **more))
        made.begin(incoming, given)
        return made
