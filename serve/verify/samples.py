"""What a served model is asked with, and what the right answers are: labelled rows of a file, or files of a folder."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from compress.errors import RepositoryError
from compress.vetting.texts import read_bytes, read_text
from serve.config.named import LARGEST_DATA
from serve.config.names import leads_out
from serve.verify.arrays import LABEL_KEYS, read_arrays

__all__ = ["Sample", "labelled_files", "samples_of"]

MEND = (
    "give a .npz with an array for each input of the served model, and one of labels (np.savez); a .jsonl or .csv with "
    "such columns; or a folder of files by label"
)


@dataclass(frozen=True)
class Sample:
    """One item: values by the served model's input names, or a file's content, and its label."""

    content: bytes
    content_type: str
    label: str


def samples_of(evaluation: Path, inputs: Sequence[str] = ()) -> Iterator[Sample]:
    """The samples of a file or folder.

    A .npz holds an array for each input of the served model, by its name, with an item a row, and the labels under
    "label" or "y"; one array for a model with one input may have any name. A table (.jsonl, .csv, .tsv) has columns of
    these names; the texts of a model with one input may stand in "text". A folder holds files in subfolders that are
    named after the label, or a labels.csv with the columns file and label.

    Args:
        inputs: names of the served model's inputs, where they are known.

    Raises:
        RepositoryError: it is none of these, or empty.
    """
    samples = list(_of_folder(evaluation) if evaluation.is_dir() else _of_arrays(evaluation, inputs))
    if not samples:
        raise RepositoryError(f"can't verify with {evaluation}", why="there is no sample in it", mend=MEND)
    yield from samples


def _of_arrays(path: Path, inputs: Sequence[str]) -> Iterator[Sample]:
    try:
        arrays = read_arrays(path, inputs)
    except (OSError, ValueError) as err:
        raise RepositoryError(f"can't verify with {path}", why=str(err), mend=MEND) from err
    key = next((key for key in LABEL_KEYS if key in arrays), None)
    if key is None:
        raise RepositoryError(
            f"can't verify with {path}", why=f"none of its arrays {', '.join(arrays)} is called label or y", mend=MEND
        )
    labels = arrays.pop(key).reshape(-1)
    odd = next((name for name, array in arrays.items() if not array.ndim or len(array) != len(labels)), None)
    if odd is not None or not arrays:
        why = f"{odd!r} has another number of rows than {key!r}" if odd else "it has labels only"
        raise RepositoryError(f"can't verify with {path}", why=why, mend=MEND)
    if len(inputs) == len(arrays) == 1:  # hooks may call it otherwise than the network does
        arrays = dict(zip(inputs, arrays.values(), strict=True))
    try:
        words = list(map(str, _text(labels).tolist()))
        for row, word in enumerate(words):
            values = {name: _text(array[row]).tolist() for name, array in arrays.items()}
            yield Sample(json.dumps(values).encode(), "application/json", word)
    except ValueError as err:  # bytes that are no UTF-8, or numbers that stand for no letter
        raise RepositoryError(f"can't verify with {path}", why=f"a text in it is none: {err}", mend=MEND) from err


def _of_folder(folder: Path) -> Iterator[Sample]:
    for path, label in labelled_files(folder):
        try:
            yield Sample(read_bytes(path, LARGEST_DATA), "application/octet-stream", label)
        except (OSError, ValueError) as err:
            raise RepositoryError(f"can't verify with {path}", why=str(err), mend=MEND) from err


def labelled_files(folder: Path) -> list[tuple[Path, str]]:
    """The files of a folder with their labels, see `samples_of`.

    Raises:
        RepositoryError: its labels.csv has other columns, is no file, or names files elsewhere.
    """
    table = folder / "labels.csv"
    if table.exists():
        try:
            rows = list(csv.DictReader(io.StringIO(read_text(table), newline="")))
        except (OSError, ValueError, csv.Error) as err:
            raise RepositoryError(f"can't verify with {table}", why=str(err), mend=MEND) from err
        if rows and not {"file", "label"} <= set(rows[0]):
            raise RepositoryError(f"can't verify with {table}", why="it has no columns file and label", mend=MEND)
        for row in rows:
            wrong = "has no label" if row["label"] is None else "leads out of the folder"
            if row["label"] is None or leads_out(row["file"] or ""):
                raise RepositoryError(f"can't verify with {table}", why=f"its row {row['file']!r} {wrong}", mend=MEND)
        return [(folder / row["file"], row["label"]) for row in rows]
    return [(path, path.parent.name) for path in sorted(folder.glob("*/*")) if path.is_file()]


def _text(array: Any) -> np.ndarray[Any, Any]:
    """The array, with strings in place of bytes."""
    array = np.asarray(array)
    return np.char.decode(array, "utf-8") if array.dtype.kind == "S" else array
