"""Compressed request bodies are unpacked here, within the bound: a few kilobytes can unpack to gigabytes."""

from __future__ import annotations

import zlib

from serve.gateway.errors import BadRequestError, BodyTooLargeError, UnsupportedMediaError

__all__ = ["unpacked"]

ANY_HEADER = 32 + zlib.MAX_WBITS  # gzip or zlib, whichever comes


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
