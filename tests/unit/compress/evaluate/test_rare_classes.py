"""Where a class has few samples, none of its errors may be among them: intervals of F1 and Matthews' correlation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from compress.data.dataset import Dataset
from compress.errors import RecipeError
from compress.evaluate.class_metrics import FIGURES
from compress.evaluate.evaluation import Evaluation
from compress.evaluate.influences import Influences
from compress.evaluate.intervals import difference_interval, mean_interval, share_interval
from compress.evaluate.judge import Budget, Judge
from compress.evaluate.metric_choice import find_metric
from compress.evaluate.metrics import METRICS
from compress.evaluate.tag_metrics import f1_scores
from tests.unit.compress.evaluate.test_class_metrics import LOGITS, Classifier

NAMES = [*FIGURES, "f1_entities"]
Array = np.ndarray[Any, Any]


def scores_of(name: str, answers: Array, labels: Array) -> Array:
    """Of the tags, class 1 is one entity in a sentence, and class 0 none."""
    if name == "f1_entities":
        counts = np.stack([answers & labels, answers, labels], axis=1)
        return f1_scores(counts.astype(np.float64))
    return FIGURES[name][0](answers, labels, 2)


def ten_of_a_thousand() -> Array:
    return np.repeat([0, 1], [990, 10])


@pytest.mark.parametrize("name", NAMES)
def test_ten_samples_without_an_error_prove_no_class(name: str) -> None:
    labels, bounds = ten_of_a_thousand(), METRICS[name].bounds
    perfect = scores_of(name, labels, labels)
    missing = labels * (np.arange(1000) % 10 > 2)  # 7 of 10 are found
    worse = float(scores_of(name, missing, labels).mean())
    assert np.asarray(perfect) == pytest.approx(1)
    alone = mean_interval(perfect, bounds=bounds)
    assert alone.low == pytest.approx(worse, abs=0.03), "none of ten seen: at most 28%"
    assert alone.high == 1
    both = difference_interval(perfect, perfect, bounds=bounds)
    assert both.low == pytest.approx(alone.low - 1)


@pytest.mark.parametrize("name", NAMES)
def test_a_common_sample_may_be_taken_for_the_rare_class_too(name: str) -> None:
    """All of 1,000 are right; of 990 one in 258 may not be, which would make 4 among the 14 that are given."""
    labels = ten_of_a_thousand()
    given = labels.copy()
    given[:4] = 1
    worse = float(scores_of(name, given, labels).mean())
    assert mean_interval(scores_of(name, labels, labels), bounds=METRICS[name].bounds).low < worse + 0.01


@pytest.mark.parametrize("name", NAMES)
def test_errors_of_the_common_class_tell_nothing_of_the_rare_one(name: str) -> None:
    labels, given = ten_of_a_thousand(), ten_of_a_thousand()
    given[:50] = 1
    scores = scores_of(name, given, labels)
    found, seen = (mean_interval(each, bounds=METRICS[name].bounds) for each in (scores, np.asarray(scores)))
    assert found.low < seen.low
    assert found.high >= seen.high


@pytest.mark.parametrize("name", FIGURES)
def test_between_two_classes_of_a_size_all_right_is_told_as_a_share_is(name: str) -> None:
    labels = np.tile([0, 1], 100)
    found = mean_interval(scores_of(name, labels, labels), bounds=METRICS[name].bounds)
    unit = 1 if name == "f1_macro" else 2  # as an error counts
    assert 1 - found.low == pytest.approx(unit * (1 - share_interval(200, 200).low), rel=0.1)


@pytest.mark.parametrize("name", NAMES)
def test_where_errors_are_seen_everywhere_an_interval_is_hardly_wider(name: str) -> None:
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, 1000)
    given = np.where(rng.random(1000) < 0.9, labels, 1 - labels)
    scores = scores_of(name, given, labels)
    found, seen = (mean_interval(each, bounds=METRICS[name].bounds) for each in (scores, np.asarray(scores)))
    assert found.high - found.low == pytest.approx(seen.high - seen.low, rel=0.05)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("samples", "share"), [(1000, 0.01), (500, 0.03)])
def test_a_drop_in_a_rare_class_is_held(name: str, samples: int, share: float) -> None:
    """The original is perfect, the other misses one in ten of the class: beyond the upper end in 2.5% at most."""
    rng = np.random.default_rng(3)
    labels = (rng.random(200_000) < share).astype(np.int64)
    true = 1 - float(scores_of(name, labels * (rng.random(200_000) < 0.9), labels).mean())
    beyond = 0
    for _ in range(60):
        labels = (rng.random(samples) < share).astype(np.int64)
        labels[0] = 1
        scores = scores_of(name, labels * (rng.random(samples) < 0.9), labels)
        beyond += difference_interval(scores, scores_of(name, labels, labels), bounds=METRICS[name].bounds).low > -true
    assert beyond <= 4


def test_many_small_classes_are_held() -> None:
    """200 classes of five samples each: macro F1 of so few is lower than of many, by 1.3 points."""
    rng = np.random.default_rng(4)
    held = 0
    for _ in range(60):
        labels = rng.integers(0, 200, 1000)
        given = np.where(rng.random(1000) < 0.9, labels, (labels + rng.integers(1, 200, 1000)) % 200)
        found = mean_interval(FIGURES["f1_macro"][0](given, labels, 200), bounds=(0.0, 1.0))
        held += found.low <= 0.9 <= found.high
    assert held >= 53, "of 60, at 95% confidence; 42 as influences alone have it"


@pytest.mark.parametrize("name", FIGURES)
@pytest.mark.parametrize(("small", "common", "wrong"), [(1000, 0, 0.0025), (1000, 0, 0.01), (100, 900, 0.1)])
def test_errors_among_many_classes_of_one_sample_are_held(name: str, small: int, common: int, wrong: float) -> None:
    """None is worse than any other: the influences of those that were seen, and one class's alone, tell too little."""
    rng = np.random.default_rng(5)
    labels = np.concatenate([np.arange(small), np.full(common, small)])
    classes, beyond = small + 1, 0

    def drawn(there: Array) -> Array:
        missed = (rng.random(len(there)) < wrong) & (there < small)
        return np.where(missed, (there + rng.integers(1, classes, len(there))) % classes, there)

    many = np.tile(labels, 200)
    true = 1 - float(FIGURES[name][0](drawn(many), many, classes).mean())
    for _ in range(60):
        scores, perfect = (FIGURES[name][0](each, labels, classes) for each in (drawn(labels), labels))
        beyond += difference_interval(scores, perfect, bounds=METRICS[name].bounds).low > -true
    assert beyond <= 4


@pytest.mark.parametrize("name", FIGURES)
def test_a_class_that_no_answer_is_right_of_hides_no_other_s_unseen_errors(name: str) -> None:
    """Of 1,990 samples none was taken for the second class, and 3.8 may be, which makes 64 / 76 of its 64 / 72."""
    labels = np.repeat([0, 1, 2], [1985, 40, 5])
    given = np.where(labels == 2, 0, labels)
    given[:100], given[1985:1993] = 2, 0
    scores = FIGURES[name][0](given, labels, 3)
    assert isinstance(scores, Influences)
    assert scores.outcomes is not None
    assert scores.outcomes.fall(0.95) > {"f1_macro": 0.014, "mcc": 0.006}[name]


def test_what_is_computed_of_influences_is_scores_alone() -> None:
    scores = scores_of("mcc", ten_of_a_thousand(), ten_of_a_thousand())
    assert isinstance(scores, Influences)
    assert scores.outcomes is not None
    for each in (scores[:5], scores - 1, scores.copy()):
        assert getattr(each, "outcomes", None) is None


@pytest.mark.parametrize("name", FIGURES)
def test_a_budget_that_a_rare_class_can_t_prove_is_refused_before_the_work(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = 10 * np.arange(1000) + np.where(np.arange(1000) < 990, 0, 9)
    data = Dataset("eval.npz", {"ids": ids}, np.where(ids % 10, 3, 0).astype(np.int64), "0" * 64)
    metric = find_metric(name, data, LOGITS)
    original = Classifier()
    monkeypatch.setattr("compress.evaluate.evaluation.open_model", lambda *_args, **_more: original)
    judge = Judge(original, data, metric)
    assert not judge.doubts
    assert judge.unseen is not None
    evaluation = Evaluation(data, metric, 0.95)
    with pytest.raises(RecipeError, match=f"can't be sure of 1 points? of {name} with 1,000 samples") as caught:
        evaluation.refuse(None, Budget(1.0))  # type: ignore[arg-type]
    assert "samples of the rarest class are too few" in caught.value.why
    evaluation.refuse(None, Budget(judge.unseen + 0.01))  # type: ignore[arg-type]
    evaluation.refuse(None, Budget(1.0, None))  # type: ignore[arg-type]
