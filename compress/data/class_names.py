"""The number of a class by the name that data has for it."""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Sequence
from pathlib import Path

from compress.console.wording import AssumedWarning, counted
from compress.errors import DatasetError

__all__ = ["are_numbers", "number_of", "numbers_of_folders"]


def are_numbers(labels: Sequence[str]) -> bool:
    """Whether names of classes look like numbers of others: stars from "1" to "5" are the classes 0 to 4."""
    return any(
        label.isascii() and label.isdigit() and (int(label) != number or str(int(label)) != label)
        for number, label in enumerate(labels)
    )


def number_of(name: str, labels: Sequence[str], what: str) -> int | None:
    """The class of a name; None where the model has none of it.

    Args:
        name: as the data has it.
        labels: the model's names by number.
        what: has the name, for the error ("row 3 of eval.csv").

    Raises:
        DatasetError: several classes are called so.
    """
    found = [number for number, label in enumerate(labels) if label == name] if name in labels else []
    if len(found) > 1:
        raise DatasetError(
            f"{what} is of the class {name[:60]!r}",
            why=f"the model calls several classes so: {', '.join(map(str, found[:8]))}",
            mend="name classes by their numbers from 0, or mend id2label in the model's config.json",
        )
    return found[0] if found else None


def numbers_of_folders(folders: Collection[str], source: Path, labels: Sequence[str]) -> dict[str, int]:
    """The class of each folder: by the model's name for it, else by a number; of a model without names by their order.

    Case alone is no difference; where it is looked past, and where the order is taken, an AssumedWarning says so.

    Args:
        folders: their names.
        source: that holds them.
        labels: the model's names by number; `LABEL_0` and so on are none.

    Raises:
        DatasetError: a folder is of no class, or of several.
    """
    ordered = sorted(folders)
    unnamed = all(re.fullmatch(r"LABEL_[0-9]+", label) for label in labels)
    found = {name: number_of(name, labels, f"the folder {source / name}") for name in ordered}
    if None not in found.values():
        if are_numbers(labels) and any(name.isdigit() for name in ordered):
            _told(f"the folders of {source} are taken as the model's names of classes, which are numbers, too")
        return {name: number for name, number in found.items() if number is not None}
    if all(name.isascii() and name.isdigit() for name in ordered):
        if labels and (beyond := [name for name in ordered if int(name) >= len(labels)]):
            raise _foreign(source, beyond[0], labels)
        return {name: int(name) for name in ordered}
    if unnamed and len(ordered) == (len(labels) or len(ordered)):
        order = ", ".join(f"{number} {name}" for number, name in enumerate(ordered[:8]))
        _told(f"the model has no names for its classes: the folders of {source} are taken in their order: {order}")
        return {name: number for number, name in enumerate(ordered)}
    folded = [label.casefold() for label in labels]
    for name in (name for name, number in found.items() if number is None):
        found[name] = number_of(name.casefold(), folded, f"the folder {source / name}")
        if found[name] is None:
            raise _foreign(source, name, labels)
    known = {name: number for name, number in found.items() if number is not None}
    other = ", ".join(f"{name} is {labels[number]}" for name, number in known.items() if name != labels[number])
    _told(f"the folders of {source} are taken as the model's classes though their case differs: {other[:300]}")
    return known


def _foreign(source: Path, name: str, labels: Sequence[str]) -> DatasetError:
    more = f" and {counted(len(labels) - 8, 'others')}" if len(labels) > 8 else ""
    return DatasetError(
        f"{source} holds the class {name[:60]!r}",
        why=f"the model's classes are {', '.join(labels[:8])[:400]}{more}",
        mend="name the folders as the model names its classes, or by their numbers from 0",
    )


def _told(words: str) -> None:
    warnings.warn(words, AssumedWarning, stacklevel=4)
