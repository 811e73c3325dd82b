"""The fields of a Protobuf message, found by their bytes: nothing is parsed that nobody asks for.

Standard library alone, so that `serve` reads files by it, too.

Source: Protocol Buffers, "Encoding".
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator

__all__ = ["BYTES", "WireError", "fields"]

VARINT, BYTES = 0, 2
FIXED = {1: 8, 5: 4}  # bytes of a field, by its wire type


class WireError(ValueError):
    """It is no message, or a cut one."""


def fields(data: mmap.mmap | memoryview, at: int, end: int) -> Iterator[tuple[int, int, int | None, int]]:
    """Number of each field, where it starts, where its bytes start (None for numbers), and where it ends.

    Args:
        data: holds the message.
        at, end: where the message begins, and ends.

    Raises:
        WireError: it is no message, or ends too early.
    """
    while at < end:
        start = at
        tag, at = _varint(data, at, end)
        kind, inside = tag & 7, None
        if kind == BYTES:
            length, inside = _varint(data, at, end)
            at = inside + length
        elif kind == VARINT:
            _, at = _varint(data, at, end)
        elif kind in FIXED:
            at += FIXED[kind]
        else:
            raise WireError("the file is no ONNX model")
        if at > end:
            raise WireError("the file ends too early")
        yield tag >> 3, start, inside, at


def _varint(data: mmap.mmap | memoryview, at: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while at < end and shift < 64:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
    raise WireError("the file ends too early")
