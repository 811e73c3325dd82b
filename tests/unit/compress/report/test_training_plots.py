"""The trials of a search, as rows and as a plot."""

from __future__ import annotations

import re
from typing import Any

import pytest

from compress.report.training_plots import settings_of, training_plots, trial_rows


def trial(rate: float, **more: Any) -> dict[str, Any]:
    usual: dict[str, Any] = {"value": None, "pruned_at": None, "failed": "", "reported": {}, "seconds": 1.25}
    return {"settings": {"learning_rate": rate, "epochs": 4}} | usual | more


def searched(*, higher: bool = True) -> dict[str, Any]:
    trials = [
        trial(0.001, value=0.5, reported={"4": 0.5}),
        trial(0.1, failed="the training has diverged"),
        trial(0.0001, pruned_at=1, reported={"1": 0.25}),
        trial(0.002, value=0.75 if higher else 0.25, reported={"4": 0.75}),
    ]
    return {"tuning": {"trials": trials, "best": 3, "metric": "top1", "higher_is_better": higher, "samples": 40}}


def test_each_trial_is_a_row_with_its_settings_and_how_it_ended() -> None:
    assert settings_of(searched()) == ("learning_rate", "epochs")
    assert trial_rows(searched()) == [
        ("1 (as asked for)", "0.001", "4", "0.5000", "1.2", ""),
        ("2", "0.1", "4", "–", "1.2", "the training has diverged"),
        ("3", "0.0001", "4", "–", "1.2", "ended at 1/4 of its epochs, with 0.2500"),
        ("4", "0.002", "4", "0.7500", "1.2", "best"),
    ]


@pytest.mark.parametrize("higher", [True, False])
def test_the_plot_tells_the_trials_apart(higher: bool) -> None:
    ((title, svg),) = training_plots(searched(higher=higher), "finetune")
    assert title == "Settings that were tried for finetune"
    told = " ".join(re.findall(r"<!-- (.*?) -->", svg)) + svg
    for name in ("best so far", "trained to the end", "ended early", "failed", "kept", "top1"):
        assert name in told


def test_where_nothing_was_searched_there_is_neither() -> None:
    assert settings_of({}) == ()
    assert trial_rows({}) == []
    assert training_plots({}) == []
