"""Frames between whoever coordinates a load and its generator processes: JSON and bytes, each with its length."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import orjson

from compress.errors import printable
from serve.load.send.batch import Batch

__all__ = ["LENGTHS", "MOST_BYTES", "WireError", "batch_of", "frame_of_batch", "lengths_of", "message_of", "pack"]

MOST_BYTES = 1 << 30
LENGTHS = struct.Struct(">II")
MOST_KINDS, LONGEST_KIND = 1000, 200
MOST_NUMBER = 1 << 62
_NUMBERS = tuple(field.name for field in fields(Batch) if field.name not in ("records", "kinds"))
_COUNTS = ("right", "labelled", "began", "warmup", "waiting", "memory_bytes")
_ENDINGS = ("", "whole", "stopped", "cut")


class WireError(Exception):
    """The other side left, is silent, or sends what can't be."""


def pack(message: Mapping[str, Any], blob: bytes = b"") -> bytes:
    """A frame."""
    text = orjson.dumps(message)
    return b"".join((LENGTHS.pack(len(text), len(blob)), text, blob))


def lengths_of(head: bytes, most: int) -> tuple[int, int]:
    """How long a frame's two parts are; raises WireError where they are over `most` bytes."""
    text_bytes, blob_bytes = LENGTHS.unpack(head)
    if text_bytes + blob_bytes > most:
        raise WireError("it sent a message that is too long")
    return text_bytes, blob_bytes


def message_of(text: bytes) -> dict[str, Any]:
    """A frame's JSON; raises WireError where it is no object."""
    try:
        message = orjson.loads(text)
    except orjson.JSONDecodeError as err:
        raise WireError("it sent a message that is not JSON") from err
    if not isinstance(message, dict):
        raise WireError("it sent a message that is no object")
    return message


def frame_of_batch(batch: Batch) -> bytes:
    """What a generator hands on, as a frame."""
    message = {"is": "batch", "kinds": batch.kinds} | {name: getattr(batch, name) for name in _NUMBERS}
    return pack(message, batch.records)


def batch_of(message: Mapping[str, Any], blob: bytes) -> Batch:
    """The other way round.

    Raises:
        WireError: it is none, whatever it is.
    """
    kinds = message.get("kinds")
    if not (isinstance(kinds, list) and 0 < len(kinds) <= MOST_KINDS and kinds[0] == ""):
        raise WireError("it sent figures without a list of kinds")
    for kind in kinds:
        if not isinstance(kind, str) or len(kind) > LONGEST_KIND or printable(kind) != kind:
            raise WireError("it sent a kind of error that is no line of text")
    for name in _COUNTS:
        if type(message.get(name)) is not int or not 0 <= message[name] < MOST_NUMBER:
            raise WireError(f"it sent figures whose {name} is no count")
    cpu_s = message.get("cpu_s")
    if isinstance(cpu_s, bool) or not isinstance(cpu_s, int | float) or not 0 <= cpu_s < MOST_NUMBER:
        raise WireError("it sent figures whose cpu_s is no time")
    if message.get("ended") not in _ENDINGS:
        raise WireError("it sent figures that do not say whether they are the last")
    return Batch(blob, tuple(kinds), **{name: message[name] for name in _NUMBERS})
