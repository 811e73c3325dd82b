"""Texts that are split into words already, with a label for each: as data of token classification stands in tables."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from compress.console.wording import counted
from compress.data.brought_names import BroughtNames
from compress.data.class_names import number_of
from compress.errors import DatasetError
from compress.processor import Columns, Processor
from compress.tokenizer.open import Tokens
from compress.vetting.tables import Row, rows_of, unread_kind

__all__ = ["IGNORED", "place_tags", "refuse_glued", "split_columns", "tags_of", "words_of"]

IGNORED = -100  # of tokens that have no label: special ones, what fills up, and all of a word but its first
TAGGED = ("ner_tags", "tags", "labels", "label")
MOST_CLASSES = 1 << 31  # of a model without names for them
WORDS = "tokens"  # the usual name of words
_MEND = 'write rows such as {"tokens": ["Ann"], "ner_tags": [1]}, or name the columns: --text-column, --label-column'


def split_columns(source: Path, processor: Processor) -> Columns | None:
    """The columns of words and of their labels; None where the model labels no tokens, or the text is not split."""
    if processor.task != "token-classification":
        return None
    asked = processor.columns
    names = dict.fromkeys((asked.text, WORDS, asked.label, *TAGGED))
    wanted = [name for name in names if name]
    rows = rows_of(source, wanted, wanted)
    first = next(rows, {})
    text = WORDS if asked.text == Columns().text and asked.text not in first and WORDS in first else asked.text
    held = first.get(text)
    if held is None and text in first:  # of a row without words, the others say what the column is
        others = (row.get(text) for row in rows_of(source, [text], [text]))
        held = next((words for words in others if words is not None), [] if text == WORDS else None)
    if not isinstance(held, list):
        return None
    if asked.label:
        return Columns(text, None, asked.label)
    # Each row may have columns of its own; one that lacks what others have is told of as such.
    tagged = (next((name for name in TAGGED if name in row), None) for row in itertools.chain([first], rows))
    return Columns(text, None, next(filter(None, tagged), None))


def words_of(rows: Sequence[Row], number: int, source: Path, columns: Columns) -> list[list[str]]:
    """The words of some rows, `number` of which stand before.

    Raises:
        DatasetError: a row has none.
    """
    found = []
    for at, row in enumerate(rows, number + 1):
        words = row.get(columns.text)
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            why = f"its {columns.text!r} is no list of texts" if columns.text in row else f"it has no {columns.text!r}"
            if words is None and columns.text in row:
                kind = unread_kind(source, columns.text)
                is_what = "null" if kind is None else f"of the kind {kind}, which is not read"
                why = f"its {columns.text!r} is {is_what}"
            raise DatasetError(f"row {at} of {source} has no words", why=why, mend=_MEND)
        try:
            "".join(words).encode()
        except UnicodeEncodeError as err:
            mend = "write the row again: \\ud83d\\ude00 is one letter, \\ud83d alone is none"
            raise DatasetError(f"row {at} of {source} can't be written in UTF-8", why=str(err), mend=mend) from err
        found.append(words)
    return found


def tags_of(
    rows: Sequence[Row],
    number: int,
    source: Path,
    processor: Processor,
    columns: Columns,
    brought: BroughtNames | None = None,
) -> list[list[int]] | None:
    """A class for each word of some rows; None where no column has them.

    Args:
        rows: of the source.
        number: how many stand before.
        source, processor, columns: see `split_columns`.
        brought: names that the data itself has for its numbers.

    Raises:
        DatasetError: there are more or fewer than words, or one is no class of the model.
    """
    if columns.label is None:
        return None
    found = []
    for at, row in enumerate(rows, number + 1):
        words, tags = row[columns.text], row.get(columns.label)
        if not isinstance(tags, list) or len(tags) != len(words):
            held = f"{counted(len(tags), 'labels')}" if isinstance(tags, list) else "no list of labels"
            why = f"it has {counted(len(words), 'words')}, and {held} in {columns.label!r}"
            raise DatasetError(f"row {at} of {source} has no label for each word", why=why, mend=_MEND)
        if brought is not None:
            tags = [brought.number(tag, at) if type(tag) is int and tag != IGNORED else tag for tag in tags]
        found.append([_class(tag, f"row {at} of {source}", processor.labels) for tag in tags])
    return found


def _class(tag: Any, what: str, labels: Sequence[str]) -> int:
    number = number_of(tag, labels, what) if isinstance(tag, str) else tag
    if type(number) is not int or not (number == IGNORED or 0 <= number < (len(labels) or MOST_CLASSES)):
        raise DatasetError(
            f"{what} has the label {str(tag)[:60]!r}",
            why=f"the model's classes are {', '.join(labels[:12])[:300] or 'without names'}",
            mend=f"write labels as the model names its classes, or as numbers from 0; {IGNORED} where none is known",
        )
    return number


def place_tags(tags: Sequence[int], words: Sequence[int | None], row: np.ndarray[Any, Any]) -> None:
    """Write labels [tokens] in place: a word's at its first token, as `transformers` has it in its examples.

    Args:
        tags: of the words.
        words: the word of each token, None of special ones.
        row: of labels, all `IGNORED`.
    """
    for at, (before, word) in enumerate(itertools.pairwise((None, *words))):
        if word is not None and word != before:
            row[at] = tags[word]


def refuse_glued(tokenizer: Tokens, source: Path) -> None:
    """Refuse a tokenizer that makes other tokens of a word by itself than of one in a text, as `transformers` does.

    Raises:
        DatasetError: it is one.
    """
    if not tokenizer.takes_words:
        raise DatasetError(
            f"can't make tokens of the words of {source}",
            why=f"the tokenizer in {tokenizer.place} tells words by the space before, and split ones have none",
            mend="write it anew: AutoTokenizer.from_pretrained(folder, add_prefix_space=True).save_pretrained(folder)",
        )
