"""Figures mean what their names say."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from compress.artifact import Signature, TensorSpec
from compress.data.dataset import Dataset
from compress.evaluate.compare import compare, cosine_similarity, max_abs_error
from compress.evaluate.judge import Judge
from compress.evaluate.metrics import METRICS
from compress.model import Arrays
from compress.runtime.measure import latency

pytestmark = pytest.mark.clock

floats = hnp.arrays(np.float64, (4, 3), elements=st.floats(-1e3, 1e3))


@given(floats, floats)
def test_cosine_similarity_is_symmetric_bounded_and_one_with_itself(
    a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]
) -> None:
    assert np.allclose(cosine_similarity(a, b), cosine_similarity(b, a))
    assert (np.abs(cosine_similarity(a, b)) <= 1 + 1e-9).all()
    whole = np.abs(a).max(axis=1) > 1e-100  # the square of less is 0 in float64
    assert np.allclose(cosine_similarity(a, a)[whole], 1)


@pytest.mark.parametrize(
    ("a", "b", "alike"), [([[0, 0]], [[0, 0]], 1.0), ([[0, 0]], [[1, 0]], 0.0), ([[1, 0]], [[-1, 0]], -1.0)]
)
def test_cosine_similarity_of_zero_vectors_is_a_number(a: list[list[int]], b: list[list[int]], alike: float) -> None:
    assert cosine_similarity(np.array(a), np.array(b)).tolist() == [alike]


def test_nan_on_one_side_is_the_largest_error_there_is() -> None:
    assert max_abs_error({"y": np.array([1.0])}, {"y": np.array([np.nan])}) == np.inf


@pytest.mark.parametrize(
    ("a", "b", "error"),
    [
        ([1.0, np.nan], [1.0, np.nan], np.inf),  # on both sides, too
        ([1.0, np.inf], [1.0, np.inf], 0.0),  # the same mask
        ([1.0, np.inf], [1.0, -np.inf], np.inf),
        ([1.0, np.inf], [1.0, 3.0], np.inf),
        ([[1.0], [2.0]], [1.0, 2.0], np.inf),  # no broadcasting
        ([1.0, 2.0], [1.0, 2.5], 0.5),
    ],
)
def test_nothing_that_is_no_number_passes_for_a_small_error(a: Any, b: Any, error: float) -> None:
    assert max_abs_error({"y": np.array(a)}, {"y": np.array(b)}) == error
    assert max_abs_error({"y": np.array(a)}, {}) == np.inf, "a missing output is none that is equal"


@pytest.mark.parametrize(
    ("a", "b", "alike"),
    [
        ([np.nan, 1], [np.nan, 1], -1.0),
        ([np.inf, 1], [np.inf, 1], -1.0),
        ([1, 1], [np.nan, 1], -1.0),
        ([1e200, 1e200], [1e200, 1e200], 1.0),  # its square overflows
        ([1e-300, 0], [1e-300, 0], 1.0),  # its square vanishes
        ([1e30, 0], [0, 1e-30], 0.0),
    ],
)
def test_vectors_of_no_numbers_are_as_unlike_as_can_be(a: list[float], b: list[float], alike: float) -> None:
    assert cosine_similarity(np.array([a]), np.array([b])) == pytest.approx([alike])


@pytest.mark.parametrize("name", ["top1", "top5", "agreement", "cosine", "mse"])
def test_a_model_that_answers_nan_has_the_worst_scores(name: str) -> None:
    logits = np.eye(6, dtype=np.float32)
    labels = np.arange(6)
    broken = np.full_like(logits, np.nan)
    metric = METRICS[name]
    assert metric.per_sample is not None
    assert (metric.per_sample({"y": broken}, {"y": logits}, labels) == metric.worst).all()
    assert (metric.per_sample({"y": broken}, {"y": broken}, labels) == metric.worst).all(), "and so has its like"


@pytest.mark.parametrize("name", ["top1", "agreement"])
def test_an_output_that_prefers_no_class_is_no_answer(name: str) -> None:
    flat = np.zeros((4, 6), np.float32)
    metric = METRICS[name]
    assert metric.per_sample is not None
    assert (metric.per_sample({"y": flat}, {"y": flat}, np.zeros(4, np.int64)) == 0).all()
    masked = np.where(np.arange(6) == 2, 1.0, -np.inf).astype(np.float32)[None]
    assert metric.per_sample({"y": masked}, {"y": masked}, np.array([2])).tolist() == [1.0], "masks are numbers enough"


class Answers:
    """A backend that answers sample i with the class in a table."""

    runtime = "table"
    emulated = False

    def __init__(self, classes: list[int], seconds: float = 0.0) -> None:
        self.classes, self.seconds, self.calls = classes, seconds, 0

    def infer(self, inputs: Arrays) -> Arrays:
        self.calls += 1
        time.sleep(self.seconds)
        index = inputs["x"][:, 0].astype(int)
        return {"logits": np.eye(4, dtype=np.float32)[np.array(self.classes)[index]]}


def test_accuracy_is_against_labels_and_agreement_against_the_reference(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", x=np.arange(5, dtype=np.float32)[:, None], label=np.array([0, 1, 2, 3, 0]))
    signature = Signature((TensorSpec.parse("x:float32[batch,1]"),), (TensorSpec.parse("logits:float32[batch,4]"),))
    data = Dataset.open(str(tmp_path / "d.npz"), signature)
    found = compare("a", {"a": Answers([0, 1, 2, 3, 1]), "b": Answers([0, 1, 3, 3, 0])}, data, batch=2)
    assert (found["a"].accuracy, found["a"].agreement, found["a"].samples) == (0.8, 1.0, 5)
    assert (found["b"].accuracy, found["b"].agreement) == (0.8, 0.6)
    assert found["b"].cosine_similarity == pytest.approx(0.6)
    assert found["b"].max_abs_error == 1.0


def test_a_number_for_all_samples_beside_one_for_each_is_compared(tmp_path: Path) -> None:
    class Told(Answers):
        def infer(self, inputs: Arrays) -> Arrays:
            found = super().infer(inputs)
            return {"loss": found["logits"].mean(), **found}

    np.savez(tmp_path / "d.npz", x=np.arange(5, dtype=np.float32)[:, None], label=np.array([0, 1, 2, 3, 0]))
    specs = TensorSpec.parse("loss:float32[]"), TensorSpec.parse("logits:float32[batch,4]")
    data = Dataset.open(str(tmp_path / "d.npz"), Signature((TensorSpec.parse("x:float32[batch,1]"),), specs))
    metric = METRICS["top1"].of("logits")
    a, b = Told([0, 1, 2, 3, 1]), Told([0, 1, 3, 3, 0])
    found = compare("a", {"a": a, "b": b}, data, metric, batch=2)
    assert (found["a"].value, found["b"].value) == (0.8, 0.8)
    assert found["b"].cosine_similarity == pytest.approx((1 + 0.6) / 2)
    assert Judge(a, data, metric).drop(b).points == 0
    assert Judge(a, data, metric).squared_error(b) == pytest.approx(4 / 5)


def test_a_comparison_counts_the_samples_whose_answers_hold_nan(tmp_path: Path) -> None:
    class Broken(Answers):
        def infer(self, inputs: Arrays) -> Arrays:
            found = super().infer(inputs)["logits"]
            found[inputs["x"][:, 0] >= 3] = np.nan
            return {"logits": found}

    np.savez(tmp_path / "d.npz", x=np.arange(5, dtype=np.float32)[:, None], label=np.array([0, 1, 2, 3, 0]))
    signature = Signature((TensorSpec.parse("x:float32[batch,1]"),), (TensorSpec.parse("logits:float32[batch,4]"),))
    data = Dataset.open(str(tmp_path / "d.npz"), signature)
    right = [0, 1, 2, 3, 0]
    found = compare("a", {"a": Answers(right), "b": Broken(right)}, data, METRICS["top1"])
    assert (found["a"].not_numbers, found["b"].not_numbers) == (0, 2)
    assert (found["b"].accuracy, found["b"].agreement, found["b"].value) == (0.6, 0.6, 0.6)
    assert found["b"].cosine_similarity == pytest.approx((3 - 2) / 5)
    assert found["b"].max_abs_error == np.inf


def test_without_labels_there_is_no_accuracy(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", x=np.zeros((3, 1), np.float32))
    signature = Signature((TensorSpec.parse("x:float32[batch,1]"),), ())
    found = compare("a", {"a": Answers([1])}, Dataset.open(str(tmp_path / "d.npz"), signature))
    assert found["a"].accuracy is None
    assert found["a"].agreement == 1.0


class Named(Answers):
    """Its one output has another name, and as many columns as are asked for."""

    def __init__(self, name: str, width: int = 4) -> None:
        super().__init__([0, 1, 2, 3, 1])
        self.name, self.width = name, width

    def infer(self, inputs: Arrays) -> Arrays:
        return {self.name: 2 * np.resize(super().infer(inputs)["logits"], (len(inputs["x"]), self.width))}


@pytest.mark.parametrize(
    ("name", "width", "features", "labels", "metric", "told"),
    [
        ("output", 4, 1, [0, 1, 2, 3, 0], "cosine", True),  # as many classes as there are labels
        ("output", 4, 1, [0, 1, 2, 3, 0], "top1", True),
        ("output", 4, 1, None, "agreement", True),
        ("logits", 4, 1, None, "mse", True),
        ("output", 4, 1, None, "cosine", False),
        ("output", 6, 1, [0, 1, 2, 3, 0], "mse", False),  # an embedding, and what it is of
        ("embedding", 4, 1, [0, 1, 2, 3, 0], "cosine", False),
        ("boxes", 4, 1, [0, 1, 2, 3, 0], "cosine", False),
        ("output", 4, 4, [0, 1, 2, 3, 0], "mse", False),  # an autoencoder
        ("output", 4, 1, np.eye(4)[[0, 1, 2, 3, 0]] * 2.5, "r2", False),
        ("logits", 4, 1, np.eye(4)[[0, 1, 2, 3, 0]], "f1_samples", False),
    ],
)
def test_only_class_scores_have_an_accuracy_and_an_agreement(
    name: str, width: int, features: int, labels: Any, metric: str, *, told: bool
) -> None:
    x = np.tile(np.arange(5, dtype=np.float32)[:, None], (1, features))
    data = Dataset("d", {"x": x}, None if labels is None else np.array(labels), "")
    found = compare("a", {"a": Named(name, width)}, data, METRICS[metric])["a"]
    assert (found.agreement is not None) == told
    assert (found.accuracy is not None) == (told and labels is not None)


def test_latency_is_of_single_calls_and_tells_slow_from_fast() -> None:
    models = {"slow": Answers([0], seconds=0.004), "fast": Answers([0], seconds=0.001)}
    found = latency(models, {"x": np.zeros((1, 1))}, rounds=3, block_seconds=0.01)
    assert found["slow"].p50_ms >= 4
    assert found["fast"].p50_ms >= 1
    assert found["slow"].p50_ms > found["fast"].p50_ms
    assert found["slow"].p99_ms >= found["slow"].p50_ms
    assert len(found["slow"].samples_ms) >= 9, "three of a block, at least"
    assert models["slow"].calls > len(found["slow"].samples_ms), "warm-up calls don't count"
