"""Ratios that are made at the same time give what they give one after the other."""

from __future__ import annotations

import itertools
import pickle
from pathlib import Path
from typing import Any

import pytest

from compress.errors import MissingExtraError, ResourceError, ToolkitError
from compress.evaluate.candidates import Candidate
from compress.evaluate.search_result import Trial
from compress.jobs import branches as module

GROUPS = [[Candidate(prune, "none"), Candidate(prune, "dynamic")] for prune in (0.0, 0.3, 0.5, 0.9)]


def trials(place: int, out: tuple[int, ...]) -> list[Trial]:
    """Of a ratio: measured, or its float model out early."""
    floating, quantized = GROUPS[place]
    if place in out:
        return [Trial(floating, "eliminated", "out early"), Trial(quantized, "eliminated", "not tried")]
    return [Trial(floating, "measured", path=Path("m")), Trial(quantized, "measured", path=Path("m"))]


@pytest.mark.parametrize("out", [(), (1,), (2,), (2, 3), (3,)])
def test_in_whatever_order_they_come_the_trials_are_the_same(out: tuple[int, ...]) -> None:
    results = set()
    for order in itertools.permutations(range(len(GROUPS))):
        found = module._Found(GROUPS)
        for place in order:
            if place in found.wanted():
                found.add(place, trials(place, out))
        assert not found.wanted()
        results.add(tuple(found.trials()))
    (only,) = results
    first = min(out, default=len(GROUPS))
    assert [t.candidate for t in only] == [candidate for group in GROUPS for candidate in group]
    beyond = [t for t in only if t.candidate.prune > GROUPS[min(first, len(GROUPS) - 1)][0].prune]
    assert all(t.status == "eliminated" and t.why.startswith("not tried: ") for t in beyond)


def test_what_one_way_to_choose_channels_loses_ends_no_other_way() -> None:
    ways: list[Any] = ["magnitude", "obs"]
    groups = [[Candidate(0.0, "none")]]
    groups += [[Candidate(prune, "none", importance=way)] for prune in (0.3, 0.5, 0.9) for way in ways]
    results = set()
    for order in itertools.permutations(range(len(groups))):
        found = module._Found(groups)
        for place in order:
            if place in found.wanted():
                (candidate,) = groups[place]
                out = (candidate.prune, candidate.importance) in ((0.3, "magnitude"), (0.5, "obs"))
                found.add(place, [Trial(candidate, "eliminated" if out else "measured", "out early" if out else "")])
        results.add(tuple(found.trials()))
    (only,) = results
    untried = [trial.candidate for trial in only if trial.why.startswith("not tried: ")]
    assert [(each.prune, each.importance) for each in untried] == [(0.5, "magnitude"), (0.9, "magnitude"), (0.9, "obs")]
    assert [trial.candidate for trial in only] == [candidate for group in groups for candidate in group]


@pytest.mark.parametrize(
    "error",
    [
        ResourceError("a", why="b", mend="c"),
        MissingExtraError("a", module="m", extra="e"),
        ToolkitError("a", why="b", mend="c"),
    ],
)
def test_an_error_of_another_process_arrives_as_it_is(error: ToolkitError) -> None:
    """One that can't be unpickled ends a pool, which would then be told as a process that the system had ended."""
    again = pickle.loads(pickle.dumps(error))  # noqa: S301  its own
    assert type(again) is type(error)
    assert str(again) == str(error)
