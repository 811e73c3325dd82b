"""Texts become token arrays, by the tokenizer that came with the model."""

from __future__ import annotations

import dataclasses
import itertools
import shutil
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from compress.console.durations import bytes_text
from compress.console.wording import AssumedWarning, counted
from compress.data.class_names import are_numbers, number_of
from compress.data.dataset import PAIRS
from compress.data.tags import IGNORED, place_tags, refuse_glued, split_columns, tags_of, words_of
from compress.errors import DatasetError
from compress.processor import Processor
from compress.tokenizer.open import open_tokenizer
from compress.vetting.csv_rows import MOST_OTHERS
from compress.vetting.tables import Row, rows_of

__all__ = ["write_tokens"]

ROOM = 0.9  # of what is free on the disk, for tokens
CHUNK, LETTERS = 1024, 16_000_000  # rows that are held at a time, and letters, by which they end before
MULTIPLE = 8  # of the length that all are padded to
_LABELS = ("label", "labels")


def write_tokens(source: Path, processor: Processor, folder: Path) -> None:
    """Write a folder of arrays: input_ids, attention_mask, token_type_ids int64 [n, length], and label [n].

    Rows are read, made and written in pieces. All are as long as the longest, up to a multiple of 8 and the
    processor's `max_length`, which longer ones are cut to. token_type_ids are zeros where the tokenizer passes none.
    Of two texts to a row, each of which is embedded, rows of arrays are the first and the second one after another,
    each with the label of both, float32; a file `PAIRS` says so. Of words with a label each, label is [n, length].

    Args:
        source: a file of `compress.vetting.tables`.
        processor: has a tokenizer, the columns' names, and labels' names.
        folder: that exists, and is empty.

    Raises:
        DatasetError: the tokenizer is missing or can't be used, a column is not there, a label has no number.
        MissingExtraError: tokenizers is not installed.
    """
    tokenizer = open_tokenizer(processor)
    for note in tokenizer.notes:
        warnings.warn(note, AssumedWarning, stacklevel=2)
    split = split_columns(source, processor)
    named = dataclasses.astuple(processor.columns if split is None else split)
    wanted = [name for name in (*named, *_LABELS) if name]
    lists = () if split is None else wanted
    if split is not None:
        refuse_glued(tokenizer, source)
    tagged = split is not None and split.label is not None

    def encoded(rows: Sequence[Row], number: int) -> Iterator[Any]:
        if split is None:
            return tokenizer.encoded(_texts(rows, number, source, processor))
        return tokenizer.encoded(words_of(rows, number, source, split), split=True)

    lengths: list[int] = []
    labels: list[int | float | None] = []
    written: set[bool] = set()  # whether labels are
    columns: dict[str, None] = {}
    each = 2 if processor.apart else 1
    for number, rows in _chunks(rows_of(source, wanted, lists)):
        lengths += [len(found.ids) for found in encoded(rows, number)]
        given = _labels_of(rows, number, source, processor) if split is None else [None] * len(rows)
        labels += _numbers(given, source, processor, number)
        written |= {isinstance(label, str) for label in given if label is not None}
        if len(columns) < MOST_OTHERS:  # each row may have others
            columns |= dict.fromkeys(itertools.chain.from_iterable(rows))
    if not lengths:
        raise DatasetError(f"{source} is empty", why="it holds no rows", mend="give it some: 100 or more is usual")
    width = min(tokenizer.longest, -(-max(lengths) // MULTIPLE) * MULTIPLE)
    names = ("input_ids", "attention_mask", "token_type_ids")
    _refuse_many(len(names) * len(lengths) * width * np.dtype(np.int64).itemsize, len(lengths), width, source, folder)
    arrays = {
        name: np.lib.format.open_memmap(folder / f"{name}.npy", "w+", np.int64, (len(lengths), width)) for name in names
    }
    arrays["input_ids"][:] = tokenizer.pad
    if tagged:
        arrays["label"] = np.lib.format.open_memmap(folder / "label.npy", "w+", np.int64, (len(lengths), width))
        arrays["label"][:] = IGNORED
    for number, rows in _chunks(rows_of(source, wanted, lists)):
        tags = None if split is None else tags_of(rows, number, source, processor, split)
        for at, found in enumerate(encoded(rows, number), each * number):
            if len(found.ids) != lengths[at]:
                raise DatasetError(
                    f"can't make tokens of row {at // each + 1} of {source}",
                    why=f"its tokenizer made {counted(lengths[at], 'tokens')} of it, and then {len(found.ids):,}",
                    mend="leave what is random out of tokenizer.json",
                )
            types = 0 if tokenizer.type_ids is False else found.type_ids
            for name, values in zip(names, (found.ids, found.attention_mask, types), strict=True):
                arrays[name][at, : len(found.ids)] = values
            if tags is not None:
                place_tags(tags[at - number], found.word_ids, arrays["label"][at])
    for array in arrays.values():
        array.flush()
    if processor.apart:
        (folder / PAIRS).touch()
    _refuse_exponents(labels, source)
    if written and are_numbers(processor.labels):
        taken = "the model's names of classes" if True in written else "numbers of classes from 0"
        shown = ", ".join(f"{number} is {label!r}" for number, label in enumerate(processor.labels[:3]))
        told = f"the labels of {source.name} are taken as {taken}; its names are numbers, too: the class {shown}"
        warnings.warn(told, AssumedWarning, stacklevel=2)
    if tagged:
        return
    if _all_labelled(labels, source):
        found = _array(labels)
        np.save(folder / "label.npy", np.repeat(found.astype(np.float32), 2) if processor.apart else found)
    elif processor.apart:
        _warn_apart(source, [name for name in columns if name not in (processor.columns.text, processor.columns.pair)])
    elif split is not None or processor.task == "sequence-classification":
        text = processor.columns.text if split is None else split.text
        _warn(source, [name for name in columns if name not in (text, processor.columns.pair)])


def _refuse_many(size: int, rows: int, width: int, source: Path, folder: Path) -> None:
    """Refuse tokens that would fill the disk: a file of short rows and one long one makes many times its size."""
    free = shutil.disk_usage(folder).free
    if size > ROOM * free:
        raise DatasetError(
            f"can't make tokens of {source}",
            why=f"{counted(rows, 'rows')} as long as the longest, {counted(width, 'tokens')}, take {bytes_text(size)}, "
            f"and {bytes_text(free)} are free in {tempfile.gettempdir()}",
            mend="name a folder with more room by TMPDIR; or give fewer rows, or leave out those that are far longer",
        )


def _chunks(rows: Iterable[Row]) -> Iterator[tuple[int, list[Row]]]:
    """The rows in pieces, each with the number of its first."""
    number, held, letters = 0, list[Row](), 0
    for row in rows:
        held.append(row)
        letters += sum(_letters(value) for value in row.values())
        if len(held) == CHUNK or letters >= LETTERS:
            yield number, held
            number, held, letters = number + len(held), [], 0
    if held:
        yield number, held


def _letters(value: Any) -> int:
    return sum(map(_letters, value)) if isinstance(value, list) else len(value) if isinstance(value, str) else 1


def _texts(rows: Sequence[Row], number: int, source: Path, processor: Processor) -> list[Any]:
    columns = [processor.columns.text, *([processor.columns.pair] if processor.columns.pair else [])]
    found: list[Any] = []
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
            if not _whole(row[column]):
                raise DatasetError(
                    f"row {at} of {source} can't be written in UTF-8",
                    why=f"its {column!r} holds half of a pair of surrogates, which is no letter",
                    mend="write the row again: \\ud83d\\ude00 is one letter, \\ud83d alone is none",
                )
        texts = tuple(row[column] for column in columns)
        found += texts if processor.apart or len(texts) == 1 else [texts]
    return found


def _whole(text: str) -> bool:
    """Whether there are no halves of letters, as JSON may hold them."""
    return text.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in text)


def _labels_of(rows: Sequence[Row], number: int, source: Path, processor: Processor) -> list[Any]:
    """Values of the column that is named; of a classifier's texts else of one of the usual name.

    A row without such a column has the label None.
    """
    usual = _LABELS if processor.task == "sequence-classification" else ()
    named = processor.columns.label
    found = []
    for at, row in enumerate(rows, number + 1):
        column = named or next((name for name in usual if name in row), None)
        label = None if column is None else row.get(column)
        if column is not None and label is None:
            raise DatasetError(
                f"row {at} of {source} has no label",
                why=f"it holds {', '.join(map(repr, row))[:200]}, and no {column!r}",
                mend="name the column of labels with --label-column, and give every row one",
            )
        found.append(label)
    return found


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


def _warn(source: Path, others: Sequence[str]) -> None:
    """Of a file that seems to have labels under another name: accuracy would be asked, and agreement judged."""
    if others:
        told = (
            f"no labels in {source.name} (not read: {', '.join(others)[:200]}): as evaluation data it judges the "
            "agreement with the original, not accuracy; --label-column names the labels"
        )
        warnings.warn(told, AssumedWarning, stacklevel=3)


def _warn_apart(source: Path, others: Sequence[str]) -> None:
    """Of pairs whose scores may stand in a column that nobody has named."""
    if others:
        told = (
            f"no scores of the pairs in {source.name} (not read: {', '.join(others)[:200]}): as evaluation data it "
            "judges each embedding by its cosine to the original's; --label-column names the scores"
        )
        warnings.warn(told, AssumedWarning, stacklevel=3)


def _numbers(labels: Sequence[Any], source: Path, processor: Processor, first: int = 0) -> list[int | float | None]:
    """Labels: numbers as they are, words by the model's names for its classes, None where there is none.

    Args:
        labels, source, processor: of some rows.
        first: how many rows there are before.
    """
    found: list[int | float | None] = []
    ambiguous = are_numbers(processor.labels)
    for at, label in enumerate(labels, first + 1):
        number = label
        if label is None:
            found.append(None)
            continue
        if isinstance(label, str):
            named = number_of(label, processor.labels, f"row {at} of {source}")
            number = _read(label) if named is None else named
            if named is None and ambiguous:
                raise DatasetError(
                    f"row {at} of {source} has the label {label[:60]!r}",
                    why=f"the model's classes are {', '.join(processor.labels[:8])}: a number may be a name of them",
                    mend="write every label as the model names its classes; or numbers from 0 as such, in JSON Lines",
                )
        if not isinstance(number, int | float) or not abs(number) < 1 << 63:  # NaN, too
            known = ", ".join(processor.labels[:8]) or "none by name"
            raise DatasetError(
                f"row {at} of {source} has the label {str(label)[:60]!r}",
                why=f"it is no number of a class, and the model's classes are {known}",
                mend="write labels as the model names its classes, or as their numbers from 0",
            )
        found.append(number)
    return found


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
