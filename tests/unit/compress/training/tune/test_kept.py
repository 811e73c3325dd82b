"""What a search keeps is believed only as it was written."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from compress.console.wording import Note
from compress.options.training import TrainingOptions
from compress.report.training_plots import training_plots, trial_rows
from compress.training.finetune import details_of, told
from compress.training.task import Trained
from compress.training.tune.kept import Kept, Trial

SETTINGS = {"learning_rate": 0.00123, "epochs": 7}
FIGURES: dict[str, Any] = {
    "history": [
        {"epoch": 1, "loss": 1.5, "seconds": 0.5, "samples_per_second": 200.0, "validation": 0.5},
        {"epoch": 2, "loss": 0.5, "seconds": 0.5, "samples_per_second": 200.0, "validation": 0.75},
    ],
    "curve": [[1, 2.0, 0.001], [35, 1.0, 0.0005]], "training_seconds": 1.0, "cpu_utilization": 0.5,
    "peak_memory_bytes": 1000, "samples_per_second": 200.0, "compiled": False, "steps": 70, "samples": 100,
    "batch_size": 32, "batch_sizes_tried": {"32": 100.0, "64": None}, "learning_rate": 0.001, "precision": "32-true",
    "device": "cpu", "processes": 1, "threads": 1, "loader_workers": 0, "rollbacks": 0,
    "outputs": {"logits": {"taken_as": "softmax", "ending": None, "because": "the labels are class ids"}},
    "resumed_at_step": None, "best_epoch": 2, "best_value": 0.75, "validation_metric": "top1",
}  # fmt: skip
TRAINED = Trained(1.5, 0.5, 70, FIGURES, ("a warning", Note("a note")))
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


ELSE: list[Any] = [None, True, "x", "0.99", -1, 5.0, 10**400, float("nan"), float("inf"), [], [1], {}, {"a": 1}]


def changed(folder: Path, path: tuple[Any, ...], value: Any, which: int = 0) -> Kept:
    """A trial as it was kept, but for one thing, with the digest of what it says now."""
    kept = Kept(folder)
    kept.keep(0, TRIALS[which])
    file = folder / "000.json"
    told = json.loads(file.read_text())
    del told["sha256"]
    place = told
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = value
    told = json.loads(json.dumps(told))
    digest = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()
    file.write_text(json.dumps(told | {"sha256": digest}))
    return kept


@pytest.mark.parametrize(
    ("path", "values"),
    [
        (("trial", "metric"), [*ELSE, "", "loss", "r3", "top\x1b[31m"]),
        (("trial", "higher_is_better"), [False, None, "no", 1]),
        (("trial", "reported"), [None, [], "x", {"0": 0.5}, {"5": 0.5}, {"-1": 0.5}, {"1": True}, {"1": "0.5"}]),
        (("trial", "reported", "1"), [*ELSE, 1.5]),
        (("trial", "value"), [*ELSE, 0.7500001, 1.5]),
        (("trial", "pruned_at"), [*(each for each in ELSE if each is not None), 1, 4]),
        (("trial", "failed"), [None, True, 1, {"a": 1}, ["x"], "it failed"]),
        (("trial", "seconds"), [each for each in ELSE if each != 5.0]),
        (("trained",), ELSE),
        (("trained", "first"), ELSE),
        (("trained", "steps"), [*ELSE, 0, 71]),
        (("trained", "warnings"), [None, "x", [1, 2], [None]]),
        (("trained", "notes"), [None, "x", [2], [-1], [True], ["0"], {}]),
        (("trained", "figures"), ELSE),
        (("trained", "figures", "history"), [*ELSE, "xx", [{}], [{"epoch": 1}]]),
        (("trained", "figures", "history", 1, "validation"), [*ELSE, 1.5]),
        (("trained", "figures", "curve"), [None, "x", [1], [[1, 2]], [[1, 2, "3"]], {}]),
        (("trained", "figures", "samples"), [None, "x", 0, 1.5, True, [1]]),
        (("trained", "figures", "outputs"), [None, [], "x", {"logits": "softmax"}, {"logits": {"taken_as": 1}}]),
        (("trained", "figures", "batch_sizes_tried"), [None, [], {"x": 1.0}, {"32": "x"}, {"32": float("nan")}]),
        (("trained", "figures", "best_epoch"), [*ELSE, 0, 3]),
        (("trained", "figures", "best_value"), [*ELSE, 0.8]),
        (("trained", "figures", "resumed_at_step"), [True, "x", -1, 1.5]),
        (("trained", "figures", "profile"), [{}, {"shares": 1}]),
        (("other",), [1]),
    ],
    ids=lambda given: ".".join(map(str, given)) if isinstance(given, tuple) else "",
)
def test_a_trial_of_what_a_search_does_not_write_is_none_and_is_told(
    tmp_path: Path, path: tuple[Any, ...], values: list[Any]
) -> None:
    for value in values:
        kept = changed(tmp_path, path, value)
        assert kept.take(0, SETTINGS) is None, value
        assert kept.refused == [0]


@pytest.mark.parametrize(
    ("which", "path", "value"),
    [
        (1, ("trial", "pruned_at"), 2), (1, ("trial", "pruned_at"), None), (1, ("trial", "value"), 0.5),
        (1, ("trial", "value"), -0.5), (1, ("trial", "reported"), {}), (1, ("trial", "reported", "1"), -3.5),
        (2, ("trial", "failed"), ""), (2, ("trial", "value"), 0.5), (2, ("trial", "pruned_at"), 1),
        (2, ("trial", "reported"), {"1": 0.5}),
    ],
)  # fmt: skip
def test_one_that_ended_early_or_failed_says_no_more_than_such_a_trial_does(
    tmp_path: Path, which: int, path: tuple[Any, ...], value: Any
) -> None:
    assert changed(tmp_path, path, value, which).take(0, SETTINGS) is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)
TOLD = {"trial": TRIALS[0].to_dict(), "trained": dataclasses.asdict(TRAINED)}
PLACES: list[tuple[str, ...]] = [(part, name) for part, inner in TOLD.items() for name in inner]
PLACES += [("trained", "figures", name) for name in FIGURES]


@settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(PLACES), JSON)
def test_what_is_taken_can_be_told(tmp_path: Path, path: tuple[str, ...], value: Any) -> None:
    found = changed(tmp_path, path, value).take(0, SETTINGS)
    if found is None:
        return
    assert found.value is not None
    assert 0 <= found.value <= 1
    assert isinstance(found.cost(found.value), float)
    assert found.trained is not None
    assert told(found.trained, TrainingOptions(epochs=7))
    tuning = {"trials": [found.to_dict()] * 2, "best": 0, "metric": found.metric, "higher_is_better": True}
    details = json.loads(json.dumps(details_of(found.trained) | {"tuning": tuning}))
    assert len(trial_rows(details)) == 2
    assert training_plots(details)


def test_trials_of_one_search_are_judged_by_one_metric(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    kept.keep(0, TRIALS[0])
    assert kept.take(0, SETTINGS, "top1") == TRIALS[0]
    assert kept.take(0, SETTINGS, "mse") is None


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
