"""As many labels as an output has values are no fit where they lie in another order."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compress.artifact import Signature, TensorSpec
from compress.data.dataset import Dataset
from compress.errors import DatasetError, RecipeError
from compress.evaluate.layout import lies_alike, lies_otherwise
from compress.evaluate.metric_choice import find_metric
from compress.evaluate.output_kind import OutputForm, OutputKind
from compress.training.labels import counts, refuse_labels
from compress.training.losses import fits

SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=4, unique=True)  # equal axes can't be told apart


@pytest.mark.parametrize(
    ("shape", "of", "alike", "otherwise"),
    [
        ((2, 8, 8), (2, 8, 8), True, False),
        ((1, 8, 8), (8, 8), True, False),
        ((8, 8), (8, 8, 1), True, False),
        ((1,), (), True, False),
        ((2, 8, 8), (128,), True, False),
        ((128,), (2, 8, 8), True, False),
        ((2, "h", "w"), (2, 8, 8), True, False),
        ((1, "h", "w"), (8, 8), True, False),
        ((2, 8, 8), (8, 8, 2), False, True),
        ((2, "h", "w"), (8, 8, 2), False, True),
        ((2, 8, 8), (64, 2), False, True),
        ((5, 100), (100, 5), False, True),
        ((2, 8, 8), (8, 8), False, False),
        ((10,), (), False, False),
        ((10,), (11,), False, False),
    ],
)
def test_only_sizes_of_1_and_a_single_axis_may_differ(
    shape: tuple[int | str, ...], of: tuple[int, ...], alike: bool, otherwise: bool
) -> None:
    assert lies_alike(shape, of) is alike
    assert lies_otherwise(shape, of) is otherwise


@given(SIZES, st.randoms())
def test_what_lies_alike_is_the_same_values_in_the_same_order(sizes: list[int], random: object) -> None:
    order = list(range(len(sizes)))
    random.shuffle(order)  # type: ignore[attr-defined]
    values = np.arange(math.prod(sizes)).reshape(sizes)
    turned = values.transpose(order)
    if lies_alike(tuple(sizes), turned.shape):
        assert (turned.ravel() == values.ravel()).all()
    assert lies_alike(tuple(sizes), turned.shape) or lies_otherwise(tuple(sizes), turned.shape)


MAP = TensorSpec("y", "float32", ("batch", 2, 8, 8))
SIGNATURE = Signature((TensorSpec("x", "float32", ("batch", 1)),), (MAP,))


@pytest.mark.parametrize("name", [None, "r2", "f1_samples", "binary_accuracy"])
@pytest.mark.parametrize("kind", ["float32", "uint8"])
def test_labels_with_their_channels_last_are_judged_by_no_metric(name: str | None, kind: str) -> None:
    labels = (np.random.default_rng(0).random((30, 8, 8, 2)) * 2).astype(kind)
    data = Dataset("", {"x": np.zeros((30, 1), np.float32)}, labels, "0" * 64)
    with pytest.raises(RecipeError, match="another order") as told:
        find_metric(name, data, SIGNATURE)
    assert "[n, 8, 8, 2]" in str(told.value)
    assert "2,8,8" in str(told.value)
    assert find_metric("cosine", data, SIGNATURE).name == "cosine"


@pytest.mark.parametrize("taught", [True, False])
def test_labels_with_their_channels_last_teach_nothing(taught: bool) -> None:
    labels = np.zeros((3, 8, 8, 2), np.float32)
    with pytest.raises(DatasetError, match="another order"):
        refuse_labels(labels, MAP, "train.npz", taught=taught)
    form = OutputForm(OutputKind.REGRESSION)
    assert not counts(form, MAP, labels)
    assert not fits(form, torch.zeros(3, 2, 8, 8), torch.from_numpy(labels))
