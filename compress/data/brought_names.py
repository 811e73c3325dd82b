"""Numbers of classes by the names that the data itself has for them: a model may number the same names otherwise."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from pathlib import Path

from compress.console.wording import AssumedWarning
from compress.data.class_names import number_of
from compress.errors import DatasetError
from compress.vetting.class_features import class_names

__all__ = ["BroughtNames", "brought_names", "unnamed"]

_MADE_UP = re.compile(r"LABEL_[0-9]+")
_SHOWN = 12


def unnamed(names: Sequence[str]) -> bool:
    """Whether classes have no names: none at all, or `LABEL_0` and so on, as transformers calls them by itself."""
    return all(_MADE_UP.fullmatch(name) for name in names)


def _only_numbers(names: Sequence[str]) -> bool:
    """Whether names say no more than how many there are: ClassLabel(num_classes=3) calls them 0, 1 and 2."""
    return unnamed(names) or all(name == str(number) for number, name in enumerate(names))


class BroughtNames:
    """Of a column.

    Args:
        source: has it.
        column: its name.
        names: that its numbers stand for, in their order.
        labels: the model's names by number.

    Raises:
        DatasetError: the model calls several classes by one of the names.
    """

    def __init__(self, source: Path, column: str, names: Sequence[str], labels: Sequence[str]) -> None:
        self._source, self._column, self._names, self._labels = source, column, names, labels
        what = f"the column {column!r} of {source}"
        found = [number_of(name, labels, what) for name in names]
        folded = [label.casefold() for label in labels]
        self._numbers = [
            number_of(name.casefold(), folded, what) if number is None else number
            for name, number in zip(names, found, strict=True)
        ]
        other = [
            f"{name} is {labels[by_case]}"
            for name, number, by_case in zip(names, found, self._numbers, strict=True)
            if number is None and by_case is not None
        ]
        if other:
            told = f"{what} is taken as the model's classes though their case differs: {', '.join(other)[:300]}"
            warnings.warn(told, AssumedWarning, stacklevel=4)

    def number(self, number: int, row: int) -> int:
        """The model's number of a class by the data's.

        Args:
            number: as the data has it.
            row: that has it, counted from 1.

        Raises:
            DatasetError: the data has no name for it, or the model no such class.
        """
        named = 0 <= number < len(self._names)
        found = self._numbers[number] if named else None
        if found is None:
            shown = repr(self._names[number][:60]) if named else f"{number}, which its classes have no name for"
            raise DatasetError(
                f"row {row} of {self._source} has the label {shown}",
                why=f"by its own names its classes are {_listed(self._names)}; the model's are {_listed(self._labels)}",
                mend="rename them as the model does (dataset.cast_column); or have the numbers taken as they are: "
                f"dataset.cast_column({self._column!r}, datasets.Value('int64')), in a list: Sequence(…)",
            )
        return found


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN])[:200] + (", …" if len(names) > _SHOWN else "")


def brought_names(source: Path, column: str | None, labels: Sequence[str]) -> BroughtNames | None:
    """The names that a table brings for the numbers in a column; None where it has none, or the model has none.

    Of a model without names the numbers stay as they are, which an AssumedWarning says.

    Args:
        source: a file or folder of rows.
        column: of the labels.
        labels: the model's names by number.

    Raises:
        DatasetError: what the data says of its columns is damaged, or the model calls several classes the same.
    """
    names = class_names(source).get(column or "", ())
    if not names or _only_numbers(names):
        return None
    if unnamed(labels):
        shown = ", ".join(f"{number} is {each}" for number, each in enumerate(names[:_SHOWN]))
        told = f"the model has no names for its classes: the numbers of {column!r} in {source.name} are taken as its "
        warnings.warn(f"{told}own ({shown[:300]})", AssumedWarning, stacklevel=3)
        return None
    return BroughtNames(source, str(column), names, labels)
