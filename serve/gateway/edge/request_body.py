"""A request's body as a client's connection takes it: in one piece, while it comes, or not at all."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from serve.gateway.access.memory import MemoryFullError, Share
from serve.gateway.errors import BodyTooLargeError, ClientGoneError, GatewayError
from serve.gateway.oip.protocol import SEQUENCE
from serve.http.body import GrowingBody, add_part

__all__ = ["Body"]

EAGER_BYTES = 32 * 1024  # a client that has sent so much at once will send the rest soon


class Body:
    """The body of one request, kept for an endpoint that has asked for all of it.

    Args:
        cycle: uvicorn's of this request; it has what came before the endpoint asked.
    """

    __slots__ = ("_chunks", "_cycle", "_dropping", "_growing", "_limit", "_share", "_size", "_whole")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._dropping = False
        self._growing: GrowingBody | None = None
        self._chunks: list[bytes | bytearray] = []
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
            cycle.flow.resume_reading()  # or nobody would hear that the client leaves
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

    def drop(self) -> None:
        """Whatever still comes is read and thrown away, so that the client gets its answer."""
        self._dropping = True
        self._cycle.body = bytearray()
        self._cycle.flow.resume_reading()

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
        share.at_close(self._growing.end)
        cycle.body = bytearray()
        cycle.flow.resume_reading()
        return self._growing

    def took(self, body: bytes) -> bool:
        """Keep a part; False where nobody has asked for the whole."""
        if self._dropping:
            return True
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
                self._dropping = True
            else:
                add_part(self._chunks, body)
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
