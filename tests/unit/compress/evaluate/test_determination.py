"""R² and what is known of it: the spread of the labels is as much drawn as the errors are."""

from __future__ import annotations

import tracemalloc
import weakref
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compress.artifact import Signature, TensorSpec
from compress.data.dataset import Dataset
from compress.errors import RecipeError
from compress.evaluate.determination import changing
from compress.evaluate.intervals import Interval, difference_interval, mean_interval
from compress.evaluate.judge import Judge
from compress.evaluate.label_moments import Moments, in_blocks, moments_of
from compress.evaluate.metric_choice import find_metric
from compress.evaluate.metrics import Metric
from compress.evaluate.scoring import Scores
from compress.model import Arrays

Array = np.ndarray[Any, Any]
BATCH = 64


def dataset(labels: Array) -> Dataset:
    """Whose input is the number of the sample."""
    return Dataset("", {"x": np.arange(len(labels), dtype=np.float32)[:, None]}, labels, "0" * 64)


def metric_of(labels: Array) -> Metric:
    spec = TensorSpec("y", "float32", ("batch", *labels.shape[1:]))
    return find_metric("r2", dataset(labels), Signature((TensorSpec("x", "float32", ("batch", 1)),), (spec,)))


def scores_of(values: Array, labels: Array, data: Array | None = None) -> Array:
    """As an evaluation has them, of labels that are all or a part of the data's."""
    tally = Scores(metric_of(labels if data is None else data).on(dataset(labels)))
    for at in range(0, len(values), BATCH):
        tally.add({"y": values[at : at + BATCH]}, {}, labels[at : at + BATCH])
    return tally.result()


class Answers:
    """A model that has an answer for each sample."""

    runtime, emulated = "none", False

    def __init__(self, values: Array) -> None:
        self._values = values

    def infer(self, inputs: Arrays) -> Arrays:
        return {"y": self._values[inputs["x"][:, 0].astype(np.int64)]}


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
    spread = whole.var(axis=0)
    expected = (1 - 0.01 / part[:, 0].var() + 1 - 0.01 / spread[1]) / 2
    assert scores_of(values, part, whole).mean() == pytest.approx(expected, abs=1e-6)


def test_one_answer_that_is_no_number_is_as_bad_as_can_be() -> None:
    labels = np.random.default_rng(3).standard_normal((40, 2))
    values = labels.copy()
    values[7, 1] = np.nan
    scores = scores_of(values, labels)
    assert scores[7] == -np.inf
    assert np.isfinite(np.delete(scores, 7)).all()


@pytest.mark.parametrize("far", [0.0, 1e6])
@pytest.mark.parametrize(("shape", "rest"), [((1,), 0), ((5,), 0), ((5,), 70), ((2, 3), 0), ((2, 3), 70)])
def test_batch_after_batch_the_scores_are_those_of_all_labels_at_once(
    shape: tuple[int, ...], rest: int, far: float
) -> None:
    """Of as many labels more that are not judged."""
    rng = np.random.default_rng(4)
    whole = (rng.lognormal(0, 1, (200 + rest, *shape)) + far) * 10.0 ** rng.integers(-3, 3, shape)
    labels = whole[:200]
    values = labels + rng.standard_normal(labels.shape) * labels.std(axis=0)
    y, z = (each.reshape(200, -1).astype(np.longdouble) for each in (labels, values))
    centre, variance = (y.mean(0), y.var(0)) if len(shape) == 1 else (y.mean(), y.var())
    errors, around = np.square(z - y) / variance, np.square(y - centre) / variance
    if len(shape) > 1:
        errors, around = (each.mean(axis=1, keepdims=True) for each in (errors, around))
    expected = (1 - errors + errors.mean(axis=0) * (around - 1)).mean(axis=1)
    np.testing.assert_allclose(scores_of(values, labels, whole), expected.astype(np.float64), rtol=0, atol=1e-9)


@given(st.integers(0, 2**32 - 1), st.lists(st.integers(1, 40), min_size=1, max_size=5), st.sampled_from([0.0, 1e6]))
def test_the_mean_and_variance_of_labels_do_not_depend_on_the_blocks_that_they_come_in(
    seed: int, sizes: list[int], far: float
) -> None:
    labels = np.random.default_rng(seed).standard_normal((sum(sizes), 3)) + far
    labels[:, 2] = 0.1
    found = moments_of(np.split(labels, np.cumsum(sizes)[:-1]))
    assert found.samples == len(labels)
    np.testing.assert_allclose(found.mean, labels.mean(axis=0), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(found.variance, labels.var(axis=0), rtol=1e-9, atol=1e-12)
    assert found.changes.tolist() == [len(labels) > 1, len(labels) > 1, False]


def test_of_many_labels_to_a_sample_none_is_kept_beside_the_data() -> None:
    """Two float64 of each were, 16 bytes: 3 GB of 50,000 samples with 4,096 numbers, for each model."""
    labels = np.random.default_rng(5).standard_normal((2000, 512)).astype(np.float32)
    metric = metric_of(labels)
    judged = metric.on(dataset(labels[:1500]))
    tracemalloc.start()
    try:
        tally = Scores(judged)
        for at in range(0, 1500, BATCH):
            given = labels[at : min(at + BATCH, 1500)]
            tally.add({"y": given + np.float32(0.1)}, {}, given)
        held = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        assert np.isfinite(tally.result()).all()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert held < 1500 * 512
    assert peak < 4 * 1500 * 512


@pytest.mark.parametrize("constant", [1, 2])
def test_whoever_always_gives_the_mean_label_is_right_in_numbers_that_never_change(constant: int) -> None:
    """Its R² is then the share of these, and no original that has no more says anything."""
    rng = np.random.default_rng(6)
    whole = rng.standard_normal((400, 2))
    part = whole[:200]
    part[:, :constant] = 3.0
    mean = np.broadcast_to(part.mean(axis=0), part.shape)
    assert scores_of(mean, part, whole).mean() == pytest.approx(constant / 2)
    worse = mean + 0.5 + 0.01 * rng.random(part.shape)
    judge = Judge(Answers(worse.astype(np.float32)), dataset(part), metric_of(whole))
    assert f"the mean label has {constant / 2:.1%}" in judge.doubts[0]
    known = Judge(Answers(part.astype(np.float32)), dataset(part), metric_of(whole))
    if constant == 1:
        assert known.doubts == ()
        assert known.constant == pytest.approx(50, rel=1e-5)
        lost = known.drop(Answers(worse.astype(np.float32)))
        assert lost.counted == np.inf


@pytest.mark.parametrize("rows", [5_000, 200_000])
@pytest.mark.parametrize("width", [1, 2, 3])
@pytest.mark.parametrize("far", [20_000.1, 1e6 + 0.1, 1.7e9 + 0.3])
def test_a_number_that_is_far_from_0_and_never_changes_has_no_variance(far: float, width: int, rows: int) -> None:
    """Of rows that are added one after another, the rounded mean of 200,000 is 1e-12 of it away."""
    found = moments_of(in_blocks(np.full((rows, width), far)))
    assert found.mean.tolist() == [far] * width
    assert found.variance.tolist() == [0.0] * width
    assert not found.changes.any()


@pytest.mark.parametrize(
    ("rows", "far", "spread", "error"), [(5_000, 20_000.1, 1e-3, 1e-5), (20_000, 1.7e9 + 0.3, 300.0, 1.0)]
)
def test_r2_of_a_number_that_never_changes_among_those_judged_is_right_far_from_0(
    rows: int, far: float, spread: float, error: float
) -> None:
    labels = np.full((2 * rows, 2), far)
    labels[rows:] += spread * np.random.default_rng(8).standard_normal((rows, 2))
    part = labels[:rows]
    expected = 1 - np.mean(error**2 / labels.var(axis=0))
    assert scores_of(part + error, part, labels).mean() == pytest.approx(expected, abs=1e-6)


def test_what_changes_is_told_by_the_labels_and_not_by_how_their_variance_is_rounded() -> None:
    same = Moments(10, np.ones(2), np.full(2, 1e-3), np.array([True, False]))
    assert changing(np.ones(2), same).tolist() == [True, False]


@pytest.mark.parametrize(("width", "other"), [(16, 32), (16, 8), (1, 4)])
def test_labels_of_another_width_than_the_evaluation_data_are_refused(width: int, other: int) -> None:
    rng = np.random.default_rng(9)
    metric = metric_of(rng.standard_normal((40, width)))
    with pytest.raises(RecipeError, match=rf"(?s)its labels are {other} numbers?.*evaluation data {width}\b.*give it"):
        metric.on(dataset(rng.standard_normal((20, other))))


LARGE = np.finfo(np.float64).max


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("missing", [LARGE, -LARGE, 1e200])
@pytest.mark.parametrize("at", [0, 5])
def test_labels_whose_variance_no_float_holds_are_not_judged_by_r2(missing: float, at: int) -> None:
    labels = np.random.default_rng(10).standard_normal((40, 1))
    labels[at] = missing
    assert moments_of([labels]).spread is None
    with pytest.raises(RecipeError, match="needs labels that are numbers"):
        metric_of(labels)


def test_a_number_whose_variance_no_float_holds_is_left_out_beside_others() -> None:
    labels = np.random.default_rng(11).standard_normal((40, 2))
    labels[5, 0] = LARGE
    values = labels + 0.1
    assert scores_of(values, labels).mean() == pytest.approx(r2(values[:, 1:], labels[:, 1:]))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf, LARGE])
@pytest.mark.parametrize("shape", [(1,), (3,), (2, 3, 2)])
@pytest.mark.parametrize("at", [0, 5])
def test_labels_to_choose_by_that_are_not_finite_are_refused(wrong: float, shape: tuple[int, ...], at: int) -> None:
    labels = np.random.default_rng(12).standard_normal((80, *shape))
    chosen = labels[:40].copy()
    chosen[at, 0] = wrong
    with pytest.raises(RecipeError, match=r"can't judge by r2(?s:.)*NaN, infinite values"):
        metric_of(labels).on(dataset(chosen))


def test_no_part_that_was_judged_is_kept_alive_by_the_metric() -> None:
    labels = np.random.default_rng(13).standard_normal((400, 2)).astype(np.float32)
    data, metric = dataset(labels), metric_of(labels)
    judge = Judge.of_part(Answers(labels), data, metric, 64)
    part = weakref.ref(judge._data)
    assert part() is not None
    del judge
    assert part() is None


class Counting:
    """Labels that count how often they are looked at."""

    def __init__(self, labels: Array) -> None:
        self._labels, self.shape, self.dtype, self.ndim = labels, labels.shape, labels.dtype, labels.ndim
        self.looked = 0

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: Any) -> Array:
        self.looked += 1
        return np.asarray(self._labels[index])


def test_labels_are_counted_once_for_each_dataset_that_lives() -> None:
    labels = np.random.default_rng(14).standard_normal((40, 2))
    counting = Counting(labels)
    data, metric = Dataset("", {"x": np.zeros((40, 1), np.float32)}, counting, "0" * 64), metric_of(labels)
    first = metric.on(data)
    assert counting.looked == 1
    metric.on(dataset(labels[:20]))
    assert first.on(data).chance is not None
    assert counting.looked == 1
