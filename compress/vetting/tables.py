"""Rows of text files as people have them: JSON lines, CSV, plain lines, Parquet. A line is bounded, a file is not."""

from __future__ import annotations

import io
import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from compress.errors import DatasetError, first_line
from compress.vetting.csv_rows import MOST_OTHERS, TableError, csv_rows
from compress.vetting.files import open_file
from compress.vetting.texts import parse_json

__all__ = ["SUFFIXES", "check_file", "rows_of"]

SUFFIXES = (".jsonl", ".ndjson", ".csv", ".tsv", ".txt", ".parquet")
LONGEST_LINE = 16 << 20
LONGEST_NAME = 100  # of a column that nobody asked for
MOST_COLUMNS, LARGEST_FOOTER = 20_000, 32 << 20  # of a Parquet file; its metadata
MOST_CELLS = 1 << 20  # of a Parquet file, that are read at a time
UNPACKED = 1 << 26, 10_000  # letters of one: so many, and so many times its size; usual are under 100 times
ROW = 64  # letters that a row counts for, whatever it holds: a page of a few bytes may have any number

Row = Mapping[str, Any]


def rows_of(path: Path, wanted: Collection[str] | None = None) -> Iterator[Row]:
    """The rows one after the other, each a value by column; a line of a .txt is its column `text`.

    Args:
        path: of the file.
        wanted: columns whose values are asked for; by default all. Of others the first are there by name, and None; of
            those that are wanted, lists and tables are empty ones. Of Parquet's columns that hold neither texts nor
            numbers (lists, dates, bytes) all values are None.

    Raises:
        DatasetError: the file is missing, damaged or no text; or it is Parquet, and pyarrow is not installed.
    """
    check_file(path)
    read = {".csv": _csv, ".tsv": _csv, ".txt": _lines, ".parquet": _parquet}.get(path.suffix, _json_lines)
    try:
        yield from read(path, wanted)
    except (OSError, ValueError) as err:
        mend = err.mend if isinstance(err, TableError) else "write it again, in UTF-8, a row for each sample"
        raise DatasetError(f"can't read the data {path}", why=first_line(err)[:300], mend=mend) from err


def check_file(path: Path) -> None:
    """Refuse what is no file of rows.

    Raises:
        DatasetError: it is missing, or a pipe.
    """
    if not path.is_file():
        raise DatasetError(
            f"can't read the data {path}",
            why="it is no file that could be read twice" if path.exists() else "there is no such file",
            mend=f"name a file of {', '.join(SUFFIXES)}",
        )


def _json_lines(path: Path, wanted: Collection[str] | None) -> Iterator[Row]:
    for number, line in enumerate(_texts(path), 1):
        if not line.strip():
            continue
        try:
            row = parse_json(line.encode())
        except ValueError as err:
            raise ValueError(f"line {number} {first_line(err)}") from err
        if not isinstance(row, dict):
            raise ValueError(f'line {number} is no JSON object such as {{"text": "…"}}')
        yield row if wanted is None else _wanted(row.items(), wanted)


def _wanted(row: Iterable[tuple[str, Any]], wanted: Collection[str]) -> Row:
    """A row without what nobody asked for: many are held at a time, and each may have been of any size."""
    kept: dict[str, Any] = {}
    others = 0
    for name, value in row:
        if name in wanted:
            kept[name] = type(value)() if isinstance(value, list | dict) else value
        elif others < MOST_OTHERS:
            others += 1
            kept.setdefault(name[:LONGEST_NAME], None)
    return kept


def _lines(path: Path, _: Collection[str] | None) -> Iterator[Row]:
    yield from ({"text": line} for line in _texts(path) if line.strip())


def _texts(path: Path) -> Iterator[str]:
    with io.TextIOWrapper(open_file(path), "utf-8-sig") as file:
        for line in _Lines(file):
            yield line.rstrip("\r\n")


class _Lines:
    """Lines of a file with their ends, each bounded; and so is what they are together until `began` says otherwise."""

    def __init__(self, file: io.TextIOWrapper, *, rows: bool = False) -> None:
        self._file, self._rows, self._letters = file, rows, 0
        self.held: list[str] = []  # of the row at hand

    def began(self) -> None:
        """A row ended with the line before: in quotes, one may be of many lines."""
        self._letters, self.held = 0, []

    def __iter__(self) -> Iterator[str]:
        while line := self._file.readline(LONGEST_LINE):
            self._letters += len(line)
            if max(len(line), self._letters * self._rows) >= LONGEST_LINE:
                raise ValueError(f"a {'row' if self._rows else 'line'} of it has over {LONGEST_LINE:,} letters")
            if self._rows:
                self.held.append(line)
            yield line


def _csv(path: Path, wanted: Collection[str] | None) -> Iterator[Row]:
    with io.TextIOWrapper(open_file(path), "utf-8-sig", newline="") as file:
        for names, fields in csv_rows(_Lines(file, rows=True), "\t" if path.suffix == ".tsv" else ","):
            row = zip(names, fields, strict=True)
            yield dict(row) if wanted is None else _wanted(row, wanted)


def _parquet(path: Path, wanted: Collection[str] | None) -> Iterator[Row]:
    try:
        import pyarrow.parquet as parquet
    except ImportError as err:
        raise DatasetError(
            f"can't read the data {path}",
            why="the Python package 'pyarrow' is not installed",
            mend="pip install pyarrow; or write it as .jsonl or .csv",
        ) from err
    try:
        with open_file(path) as file:
            _refuse_footer(file)
            schema = parquet.ParquetFile(file).schema_arrow
            if len(schema.names) > MOST_COLUMNS:
                raise ValueError(f"it has more columns than the {MOST_COLUMNS:,} that are taken: {len(schema.names):,}")
            if twice := next((name for name, times in Counter(schema.names).items() if times > 1), None):
                raise ValueError(f"it has the column {twice[:60]!r} twice")
            # A text that is there once, and meant by many rows, stays one until it is known how long they all are.
            table = parquet.ParquetFile(file, read_dictionary=[each.name for each in schema if _is_text(each.type)])
            read = [each.name for each in schema if _is_plain(each.type) and (wanted is None or each.name in wanted)]
            held = frozenset(read)
            others = dict.fromkeys([name for name in schema.names if name not in held][:MOST_OTHERS])
            room = UNPACKED[0] + UNPACKED[1] * path.stat().st_size
            for batch in table.iter_batches(max(1, min(1024, MOST_CELLS // (len(read) or 1))), columns=read):
                for few, letters in _few(batch):
                    room -= letters + ROW * few.num_rows
                    if room < 0:
                        raise ValueError(f"it unpacks to over {UNPACKED[1]:,} times of its size")
                    yield from (row | others for row in few.to_pylist())
    except MemoryError:
        raise
    except Exception as err:  # of all kinds, for what it does not know
        raise ValueError(first_line(err)) from err


def _refuse_footer(file: BinaryIO) -> None:
    """Refuse metadata that would take more memory than any file's: Arrow makes objects of all of it.

    Source: Apache Parquet, "File Format": at the end stand the metadata, their length in 4 bytes, and PAR1.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - 8))
    length = int.from_bytes(file.read(4), "little")
    file.seek(0)
    if LARGEST_FOOTER < length <= size:
        raise ValueError(f"its metadata have {length:,} bytes, and {LARGEST_FOOTER:,} are taken")


def _is_text(kind: Any) -> bool:
    from pyarrow import types

    kind = kind.value_type if types.is_dictionary(kind) else kind
    return bool(types.is_string(kind) or types.is_large_string(kind))


def _is_plain(kind: Any) -> bool:
    """Whether a column holds what a text or a label may be."""
    from pyarrow import types

    return _is_text(kind) or any(is_kind(kind) for is_kind in (types.is_integer, types.is_floating, types.is_boolean))


def _few(batch: Any) -> Iterator[tuple[Any, int]]:
    """A batch in parts of not too many letters, and how many these are, in bytes.

    Raises:
        ValueError: a row alone has too many.
    """
    import pyarrow.compute as compute

    letters = [0] * batch.num_rows
    for column in (each for each in batch.columns if _is_text(each.type)):
        if hasattr(column, "dictionary"):
            each = compute.binary_length(column.dictionary).fill_null(0).to_pylist()
            found = [0 if at is None else each[at] for at in column.indices.to_pylist()]
        else:
            found = compute.binary_length(column).fill_null(0).to_pylist()
        letters = [one + more for one, more in zip(letters, found, strict=True)]
    begun = held = 0
    for at, count in enumerate(letters):
        if count >= LONGEST_LINE:
            raise ValueError(f"a row of it has over {LONGEST_LINE:,} letters")
        if held + count >= LONGEST_LINE:
            yield batch.slice(begun, at - begun), held
            begun, held = at, 0
        held += count
    yield batch.slice(begun), held
