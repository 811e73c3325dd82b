"""The fields of a Protobuf message, found by their bytes: nothing is parsed that nobody asks for.

Standard library alone, so that `serve` reads files by it, too.

Source: Protocol Buffers, "Encoding".
"""

from __future__ import annotations

import functools
import mmap
import re
from collections.abc import Iterator

__all__ = ["BYTES", "FIXED", "VARINT", "WireError", "fields", "runs"]

VARINT, BYTES = 0, 2
RUN = 4096  # numbers that are passed over at a time
FIXED = {1: 8, 5: 4}  # bytes of a field, by its wire type


class WireError(ValueError):
    """It is no message, or a cut one."""


def fields(data: mmap.mmap | memoryview, at: int, end: int) -> Iterator[tuple[int, int, int | None, int]]:
    """Number of each field, where it starts, where its bytes start (None for numbers), and where it ends.

    Numbers of one field that stand behind each other are one: forests of trees have millions.

    Args:
        data: holds the message.
        at, end: where the message begins, and ends.

    Raises:
        WireError: it is no message, or ends too early.
    """
    while at < end:
        start = at
        tag, at = _varint(data, at, end)
        key, kind, inside = at, tag & 7, None
        if not tag >> 3:  # as in zeros, of which a file with holes has any number
            raise WireError("the file is no ONNX model")
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
        if inside is None and data[at : at + key - start] == data[start:key]:
            for _, stop in runs(data, bytes(data[start:key]), kind, at, end):
                at = stop
        yield tag >> 3, start, inside, at


def runs(data: mmap.mmap | memoryview, key: bytes, kind: int, at: int, end: int) -> Iterator[tuple[int, int]]:
    """Where numbers of one field begin and end that stand behind each other, each with its key: many at a time.

    Args:
        data: holds the message.
        key: of the field, as it is written.
        kind: its wire type: of numbers.
        at, end: where they begin, and where the message ends.
    """
    few = _run(key, kind)
    while found := few.match(data, at, end):
        yield at, found.end()
        at = found.end()


@functools.lru_cache(maxsize=256)
def _run(key: bytes, kind: int) -> re.Pattern[bytes]:
    value = rb"[\x80-\xff]{0,9}[\x00-\x7f]" if kind == VARINT else rb"[\x00-\xff]{%d}" % FIXED[kind]
    return re.compile(rb"(?:%b%b){1,%d}" % (re.escape(key), value, RUN))


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
