"""Rows of text files as people have them: JSON lines, CSV, plain lines, Parquet. A line is bounded, a file is not."""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from compress.errors import DatasetError, first_line
from compress.vetting.files import open_file

__all__ = ["SUFFIXES", "check_file", "rows_of"]

SUFFIXES = (".jsonl", ".ndjson", ".csv", ".tsv", ".txt", ".parquet")
LONGEST_LINE = 16 << 20

Row = Mapping[str, Any]


def rows_of(path: Path) -> Iterator[Row]:
    """The rows one after the other, each a value by column; a line of a .txt is its column `text`.

    Raises:
        DatasetError: the file is missing, damaged or no text; or it is Parquet, and pyarrow is not installed.
    """
    check_file(path)
    read = {".csv": _csv, ".tsv": _csv, ".txt": _lines, ".parquet": _parquet}.get(path.suffix, _json_lines)
    try:
        yield from read(path)
    except (OSError, ValueError, csv.Error) as err:
        raise DatasetError(
            f"can't read the data {path}",
            why=first_line(err)[:300],
            mend="write it again, in UTF-8, a row for each sample",
        ) from err


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


def _json_lines(path: Path) -> Iterator[Row]:
    for number, line in enumerate(_texts(path), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as err:
            raise ValueError(f"line {number} is no JSON: {first_line(err)}") from err
        if not isinstance(row, dict):
            raise ValueError(f'line {number} is no JSON object such as {{"text": "…"}}')
        yield row


def _lines(path: Path) -> Iterator[Row]:
    yield from ({"text": line} for line in _texts(path) if line.strip())


def _texts(path: Path) -> Iterator[str]:
    with io.TextIOWrapper(open_file(path), "utf-8-sig") as file:
        for line in _Lines(file):
            yield line.rstrip("\r\n")


class _Lines:
    """Lines of a file with their ends, each bounded; and so is what they are together until `began` says otherwise."""

    def __init__(self, file: io.TextIOWrapper, *, rows: bool = False) -> None:
        self._file, self._rows, self._letters = file, rows, 0

    def began(self) -> None:
        """A row ended with the line before: in quotes, one may be of many lines."""
        self._letters = 0

    def __iter__(self) -> Iterator[str]:
        while line := self._file.readline(LONGEST_LINE):
            self._letters += len(line)
            if max(len(line), self._letters * self._rows) >= LONGEST_LINE:
                raise ValueError(f"a {'row' if self._rows else 'line'} of it has over {LONGEST_LINE:,} letters")
            yield line


def _csv(path: Path) -> Iterator[Row]:
    with io.TextIOWrapper(open_file(path), "utf-8-sig", newline="") as file:
        lines = _Lines(file, rows=True)
        rows = csv.DictReader(lines, delimiter="\t" if path.suffix == ".tsv" else ",")
        columns = Counter(name for name in rows.fieldnames or () if name)
        if twice := next((name for name, times in columns.items() if times > 1), None):
            raise ValueError(f"its first line has the column {twice[:60]!r} twice")
        lines.began()
        for number, row in enumerate(rows, 2):
            lines.began()
            if None in row or None in row.values():
                raise ValueError(f"row {number} has another number of columns than the first line")
            yield row


def _parquet(path: Path) -> Iterator[Row]:
    try:
        import pyarrow.parquet as parquet
    except ImportError as err:
        raise DatasetError(
            f"can't read the data {path}",
            why="the Python package 'pyarrow' is not installed",
            mend="pip install pyarrow; or write it as .jsonl or .csv",
        ) from err
    for batch in parquet.ParquetFile(path).iter_batches(1024):
        yield from batch.to_pylist()
