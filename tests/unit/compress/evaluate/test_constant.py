"""No budget counts as kept by a model that is no better than an answer that looks at nothing."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.artifact import Measured, StageReport
from compress.data.dataset import Dataset
from compress.evaluate.candidates import Candidate
from compress.evaluate.compare import compare
from compress.evaluate.gains import drop_told
from compress.evaluate.judge import Budget, Judge
from compress.evaluate.metrics import METRICS
from compress.evaluate.scoring import Answers
from compress.evaluate.search_result import SearchResult, Trial
from compress.jobs.evidence import missed_budgets
from compress.model import Arrays
from compress.options import ExportOptions
from compress.report.export import _change, _drop
from compress.report.findings import findings

Array = np.ndarray[Any, Any]
COMPARING = ("agreement", "cosine", "mse")
RNG = np.random.default_rng(0)


class Gives:
    """A model whose outputs are made of its input by a function."""

    runtime = "numpy"
    emulated = False

    def __init__(self, *makes: Any) -> None:
        self._makes = makes

    def infer(self, inputs: Arrays) -> Arrays:
        return {f"y{at}": make(inputs["x"]) for at, make in enumerate(self._makes)}


def data(values: Array) -> Dataset:
    return Dataset("", {"x": values}, None, "")


def best_constant(name: str, values: Array) -> float:
    """By trying: the metric of each answer that could be the best."""
    metric = METRICS[name]
    assert metric.per_sample is not None
    if name == "agreement":
        tried = list(np.eye(values.shape[1]) if values.dtype.kind == "f" else np.unique(values, axis=0))
    elif name == "cosine":
        norms = np.linalg.norm(values, axis=1, keepdims=True)
        tried = [(values / np.where(norms == 0, 1, norms)).mean(0), np.zeros(values.shape[1])]
    else:
        tried = [values.mean(0)]
    scores = [
        metric.per_sample({"y": np.broadcast_to(each, values.shape)}, {"y": values}, None).mean() for each in tried
    ]
    return float(max(scores) if metric.higher_is_better else min(scores))


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(COMPARING), st.integers(2, 90), st.integers(0, 1000), st.booleans(), st.floats(0, 50))
def test_the_best_is_known_from_sums_batch_by_batch(
    name: str, count: int, seed: int, whole: bool, middle: float
) -> None:
    random = np.random.default_rng(seed)
    values: Array = middle * random.standard_normal(5) + random.standard_normal((count, 5))
    values[random.random(count) < 0.1] = 0
    if whole and name == "agreement":
        values = random.integers(0, 2, (count, 3))
    if name == "agreement" and not whole:
        values[:, 0] += 1e-9  # a sample without an answer agrees with none
    answers = Answers(METRICS[name])
    for start in range(0, count, 7):
        answers.add({"y": values[start : start + 7]}, None)
    assert answers.constant == pytest.approx(best_constant(name, values), rel=1e-9, abs=1e-12)


def test_of_several_outputs_it_is_the_mean_as_the_metric_is() -> None:
    first, second = RNG.standard_normal((40, 3)) + 2, RNG.standard_normal((40, 2, 4))
    for name in ("cosine", "mse"):
        answers = Answers(METRICS[name])
        answers.add({"a": first, "b": second}, None)
        alone = [best_constant(name, values.reshape(40, -1)) for values in (first, second)]
        assert answers.constant == pytest.approx(np.mean(alone))


def test_what_is_masked_in_all_samples_says_nothing() -> None:
    scores = RNG.standard_normal((40, 6))
    filled = np.where(np.arange(6) < 2, -1e9, scores)
    for name in ("cosine", "mse"):
        bare, masked = Answers(METRICS[name]), Answers(METRICS[name])
        bare.add({"y": np.where(np.arange(6) < 2, 0, scores)}, None)
        masked.add({"y": filled}, None)
        assert masked.constant == pytest.approx(bare.constant)


@pytest.mark.parametrize("name", ["cosine", "mse"])
def test_outputs_of_several_sizes_have_no_one_answer(name: str) -> None:
    makes = METRICS[name].constant
    assert makes is not None
    found = makes()
    found.add({"y": np.ones((4, 3))})
    found.add({"y": np.ones((4, 5))})
    assert found.score() is None


# Outputs that are nearly the same for all samples, and a network that looks at none of them.
NEARLY = {
    "cosine": lambda x: np.array([3.0, 4, 5, 6]) + 0.1 * x,
    "mse": lambda x: np.array([3.0, 4, 5, 6]) + 0.1 * x,
    "agreement": lambda x: np.where(x > 1, x, 0) + np.array([0.5, 0, 0, 0]),
}


@pytest.mark.parametrize("confidence", [0.95, None])
@pytest.mark.parametrize("name", COMPARING)
def test_a_network_that_answers_nothing_keeps_no_budget(name: str, confidence: float | None) -> None:
    values = data(RNG.standard_normal((400, 4)))
    original = Gives(NEARLY[name])
    outputs = original.infer({"x": values.inputs["x"]})["y0"]
    best = outputs.mean(0) if name != "agreement" else np.eye(4)[np.bincount(outputs.argmax(1)).argmax()]
    judge = Judge(original, values, METRICS[name], confidence=confidence)
    nothing = judge.drop(Gives(lambda x: np.broadcast_to(best, x.shape)))
    assert nothing.points < 100
    assert nothing.counted == np.inf
    near = judge.drop(Gives(lambda x: NEARLY[name](x) + 1e-3 * x[:, ::-1]))
    assert near.counted < np.inf
    assert not judge.doubts


@pytest.mark.parametrize("name", ["agreement", "cosine"])
def test_token_ids_and_sequences_are_held_against_it_too(name: str) -> None:
    tokens = RNG.integers(0, 3, (300, 2))
    original = Gives(lambda x: x) if name == "agreement" else Gives(lambda x: x.astype(np.float64))
    judge = Judge(original, data(tokens), METRICS[name])
    most = max(np.unique(tokens, axis=0, return_counts=True)[1]) / 300
    if name == "agreement":
        assert judge.constant == pytest.approx(100 * (1 - most), rel=1e-5)
    nothing = judge.drop(Gives(lambda x: np.ones_like(x) if name == "agreement" else np.ones(x.shape)))
    assert nothing.counted == np.inf
    assert judge.drop(original).counted < np.inf


def test_ids_that_are_nearly_always_the_same_tell_nothing() -> None:
    ids = np.zeros((200, 4), np.int64)
    ids[0] = 1
    judge = Judge(Gives(lambda x: x), data(ids), METRICS["agreement"])
    assert "one and the same answer for 99.5%" in judge.doubts[0]


# By metric: the labels of 400 samples, a model's output that says them, and one that always says the most frequent.
OFTEN = np.where(RNG.random(400) < 0.6, 0, RNG.integers(1, 8, 400))
SETS = (RNG.random((400, 3)) < np.array([0.9, 0.3, 0.1])).astype(np.int64)
PLACES = np.where(RNG.random((400, 9)) < 0.7, 0, RNG.integers(1, 4, (400, 9)))
LABELLED: dict[str, tuple[Array, Any, Any]] = {
    "top1": (OFTEN, lambda y: np.eye(8)[y], lambda y: np.tile(np.eye(8)[0], (len(y), 1))),
    "top5": (OFTEN, lambda y: np.eye(8)[y], lambda y: np.tile(np.arange(8.0)[::-1], (len(y), 1))),
    "binary_accuracy": (SETS, lambda y: y - 0.5, lambda y: np.tile([1.0, -1.0, -1.0], (len(y), 1))),
    "f1_samples": (SETS, lambda y: y - 0.5, lambda y: np.tile([1.0, -1.0, -1.0], (len(y), 1))),
    "pixel_accuracy": (
        PLACES, lambda y: np.moveaxis(np.eye(4)[y], 2, 1), lambda y: np.moveaxis(np.eye(4)[0 * y], 2, 1)
    ),
    "miou": (PLACES, lambda y: np.moveaxis(np.eye(4)[y], 2, 1), lambda y: np.moveaxis(np.eye(4)[0 * y], 2, 1)),
    "r2": (RNG.standard_normal(400), lambda y: y[:, None], lambda y: np.zeros((len(y), 1)) - 1e-3),
}  # fmt: skip


@pytest.mark.parametrize("confidence", [0.95, None])
@pytest.mark.parametrize("name", list(LABELLED))
def test_by_labels_what_always_says_the_most_frequent_ones_keeps_no_budget(name: str, confidence: float | None) -> None:
    labels, right, same = LABELLED[name]
    at = dataclasses.replace(data(np.arange(400)), labels=labels)
    wrong = RNG.permutation(400)[:20]  # of these the original answers another sample's label

    def original(x: Array) -> Array:
        return np.asarray(right(labels[np.where(np.isin(x, wrong), x[::-1], x)]), np.float32)

    judge = Judge(Gives(original), at, METRICS[name], confidence=confidence)
    assert not judge.doubts
    nothing = judge.drop(Gives(lambda x: np.asarray(same(labels[x]), np.float32)))
    assert nothing.counted == np.inf
    near = judge.drop(Gives(lambda x: original(x) * 0.9))
    assert near.counted < np.inf or (name == "miou" and confidence)  # one figure has no interval
    assert near.points < (judge.constant or 0.0)


def test_a_result_that_answers_infinity_keeps_no_budget_by_labels() -> None:
    at = dataclasses.replace(data(np.arange(400)), labels=OFTEN)
    judge = Judge(Gives(lambda x: np.eye(8)[OFTEN[x]]), at, METRICS["top1"])
    endless = judge.drop(Gives(lambda x: np.tile(np.array([np.inf] + [0.0] * 7), (len(x), 1))))
    assert endless.points < 45
    assert endless.counted == np.inf


def test_a_comparison_has_it_and_so_has_the_row_that_a_budget_is_held_against() -> None:
    values = data(RNG.standard_normal((200, 4)))
    original, nothing = Gives(NEARLY["cosine"]), Gives(lambda x: np.broadcast_to([3.0, 4, 5, 6], x.shape))
    found = compare("original", {"original": original, "nothing": nothing}, values, METRICS["cosine"])
    constant = found["original"].constant
    assert constant is not None
    assert constant <= 100 * (1 - found["nothing"].value)
    lost = 100 * (1 - found["nothing"].value)
    measured = Measured(metric="cosine", value=0.9, drop=lost, drop_low=lost, drop_high=lost, drop_constant=constant)
    row = StageReport("quantize_onnx", "", measured, 0.0)
    options = ExportOptions(output=Path("out"), max_drop=100)
    (missed,) = missed_budgets(options, [row], Budget(100))
    assert "an answer that looks at nothing loses" in missed
    rows = [StageReport("original", "", Measured(metric="cosine", value=1.0), 0.0), row]
    assert any("keeps nothing of cosine" in told for told in findings(rows))
    better = dataclasses.replace(row, measured=dataclasses.replace(measured, drop=constant / 2, drop_high=2 * constant))
    assert not any("looks at nothing" in told for told in findings([rows[0], better]))
    assert not missed_budgets(options, [better], Budget(100))


def test_a_search_takes_no_candidate_that_answers_nothing_and_says_why_none_was_taken() -> None:
    trial = Trial(Candidate(0.5, "none", "minmax"), "measured", drop=40.0, drop_low=39.0, drop_high=41.0, size_bytes=1)
    found = SearchResult("size", 100, "cosine", 1.0, 100, (trial,), 0.95)
    assert found.best is trial
    kept = dataclasses.replace(found, constant=39.5)
    assert kept.best is None
    assert "1 no better than an answer that looks at nothing" in kept.missed
    assert "an answer that looks at nothing loses 39.5" in kept.missed
    assert kept.to_dict()["constant"] == 39.5


@pytest.mark.parametrize("unit", [1e-4, 1.0, 1e6])
def test_a_squared_error_is_told_in_the_outputs_own_unit(unit: float) -> None:
    """Of outputs of any size: 0.00 said that nothing had changed of a network that answers nothing."""
    lost, constant = 0.5 * unit**2, unit**2
    first = Measured(metric="mse", value=0.0, drop=0.0, drop_low=0.0, drop_high=0.0, drop_constant=constant)
    last = Measured(
        metric="mse", value=lost, drop=lost, drop_low=0.9 * lost, drop_high=1.1 * lost, drop_constant=constant
    )
    rows = [StageReport("original", "", first, 0.0), StageReport("quantize_onnx", "", last, 0.0)]
    assert any(f"mse rose by {lost:.3g}, from 0 to {lost:.4g}" in told for told in findings(rows))
    change = _change(first, last, "95%")
    assert change is not None
    assert float(change.figure) == pytest.approx(lost)
    assert change.words == "change in mse"
    assert float(_drop(last).split()[0]) == pytest.approx(lost)
    assert "points" not in drop_told(lost, metric="mse")
    small = dataclasses.replace(last, value=1e-6 * constant, drop=1e-6 * constant)
    assert not any("rose" in told for told in findings([rows[0], dataclasses.replace(rows[1], measured=small)]))


def test_fills_are_looked_for_in_what_the_original_gives() -> None:
    """Larger scores in a result hide its fills, by which alone it would be alike."""
    rng = np.random.default_rng(0)
    masked = np.arange(12) < 4
    original, unlike = (np.where(masked, -1e4, size * rng.standard_normal((64, 12))) for size in (2, 4))
    judge = Judge(Gives(lambda x: original[x]), data(np.arange(64)), METRICS["cosine"])
    found = judge.drop(Gives(lambda x: unlike[x]))
    assert found.points > 80
    assert judge.drop(Gives(lambda x: 2 * original[x] * np.where(masked, 0.5, 1))).points < 1


@pytest.mark.parametrize("name", ["cosine", "mse"])
def test_masks_that_move_do_not_make_nothing_look_like_something(name: str) -> None:
    rng = np.random.default_rng(0)
    masked = rng.random((400, 12)) < 0.3
    original = np.where(masked, -1e9, rng.standard_normal((400, 12)))
    judge = Judge(Gives(lambda x: original[x]), data(np.arange(400)), METRICS[name])
    nothing = judge.drop(Gives(lambda x: np.where(masked[x], -1e9, 0.0)))
    assert nothing.counted == np.inf
    assert judge.drop(Gives(lambda x: original[x] * np.where(masked[x], 1.0, 1.01))).counted < np.inf
