"""Texts become token arrays, by the tokenizer that came with the model."""

from __future__ import annotations

import dataclasses
import itertools
import shlex
import shutil
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from compress.console.durations import bytes_text
from compress.console.wording import AssumedWarning, counted
from compress.data.brought_names import brought_names
from compress.data.dataset import PAIRS
from compress.data.tags import IGNORED, place_tags, refuse_glued, split_columns, tags_of, words_of
from compress.data.text_labels import USUAL, TextLabels
from compress.errors import DatasetError
from compress.processor import Processor
from compress.tokenizer.open import open_tokenizer
from compress.vetting.csv_rows import MOST_OTHERS, SEPARATE, other_separator
from compress.vetting.tables import Row, rows_of, unread_kind

__all__ = ["write_tokens"]

ROOM = 0.9  # of what is free on the disk, for tokens
CHUNK, LETTERS = 1024, 16_000_000  # rows that are held at a time, and letters, by which they end before
HOLDS = 64  # letters, that a list or a table, and each value in it, counts for
MULTIPLE = 8  # of the length that all are padded to


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
    labels = TextLabels(source, processor) if split is None else None
    wanted = [name for name in (*named, *USUAL) if name]
    lists = wanted if labels is None else labels.columns
    if split is not None:
        refuse_glued(tokenizer, source)
    tagged = split is not None and split.label is not None
    brought = brought_names(source, split.label, processor.labels) if split is not None else None

    def encoded(rows: Sequence[Row], number: int) -> Iterator[Any]:
        if split is None:
            return tokenizer.encoded(_texts(rows, number, source, processor))
        return tokenizer.encoded(words_of(rows, number, source, split), split=True)

    lengths: list[int] = []
    columns: dict[str, None] = {}
    each = 2 if processor.apart else 1
    for number, rows in _chunks(rows_of(source, wanted, lists)):
        lengths += [len(found.ids) for found in encoded(rows, number)]
        if labels is not None:
            labels.add(rows, number)
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
        tags = None if split is None else tags_of(rows, number, source, processor, split, brought)
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
    if tagged:
        return
    if labels is not None and labels.write(folder / "label.npy"):
        return
    if processor.apart:
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
    """Of a value; what holds others, and each of them, counts for `HOLDS` beside its own."""
    if isinstance(value, list | dict):
        inner = value.values() if isinstance(value, dict) else value
        return HOLDS + HOLDS * len(value) + sum(map(_letters, inner))
    return len(value) if isinstance(value, str) else 1


def _texts(rows: Sequence[Row], number: int, source: Path, processor: Processor) -> list[Any]:
    columns = [processor.columns.text, *([processor.columns.pair] if processor.columns.pair else [])]
    found: list[Any] = []
    for at, row in enumerate(rows, number + 1):
        for column, flag in zip(columns, ("--text-column", "--text-pair-column"), strict=False):
            if not isinstance(row.get(column), str):
                raise _no_text(source, at, row, column, flag)
            if not _whole(row[column]):
                raise DatasetError(
                    f"row {at} of {source} can't be written in UTF-8",
                    why=f"its {column!r} holds half of a pair of surrogates, which is no letter",
                    mend="write the row again: \\ud83d\\ude00 is one letter, \\ud83d alone is none",
                )
        texts = tuple(row[column] for column in columns)
        found += texts if processor.apart or len(texts) == 1 else [texts]
    return found


def _no_text(source: Path, at: int, row: Row, column: str, flag: str) -> DatasetError:
    """Of a row that has none; says what is there."""
    held, mend = f"it holds {', '.join(map(repr, row)) or 'nothing'}", f"name the column of texts with {flag}"
    kind = unread_kind(source, column) if column in row else None
    if kind is not None:
        held, mend = f"its {column!r} is of the kind {kind}, which is not read", f"write {column!r} as texts (string)"
    elif column in row:
        held = f"its {column!r} is {'null' if row[column] is None else 'no text'}"
    elif like := next((each for each in row if each.strip().casefold() == column.casefold()), None):
        held = f"it holds {like!r}, which is another name"
        mend = f"name that column: {flag} {shlex.quote(like)}; or write {column!r} in the file"
    elif source.suffix == ".csv" and len(row) == 1 and (other := other_separator(*row)):
        held, mend = f"{held[:150]}: its columns are separated by {other}, not by commas", SEPARATE
    return DatasetError(f"row {at} of {source} has no text in a column {column!r}", why=held[:200], mend=mend)


def _whole(text: str) -> bool:
    """Whether there are no halves of letters, as JSON may hold them."""
    return text.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in text)


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
