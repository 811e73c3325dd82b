"""Frames between whoever coordinates a load and its generator processes: JSON and bytes, each with its length."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import orjson

from serve.load.send.batch import Batch

__all__ = ["MOST_BYTES", "WireError", "batch_of", "frame_of_batch", "pack", "read"]

MOST_BYTES = 1 << 30
_LENGTHS = struct.Struct(">II")
_NUMBERS = tuple(field.name for field in fields(Batch) if field.name not in ("records", "kinds"))


class WireError(Exception):
    """The other side left, or sends what is no frame."""


def pack(message: Mapping[str, Any], blob: bytes = b"") -> bytes:
    """A frame."""
    text = orjson.dumps(message)
    return b"".join((_LENGTHS.pack(len(text), len(blob)), text, blob))


async def read(reader: asyncio.StreamReader, most: int = MOST_BYTES) -> tuple[dict[str, Any], bytes]:
    """The next frame.

    Raises:
        WireError: none comes, or it is longer than `most` bytes.
    """
    try:
        text_bytes, blob_bytes = _LENGTHS.unpack(await reader.readexactly(_LENGTHS.size))
        if text_bytes + blob_bytes > most:
            raise WireError("a message that is too long")
        message = orjson.loads(await reader.readexactly(text_bytes))
        blob = await reader.readexactly(blob_bytes)
    except (asyncio.IncompleteReadError, ConnectionError) as err:
        raise WireError("the connection was closed") from err
    except orjson.JSONDecodeError as err:
        raise WireError("a message that is not JSON") from err
    if not isinstance(message, dict):
        raise WireError("a message that is no object")
    return message, blob


def frame_of_batch(batch: Batch) -> bytes:
    """What a generator hands on, as a frame."""
    message = {"is": "batch", "kinds": batch.kinds} | {name: getattr(batch, name) for name in _NUMBERS}
    return pack(message, batch.records)


def batch_of(message: Mapping[str, Any], blob: bytes) -> Batch:
    """The other way round."""
    return Batch(blob, tuple(message["kinds"]), **{name: message[name] for name in _NUMBERS})
