"""Compressed request bodies are unpacked here, within the bound: a few kilobytes can unpack to gigabytes."""

from __future__ import annotations

import asyncio
import zlib

from serve.gateway.access.memory import Share
from serve.gateway.errors import BadRequestError, BodyTooLargeError, UnsupportedMediaError

__all__ = ["unpack", "unpacked"]

MOST_RATIO = 1032  # of deflate
LONG_PACKED = 1024  # which may unpack to a megabyte

ANY_HEADER = 32 + zlib.MAX_WBITS  # gzip or zlib, whichever comes


async def unpack(body: bytes, encoding: bytes, limit: int, share: Share) -> bytes:
    """As `unpacked`, away from the event loop where it may take over a millisecond, and within the memory's bound.

    Raises:
        MemoryFullError: there is no room for what it may unpack to.
        GatewayError: as `unpacked`.
    """
    before = share.size
    share.take(min(limit, len(body) * MOST_RATIO) + 1)
    long = len(body) > LONG_PACKED
    result = await asyncio.to_thread(unpacked, body, encoding, limit) if long else unpacked(body, encoding, limit)
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
