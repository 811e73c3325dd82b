"""How many ids a tokenizer can make, held against the rows of a network's table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["MEND", "ids_of", "too_many"]

MEND = (
    "take the tokenizer.json that the model was trained with, or give the table a row for each of its ids before the "
    "export: model.resize_token_embeddings(len(tokenizer))"
)


def ids_of(told: Mapping[str, Any]) -> int:
    """One more than the largest id that a tokenizer.json names, in its vocabulary and its added tokens; 0 for none."""
    model, added = told.get("model"), told.get("added_tokens")
    vocabulary = model.get("vocab") if isinstance(model, Mapping) else None
    ids = [each.get("id") for each in added if isinstance(each, Mapping)] if isinstance(added, list) else []
    if isinstance(vocabulary, Mapping):
        ids += vocabulary.values()
    elif isinstance(vocabulary, list):  # Unigram's, by place
        ids.append(len(vocabulary) - 1)
    return max((each for each in ids if type(each) is int), default=-1) + 1


def too_many(ids: int, rows: int) -> str:
    """What to know of a tokenizer that makes more ids than a table has rows."""
    return (
        f"tokenizer.json has {ids:,} ids, and the network's table of tokens a row for {rows:,}: a text with one of the "
        f"ids from {rows:,} on can't be answered"
    )
