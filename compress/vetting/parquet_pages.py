"""How many values the pages of a Parquet file hold by their headers: one of a few bytes may have billions.

The footer may tell of two. A row of lists is unpacked whole, whatever its length, so that is known before. Of pages
nothing is read but headers.

Source: Apache Parquet, parquet.thrift (PageHeader); Apache Thrift, "Thrift Compact protocol".
"""

from __future__ import annotations

import os
from typing import Any, BinaryIO

__all__ = ["PageError", "most_values"]

LARGEST_HEADER = 16 << 20  # that Arrow takes
FEW = 1 << 12  # bytes that are read for a header at first: statistics may make it longer
DEEPEST = 32
PAST = 100  # bytes by which old writers' chunks are longer than they say; Arrow reads on so far
_COMPRESSED, _COUNTS = 3, (5, 7, 8)  # of a PageHeader: its size in the file; headers that begin with a number of values
_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT, _UUID = 1, 2, 3, 7, 8, 9, 10, 11, 12, 13
_WHOLE = (4, 5, 6)
_FIXED = {_BYTE: 1, _DOUBLE: 8, _UUID: 16}


class PageError(ValueError):
    """A header that is none."""


class _ShortError(Exception):
    """It goes on behind the bytes that were read."""


def most_values(file: BinaryIO, column: Any, writer: str) -> int:
    """The values of a column chunk by its pages' headers, those that are null and those of dictionaries among them.

    Args:
        file: that it is in.
        column: pyarrow's metadata of the chunk.
        writer: what wrote the file, as it says.

    Raises:
        PageError: a header is damaged.
    """
    first, dictionary = column.data_page_offset, column.dictionary_page_offset
    at = dictionary if dictionary and 0 < dictionary < first else first
    end = min(at + column.total_compressed_size, file.seek(0, os.SEEK_END))
    last = end + PAST if writer.lower().startswith("parquet-mr") else end
    if at < 0:
        raise PageError("its pages begin before it")
    values = 0
    while at < last:
        try:
            header, length = _header(file, at)
        except PageError:
            if at >= end:
                break
            raise
        size = header.get(_COMPRESSED, -1)
        if type(size) is not int or size < 0:
            if at >= end:
                break
            raise PageError("a page of it has no size")
        counts = [header[kind].get(1, 0) for kind in _COUNTS if type(header.get(kind)) is dict]
        values += max((count for count in counts if type(count) is int), default=0)
        at += length + size
    return values


def _header(file: BinaryIO, at: int) -> tuple[dict[int, Any], int]:
    few = FEW
    while True:
        file.seek(at)
        data = file.read(few)
        try:
            return _Reader(data).struct(0)
        except _ShortError:
            if len(data) < few or few >= LARGEST_HEADER:
                raise PageError("the header of a page of it has no end") from None
            few *= 16


class _Reader:
    """Fields of a struct by number: whole numbers and structs as such, others passed over."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def struct(self, depth: int) -> tuple[dict[int, Any], int]:
        """The fields, and where they end."""
        if depth > DEEPEST:
            raise PageError("the header of a page of it is nested too deeply")
        found: dict[int, Any] = {}
        number = 0
        while kind := self._byte():
            number = number + (kind >> 4) if kind >> 4 else self._signed()
            found[number] = self._value(kind & 15, depth)
        return found, self._at

    def _value(self, kind: int, depth: int) -> Any:
        if kind in (_TRUE, _FALSE):
            return None
        if kind in _WHOLE:
            return self._signed()
        if kind == _STRUCT:
            return self.struct(depth + 1)[0]
        if kind in (_BINARY, *_FIXED):
            self._pass(_FIXED[kind] if kind in _FIXED else self._unsigned())
        elif kind in (_LIST, _SET):
            size = self._byte()
            self._several(self._unsigned() if size >> 4 == 15 else size >> 4, (size & 15,), depth)
        elif kind == _MAP:
            if count := self._unsigned():
                kinds = self._byte()
                self._several(count, (kinds >> 4, kinds & 15), depth)
        else:
            raise PageError("the header of a page of it is damaged")
        return None

    def _several(self, count: int, kinds: tuple[int, ...], depth: int) -> None:
        if depth > DEEPEST:
            raise PageError("the header of a page of it is nested too deeply")
        for _ in range(count):
            for kind in kinds:
                if kind in (_TRUE, _FALSE):  # in a collection, of a byte
                    self._pass(1)
                else:
                    self._value(kind, depth + 1)

    def _pass(self, count: int) -> None:
        self._at += count
        if self._at > len(self._data):
            raise _ShortError

    def _byte(self) -> int:
        self._pass(1)
        return self._data[self._at - 1]

    def _unsigned(self) -> int:
        value = shift = 0
        while shift < 70:
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7
        raise PageError("the header of a page of it is damaged")

    def _signed(self) -> int:
        value = self._unsigned()
        return value >> 1 ^ -(value & 1)
