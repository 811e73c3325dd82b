"""R² and what is known of it: the spread of the labels is as much drawn as the errors are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compress.artifact import Signature, TensorSpec
from compress.data.dataset import Dataset
from compress.evaluate.intervals import Interval, difference_interval, mean_interval
from compress.evaluate.label_metrics import spread_of
from compress.evaluate.metric_choice import find_metric
from compress.evaluate.scoring import Scores

Array = np.ndarray[Any, Any]
BATCH = 64


def scores_of(values: Array, labels: Array, data: Array | None = None) -> Array:
    """As an evaluation has them, of labels that are all or a part of the data's."""
    spec = TensorSpec("y", "float32", ("batch", *values.shape[1:]))
    signature = Signature((TensorSpec("x", "float32", ("batch", 1)),), (spec,))
    whole = labels if data is None else data
    metric = find_metric("r2", Dataset("", {"x": np.zeros((len(whole), 1), np.float32)}, whole, "0" * 64), signature)
    tally = Scores(metric)
    for at in range(0, len(values), BATCH):
        tally.add({"y": values[at : at + BATCH]}, {}, labels[at : at + BATCH])
    return tally.result()


def r2(values: Array, labels: Array, weights: Array | None = None) -> float:
    """By its definition, of numbers [n, k], or of all places of maps [n, ...] together."""
    many = values.ndim <= 2
    y, z = (np.asarray(each, np.float64).reshape(len(each), -1) for each in (labels, values))
    share = np.full(len(y), 1 / len(y)) if weights is None else weights / weights.sum()
    per_place = np.repeat(share[:, None], y.shape[1], 1) / (1 if many else y.shape[1])
    axis = 0 if many else None
    mean = (per_place * y).sum(axis=axis)
    return float(np.mean(1 - (per_place * (z - y) ** 2).sum(axis=axis) / (per_place * (y - mean) ** 2).sum(axis=axis)))


@given(st.integers(0, 2**32 - 1), st.sampled_from([(1,), (4,), (2, 3, 2)]), st.sampled_from([0.0, 1e3]))
def test_each_score_is_r2_and_how_r2_moves_with_the_weight_of_its_sample(
    seed: int, shape: tuple[int, ...], shift: float
) -> None:
    rng = np.random.default_rng(seed)
    scale = 10.0 ** rng.integers(-4, 4, shape)
    labels = (rng.lognormal(0, 1, (90, *shape)) + shift) * scale
    values = labels + rng.standard_normal(labels.shape) * scale
    scores = scores_of(values, labels)
    assert scores.mean() == pytest.approx(r2(values, labels), abs=1e-6)
    for at in (0, 89):
        moved = [r2(values, labels, 1 + step * (np.arange(90) == at)) for step in (-1e-4, 1e-4)]
        influence = 90 * (moved[1] - moved[0]) / 2e-4
        assert scores[at] - scores.mean() == pytest.approx(influence, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("law", ["normal", "lognormal"])
@pytest.mark.parametrize("level", [0.5, 0.9])
def test_intervals_of_r2_hold_the_truth_as_often_as_they_say(law: str, level: float) -> None:
    """With the spread taken for known, 83% of 95% did for normal labels, 31% for lognormal ones."""
    rng = np.random.default_rng(0)
    variance = 1.0 if law == "normal" else (np.e - 1) * np.e
    error = (variance * (1 - level)) ** 0.5
    least = {"normal": 0.92, "lognormal": 0.79}[law]  # a tail of which few samples show anything
    held = 0
    for _ in range(200):
        labels = getattr(rng, law if law == "lognormal" else "standard_normal")(size=(300, 1))
        found = mean_interval(scores_of(labels + error * rng.standard_normal((300, 1)), labels))
        held += found.low <= level <= found.high
    assert least <= held / 200 <= 0.99


def test_intervals_of_r2_and_of_its_drop_are_as_wide_as_those_of_a_bootstrap_of_it() -> None:
    rng = np.random.default_rng(1)
    labels = rng.standard_normal((400, 2))
    first = labels + 0.3 * rng.standard_normal((400, 2))
    second = 0.6 * first
    of = {"one": mean_interval(scores_of(first, labels))}
    of["drop"] = difference_interval(scores_of(second, labels), scores_of(first, labels))
    draws = [rng.integers(0, 400, 400) for _ in range(2000)]
    own = {
        "one": [r2(first[each], labels[each]) for each in draws],
        "drop": [r2(second[each], labels[each]) - r2(first[each], labels[each]) for each in draws],
    }

    def width(interval: Interval) -> float:
        return interval.high - interval.low

    for name, found in own.items():
        low, high = np.quantile(found, (0.025, 0.975))
        assert width(of[name]) == pytest.approx(high - low, rel=0.12), name


def test_a_number_that_never_changes_among_those_judged_is_counted_in_the_spread_of_all() -> None:
    rng = np.random.default_rng(2)
    whole = rng.standard_normal((200, 2))
    whole[:100, 1] = 3.0
    part = whole[:100]
    values = part + 0.1
    spread = spread_of(whole)
    assert spread is not None
    expected = (1 - 0.01 / part[:, 0].var() + 1 - 0.01 / spread[1]) / 2
    assert scores_of(values, part, whole).mean() == pytest.approx(expected, abs=1e-6)


def test_one_answer_that_is_no_number_is_as_bad_as_can_be() -> None:
    labels = np.random.default_rng(3).standard_normal((40, 2))
    values = labels.copy()
    values[7, 1] = np.nan
    scores = scores_of(values, labels)
    assert scores[7] == -np.inf
    assert np.isfinite(np.delete(scores, 7)).all()
