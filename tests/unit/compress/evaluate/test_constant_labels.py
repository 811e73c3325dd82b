"""What an answer that looks at nothing gets by labels: no better one is passed over, none is made up."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from compress.evaluate.chance import OfShuffled
from compress.evaluate.label_metrics import _f1, _known, _right, constant_accuracy, constant_f1
from compress.evaluate.tag_metrics import TagF1


def always(names: list[str], labels: np.ndarray, given: int) -> tuple[float, float]:
    """The F1 of one class given everywhere, and what is told of the best."""
    figure = TagF1(names, -1, entities=True)
    figure.update(
        {"logits": np.broadcast_to(np.eye(len(names), dtype=np.float32)[given], (*labels.shape, len(names)))}, labels
    )
    return float(figure.compute().mean()), figure.rate()


@pytest.mark.parametrize("names", [["O", "I-PER", "I-LOC"], ["O", "B-PER", "I-PER"], ["O", "S-PER", "E-PER"]])
@pytest.mark.parametrize("kind", ["spread", "whole", "mixed"])
def test_of_tags_each_class_is_tried(names: list[str], kind: str) -> None:
    labels = np.zeros((50, 10), np.int64)
    labels[:, [1, 4, 7]] = 1
    if kind == "whole":
        labels[:] = 2
        labels[:, 0] = 1
    elif kind == "mixed":
        labels = np.random.default_rng(0).integers(-1, 3, (50, 6))
    found = [always(names, labels, given) for given in range(3)]
    assert found[0][1] == pytest.approx(max(score for score, _ in found))


def test_a_network_that_always_says_one_whole_entity_is_no_better_than_chance() -> None:
    labels = np.tile([1, 2, 2, 2], (50, 1))
    assert always(["O", "B-PER", "I-PER"], labels, 2) == (1.0, 1.0)
    spread = np.tile([0, 1, 0, 0, 1, 0, 0, 1, 0, 0], (50, 1))
    assert always(["O", "I-PER", "I-LOC"], spread, 1) == (0.0, 0.0)


def test_labels_that_few_samples_know_are_not_passed_over() -> None:
    labels = np.full((100, 2), -1)
    labels[:10, 0] = 1
    labels[:, 1] = np.arange(100) >= 80
    assert constant_f1(labels) == pytest.approx(0.8)


def test_of_accuracy_a_sample_counts_by_what_is_known_of_it() -> None:
    labels = np.full((160, 2), -1)
    labels[:60, 0] = 1
    labels[60:, 0] = 0
    labels[60:, 1] = np.arange(100) % 2
    assert constant_accuracy(labels) == pytest.approx(0.53125)


@pytest.mark.parametrize("seed", range(6))
def test_of_a_few_labels_it_is_the_best_of_all(seed: int) -> None:
    rng = np.random.default_rng(seed)
    labels = np.where(rng.random((60, 6)) < 0.3, -1, rng.random((60, 6)) < rng.random(6)).astype(np.int64)
    known, there = _known(labels), labels == 1
    all_of_them = [np.array(given) for given in itertools.product((False, True), repeat=6)]
    assert constant_f1(labels) == pytest.approx(max(_f1(each & known, there).mean() for each in all_of_them))
    assert constant_accuracy(labels) == pytest.approx(max(_right(each == there, known).mean() for each in all_of_them))


@pytest.mark.parametrize("count", [2, 3, 4])
def test_a_perfect_original_is_not_doubted_for_shuffles_that_change_nothing(count: int) -> None:
    """Of three labels every sixth order is the one that they have."""
    labels = np.arange(count)
    chance = OfShuffled(lambda outputs, labels: float((outputs["y"] == labels).mean()), higher_is_better=True)
    chance.add({"y": labels}, labels)
    assert chance.doubt(None, "") is None
    nothing = OfShuffled(lambda outputs, labels: float((outputs["y"] == labels).mean()), higher_is_better=True)
    nothing.add({"y": np.roll(labels, 1)}, labels)
    assert "no better with the labels" in (nothing.doubt(None, "") or "")
