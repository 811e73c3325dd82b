"""What models are judged by, and how sure one can be of it."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.artifact import Signature, TensorSpec
from compress.data.dataset import Dataset
from compress.errors import RecipeError
from compress.evaluate.intervals import difference_interval, mean_interval
from compress.evaluate.judge import Judge, spread
from compress.evaluate.metric_choice import find_metric
from compress.evaluate.metrics import METRICS
from compress.model import Arrays

CLASSIFIER = Signature((TensorSpec("x", "float32", ("batch", 4)),), (TensorSpec("y", "float32", ("batch", 6)),))
EMBEDDER = Signature(CLASSIFIER.inputs, (TensorSpec("y", "float32", ("batch", 3, 8)),))
RNG = np.random.default_rng(0)


def data(labels: object = None, count: int = 200) -> Dataset:
    return Dataset("", {"x": RNG.standard_normal((count, 4)).astype(np.float32)}, labels, "")


def learnt(count: int = 200) -> Dataset:
    """Labels that `Linear` gives."""
    found = data(None, count)
    return dataclasses.replace(found, labels=Linear().infer(found.inputs)["y"].argmax(1))


class Linear:
    """A model that is one matrix, with noise of its own."""

    runtime = "numpy"
    emulated = False

    def __init__(self, noise: float = 0.0) -> None:
        self.weight = np.random.default_rng(1).standard_normal((4, 6)).astype(np.float32)
        self.weight += noise * np.random.default_rng(2).standard_normal((4, 6)).astype(np.float32)

    def infer(self, inputs: Arrays) -> Arrays:
        return {"y": inputs["x"] @ self.weight}


@pytest.mark.parametrize(
    ("labels", "signature", "name"),
    [
        (np.zeros(200, np.int64), CLASSIFIER, "top1"),
        (None, CLASSIFIER, "agreement"),
        (None, EMBEDDER, "cosine"),
        (np.zeros((200, 4), np.float32), CLASSIFIER, "cosine"),
        (np.linspace(0, 1, 200, dtype=np.float32), CLASSIFIER, "cosine"),
        (np.zeros((200, 2), np.int64), CLASSIFIER, "cosine"),
        (np.arange(200, dtype=np.float32) % 4, CLASSIFIER, "agreement"),
    ],
)
def test_the_metric_fits_the_data(labels: object, signature: Signature, name: str) -> None:
    assert find_metric(None, data(labels), signature).name == name


@pytest.mark.parametrize(
    ("output", "labels", "name"),
    [("output", None, "cosine"), ("logits", None, "agreement"), ("output", np.arange(200) % 4, "top1")],
)
def test_what_has_an_inputs_shape_is_no_class_scores(output: str, labels: object, name: str) -> None:
    signature = Signature(CLASSIFIER.inputs, (TensorSpec(output, "float32", ("batch", 4)),))
    assert find_metric(None, data(labels), signature).name == name


@pytest.mark.parametrize(
    ("name", "labels", "signature", "why"),
    [
        ("accuracy", None, CLASSIFIER, "known are top1"),
        ("top1", None, CLASSIFIER, "no labels"),
        ("top5", np.zeros(200, np.int64), EMBEDDER, "first output"),
        ("nowhere:nothing", None, CLASSIFIER, "ModuleNotFoundError"),
    ],
)
def test_a_metric_that_cannot_serve_is_refused(name: str, labels: object, signature: Signature, why: str) -> None:
    with pytest.raises(RecipeError) as caught:
        find_metric(name, data(labels), signature)
    assert why in caught.value.why


def test_top5_is_right_where_the_label_is_among_five() -> None:
    logits = np.tile(np.arange(6.0, dtype=np.float32), (6, 1))
    scores = METRICS["top5"].per_sample({"y": logits}, {"y": logits}, np.arange(6))  # type: ignore[misc]
    assert scores.tolist() == [0, 1, 1, 1, 1, 1]


@given(st.floats(0, 1), st.floats(0, 1))
def test_a_drop_is_in_points_and_positive_for_a_loss(before: float, after: float) -> None:
    assert METRICS["top1"].drop(before, after) == pytest.approx(100 * (before - after))
    assert METRICS["mse"].drop(before, after) == pytest.approx(after - before)
    assert not str(METRICS["top1"].drop(before, before)).startswith("-")


USERS = """
import numpy as np
def per_sample(outputs, labels):
    return (outputs["y"].argmax(1) == labels).astype(float)
def whole(outputs, labels):
    return float(np.abs(outputs["y"]).mean())
whole.higher_is_better = False
whole.scale = 1.0
def broken(outputs, labels):
    raise KeyError("boxes")
class Accuracy:
    higher_is_better = True
    def __init__(self): self.reset()
    def reset(self): self.right = self.seen = 0
    def update(self, preds, target):
        self.right += int((preds.argmax(1) == target).sum()); self.seen += len(target)
    def compute(self): return self.right / self.seen
    def __call__(self, preds, target): raise NotImplementedError
number = 3
def batched(outputs, labels):
    assert len(labels) <= 64
    return (outputs["y"].argmax(1) == labels).astype(float)
batched.per_sample = True
def classes(outputs, labels):
    return np.zeros(6)
def nan(outputs, labels):
    return float("nan")
def some_nan(outputs, labels):
    return np.where(np.arange(len(labels)) < 50, np.nan, 1.0)
"""
TORCHMETRICS = """
from torchmetrics import MeanSquaredError
from torchmetrics.classification import (
    MulticlassAccuracy, MulticlassCalibrationError, MulticlassConfusionMatrix, MulticlassF1Score,
)
accuracy = MulticlassAccuracy(num_classes=6, average="micro")
f1 = MulticlassF1Score(num_classes=6)
confusion = MulticlassConfusionMatrix(num_classes=6)
each = MulticlassAccuracy(num_classes=6, average=None)
squares = MeanSquaredError(num_outputs=1)
calibration = MulticlassCalibrationError(num_classes=6)
"""


@pytest.fixture
def users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_metrics.py").write_text(USERS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    sys.modules.pop("my_metrics", None)
    return "my_metrics"


def test_a_users_function_judges(users: str) -> None:
    given_data = learnt()
    same = Judge(Linear(), given_data, find_metric("top1", given_data, CLASSIFIER))
    mine = Judge(Linear(), given_data, find_metric(f"{users}:per_sample", given_data, CLASSIFIER))
    theirs = Judge(Linear(), given_data, find_metric(f"{users}:Accuracy", given_data, CLASSIFIER))
    worse = Linear(0.5)
    assert mine.drop(worse) == same.drop(worse), "scores for each sample have an interval, too"
    assert theirs.drop(worse).points == pytest.approx(same.drop(worse).points)
    assert theirs.drop(worse).low is None, "one figure for all samples has none"


def test_objects_of_torchmetrics_judge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "their_metrics.py").write_text(TORCHMETRICS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    given_data = learnt()
    same = Judge(Linear(), given_data, find_metric("top1", given_data, CLASSIFIER)).drop(Linear(0.5))
    drops = {
        name: Judge(Linear(), given_data, find_metric(f"their_metrics:{name}", given_data, CLASSIFIER)).drop(
            Linear(0.5)
        )
        for name in ("accuracy", "f1")
    }
    assert drops["accuracy"].points == pytest.approx(same.points)
    assert drops["f1"].points != drops["accuracy"].points


@pytest.mark.parametrize(
    ("name", "higher", "rise"),
    [("accuracy", True, -10.0), ("squares", False, 0.1), ("calibration", False, 10.0)],
)
def test_an_object_of_torchmetrics_says_which_way_is_better_and_what_a_point_is(
    name: str, higher: bool, rise: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ways_metrics.py").write_text(TORCHMETRICS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    metric = find_metric(f"ways_metrics:{name}", data(), CLASSIFIER)
    assert metric.higher_is_better is higher
    assert metric.drop(0.5, 0.6) == pytest.approx(rise), "a share is in points, an error as it is"


@pytest.mark.parametrize(("name", "why"), [("confusion", "nobody knows which way"), ("each", "an array [6]")])
def test_an_object_that_gives_no_figure_is_refused(
    name: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "odd_metrics.py").write_text(TORCHMETRICS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError) as caught:
        Judge(Linear(), learnt(), find_metric(f"odd_metrics:{name}", learnt(), CLASSIFIER))
    assert why in caught.value.why


def test_a_function_that_scores_samples_is_given_batches(users: str) -> None:
    given_data = learnt()
    whole, parts = (
        Judge(Linear(), given_data, find_metric(f"{users}:{name}", given_data, CLASSIFIER))
        for name in ("per_sample", "batched")
    )
    assert whole.drop(Linear(0.5)) == parts.drop(Linear(0.5))


def test_an_array_that_is_neither_scores_nor_a_figure_is_refused(users: str) -> None:
    with pytest.raises(RecipeError) as caught:
        Judge(Linear(), learnt(), find_metric(f"{users}:classes", learnt(), CLASSIFIER))
    assert "an array [6] for 200 samples" in caught.value.why


def test_a_figure_that_is_no_number_keeps_no_budget(users: str) -> None:
    judge = Judge(Linear(), learnt(), find_metric(f"{users}:nan", learnt(), CLASSIFIER), confidence=None)
    assert judge.drop(Linear()).counted == np.inf
    scored = Judge(Linear(), learnt(), find_metric(f"{users}:some_nan", learnt(), CLASSIFIER))
    assert scored.original == 0.75, "a score that is no number counts as the worst"


def test_a_users_function_says_which_way_is_better(users: str) -> None:
    metric = find_metric(f"{users}:whole", data(), CLASSIFIER)
    assert metric.drop(1.0, 3.0) == 2.0


@pytest.mark.parametrize(("name", "why"), [("broken", "KeyError: 'boxes'"), ("number", "it is a int")])
def test_a_users_function_that_fails_is_told(users: str, name: str, why: str) -> None:
    with pytest.raises(RecipeError) as caught:
        Judge(Linear(), data(), find_metric(f"{users}:{name}", data(), CLASSIFIER))
    assert why in caught.value.why


@settings(max_examples=30, deadline=None)
@given(st.integers(20, 400), st.floats(0.05, 0.95), st.integers(0, 1000))
def test_an_interval_holds_its_mean_and_narrows_with_the_root_of_the_samples(n: int, share: float, seed: int) -> None:
    scores = (np.random.default_rng(seed).random(n) < share).astype(float)
    found = mean_interval(scores, bounds=(0.0, 1.0))
    assert found.low <= found.value <= found.high
    wide = found.high - found.low
    expected = 2 * 1.96 * scores.std() / np.sqrt(n)
    assert wide == pytest.approx(expected, rel=0.35, abs=4 / n)


@pytest.mark.parametrize("name", ["mse", "r2"])
def test_a_metric_without_bounds_counts_nothing(name: str) -> None:
    """An original's squared error against itself is 0 in every sample: no share of which none was seen."""
    nothing, some = np.zeros(200), np.repeat([0.0, 1.0], [190, 10])
    found = mean_interval(nothing, bounds=METRICS[name].bounds)
    assert (found.low, found.high) == (-np.inf, np.inf)
    apart = difference_interval(nothing, nothing, bounds=METRICS[name].bounds)
    assert (apart.low, apart.high) == (-np.inf, np.inf)
    wilson = mean_interval(some, bounds=METRICS["top1"].bounds)
    assert mean_interval(some, bounds=METRICS[name].bounds) != wilson == mean_interval(some, bounds=(0.0, 1.0))


def test_a_cosine_of_1_everywhere_may_have_missed_one_of_minus_1() -> None:
    found = mean_interval(np.ones(200), bounds=METRICS["cosine"].bounds)
    assert found.low == pytest.approx(1 - 2 * 0.01885, abs=1e-4)


def test_about_95_of_100_intervals_hold_the_truth() -> None:
    rng = np.random.default_rng(0)
    held = [mean_interval(rng.random(200)) for _ in range(300)]
    share = np.mean([found.low <= 0.5 <= found.high for found in held])
    assert 0.9 <= share <= 0.99


def test_pairing_takes_out_what_is_hard_for_both() -> None:
    given_data = learnt()
    given_data.labels[::3] = 5  # type: ignore[index]  # a third that no model gets right
    judge = Judge(Linear(), given_data, find_metric(None, given_data, CLASSIFIER))
    drop = judge.drop(Linear())
    assert drop.points == 0, "the same model, whatever it gets wrong"
    assert (drop.low, drop.high) == pytest.approx((-1.88, 1.88), abs=0.01), "as if all were right"


def test_a_part_is_spread_over_the_data() -> None:
    whole = data(np.arange(200))
    part = spread(whole, 5)
    assert part.labels is not None
    assert part.labels.tolist() == [0, 49, 99, 149, 199]
    assert len(spread(whole, 1000)) == 200


@pytest.fixture
def bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "with_bounds.py").write_text(
        """
def right(outputs, labels):
    return (outputs["y"].argmax(1) == labels).astype(float)
def listed(outputs, labels):
    return right(outputs, labels)
listed.bounds = [0, 1]
def decibels(outputs, labels):
    return 30 + outputs["y"].max(1)
def one_by_one(outputs, labels):
    return 30 + outputs["y"].max(1)
one_by_one.per_sample = True
def declared(outputs, labels):
    return 30 + outputs["y"].max(1)
declared.scale = 1
def nonsense(outputs, labels):
    return right(outputs, labels)
nonsense.bounds = (1, 0)
""",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("with_bounds", None)
    return "with_bounds"


def test_bounds_that_are_listed_are_those_of_a_share(bounded: str) -> None:
    labelled = data(np.arange(200) % 6)
    drops = []
    for name in ("right", "listed"):
        metric = find_metric(f"{bounded}:{name}", labelled, CLASSIFIER)
        assert metric.bounds == (0.0, 1.0)
        assert isinstance(metric.bounds, tuple)
        drops.append(Judge(Linear(), labelled, metric).drop(Linear(0.1)))
    assert (drops[0].low, drops[0].high) == (drops[1].low, drops[1].high)
    with pytest.raises(RecipeError, match="can't use the metric") as caught:
        find_metric(f"{bounded}:nonsense", labelled, CLASSIFIER)
    assert "(1, 0)" in caught.value.why


@pytest.mark.parametrize("name", ["decibels", "one_by_one"])
def test_scores_beyond_what_the_metric_states_are_refused(bounded: str, name: str) -> None:
    labelled = data(np.arange(200) % 6)
    with pytest.raises(RecipeError, match="can't judge by") as caught:
        Judge(Linear(), labelled, find_metric(f"{bounded}:{name}", labelled, CLASSIFIER))
    assert "between 0 and 1" in caught.value.why
    assert "scale = 1" in caught.value.mend
    assert Judge(Linear(), labelled, find_metric(f"{bounded}:declared", labelled, CLASSIFIER)).original > 29
