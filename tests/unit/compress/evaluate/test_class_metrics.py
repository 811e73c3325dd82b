"""Macro F1 and Matthews' correlation, as scikit-learn has them, with an interval."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compress.artifact import TensorSpec
from compress.data.dataset import Dataset
from compress.errors import RecipeError
from compress.evaluate.class_metrics import FIGURES, ClassFigure, f1_macro_scores, mcc_scores
from compress.evaluate.intervals import difference_interval, mean_interval
from compress.evaluate.judge import Judge
from compress.evaluate.metric_choice import find_metric
from compress.model import Arrays
from compress.signature import Signature

LOGITS = Signature((TensorSpec("ids", "int64", ("batch",)),), (TensorSpec("logits", "float32", ("batch", 4)),))
RNG = np.random.default_rng(0)
NAMES = list(FIGURES)


class Classifier:
    """Gives the class that the ids say, and others where their hash says so."""

    runtime, emulated = "numpy", False

    def __init__(self, wrong: float = 0.0) -> None:
        self._wrong = wrong

    def infer(self, inputs: Arrays) -> Arrays:
        ids = inputs["ids"]
        odd = (np.sin(ids * 7919.0) + 1) / 2 < self._wrong
        return {"logits": np.eye(4, dtype=np.float32)[np.where(odd, (ids % 7) % 4, _class(ids))]}


def _class(ids: Any) -> Any:
    """Unlike many of each."""
    return np.searchsorted([5, 8, 9], ids % 10, "right")


def labelled(samples: int = 300) -> Dataset:
    ids = np.random.default_rng(0).integers(0, 10_000, samples)  # the same whichever tests ran before
    return Dataset("", {"ids": ids}, _class(ids).astype(np.int64), "0" * 64)


@pytest.mark.filterwarnings("ignore:A single label was found")
@given(
    st.integers(1, 5).flatmap(lambda k: st.lists(st.tuples(st.integers(0, k - 1), st.integers(0, k - 1)), min_size=1))
)
def test_the_mean_of_the_scores_is_scikit_learns_figure(pairs: list[tuple[int, int]]) -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    answers, labels = np.array(pairs).T
    f1 = metrics.f1_score(labels, answers, average="macro", zero_division=0)
    assert f1_macro_scores(answers, labels, 5).mean() == pytest.approx(f1, abs=1e-12)
    mcc = metrics.matthews_corrcoef(labels, answers)
    assert mcc_scores(answers, labels, 5).mean() == pytest.approx(mcc, abs=1e-9)


def test_figures_by_hand() -> None:
    answers, labels = np.array([0, 0, 1, 1, 1]), np.array([0, 1, 1, 1, 0])
    assert f1_macro_scores(answers, labels, 3).mean() == pytest.approx((2 * 1 / 4 + 2 * 2 / 6) / 2), "no one is a 2"
    assert mcc_scores(answers, labels, 2).mean() == pytest.approx((1 * 2 - 1 * 1) / np.sqrt(2 * 2 * 3 * 3) + 0 * 1)
    assert f1_macro_scores(labels, labels, 3).tolist() == [1] * 5
    assert mcc_scores(labels, labels, 3).tolist() == pytest.approx([1] * 5)


@pytest.mark.parametrize("name", NAMES)
def test_a_model_is_judged_with_an_interval_against_its_original(name: str) -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    data, wrong = labelled(), Classifier(0.2)
    metric = find_metric(name, data, LOGITS)
    judge = Judge(Classifier(), data, metric)
    assert judge.original == pytest.approx(1)
    assert not judge.doubts
    drop = judge.drop(wrong)
    assert drop.low is not None
    assert drop.high is not None
    assert 0 < drop.low < drop.points < drop.high
    answers = wrong.infer(data.inputs)["logits"].argmax(1)
    scorer = {"f1_macro": lambda t, p: metrics.f1_score(t, p, average="macro"), "mcc": metrics.matthews_corrcoef}[name]
    assert drop.after == pytest.approx(scorer(data.labels, answers))


@pytest.mark.parametrize("name", NAMES)
def test_intervals_hold_the_figure_as_often_as_they_say(name: str) -> None:
    scores, bounds = FIGURES[name][0], (0.0 if name == "f1_macro" else -1.0, 1.0)
    data = labelled(50_000)
    labels = np.asarray(data.labels)
    answers = [Classifier(share).infer(data.inputs)["logits"].argmax(1) for share in (0.2, 0.3)]
    true = [scores(each, labels, 4).mean() for each in answers]
    held = apart = 0
    for _ in range(200):
        rows = RNG.integers(0, 50_000, 200)
        found = [scores(each[rows], labels[rows], 4) for each in answers]
        own = mean_interval(found[0], bounds=bounds)
        lost = difference_interval(found[1], found[0], bounds=bounds)
        held += own.low <= true[0] <= own.high
        apart += lost.low <= true[1] - true[0] <= lost.high
    assert held >= 180, "90% of 200, at 95% confidence"
    assert apart >= 180


@pytest.mark.parametrize("name", NAMES)
def test_an_original_that_knows_nothing_is_doubted(name: str) -> None:
    data = labelled()
    metric = find_metric(name, data, LOGITS)
    mixed = np.random.default_rng(1).permutation(data.inputs["ids"])
    shuffled = dataclasses.replace(data, inputs={"ids": mixed})
    assert "no better than chance" in Judge(Classifier(), shuffled, metric).doubts[0]
    beyond = dataclasses.replace(data, labels=np.asarray(data.labels) + 2)
    assert "are no class of the model" in Judge(Classifier(), beyond, metric).doubts[0]


@pytest.mark.parametrize(("name", "rate"), [("f1_macro", 0.25), ("mcc", 0.0)])
@pytest.mark.parametrize("given", [[1, 0, 0, 0], [0.5, 0.3, 0.1, 0.1], [0.25] * 4, [0.1, 0.1, 0.3, 0.5]])
def test_whoever_looks_at_nothing_has_no_more_than_what_is_called_chance(
    name: str, rate: float, given: list[float]
) -> None:
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(4), [20_000, 12_000, 4_000, 4_000])
    figure = ClassFigure(name)
    figure.update({"logits": np.eye(4, dtype=np.float32)[rng.choice(4, size=len(labels), p=given)]}, labels)
    assert figure.rate() == pytest.approx(rate)
    assert figure.compute().mean() <= rate + 0.01
    if given[:2] == [0.5, 0.3]:
        assert figure.compute().mean() == pytest.approx(rate, abs=0.01), "as often as they come is the best guess"


def test_logits_that_prefer_nothing_are_no_answer() -> None:
    figure = ClassFigure("f1_macro")
    figure.update({"logits": np.array([[1, 0], [0, 0], [np.nan, 1]], np.float32)}, np.array([0, 0, 1]))
    assert figure.compute().mean() == pytest.approx((2 / 3 + 0) / 2)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("labels", [None, RNG.random((300, 4)).astype(np.float32)], ids=["none", "numbers"])
def test_labels_are_one_class_for_each_sample(name: str, labels: Any) -> None:
    with pytest.raises(RecipeError, match=f"can't judge by {name}"):
        find_metric(name, dataclasses.replace(labelled(), labels=labels), LOGITS)


def test_an_output_without_classes_is_refused() -> None:
    one = Signature(LOGITS.inputs, (TensorSpec("value", "float32", ("batch",)),))
    with pytest.raises(RecipeError, match="can't judge by mcc"):
        find_metric("mcc", labelled(), one)
