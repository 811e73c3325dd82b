"""Data to ask a served model with: the arrays of an .npz, or the columns of a table of texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from compress.errors import DatasetError
from compress.vetting.arrays import open_npz
from compress.vetting.tables import rows_of
from serve.config.named import LARGEST_DATA

__all__ = ["LABEL_KEYS", "LONGEST_TEXT", "TABLES", "read_arrays"]

Array = np.ndarray[Any, Any]
LABEL_KEYS = ("label", "labels", "y", "target", "targets")
LONGEST_TEXT = 1 << 20  # bytes of one string of an .npz
TABLES = (".jsonl", ".ndjson", ".csv", ".tsv", ".txt")
TEXT = "text"  # the column of texts, where none is named as the model's input


def read_arrays(path: Path, inputs: Sequence[str] = ()) -> dict[str, Array]:
    """The arrays of a file by name, a sample a row, its labels among them.

    Of a table (`TABLES`) these are the columns that are named as the model's inputs; of a model with one input else the
    column `text`, or the only one. Texts are str in arrays of objects [n], numbers and lists of them arrays of numbers.

    Args:
        path: an .npz or a table.
        inputs: names of the model's inputs; without them all columns are taken.

    Raises:
        ValueError: it is neither, damaged, too large, or has no such columns; says what.
        OSError: it can't be read.
    """
    if path.suffix.lower() not in TABLES:
        with path.open("rb") as file:
            if path.suffix != ".npz" and not file.read(2).startswith(b"PK"):
                raise ValueError(f"it is no .npz, and no table of texts ({', '.join(TABLES)})")
        return open_npz(path, text=LONGEST_TEXT)
    if path.is_file() and path.stat().st_size > LARGEST_DATA:
        raise ValueError(f"it has over {LARGEST_DATA >> 20} MiB")
    try:
        rows = list(rows_of(path))
    except DatasetError as err:
        raise ValueError(err.why) from err
    if not rows:
        raise ValueError("there is no row in it")
    columns = _columns(list(rows[0]), inputs)
    return {name: _array(rows, column) for name, column in columns.items()}


def _columns(there: list[str], inputs: Sequence[str]) -> dict[str, str]:
    """Which column is taken for what: labels under their own names."""
    label = next((key for key in LABEL_KEYS if key in there and key not in inputs), None)
    labels = {} if label is None else {label: label}
    others = [column for column in there if column != label]
    if not inputs or set(inputs) <= set(others):
        return {name: name for name in (inputs or others)} | labels
    if len(inputs) == 1 and (TEXT in others or len(others) == 1):
        return {inputs[0]: TEXT if TEXT in others else others[0]} | labels
    raise ValueError(f"its columns are {', '.join(there)}, and the model takes {', '.join(inputs)}")


def _array(rows: Sequence[Mapping[str, Any]], column: str) -> Array:
    """A column [n, …].

    Raises:
        ValueError: a row has no such value, or values are neither texts nor numbers of one shape.
    """
    missing = next((number for number, row in enumerate(rows, 1) if row.get(column) is None), None)
    if missing is not None:
        raise ValueError(f"its row {missing} has no {column!r}")
    values = [row[column] for row in rows]
    if all(isinstance(value, str) for value in values):
        found = np.empty(len(values), np.object_)
        for number, value in enumerate(values):
            value.encode()  # half of a letter that is written in two is no text
            found[number] = value
        return found
    try:
        found = np.asarray(values)
    except (ValueError, OverflowError) as err:  # lists of unlike lengths, or numbers beyond any dtype
        raise ValueError(f"the values of its column {column!r} have no one shape: {err}") from err
    if found.dtype.kind not in "biuf":
        raise ValueError(f"the values of its column {column!r} are neither all texts nor all numbers")
    return found
