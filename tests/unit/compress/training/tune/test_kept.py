"""What a search keeps is believed only as it was written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from compress.console.wording import Note
from compress.training.task import Trained
from compress.training.tune.kept import Kept, Trial

SETTINGS = {"learning_rate": 0.00123, "epochs": 7}
TRAINED = Trained(1.5, 0.5, 70, {"history": [{"epoch": 1}], "best_value": 0.75}, ("a warning", Note("a note")))
TRIALS = [
    Trial(SETTINGS, "top1", True, {1: 0.5, 2: 0.75, 4: 0.75}, 0.75, seconds=1.25, trained=TRAINED),
    Trial(SETTINGS, "loss", False, {1: 3.5}, pruned_at=1, seconds=0.5),
    Trial(SETTINGS, failed="the training has diverged: NaN"),
]


@pytest.mark.parametrize("trial", TRIALS, ids=["whole", "ended", "failed"])
def test_a_trial_is_taken_as_it_was_kept(tmp_path: Path, trial: Trial) -> None:
    kept = Kept(tmp_path)
    kept.keep(3, trial)
    again = kept.take(3, SETTINGS)
    assert again == trial
    assert kept.count() == 1
    if again is not None and again.trained is not None:
        assert [isinstance(words, Note) for words in again.trained.warnings] == [False, True]


def test_one_with_other_settings_or_another_number_is_not_taken(tmp_path: Path) -> None:
    Kept(tmp_path).keep(0, TRIALS[0])
    assert Kept(tmp_path).take(0, {**SETTINGS, "epochs": 8}) is None
    assert Kept(tmp_path).take(1, SETTINGS) is None


def _other(told: dict[str, Any]) -> str:
    told["trial"]["value"] = 0.99
    return json.dumps(told)


@pytest.mark.parametrize(
    "change",
    [lambda _: "", lambda _: "[]", lambda _: '{"sha256": 1}', lambda told: json.dumps(told)[:-20], _other],
    ids=["empty", "a list", "a digest alone", "cut off", "another score"],
)
def test_a_damaged_one_is_trained_again(tmp_path: Path, change: Any) -> None:
    Kept(tmp_path).keep(0, TRIALS[0])
    (path,) = tmp_path.glob("*.json")
    path.write_text(change(json.loads(path.read_text())))
    assert Kept(tmp_path).take(0, SETTINGS) is None


def test_weights_are_those_of_the_trial_that_is_asked_for_and_fit_the_network(tmp_path: Path) -> None:
    kept, like = Kept(tmp_path), torch.nn.Linear(3, 2).state_dict()
    assert kept.weights(0, like) is None
    kept.keep_weights(4, like)
    found = kept.weights(4, like)
    assert found is not None
    assert all(torch.equal(found[name], tensor) for name, tensor in like.items())
    assert kept.weights(3, like) is None
    assert kept.weights(4, torch.nn.Linear(3, 5).state_dict()) is None
    kept.keep_weights(4, {name: tensor * float("nan") for name, tensor in like.items()})
    assert kept.weights(4, like) is None
    kept.drop_weights()
    assert not list(tmp_path.iterdir())
