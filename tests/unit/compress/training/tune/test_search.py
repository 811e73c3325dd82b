"""A search: never worse than what was asked for, the same each time, and no trial trained twice."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from compress.artifact import TensorSpec
from compress.data.dataset import Dataset
from compress.errors import MissingExtraError, RecipeError, StageError
from compress.jobs.rehearsal import rehearse
from compress.model import TorchModel
from compress.model.infer import infer_signature
from compress.stage import Given
from compress.training.finetune import Finetune
from compress.training.loop import STATE_FILE
from compress.training.tune.kept import FOLDER, Kept
from compress.training.tune.sampling import BAYESIAN, RANDOM
from compress.training.tune.search import Search, trainings_left
from tests.unit.compress.training.networks import model, same, stage, weights

TRIALS = 7


def quiet(_done: int, _total: int, _note: str) -> None:
    pass


def asked(folder: Path, **options: Any) -> Finetune:
    usual: dict[str, Any] = {"epochs": 4, "hold_out": 0.2, "tune_training": TRIALS, "train_threads": 1}
    return stage(folder, **usual | {"count": 240, "learning_rate": 1e-3} | options)


def run(
    folder: Path, progress: Callable[[int, int, str], None] = quiet, *, name: str = "work", **options: Any
) -> Given:
    (folder / name).mkdir(exist_ok=True)
    return asked(folder, **options).run(model(folder, "student", 8), folder / name, progress)


def untimed(trial: Any) -> Any:
    return {name: value for name, value in trial.items() if name != "seconds"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Given]:
    folder = tmp_path_factory.mktemp("whole")
    return folder, run(folder)


def test_the_first_trial_is_the_training_as_asked_for_and_the_result_is_never_worse(
    whole: tuple[Path, Given], tmp_path: Path
) -> None:
    tuning = whole[1].details["tuning"]
    plain = run(tmp_path, tune_training=None)
    first, best = tuning["trials"][0], tuning["trials"][tuning["best"]]
    assert first["settings"] == {"learning_rate": 1e-3, "epochs": 4, "batch_size": 32}
    assert first["value"] == plain.details["best_value"]
    assert best["value"] == max(each["value"] for each in tuning["trials"] if each["value"] is not None)
    assert best["value"] > first["value"]
    assert best["value"] == whole[1].details["best_value"]
    assert len(tuning["trials"]) == TRIALS


def test_the_network_of_the_best_trial_is_that_of_a_training_with_the_flags_that_are_told(
    whole: tuple[Path, Given], tmp_path: Path
) -> None:
    words = whole[1].details["tuning"]["flags"].split()
    told = {
        name.removeprefix("--").replace("-", "_"): float(value)
        for name, value in zip(words[::2], words[1::2], strict=True)
    }
    settings: dict[str, Any] = {name: value if name == "learning_rate" else int(value) for name, value in told.items()}
    assert same(weights(whole[1]), weights(run(tmp_path, tune_training=None, **settings)))
    assert whole[1].details["tuning"]["flags"] in whole[1].did


def test_the_same_seed_gives_the_same_and_another_does_not(whole: tuple[Path, Given], tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    again, other = run(tmp_path), run(tmp_path / "other", seed=1)
    assert same(weights(whole[1]), weights(again))
    settings = [[each["settings"] for each in given.details["tuning"]["trials"]] for given in (whole[1], again, other)]
    assert settings[0] == settings[1]
    assert settings[0] != settings[2]


@pytest.mark.parametrize("share", [0.2, 0.55, 0.87])
def test_an_interrupted_search_goes_on_where_it_was_and_ends_the_same(
    whole: tuple[Path, Given], tmp_path: Path, share: float
) -> None:
    """In the middle of a trial, too: neither is a trial trained twice, nor an epoch of it."""

    def interrupted(done: int, total: int, _note: str) -> None:
        if done >= share * total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, interrupted)
    through = Kept(tmp_path / "work" / FOLDER).count()
    assert 0 < through < TRIALS
    told: list[int] = []
    again = run(tmp_path, lambda done, _total, _note: told.append(done))
    assert min(told) >= 1000 * through, "nothing is trained again"
    assert same(weights(again), weights(whole[1]))
    before, after = ([untimed(each) for each in given.details["tuning"]["trials"]] for given in (whole[1], again))
    assert before == after


@pytest.mark.parametrize("lost", ["weights", "result"])
def test_what_is_damaged_of_an_interrupted_search_is_trained_again(
    whole: tuple[Path, Given], tmp_path: Path, lost: str
) -> None:
    shutil.copytree(whole[0] / "work", tmp_path / "work")
    best = whole[1].details["tuning"]["best"]
    if lost == "result":
        (tmp_path / "work" / FOLDER / f"{best:03d}.json").write_text("{}")
    assert not (tmp_path / "work" / FOLDER / "best.weights").exists(), "a search that is through keeps none"
    assert same(weights(run(tmp_path)), weights(whole[1]))


def test_trials_are_ended_early_where_they_are_worse_than_half_of_the_others(whole: tuple[Path, Given]) -> None:
    trials = whole[1].details["tuning"]["trials"]
    ended = [each for each in trials if each["pruned_at"] is not None]
    assert ended
    for each in ended:
        quarter = each["pruned_at"]
        others = [
            t["reported"][str(quarter)] for t in trials if t["value"] is not None and str(quarter) in t["reported"]
        ]
        assert quarter < 4
        assert each["value"] is None
        assert each["reported"][str(quarter)] < max(others)
    assert f"{len(ended)} ended early" in whole[1].did


def test_a_folder_holds_no_more_than_the_results_when_it_is_through(whole: tuple[Path, Given]) -> None:
    left = {path.name for path in (whole[0] / "work").rglob("*") if path.is_file()}
    assert left == {f"{number:03d}.json" for number in range(TRIALS)}


def test_how_far_it_is_only_grows_and_names_the_trial(tmp_path: Path) -> None:
    told: list[tuple[int, int, str]] = []
    run(tmp_path, lambda *how: told.append(how), tune_training=3, epochs=2)
    assert [done for done, _, _ in told] == sorted(done for done, _, _ in told)
    assert {total for _, total, _ in told} == {3000}
    assert told[0][2].startswith("trial 1/3")
    assert "best" in told[-1][2]
    assert "epoch 2/2" in told[-1][2] or "epoch 1/1" in told[-1][2]


def test_a_trial_that_diverges_is_told_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fit = Finetune.fit

    def fails_at_first(stage: Finetune, *given: Any, **named: Any) -> Any:
        if stage.training.learning_rate == 1e-3:
            raise StageError("the training has diverged", why="the loss became nan", mend="try a lower rate")
        return fit(stage, *given, **named)

    monkeypatch.setattr(Finetune, "fit", fails_at_first)
    given = run(tmp_path, tune_training=4, epochs=2)
    first, *others = given.details["tuning"]["trials"]
    assert first["failed"] == "the training has diverged: the loss became nan"
    assert first["value"] is None
    assert any(each["value"] is not None for each in others)
    assert "1 failed" in given.did
    assert "as asked for: failed" in given.did


def test_where_all_trials_diverge_that_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StageError, match="no training of the search") as caught:
        run(tmp_path, learning_rate=1e30, tune_training=3, epochs=2)
    assert "all 3 trials failed" in caught.value.why
    assert "diverged" in caught.value.why
    assert "--learning-rate" in caught.value.mend


def test_trials_of_one_search_share_the_originals_answers(tmp_path: Path) -> None:
    notes: list[str] = []
    given = run(tmp_path, lambda _d, _t, note: notes.append(note), taught=True, tune_training=3)
    asked_for = [note for note in notes if "the original's answers" in note]
    assert all(note.startswith("trial 1/3") for note in asked_for)
    assert asked_for
    assert "temperature" in given.details["tuning"]["trials"][0]["settings"]


def test_a_kept_score_that_no_training_gives_is_not_the_result(whole: tuple[Path, Given], tmp_path: Path) -> None:
    """Its weights are not there, so that it is trained again: what that gives counts."""
    shutil.copytree(whole[0] / "work", tmp_path / "work")
    tuning = whole[1].details["tuning"]
    forged = next(
        at for at, each in enumerate(tuning["trials"]) if each["value"] is not None and at not in (0, tuning["best"])
    )
    file = tmp_path / "work" / FOLDER / f"{forged:03d}.json"
    told = json.loads(file.read_text())
    del told["sha256"]
    told["trial"]["value"] = told["trained"]["figures"]["best_value"] = 1.0
    digest = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()
    file.write_text(json.dumps(told | {"sha256": digest}))
    again = run(tmp_path)
    found = again.details["tuning"]
    best = found["trials"][found["best"]]
    assert best["value"] == again.details["best_value"] == max(each["value"] or 0 for each in found["trials"])
    assert best["value"] < 1
    assert f"{best['value']:.2%}" in again.did


def test_a_kept_trial_that_can_not_be_used_is_trained_again_and_told(whole: tuple[Path, Given], tmp_path: Path) -> None:
    shutil.copytree(whole[0] / "work", tmp_path / "work")
    (tmp_path / "work" / FOLDER / "000.json").write_text('{"trial": 1}')
    again = run(tmp_path)
    assert again.details["tuning"]["trials"][0]["value"] == whole[1].details["tuning"]["trials"][0]["value"]
    assert any("had kept of 1 trial can't be used" in words for words in again.warnings)
    assert not any("can't be used" in words for words in whole[1].warnings)


def test_labels_of_one_class_are_told(tmp_path: Path) -> None:
    usual = asked(tmp_path, tune_training=2, epochs=2)
    labels = np.full(len(usual.data), 3)
    given = dataclasses.replace(usual, data=dataclasses.replace(usual.data, labels=labels)).run(
        model(tmp_path, "student", 8), tmp_path, quiet
    )
    assert any("All labels are of the class 3" in words for words in given.warnings)


def test_whoever_has_no_optuna_is_told_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(MissingExtraError, match=r"\[optuna\]"):
        asked(tmp_path).check(model(tmp_path, "student", 8))
    asked(tmp_path, tune_training=None).check(model(tmp_path, "student", 8))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"hold_out": 0.0}, "nothing judges"),
        ({"hold_out": 0.05}, "12 samples judge"),
        ({"devices": 2}, "several processes"),
        ({"tune_training": 0}, "is 0"),
    ],
)
def test_what_can_not_be_searched_is_refused_before_any_work(tmp_path: Path, options: dict[str, Any], why: str) -> None:
    with pytest.raises(RecipeError, match="can't search") as caught:
        asked(tmp_path, **options).check(model(tmp_path, "student", 8))
    assert why in caught.value.why


def test_a_search_is_another_stage_than_its_training_which_is_kept_under_its_old_options(tmp_path: Path) -> None:
    searched, plain = asked(tmp_path), asked(tmp_path, tune_training=None)
    assert "tune_training" not in plain.options
    assert {**plain.options, "tune_training": TRIALS} == searched.options


def test_a_dry_run_counts_the_trials_that_are_to_come(tmp_path: Path) -> None:
    student, kept = model(tmp_path, "student", 8), tmp_path / "work/01-finetune-abc"
    searched = asked(tmp_path, epochs=400)
    options = searched.training
    assert trainings_left(options, tmp_path) == pytest.approx(1 + 6 * 0.625)
    (tmp_path / "tried").mkdir()
    tried = rehearse(searched, student, tmp_path / "tried", kept, quiet)
    assert tried.seconds is not None
    assert tried.seconds > 4 * tried.given.details["trial"]["whole"]
    assert not (tmp_path / "tried" / FOLDER).exists(), "it is not searched"
    (tmp_path / FOLDER).mkdir()
    for number in range(5):
        (tmp_path / FOLDER / f"{number:03d}.json").touch()
    assert trainings_left(options, tmp_path) == pytest.approx(2 * 0.625)
    assert trainings_left(dataclasses.replace(options, tune_training=None), tmp_path / "none") == 1


def test_a_lead_that_may_be_chance_is_told(whole: tuple[Path, Given]) -> None:
    tuning = whole[1].details["tuning"]
    lead = tuning["trials"][tuning["best"]]["value"] - tuning["trials"][0]["value"]
    assert any("may be chance" in words for words in whole[1].warnings) is (lead < 0.1)


@pytest.mark.parametrize("method", [BAYESIAN, RANDOM], ids=["bayesian", "random"])
def test_either_way_to_search_begins_with_what_was_asked_for(tmp_path: Path, method: Any) -> None:
    searched, student = asked(tmp_path, epochs=2, tune_training=3), model(tmp_path, "student", 8)
    (tmp_path / "work").mkdir()
    search = Search(searched, student, tmp_path / "work", quiet, method)
    found = search.run()
    assert search.trials[0].settings["learning_rate"] == 1e-3
    assert found.trained.figures["best_value"] == max(t.value for t in search.trials if t.value is not None)
    assert not found.module.training


def test_scores_of_which_less_is_better_are_searched_too(tmp_path: Path) -> None:
    """Labels that are each there or not are judged by their loss."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).eval()
    student = TorchModel(net, infer_signature(net, (TensorSpec.parse("x:float32[batch,6]"),)))
    x = np.random.default_rng(0).standard_normal((200, 6)).astype(np.float32)
    np.savez(tmp_path / "sets.npz", x=x, label=(x[:, :2] > 0).astype(np.float32))
    opened = Dataset.open(str(tmp_path / "sets.npz"), student.signature)
    searched = asked(tmp_path)
    searched = dataclasses.replace(searched, data=opened, teacher=None)
    searched.check(student)
    (tmp_path / "work").mkdir()
    tuning = searched.run(student, tmp_path / "work", quiet).details["tuning"]
    assert tuning["metric"] == "loss"
    assert not tuning["higher_is_better"]
    values = [each["value"] for each in tuning["trials"] if each["value"] is not None]
    assert tuning["trials"][tuning["best"]]["value"] == min(values) < values[0]


def test_a_trial_goes_on_in_the_middle_from_its_own_state(tmp_path: Path) -> None:
    def interrupted(done: int, _total: int, _note: str) -> None:
        if done > 500:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, interrupted, tune_training=1, epochs=8)
    assert (tmp_path / "work" / FOLDER / "000" / STATE_FILE).exists()
    given = run(tmp_path, tune_training=1, epochs=8)
    assert given.details["resumed_at_step"] > 0
