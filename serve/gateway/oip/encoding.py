"""Compressed request bodies are unpacked here, within the bound: a few kilobytes can unpack to gigabytes."""

from __future__ import annotations

import asyncio
import zlib
from dataclasses import dataclass

from serve.gateway.access.long_work import LONG_BYTES, LongWork
from serve.gateway.access.memory import Share
from serve.gateway.errors import BadRequestError, BodyTooLargeError, UnsupportedMediaError

__all__ = ["Packed", "is_long", "unpack", "unpacked"]

MOST_RATIO = 1032  # of deflate
LONG_PACKED = 1024  # which may unpack to a megabyte

ANY_HEADER = 32 + zlib.MAX_WBITS  # gzip or zlib, whichever comes


@dataclass(frozen=True, slots=True)
class Packed:
    """A JSON that is unpacked where it is read, in the process for what is dear: nothing else is made of it.

    Attributes:
        body: as it came.
        encoding: the header's value.
        limit: bytes that it may unpack to.
    """

    body: bytes
    encoding: bytes
    limit: int

    def __len__(self) -> int:
        return len(self.body)

    def unpacked(self) -> bytes:
        """The JSON; raises as the function does."""
        return unpacked(self.body, self.encoding, self.limit)


def is_long(body: bytes) -> bool:
    """Whether to unpack a body may take over a millisecond."""
    return len(body) > LONG_PACKED


async def unpack(body: bytes, encoding: bytes, limit: int, share: Share, long_work: LongWork) -> bytes:
    """As `unpacked`, away from the event loop where it may take over a millisecond, and within the memory's bound.

    What is long once it is unpacked has its turn: threads that unpack leave the event loop no core, and to put it
    together holds it.

    Raises:
        MemoryFullError: there is no room for what it may unpack to.
        GatewayError: as `unpacked`.
    """
    before = share.size
    share.take(min(limit, len(body) * MOST_RATIO) + 1)
    if not is_long(body):
        result = unpacked(body, encoding, limit)
    else:
        try:
            result = await asyncio.to_thread(unpacked, body, encoding, min(limit, LONG_BYTES))
        except BodyTooLargeError:
            if limit <= LONG_BYTES:
                raise
            async with long_work.alone(share.key, limit):
                result = await asyncio.to_thread(unpacked, body, encoding, limit)
    share.resize(before - len(body) + len(result))
    return result


def unpacked(body: bytes, encoding: bytes, limit: int) -> bytes:
    """A body as it was before its Content-Encoding.

    Args:
        encoding: the header's value: gzip, deflate or identity.
        limit: bytes of the result at most.

    Raises:
        UnsupportedMediaError: another encoding.
        BodyTooLargeError: it unpacks to more.
        BadRequestError: it is damaged.
    """
    name = encoding.strip().lower()
    if name in (b"", b"identity"):
        return body
    if name not in (b"gzip", b"x-gzip", b"deflate"):
        raise UnsupportedMediaError(
            "the content encoding is not one that is read", why="it takes gzip and deflate", mend="send one of them"
        )
    unpacker = zlib.decompressobj(ANY_HEADER)
    try:
        result = unpacker.decompress(body, limit + 1)
    except zlib.error as err:
        raise BadRequestError("the body can't be unpacked", why=str(err)) from err
    if len(result) > limit:
        raise BodyTooLargeError(limit)
    if not unpacker.eof or unpacker.unused_data:
        raise BadRequestError("the body can't be unpacked", why="it is cut short, or more follows its end")
    return result
