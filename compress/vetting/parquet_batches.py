"""How many rows of a Parquet file are read at a time, so that what is in memory is bounded whatever they unpack to.

Arrow unpacks a page whole, and makes a whole batch of rows before anybody sees how long they are. By the headers of its
pages a file says before how much that can be at most: values take what they take in their page, or are one of the
dictionary's. A row of lists may have all of the values that its row group has.

So there are in memory, beside the file's own bytes of a row group, at most `LARGEST_PAGES` of pages, as much again of
the values of one row and of Arrow's copies of either, and `HELD` of a batch of several rows; of lists of numbers
`MOST_LISTED` values.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Collection, Iterator
from typing import Any, BinaryIO

import numpy as np

from compress.vetting.parquet_pages import DELTA_BYTE_ARRAY, DICTIONARY, PLAIN_DICTIONARY, RLE_DICTIONARY, pages_of

__all__ = ["Batches", "TooLargeError", "planned"]

LARGEST_PAGES = 512 << 20  # bytes of pages, unpacked, that are in memory together: one of each column that is read
MOST_LISTED = 1 << 25  # values of lists in a row group: a row may have all of them
HELD = 64 << 20  # bytes of the texts of a batch
ROWS = (1024, 256, 64, 16, 4, 1)  # of a batch, the most that stay within HELD
_AGAIN = "write it again with fewer rows to a group (pyarrow: write_table(…, row_group_size=1000))"


class TooLargeError(ValueError):
    """What is in memory at a time would be more than is taken; says how to mend it."""

    def __init__(self, why: str, mend: str) -> None:
        super().__init__(why)
        self.mend = mend


class Batches:
    """Of a file: how it is to be read.

    Attributes:
        rows: of each row group, how many rows are read at a time.
        packed: columns of the file whose texts stay as its dictionaries have them: they are there once, and meant by
            many rows.
        values: of lists, in all of the file.
        texts: bytes of pages of texts in all of it, unpacked.
    """

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.packed: set[str] = set()
        self.values = 0
        self.texts = 0


def planned(file: BinaryIO, metadata: Any, names: Collection[str], most: int, room: int) -> Batches:
    """How to read these columns of a file.

    Args:
        file: of Parquet.
        metadata: of pyarrow's.
        names: columns that are read.
        most: values of lists that all of it may have.
        room: bytes of texts that all of it may have, beside those of dictionaries.

    Raises:
        TooLargeError: no number of rows would do.
        ValueError: there are more values or bytes than that, or a header of a page is damaged.
    """
    found, leaves = Batches(), list(_leaves(metadata.schema, frozenset(names)))
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        if not group.num_rows:  # it has no pages, as what Spark writes of an empty partition, and is not read
            found.rows.append(ROWS[0])
            continue
        pages = held = listed = 0
        windows = np.zeros(len(ROWS), np.int64)
        for at, path, repeated, texts in leaves:
            column = _Column(file, group.column(at), str(metadata.created_by))
            if texts and column.prefixed:
                raise TooLargeError(
                    f"its {path[:60]!r} is encoded as DELTA_BYTE_ARRAY, and nothing tells how long texts are then",
                    "write it again, in PLAIN or with a dictionary, as pyarrow does by default",
                )
            pages += column.dictionary + column.largest
            if texts and column.dictionary:
                found.packed.add(path)
            if repeated:
                listed, held = listed + column.values, held + column.size * texts
                found.values += column.values
            elif texts:
                windows += [column.window(rows) for rows in ROWS]
            found.texts += column.size * texts
            _refuse_all(found, file, most, room)
            _refuse(number, listed, pages, held)
        small = np.flatnonzero(windows + held <= HELD)
        found.rows.append(ROWS[small[0]] if len(small) else 1)
    file.seek(0)
    return found


def _refuse_all(found: Batches, file: BinaryIO, most: int, room: int) -> None:
    """Before any is read: a tokenizer may take minutes for what a file says in its first rows."""
    of = f"and has {file.seek(0, os.SEEK_END):,} bytes"
    if found.values > most:
        raise ValueError(f"it unpacks to over {most:,} values in lists, {of}")
    if found.texts > room:
        raise ValueError(f"it unpacks to over {room:,} bytes of texts, {of}")


def _refuse(group: int, listed: int, pages: int, held: int) -> None:
    if listed > MOST_LISTED:
        why = f"its row group {group} has lists of {listed:,} values, which a row may have all, and {MOST_LISTED:,}"
        raise TooLargeError(f"{why} are taken", _AGAIN)
    if max(pages, held) > LARGEST_PAGES:
        what = "pages that have" if pages >= held else "lists of texts that have"
        why = f"its row group {group} has {what} {max(pages, held):,} bytes unpacked, and {LARGEST_PAGES:,}"
        raise TooLargeError(f"{why} are taken", _AGAIN)


def _leaves(schema: Any, names: frozenset[str]) -> Iterator[tuple[int, str, bool, bool]]:
    """Columns of the file: the place, the path, whether they are of lists, and of texts.

    A column is read with all whose path goes on from its name.
    """
    for at in range(len(schema)):
        column = schema.column(at)
        parts = column.path.split(".")
        if any(".".join(parts[:end]) in names for end in range(1, len(parts) + 1)):
            yield at, column.path, column.max_repetition_level > 0, column.physical_type == "BYTE_ARRAY"


class _Column:
    """Of a column chunk, what its pages say; sizes in bytes, unpacked.

    Attributes:
        values: of all pages.
        size: of all pages that have values of rows themselves, not by a dictionary.
        largest: of the pages of rows.
        dictionary: of the dictionary, 0 where there is none.
        prefixed: whether a value may be one before it and more.
    """

    def __init__(self, file: BinaryIO, chunk: Any, writer: str) -> None:
        self.values = self.size = self.largest = self.dictionary = 0
        self.prefixed = False
        counts, sizes = array("q", [0]), array("q", [0])
        for page in pages_of(file, chunk, writer):
            self.values += page.values
            if page.encoding == DICTIONARY:
                self.dictionary = max(self.dictionary, page.size)
                continue
            self.prefixed |= page.encoding == DELTA_BYTE_ARRAY
            self.largest = max(self.largest, page.size)
            self.size += page.size * (page.encoding not in (PLAIN_DICTIONARY, RLE_DICTIONARY))
            counts.append(counts[-1] + page.values)
            sizes.append(self.size)
        self._counts, self._sizes = np.frombuffer(counts, np.int64), np.frombuffer(sizes, np.int64)

    def window(self, rows: int) -> int:
        """The most that so many rows, one after another, can have: all of the pages that they are in."""
        if len(self._counts) < 2:
            return 0
        last = np.searchsorted(self._counts, self._counts[1:] + rows - 2, "right")  # from the last row of each page on
        return int((self._sizes[np.minimum(last, len(self._sizes) - 1)] - self._sizes[:-1]).max())
