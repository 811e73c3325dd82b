"""An infer request as it is on the wire, whose raw inputs are left where they are: protobuf would copy each, twice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from serve.gateway.errors import BadRequestError

__all__ = ["HEAD_COST", "head_of", "split", "whole"]

WHOLE_BYTES = 64 * 1024  # which protobuf reads faster
RAW = b"\x3a"  # ModelInferRequest.raw_input_contents, field 7 with a length
MOST_FIELDS = 4096  # beside each other: as many inputs and outputs as any model has, and their data
HEAD_COST = 8  # bytes that protobuf makes of one: an empty text of two becomes 16, a number of one 8
VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5


def split(body: bytes) -> tuple[bytes, list[memoryview]]:
    """What an infer request says of itself, and its raw inputs.

    Raises:
        BadRequestError: it is none, or has too many fields.
    """
    view, at, began = memoryview(body), 0, 0
    heads: list[memoryview] = []
    raws: list[memoryview] = []
    fields = 0
    while at < len(body):
        fields += 1
        if fields > MOST_FIELDS:
            raise BadRequestError("the message can't be read", why=f"it has more than {MOST_FIELDS} fields")
        start = at
        tag, at = _varint(view, at)
        kind = tag & 7
        if tag >= 1 << 32:  # of which others may read the lower bits
            raise BadRequestError("the message can't be read", why="it has a field of no number")
        if kind == LENGTH:
            size, at = _varint(view, at)
            at += size
        elif kind == VARINT:
            _, at = _varint(view, at)
        elif kind in (FIXED64, FIXED32):
            at += 8 if kind == FIXED64 else 4
        else:
            raise BadRequestError("the message can't be read", why=f"it has a field of kind {kind}")
        if at > len(body):
            raise BadRequestError("the message can't be read", why="it ends within a field")
        if tag == RAW[0]:
            raws.append(view[at - size : at])
            heads.append(view[began:start])
            began = at
    heads.append(view[began:])
    return b"".join(heads), raws


def head_of(body: bytes) -> tuple[bytes, list[memoryview] | None]:
    """What to have protobuf read of an infer request, and its raw inputs; None where they are among it."""
    return (body, None) if len(body) < WHOLE_BYTES else split(body)


def whole(request: Any, raws: Sequence[memoryview] | None) -> bytes:
    """The request in bytes, with its raw inputs, which were left aside unless they are None."""
    head: bytes = request.SerializeToString()
    if raws is None:
        return head
    parts: list[bytes | memoryview] = [head]
    for raw in raws:
        parts += RAW, _written(len(raw)), raw
    return b"".join(parts)


def _varint(view: memoryview, at: int) -> tuple[int, int]:
    number = shift = 0
    while at < len(view) and shift < 64:
        byte = view[at]
        at += 1
        number |= (byte & 127) << shift
        if byte < 128:
            return number, at
        shift += 7
    raise BadRequestError("the message can't be read", why="it ends within a field")


def _written(number: int) -> bytes:
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    found.append(number)
    return bytes(found)
