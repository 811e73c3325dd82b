"""Rows of CSV and TSV, where a quote too many makes one row of several: such a file is refused by its line.

Python's reader takes every quote that begins a field for one that ends somewhere, lines later if need be, and says
nothing. A field of several lines is as anybody may have it; one each of whose lines would be a row by itself is none.

Source: RFC 4180, 2.5 to 2.7.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterator
from typing import Protocol

__all__ = ["MOST_OTHERS", "SEPARATE", "Lines", "TableError", "csv_rows", "other_separator"]

MEND = 'write a field with quotes in it in quotes, and each of them twice: "a 5"" disk",1; or write the rows as .jsonl'
SEPARATE = "write it with commas, as pandas' to_csv does by default; or with tabs, as .tsv"
OTHERS = {";": "semicolons", "\t": "tabs", "|": "bars"}
LONGEST = 16 << 20  # letters of a field: what a row may have
MOST_OTHERS = 64  # columns that are looked at, or kept by name alone
MOST_WORDS, LONGEST_WORD = 256, 64  # of a column of few values, such as labels; their letters
MOST_DOUBTS, MOST_LINES = 100, 50
_FIELD = r'(?:"[^"]*+(?:""[^"]*+)*+"|[^",\r\n]*+)'
_RECORD = re.compile(rf"{_FIELD}(?:,{_FIELD})*+[\r\n]*")
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")


class TableError(ValueError):
    """A table that can be understood in more than one way; says where, and how to mend it."""

    def __init__(self, why: str, mend: str = MEND) -> None:
        super().__init__(why)
        self.mend = mend


class Lines(Protocol):
    """Lines of a file with their ends, which remembers those of the row at hand."""

    held: list[str]

    def began(self) -> None:
        """A row ended with the line before."""

    def __iter__(self) -> Iterator[str]:
        """The lines."""


def csv_rows(lines: Lines, delimiter: str) -> Iterator[tuple[tuple[str, ...], list[str]]]:
    """The names of the columns, and the values of a row, for each row.

    Raises:
        TableError: a quote stands where none can, is never closed, or makes one row of what are several.
        ValueError: a column is there twice, or a row has another number of columns.
    """
    names: tuple[str, ...] | None = None
    for line, fields in _records(lines, delimiter):
        if names is None:
            names = tuple(fields)
            twice = next((name for name, times in Counter(filter(None, names)).items() if times > 1), None)
            if twice is not None:
                raise ValueError(f"its first line has the column {twice[:60]!r} twice")
            kinds, doubts = _Kinds(len(names)), list[_Doubt]()
            continue
        if len(fields) != len(names):
            other = other_separator(names[0]) if delimiter == "," and len(names) == 1 else None
            told = f", whose columns are separated by {other}" if other else ""
            why = f"line {line:,} has another number of columns than the first line{told}"
            raise TableError(why, SEPARATE) if other else ValueError(why)
        kinds.add(fields)
        if len(lines.held) > 1 and len(names) > 1 and len(doubts) < MOST_DOUBTS:
            doubts += _doubt(line, lines.held, delimiter, len(names))
        yield names, fields
    if names is not None:
        for doubt in doubts:
            if kinds.fit(doubt.rows):
                raise TableError(
                    f"lines {doubt.first:,} to {doubt.last:,} are one row by a quote on the first of them, and each of "
                    "them would be a row without it"
                )


def other_separator(name: str) -> str | None:
    """What separates the columns of a first line that has no commas, in words, if anything does."""
    return next((words for sign, words in OTHERS.items() if sign in name), None)


def _records(lines: Lines, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """The line that each begins on, and its fields; lines of nothing or of spaces are none, as in other files."""
    csv.field_size_limit(max(LONGEST, csv.field_size_limit()))  # of all the process: Python has no other
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    while True:
        lines.began()
        line = reader.line_num + 1
        try:
            fields = next(reader, None)
        except csv.Error as err:
            raise TableError(_told(str(err), line, reader.line_num)) from err
        if fields is None:
            return
        # Tables with tabs are written without quotes, too: there, one inside of a field is a letter.
        if delimiter == "," and any('"' in each for each in lines.held) and not _RECORD.fullmatch("".join(lines.held)):
            raise TableError(f"line {line:,} has a quote inside of a field that does not begin with one")
        if len(fields) > 1 or "".join(lines.held).strip():  # "" in quotes is an empty text
            yield line, fields


def _told(error: str, line: int, last: int) -> str:
    if "end of data" in error:
        return f"a quote on line {line:,} begins a field that never ends"
    if "expected after" in error:
        begun = "" if line == last else f" that began on line {line:,}"
        return f"line {last:,} goes on behind the quote that ends a field{begun}"
    return f"line {line:,}: {error}"


class _Doubt:
    """A row of several lines, each of which has as many columns as a row."""

    def __init__(self, first: int, last: int, rows: list[list[str]]) -> None:
        self.first, self.last, self.rows = first, last, rows


def _doubt(line: int, held: list[str], delimiter: str, columns: int) -> Iterator[_Doubt]:
    rows = [each for each in held if each.strip()]
    if all(each.count(delimiter) == columns - 1 for each in rows):
        few = (each.rstrip("\r\n").split(delimiter)[:MOST_OTHERS] for each in rows[-MOST_LINES:])
        yield _Doubt(line, line + len(held) - 1, [[value[: LONGEST_WORD + 1] for value in row] for row in few])


class _Kinds:
    """What the columns hold: numbers, or one of a few words; of others nothing is known."""

    def __init__(self, columns: int) -> None:
        self._rows = 0
        self._numbers = set(range(min(columns, MOST_OTHERS)))
        self._words: dict[int, set[str]] = {at: set() for at in self._numbers}

    def add(self, fields: list[str]) -> None:
        self._rows += 1
        for at in list(self._numbers):
            if not _NUMBER.fullmatch(fields[at]):
                self._numbers.discard(at)
        for at, words in list(self._words.items()):
            words.add(fields[at])
            if len(words) > MOST_WORDS or len(fields[at]) > LONGEST_WORD:
                del self._words[at]

    def fit(self, rows: list[list[str]]) -> bool:
        """Whether rows hold in each column what others have there; False where nothing is known of any."""
        few = {at: words for at, words in self._words.items() if 2 * len(words) <= self._rows}
        known = self._numbers | few.keys()
        return bool(known) and all(
            bool(_NUMBER.fullmatch(row[at])) if at in self._numbers else row[at] in few[at]
            for row in rows
            for at in known
        )
