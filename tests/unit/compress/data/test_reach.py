"""Lone samples that decide how far an input reaches are named."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.data.class_labels import with_class_ids
from compress.data.dataset import Dataset
from compress.data.reach import far_beyond


def data(x: Any, labels: Any = None) -> Dataset:
    return Dataset("given", {"x": x}, labels, "0")


def typical(count: int = 300) -> Any:
    return np.random.default_rng(0).standard_normal((count, 4)).astype(np.float32)


@pytest.mark.parametrize("value", [1e30, -1e30, 1e5])
def test_a_sample_far_beyond_all_others_is_named(value: float) -> None:
    x = typical()
    x[137, 2] = value
    (said,) = far_beyond(data(x))
    assert "sample 137 reaches" in said
    assert f"{abs(value):.3g} in the input 'x'" in said


def test_several_are_counted() -> None:
    x = typical()
    x[[3, 8, 200]] *= 1e6
    (said,) = far_beyond(data(x))
    assert "3 samples" in said


@settings(deadline=None, max_examples=30)
@given(st.floats(1e-30, 1e30), st.integers(1, 400))
def test_nothing_is_said_of_what_reaches_alike_whatever_its_scale(scale: float, count: int) -> None:
    assert far_beyond(data(scale * typical(count).astype(np.float64))) == ()


@pytest.mark.parametrize(
    "x",
    [np.zeros((5, 3), np.float32), np.zeros((5, 0), np.float32), np.array([[1], [2**40]]), np.eye(64, dtype="f4")],
    ids=["zeros", "no values", "whole numbers", "sparse"],
)
def test_nor_where_nothing_is_told_by_it(x: Any) -> None:
    assert far_beyond(data(x)) == ()


@pytest.mark.parametrize("shape", [(300,), (300, 1), (300, 2)])
def test_labels_that_hold_nan_are_said_to(shape: tuple[int, ...]) -> None:
    labels = np.random.default_rng(0).random(shape).astype(np.float32)
    labels[[3, 7]] = np.nan
    given_data = data(typical(), labels)
    found, (said,) = with_class_ids(given_data)
    assert found is given_data
    assert "hold NaN or infinite values in 2 of 300 samples" in said
    assert "class ids" not in said
