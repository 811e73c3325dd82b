"""What may be tried is around what was asked for, in numbers that flags can say."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compress.options.training import TrainingOptions
from compress.training.tune.space import Range, broken, flags_of, mean_share, space_of


@pytest.mark.parametrize(
    ("asked", "softens", "names"),
    [
        ({}, True, ["learning_rate", "epochs", "temperature", "batch_size"]),
        ({}, False, ["learning_rate", "epochs", "batch_size"]),
        ({"epochs": 1}, False, ["learning_rate", "batch_size"]),
        ({"batch_size": "auto"}, False, ["learning_rate", "epochs"]),
        ({"feature_weight": 0.5}, False, ["learning_rate", "epochs", "feature_weight", "batch_size"]),
    ],
)
def test_what_counts_is_searched_and_nothing_else(asked: dict[str, Any], softens: bool, names: list[str]) -> None:
    assert list(space_of(TrainingOptions(**asked), 1000, softens=softens)) == names


@given(
    st.builds(
        TrainingOptions,
        learning_rate=st.floats(1e-6, 1.0),
        epochs=st.integers(1, 500),
        batch_size=st.integers(2, 512),
        temperature=st.floats(0.1, 50),
        feature_weight=st.floats(0, 3),
    ),
    st.integers(2, 2000),
)
def test_what_was_asked_for_is_always_in_it_and_no_trial_has_more_epochs(asked: TrainingOptions, samples: int) -> None:
    space = space_of(asked, samples, softens=True)
    for name, within in space.items():
        value = getattr(asked, name)
        if isinstance(within, Range):
            assert within.low <= value <= within.high
        else:
            assert value in within
            assert all(size >= 2 and (size <= samples or size == value) for size in within)
    if isinstance(epochs := space.get("epochs"), Range):
        assert 1 <= epochs.low <= epochs.high == asked.epochs
    assert 0.5 < mean_share(asked.epochs) <= 1


@given(st.floats(1e-7, 100))
def test_the_flags_of_a_rate_say_that_very_rate(rate: float) -> None:
    told = Range(1e-7, 100).told(rate)
    assert told == pytest.approx(rate, rel=0.01)
    assert flags_of({"learning_rate": told, "batch_size": 64}).split() == [
        "--learning-rate", f"{told:g}", "--batch-size", "64",
    ]  # fmt: skip
    assert float(f"{told:g}") == told


@pytest.mark.parametrize(
    ("asked", "held", "alone", "why", "mend"),
    [
        ({"tune_training": 0}, 50, True, "--tune-training is 0", "such as 12"),
        ({"tune_training": 5}, None, True, "nothing judges", "--hold-out 0.1"),
        ({"tune_training": 5, "hold_out": 0.05}, 10, True, "10 samples judge them, and 32", "--hold-out 0.16"),
        ({"tune_training": 5}, 10, True, "10 samples", "--validation"),
        ({"tune_training": 5}, 50, False, "several processes", "--devices 1"),
    ],
)
def test_a_search_that_can_tell_nothing_is_refused(
    asked: dict[str, Any], held: int | None, alone: bool, why: str, mend: str
) -> None:
    ((said, how), *_) = broken(TrainingOptions(**asked), 200, held, alone=alone)
    assert why in said
    assert mend in how


def test_where_no_search_is_asked_for_nothing_is_refused() -> None:
    assert not list(broken(TrainingOptions(), 10, None, alone=False))
