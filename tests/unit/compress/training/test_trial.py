"""A training tried: a few real steps, that leave nothing behind and change nothing of what a run is."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from compress.stage import Given
from compress.training.finetune import Finetune
from compress.training.trial import Enough, Pace
from tests.unit.compress.training.networks import model, stage


def tried(folder: Path, progress: Any = lambda _done, _total, _note: None, **options: Any) -> tuple[Finetune, Given]:
    asked = dataclasses.replace(stage(folder, **options), trial=True)
    work = folder / "work"
    work.mkdir(exist_ok=True)
    return asked, asked.run(model(folder, "student", 8), work, progress)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"taught": True},
        {"taught": True, "augment": ("flip",)},
        {"hold_out": 0.2, "ema": 0.9, "patience": 3},
        {"batch_size": "auto"},
        {"count": 40, "batch_size": 40},
    ],
    ids=str,
)
def test_a_few_steps_tell_how_long_all_take(tmp_path: Path, options: dict[str, Any]) -> None:
    told: list[tuple[int, int, str]] = []
    _, given = tried(tmp_path, lambda *how: told.append(how), epochs=100_000, **options)
    steps = [(done, total) for done, total, note in told if note.startswith("epoch")]
    assert steps[-1][0] < steps[-1][1] / 10
    trial = given.details["trial"]
    assert trial["whole"] > trial["spent"]
    assert not list((tmp_path / "work").iterdir()), "neither a state nor answers"


def test_a_training_of_a_few_steps_is_through(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    tried(tmp_path, lambda done, total, _note: told.append((done, total)), epochs=1, batch_size=128)
    assert told[-1] == (2, 2)


def test_a_trial_writes_no_logs_and_is_no_other_stage(tmp_path: Path) -> None:
    asked, given = tried(tmp_path, epochs=1, tensorboard=tmp_path / "logs", profile=True)
    assert not (tmp_path / "logs").exists()
    assert "profile" not in given.details
    assert asked.options == dataclasses.replace(asked, trial=False).options


class Alone:
    """Of a fabric, what a pace asks for."""

    def broadcast(self, value: bool) -> bool:
        return value


def test_steps_that_were_not_taken_go_as_fast_as_the_last_ones() -> None:
    pace = Pace(10, Alone(), lambda _done, _total, _note: None)
    try:
        for step in range(11, 10_000_000):
            pace(step, 10_000_000, "")
    except Enough:
        pass
    thousand, two, three = (pace.seconds(steps) for steps in (10**8, 2 * 10**8, 3 * 10**8))
    assert three - two == pytest.approx(two - thousand, rel=1e-6)
    assert two > thousand > 0
