"""Which tokens are padding: by the one mask that is known, in the order that a tensor has."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compress.data.dataset import Dataset
from compress.data.padding import batch_sizes, by_shape, padding_mask
from compress.prune.repair.samples import Samples
from compress.signature import Signature, TensorSpec


def samples(name: str, count: int, tokens: int) -> Samples:
    x = np.zeros((count, tokens, 4), np.float32)
    mask = np.ones((count, tokens), np.int64)
    mask[:, -1] = 0
    specs = (TensorSpec.parse(f"x:float32[batch,{tokens},4]"), TensorSpec.parse(f"{name}:int64[batch,{tokens}]"))
    return Samples(Dataset("made up", {"x": x, name: mask}, None, "0"), Signature(specs, ()))


@pytest.mark.parametrize("name", ["src_key_padding_mask", "key_padding_mask", "mask", "global_attention_mask"])
def test_of_a_mask_that_may_say_padding_by_1_nothing_is_left_out(name: str) -> None:
    assert samples(name, 20, 6).kept(0, torch.zeros(18, 6, 4)) is None


def test_a_mask_of_floats_or_of_other_numbers_is_none() -> None:
    for mask in (np.ones((4, 3), np.float32), np.full((4, 3), 2), np.ones((4, 3, 3), np.int64)):
        assert padding_mask(Dataset("made up", {"attention_mask": mask}, None, "0")) is None


@pytest.mark.parametrize("tokens", [6, 31, 32], ids=["few", "as many as in a batch but one", "as many as in a batch"])
def test_tokens_are_left_out_in_both_orders(tokens: int) -> None:
    found = samples("attention_mask", 80, tokens)
    for batch, index in enumerate(found.batches):
        count = len(index)
        kept = found.kept(batch, torch.zeros(count, tokens, 4))
        turned = found.kept(batch, torch.zeros(tokens, count, 4))
        assert kept is not None
        assert turned is not None
        assert kept.shape == (count, tokens)
        assert (kept.sum(0) == count).tolist() == [*[True] * (tokens - 1), False]
        assert torch.equal(turned, kept.T)


def test_as_many_samples_as_tokens_tell_nothing() -> None:
    assert by_shape(np.ones((5, 5), bool), (5, 5, 8)) is None


@given(st.integers(0, 300), st.integers(1, 40), st.integers(0, 40))
def test_batches_are_all_of_the_samples_and_none_is_of_as_many_as_tokens(count: int, most: int, tokens: int) -> None:
    sizes = batch_sizes(count, most, tokens)
    assert sum(sizes) == count
    assert all(0 < size <= most for size in sizes)
    assert tokens <= 1 or tokens not in sizes
