"""Several classes to a text: 0 or 1 for each class of the model, or a list of names or numbers of those that it has."""

from __future__ import annotations

import warnings
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from compress.console.wording import AssumedWarning, counted
from compress.data.brought_names import BroughtNames
from compress.data.class_names import number_of
from compress.errors import DatasetError

__all__ = ["SeveralLabels"]

UNKNOWN = -1  # beside 0 and 1
_SHOWN = 60


class SeveralLabels:
    """Of all rows, taken one by one; which of the two ways they are written is known by all of them.

    Args:
        source: has them.
        labels: the model's names by number.
    """

    def __init__(self, source: Path, labels: Sequence[str]) -> None:
        self._source, self._labels = source, labels
        self._each, self._listed = True, True  # whether they may be 0 or 1 for each class; numbers of classes
        self._named = False
        # Of a row: classes of a list, or those that have 1; and those that are not known.
        self._ones, self._ids, self._unknown = _Lists(), _Lists(), _Lists()

    def add(self, values: Sequence[Any], row: int, brought: BroughtNames | None) -> None:
        """Take the labels of a row.

        Args:
            values: of it.
            row: counted from 1.
            brought: names that the data has for its numbers.

        Raises:
            DatasetError: with the rows before, they are neither; or a name is none of the model's.
        """
        if brought is not None:
            values = [brought.number(each, row) if type(each) is int else each for each in values]
        if any(isinstance(each, str) for each in values) or brought is not None:
            self._named, self._each = True, False
        ids = [self._id(each) for each in values]
        known = [at for at in ids if at is not None]
        self._listed &= len(known) == len(values) == len(set(known))
        self._each &= len(values) == len(self._labels) and all(_is_flag(each) for each in values)
        if not (self._listed or self._each):
            raise self._refused(values, row)
        self._ids.add(known if self._listed else [])
        self._ones.add([at for at, each in enumerate(values) if each == 1] if self._each else [])
        self._unknown.add([at for at, each in enumerate(values) if each in (None, UNKNOWN)] if self._each else [])

    def _id(self, value: Any) -> int | None:
        if isinstance(value, str):
            return number_of(value, self._labels, str(self._source))
        return value if type(value) is int and 0 <= value < len(self._labels) else None

    def _refused(self, values: Sequence[Any], row: int) -> DatasetError:
        names = ", ".join(self._labels[:8])[:200] or "without names"
        return DatasetError(
            f"row {row} of {self._source} has the labels {str(list(values[:8]))[:_SHOWN]}",
            why=f"the model has {counted(len(self._labels), 'classes')}: {names}; in all rows alike, labels are names "
            "or numbers of those that a text has, each once, or 0 or 1 for each of the model's",
            mend="write lists of names as the model has them for its classes, or a 0 or a 1 for each of them",
        )

    def write(self, path: Path) -> None:
        """Write int8 [n, classes] of 0, 1, and -1 where it is not known.

        Raises:
            OSError: the disk is full.
        """
        if self._each and self._listed and len(self._ids):
            told = f"the labels of {self._source.name} are taken as 0 or 1 for each class, not as numbers of classes"
            warnings.warn(told, AssumedWarning, stacklevel=3)
        shape = len(self._ids), len(self._labels)
        found = np.lib.format.open_memmap(path, "w+", np.int8, shape)
        (self._ones if self._each else self._ids).place(found, 1)
        self._unknown.place(found, UNKNOWN)
        found.flush()


def _is_flag(value: Any) -> bool:
    return value is None or (isinstance(value, bool | int | float) and value in (0, 1, UNKNOWN))


class _Lists:
    """Lists of numbers, one after the other."""

    def __init__(self) -> None:
        self._values, self._ends = array("i"), array("q")

    def __len__(self) -> int:
        return len(self._ends)

    def add(self, values: Sequence[int]) -> None:
        self._values.extend(values)
        self._ends.append(len(self._values))

    def place(self, found: np.ndarray[Any, Any], value: int) -> None:
        """Write a value in [n, …] wherever a row's list says."""
        begun = 0
        for row, end in enumerate(self._ends):
            found[row, self._values[begun:end]] = value
            begun = end
