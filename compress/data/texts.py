"""Texts become token arrays, by the tokenizer that came with the model."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from compress.errors import DatasetError, MissingExtraError, first_line
from compress.processor import Processor
from compress.vetting.tables import SUFFIXES, Row, rows_of
from compress.vetting.texts import read_json

__all__ = ["SUFFIXES", "write_tokens"]

CHUNK = 1024  # rows that are held at a time
MULTIPLE = 8  # of the length that all are padded to
_LABELS = ("label", "labels")
_TOKENIZER = "tokenizer.json"


def write_tokens(source: Path, processor: Processor, folder: Path) -> None:
    """Write a folder of arrays: input_ids, attention_mask, token_type_ids int64 [n, length], and label [n].

    Rows are read, made and written in pieces. All are as long as the longest, up to a multiple of 8 and the
    processor's `max_length`, which longer ones are cut to.

    Args:
        source: a file of `compress.vetting.tables`.
        processor: has a tokenizer, the columns' names, and labels' names.
        folder: that exists, and is empty.

    Raises:
        DatasetError: the tokenizer is missing, a column is not there, a label has no number.
        MissingExtraError: tokenizers is not installed.
    """
    tokenizer, pad = _tokenizer(processor)
    longest = processor.max_length or 512
    tokenizer.enable_truncation(longest)
    tokenizer.no_padding()
    lengths: list[int] = []
    labels: list[Any] = []
    for number, rows in _chunks(rows_of(source)):
        lengths += [len(found.ids) for found in tokenizer.encode_batch(_texts(rows, number, source, processor))]
        labels += _labels_of(rows, number, source, processor)
    if not lengths:
        raise DatasetError(f"{source} is empty", why="it holds no rows", mend="give it some: 100 or more is usual")
    width = min(longest, -(-max(lengths) // MULTIPLE) * MULTIPLE)
    names = ("input_ids", "attention_mask", "token_type_ids")
    arrays = {
        name: np.lib.format.open_memmap(folder / f"{name}.npy", "w+", np.int64, (len(lengths), width)) for name in names
    }
    arrays["input_ids"][:] = pad
    for number, rows in _chunks(rows_of(source)):
        for at, found in enumerate(tokenizer.encode_batch(_texts(rows, number, source, processor)), number):
            for name, values in zip(names, (found.ids, found.attention_mask, found.type_ids), strict=True):
                arrays[name][at, : len(values)] = values
    for array in arrays.values():
        array.flush()
    if labels:
        np.save(folder / "label.npy", _numbers(labels, source, processor))


def _tokenizer(processor: Processor) -> tuple[Any, int]:
    """The tokenizer, and the number that pads."""
    place = processor.folder
    if _TOKENIZER not in processor.files:
        raise DatasetError(
            f"can't read texts for {place}",
            why=f"there is no {_TOKENIZER} in it",
            mend="download it, or write it: AutoTokenizer.from_pretrained(folder).save_pretrained(folder); or give "
            "tokens as arrays in an .npz",
        )
    try:
        from tokenizers import Tokenizer
    except ImportError as err:
        raise MissingExtraError("read texts", module="tokenizers", extra="hf") from err
    try:
        tokenizer = Tokenizer.from_file(str(place / _TOKENIZER))
        config: Any = read_json(place / "tokenizer_config.json") if "tokenizer_config.json" in processor.files else {}
    except Exception as err:  # tokenizers raises plain Exceptions
        raise DatasetError(
            f"can't read the tokenizer of {place}", why=first_line(err)[:300], mend="copy or download the folder again"
        ) from err
    named = config.get("pad_token") if isinstance(config, dict) else None
    named = named.get("content") if isinstance(named, dict) else named
    padding = tokenizer.padding or {}
    known = (tokenizer.token_to_id(str(each)) for each in (named, "[PAD]", "<pad>") if each)
    return tokenizer, int(next((each for each in known if each is not None), padding.get("pad_id", 0)))


def _chunks(rows: Iterable[Row]) -> Iterator[tuple[int, list[Row]]]:
    """The rows in pieces, each with the number of its first."""
    rows, number = iter(rows), 0
    while piece := list(itertools.islice(rows, CHUNK)):
        yield number, piece
        number += len(piece)


def _texts(rows: Sequence[Row], number: int, source: Path, processor: Processor) -> list[Any]:
    columns = [processor.columns.text, *([processor.columns.pair] if processor.columns.pair else [])]
    found = []
    for at, row in enumerate(rows, number + 1):
        for column, flag in zip(columns, ("--text-column", "--text-pair-column"), strict=False):
            if not isinstance(row.get(column), str):
                held = (
                    f"its {column!r} is no text"
                    if column in row
                    else f"it holds {', '.join(map(repr, row)) or 'nothing'}"
                )
                raise DatasetError(
                    f"row {at} of {source} has no text in a column {column!r}",
                    why=held[:200],
                    mend=f"name the column of texts with {flag}",
                )
        texts = tuple(row[column] for column in columns)
        found.append(texts if len(texts) > 1 else texts[0])
    return found


def _labels_of(rows: Sequence[Row], number: int, source: Path, processor: Processor) -> list[Any]:
    """Values of the column that is named; of a classifier's texts else of one of the usual name, where there is one."""
    usual = _LABELS if processor.task == "sequence-classification" and rows else ()
    column = processor.columns.label or next((name for name in usual if name in rows[0]), None)
    if column is None:
        return []
    for at, row in enumerate(rows, number + 1):
        if row.get(column) is None:
            raise DatasetError(
                f"row {at} of {source} has no label",
                why=f"it holds {', '.join(map(repr, row))[:200]}, and no {column!r}",
                mend="name the column of labels with --label-column, and give every row one",
            )
    return [row[column] for row in rows]


def _numbers(labels: list[Any], source: Path, processor: Processor) -> np.ndarray[Any, Any]:
    """Labels [n]: numbers as they are, words by the model's names for its classes."""
    names = {name: number for number, name in enumerate(processor.labels)}
    found = []
    for at, label in enumerate(labels, 1):
        number = label
        if isinstance(label, str):
            number = names.get(label, _read(label))
        if not isinstance(number, int | float):
            known = ", ".join(list(names)[:8]) or "none by name"
            raise DatasetError(
                f"row {at} of {source} has the label {str(label)[:60]!r}",
                why=f"it is no number, and the model's classes are {known}",
                mend="write labels as the model names its classes, or as their numbers from 0",
            )
        found.append(number)
    return np.asarray(found, np.int64 if all(isinstance(each, int) for each in found) else np.float32)


def _read(text: str) -> int | float | None:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return None
