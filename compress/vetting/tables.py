"""Rows of texts as people have them: JSON lines or a list, CSV, plain lines, Parquet, a folder that `datasets` saved.

A line is bounded, a file is not.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from compress.errors import DatasetError, first_line
from compress.vetting.arrow_rows import (
    Row,
    is_saved,
    kind_not_read,
    parquet_rows,
    saved_rows,
)
from compress.vetting.class_features import schema_of
from compress.vetting.csv_rows import MOST_OTHERS, TableError, csv_rows
from compress.vetting.files import open_file
from compress.vetting.parquet_batches import TooLargeError
from compress.vetting.shards import is_sharded, shards_of
from compress.vetting.texts import parse_json, read_bytes

__all__ = ["SUFFIXES", "Row", "check_file", "rows_of", "unread_kind"]

SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".txt", ".parquet")
LONGEST_LINE = 16 << 20
FEW = 64  # bytes that tell a list
BOM = b"\xef\xbb\xbf"
LONGEST_NAME = 100  # of a column that nobody asked for


def rows_of(path: Path, wanted: Collection[str] | None = None, lists: Collection[str] = ()) -> Iterator[Row]:
    """The rows one after the other, each a value by column; a line of a .txt is its column `text`.

    A .json is a list of objects, or has a line for each. Parquet files of a folder are one table, in order of names.

    Args:
        path: of the file, or of the folder.
        wanted: columns whose values are asked for; by default all. Of others the first are there by name, and None; of
            those that are wanted, lists and tables are empty ones. Of Parquet's columns that hold neither texts nor
            numbers (lists, dates, bytes) all values are None.
        lists: columns that are wanted with their lists of texts and numbers.

    Raises:
        DatasetError: the file is missing, damaged or no text; or it is Parquet, and pyarrow is not installed.
    """
    check_file(path)
    kinds = {".csv": _csv, ".tsv": _csv, ".txt": _lines, ".parquet": parquet_rows, ".json": _json}
    read = kinds.get(path.suffix, _json_lines)
    try:
        if is_saved(path):
            yield from saved_rows(path, wanted, lists)
        elif path.is_dir():
            yield from _of_shards(path, wanted, lists)
        else:
            yield from read(path, wanted, lists)
    except (OSError, ValueError) as err:
        mend = (
            err.mend
            if isinstance(err, TableError | TooLargeError)
            else "write it again, in UTF-8, a row for each sample"
        )
        raise DatasetError(f"can't read the data {path}", why=first_line(err)[:300], mend=mend) from err


def check_file(path: Path) -> None:
    """Refuse what is no file of rows, nor a folder of them.

    Raises:
        DatasetError: it is missing, or a pipe.
    """
    if not path.is_file() and not is_saved(path) and not is_sharded(path):
        raise DatasetError(
            f"can't read the data {path}",
            why="it is no file that could be read twice" if path.exists() else "there is no such file",
            mend=f"name a file of {', '.join(SUFFIXES)}",
        )


def unread_kind(path: Path, column: str) -> str | None:
    """The kind of a column of Arrow's that is not read, for it holds neither texts nor numbers nor lists of these.

    Returns:
        As pyarrow calls it, as "date32[day]"; None of other columns and files.
    """
    try:
        schema = schema_of(path)
    except (OSError, ValueError):
        return None
    return None if schema is None else kind_not_read(schema, column)


def _of_shards(path: Path, wanted: Collection[str] | None, lists: Collection[str]) -> Iterator[Row]:
    for file in shards_of(path):
        yield from rows_of(file, wanted, lists)


def _json(path: Path, wanted: Collection[str] | None, lists: Collection[str]) -> Iterator[Row]:
    """A list of objects, as pandas' `to_json(orient="records")` writes it; of anything else a row in each line."""
    with open_file(path) as file:
        begin = file.read(FEW).removeprefix(BOM).lstrip()
        while not begin and (more := file.read(FEW)):
            begin = more.lstrip()
    if not begin.startswith(b"["):
        yield from _json_lines(path, wanted, lists)
        return
    try:
        rows = parse_json(read_bytes(path).removeprefix(BOM))
    except ValueError as err:
        raise TableError(
            first_line(err), "write it as .jsonl, an object in each line: such a file may be of any size"
        ) from err
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise ValueError(f'row {number} of its list is no JSON object such as {{"text": "…"}}')
        yield row if wanted is None else _wanted(row.items(), wanted, lists)


def _json_lines(path: Path, wanted: Collection[str] | None, lists: Collection[str]) -> Iterator[Row]:
    for number, line in enumerate(_texts(path), 1):
        if not line.strip():
            continue
        try:
            row = parse_json(line.encode())
        except ValueError as err:
            raise ValueError(f"line {number} {first_line(err)}") from err
        if not isinstance(row, dict):
            raise ValueError(f'line {number} is no JSON object such as {{"text": "…"}}')
        yield row if wanted is None else _wanted(row.items(), wanted, lists)


def _wanted(row: Iterable[tuple[str, Any]], wanted: Collection[str], lists: Collection[str]) -> Row:
    """A row without what nobody asked for: many are held at a time, and each may have been of any size."""
    kept: dict[str, Any] = {}
    others = 0
    for name, value in row:
        if name in wanted:
            kept[name] = type(value)() if isinstance(value, list | dict) and name not in lists else value
        elif others < MOST_OTHERS:
            others += 1
            kept.setdefault(name[:LONGEST_NAME], None)
    return kept


def _lines(path: Path, _: Collection[str] | None, __: Collection[str]) -> Iterator[Row]:
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


def _csv(path: Path, wanted: Collection[str] | None, _: Collection[str]) -> Iterator[Row]:
    with io.TextIOWrapper(open_file(path), "utf-8-sig", newline="") as file:
        for names, fields in csv_rows(_Lines(file, rows=True), "\t" if path.suffix == ".tsv" else ","):
            row = zip(names, fields, strict=True)
            yield dict(row) if wanted is None else _wanted(row, wanted, ())
