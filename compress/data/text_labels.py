"""Labels of texts in tables: a number of a class, its name, a value to hit, or several classes to a text."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from compress.console.wording import AssumedWarning, counted
from compress.data.brought_names import BroughtNames, brought_names
from compress.data.class_names import are_numbers, number_of
from compress.data.several_labels import SeveralLabels
from compress.errors import DatasetError
from compress.processor import Processor
from compress.vetting.tables import Row, unread_kind

__all__ = ["USUAL", "TextLabels"]

USUAL = ("label", "labels")  # names of their column


class TextLabels:
    """Of all rows, taken a few at a time.

    Args:
        source: has them.
        processor: has the column's name, and the classes' names.
    """

    def __init__(self, source: Path, processor: Processor) -> None:
        self._source, self._processor = source, processor
        self._labels: list[int | float | None] = []
        self._several: SeveralLabels | None = None
        self._written: set[bool] = set()  # whether labels are texts
        self._brought = functools.cache(self._brought_by)

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that labels may stand in, the first of which that a row has is taken."""
        if self._processor.columns.label:
            return (self._processor.columns.label,)
        return USUAL if self._processor.task == "sequence-classification" else ()

    def add(self, rows: Sequence[Row], number: int) -> None:
        """Take some rows, `number` of which stand before.

        Raises:
            DatasetError: one has a column of labels and no label, or what is none; or only some have several.
        """
        for at, row in enumerate(rows, number + 1):
            column = self._processor.columns.label or next((name for name in self.columns if name in row), None)
            label = None if column is None else row.get(column)
            if column is not None and label is None:
                raise _no_label(self._source, at, row, column)
            self._add(label, column, at)

    def _add(self, label: Any, column: str | None, row: int) -> None:
        brought = None if label is None else self._brought(column)
        if isinstance(label, list) and self._processor.task == "sequence-classification":
            if self._several is None:
                self._several = SeveralLabels(self._source, self._processor.labels)
            self._refuse_unlike(row)
            self._several.add(label, row, brought)
            return
        if self._several is not None:
            raise _no_label(self._source, row) if label is None else self._unlike(row, several=False)
        if brought is not None and type(label) is int:
            label = brought.number(label, row)
        self._labels.append(_number(label, row, self._source, self._processor))
        if label is not None:
            self._written.add(isinstance(label, str))

    def _refuse_unlike(self, row: int) -> None:
        if any(each is not None for each in self._labels):
            raise self._unlike(row, several=True)
        if self._labels:
            raise _no_label(self._source, 1)

    def _unlike(self, row: int, *, several: bool) -> DatasetError:
        has, others = ("several labels", "one") if several else ("one label", "a list of them")
        return DatasetError(
            f"row {row} of {self._source} has {has}",
            why=f"the rows before have {others} each",
            mend="give every row a list of labels, or every row one label",
        )

    def _brought_by(self, column: str | None) -> BroughtNames | None:
        if not self._processor.task.endswith("classification"):
            return None
        return brought_names(self._source, column, self._processor.labels)

    def write(self, path: Path) -> bool:
        """Write all of them, where there are labels: [n], of several classes to a text [n, classes].

        Of pairs of texts, each of which is a row of its own, float32 [2 n].

        Returns:
            Whether there are labels.

        Raises:
            DatasetError: some rows have labels and others none, or they are of different kinds.
        """
        if self._several is not None:
            self._several.write(path)
            return True
        _refuse_exponents(self._labels, self._source)
        names = self._processor.labels
        if self._written and are_numbers(names):
            taken = "the model's names of classes" if True in self._written else "numbers of classes from 0"
            shown = ", ".join(f"{number} is {label!r}" for number, label in enumerate(names[:3]))
            told = (
                f"the labels of {self._source.name} are taken as {taken}; its names are numbers, too: the class {shown}"
            )
            warnings.warn(told, AssumedWarning, stacklevel=3)
        if not _all_labelled(self._labels, self._source):
            return False
        found = _array(self._labels)
        np.save(path, np.repeat(found.astype(np.float32), 2) if self._processor.apart else found)
        return True


def _no_label(source: Path, at: int, row: Row | None = None, column: str = "") -> DatasetError:
    """Of a row that has none; of a column of another kind, what it is."""
    held = "others have one"
    mend = "name the column of labels with --label-column, and give every row one"
    if row is not None and column not in row:
        held = f"it holds {', '.join(map(repr, row))[:200]}, and no {column!r}"
    elif row is not None and (kind := unread_kind(source, column)) is not None:
        held = f"its {column!r} is of the kind {kind}, and labels are texts, whole numbers or floats, or lists of these"
        mend = f"write {column!r} as one of them"
    elif row is not None:
        held = f"its {column!r} is null"
    return DatasetError(f"row {at} of {source} has no label", why=held, mend=mend)


def _all_labelled(labels: Sequence[Any], source: Path) -> bool:
    """Whether rows have labels: all of them or none."""
    bare = [at for at, label in enumerate(labels, 1) if label is None]
    if bare and len(bare) < len(labels):
        raise DatasetError(
            f"row {bare[0]} of {source} has no label",
            why=f"{len(labels) - len(bare):,} of {counted(len(labels), 'rows')} have one",
            mend="give every row one, or none",
        )
    return not bare


def _number(label: Any, at: int, source: Path, processor: Processor) -> int | float | None:
    """A label: a number as it is, a word by the model's names for its classes, None where there is none.

    Args:
        label, source, processor: of a row.
        at: which it is, counted from 1.
    """
    if label is None:
        return None
    number = label
    if isinstance(label, str):
        named = number_of(label, processor.labels, f"row {at} of {source}")
        number = _read(label) if named is None else named
        if named is None and are_numbers(processor.labels):
            raise DatasetError(
                f"row {at} of {source} has the label {label[:60]!r}",
                why=f"the model's classes are {', '.join(processor.labels[:8])}: a number may be a name of them",
                mend="write every label as the model names its classes; or numbers from 0 as such, in JSON Lines",
            )
    if not isinstance(number, int | float) or not abs(number) < 1 << 63:  # NaN, too
        known = ", ".join(processor.labels[:8]) or "none by name"
        shown = f"a {type(label).__name__}" if isinstance(label, list | dict) else repr(str(label)[:60])
        raise DatasetError(
            f"row {at} of {source} has the label {shown}",
            why=f"it is no number of a class, and the model's classes are {known}",
            mend="write labels as the model names its classes, or as their numbers from 0",
        )
    return number


class _Exponent(float):
    """A number that a text has written so: 1e3."""


def _refuse_exponents(labels: Sequence[int | float | None], source: Path) -> None:
    """Refuse 1e3 among whole numbers, which are classes: all of them would be taken as values."""
    known = [each for each in labels if each is not None]
    odd = next((at for at, each in enumerate(labels, 1) if isinstance(each, _Exponent)), None)
    if odd is not None and any(type(each) is int for each in known) and all(float(each).is_integer() for each in known):
        raise DatasetError(
            f"row {odd} of {source} has a label with an exponent, {labels[odd - 1]:g}",
            why="the other labels are whole numbers, as classes are",
            mend="write it as the others, or values that are to be hit with a point (1000.0)",
        )


def _array(labels: Sequence[int | float | None]) -> np.ndarray[Any, Any]:
    """Of all rows [n]."""
    if all(isinstance(each, int) for each in labels):
        return np.asarray(labels, np.int64)
    array = np.asarray(labels, np.float64)
    small = array.astype(np.float32)
    # A number of a class beside 2.0 stays the one that it is.
    whole = [isinstance(each, int) and float(other) != each for each, other in zip(labels, small, strict=True)]
    return array if any(whole) else small


def _read(text: str) -> int | float | None:
    if not text.isascii() or "_" in text:  # which Python reads as numbers, and no table means as such
        return None
    for kind in (int, _Exponent if "e" in text.lower() else float):
        try:
            return kind(text)
        except ValueError:
            continue
    return None
