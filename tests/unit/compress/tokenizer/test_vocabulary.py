"""How many ids a tokenizer.json makes: as the library that reads it counts them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models

from compress.tokenizer.vocabulary import ids_of

WORDS = {"[UNK]": 0, "a": 1, "b": 2, "ab": 7}


@pytest.mark.parametrize(
    "model",
    [
        models.WordLevel(WORDS, unk_token="[UNK]"),
        models.WordPiece(WORDS, unk_token="[UNK]"),
        models.BPE(WORDS, [("a", "b")], unk_token="[UNK]"),
        models.Unigram([("[UNK]", 0.0), ("a", -1.0), ("b", -2.0)], 0, False),
    ],
    ids=lambda model: type(model).__name__,
)
@pytest.mark.parametrize("added", [(), ("<more>", "<most>")])
def test_it_is_one_more_than_the_largest(model: Any, added: tuple[str, ...]) -> None:
    tokenizer = Tokenizer(model)
    tokenizer.add_special_tokens([AddedToken(word) for word in added])
    assert ids_of(json.loads(tokenizer.to_str())) == max(tokenizer.get_vocab().values()) + 1


@pytest.mark.parametrize(
    "told", [{}, {"model": []}, {"model": {"vocab": 1}, "added_tokens": 2}, {"added_tokens": [1, {"id": "7"}]}]
)
def test_what_says_nothing_makes_none(told: dict[str, Any]) -> None:
    assert ids_of(told) == 0
