"""Copies among pairs of texts are pairs that come again, whichever text is first."""

from __future__ import annotations

import numpy as np

from compress.data.dataset import Dataset
from compress.evaluate.kinder import copies_told


def of_pairs(texts: np.ndarray) -> Dataset:
    return Dataset("eval", {"ids": texts.reshape(-1, 1)}, np.repeat(np.arange(len(texts)), 2), "0" * 64, pairs=True)


def test_one_text_in_many_pairs_is_no_copy() -> None:
    pairs = np.stack([np.zeros(100, np.int64), np.arange(1, 101)], axis=1)
    assert copies_told(of_pairs(pairs)) == ()
    again = np.concatenate([pairs, pairs[:50, ::-1]])
    assert copies_told(of_pairs(again))[0].startswith("Of 150 evaluation pairs 50 have the inputs of another one")
