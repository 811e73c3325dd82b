"""What the pages of a Parquet file hold by their headers: one of a few bytes may have billions of values, or gigabytes.

The footer may tell of two. Of pages nothing is read but headers.

Source: Apache Parquet, parquet.thrift (PageHeader, Encoding); Apache Thrift, "Thrift Compact protocol".
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

__all__ = ["DELTA_BYTE_ARRAY", "DICTIONARY", "PLAIN_DICTIONARY", "RLE_DICTIONARY", "Page", "PageError", "pages_of"]

LARGEST_HEADER = 16 << 20  # that Arrow takes
FEW = 1 << 12  # bytes that are read for a header at first: statistics may make it longer
DEEPEST = 32
PAST = 100  # bytes by which old writers' chunks are longer than they say; Arrow reads on so far
PLAIN_DICTIONARY, DELTA_BYTE_ARRAY, RLE_DICTIONARY = 2, 7, 8  # encodings
DICTIONARY = -1  # in an encoding's place: the page is a dictionary, and holds no values of rows
_UNPACKED, _COMPRESSED = 2, 3  # of a PageHeader: its page's size, and that in the file
_HEADERS = {5: 2, 7: 2, 8: 4}  # headers that begin with a number of values, and where each has their encoding
_OF_DICTIONARY = 7
_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT, _UUID = 1, 2, 3, 7, 8, 9, 10, 11, 12, 13
_WHOLE = (4, 5, 6)
_FIXED = {_BYTE: 1, _DOUBLE: 8, _UUID: 16}


class PageError(ValueError):
    """A header that is none."""


class _ShortError(Exception):
    """It goes on behind the bytes that were read."""


class Page(NamedTuple):
    """Of a column chunk.

    Attributes:
        values: how many, those that are null among them.
        size: bytes of it, unpacked.
        encoding: of its values, or `DICTIONARY`; None where it holds none.
    """

    values: int
    size: int
    encoding: int | None


def pages_of(file: BinaryIO, column: Any, writer: str) -> Iterator[Page]:
    """The pages of a column chunk by their headers.

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
        yield _page(header)
        at += length + size


def _page(header: dict[int, Any]) -> Page:
    """A header of two kinds of pages is taken as the one of more values."""
    page = Page(0, max(_whole(header.get(_UNPACKED)), _whole(header.get(_COMPRESSED))), None)
    for kind in _HEADERS:
        if type(header.get(kind)) is dict:
            values = _whole(header[kind].get(1))
            encoding = DICTIONARY if kind == _OF_DICTIONARY else _whole(header[kind].get(_HEADERS[kind]))
            if page.encoding is None or values > page.values:
                page = page._replace(values=values, encoding=encoding)
    return page


def _whole(value: Any) -> int:
    return max(0, value) if type(value) is int else 0


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
