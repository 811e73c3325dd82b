"""The gateway's own release classes, on a simulated clock: who is rolled back, and who is not."""

from __future__ import annotations

import importlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from serve.rollout.plan import Plan

RUNS = 8
COPIES = Plan(steps=(), shadow=100.0, step_s=5.0)
SHARES = Plan(steps=(50.0,), shadow=0.0, step_s=5.0)
BOTH = Plan(steps=(50.0,), shadow=50.0, step_s=5.0)


@pytest.fixture
def simulation(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[4] / "benchmarks"))
    return importlib.import_module("rollout_simulation")


def states(simulation: Any, world: str, plan: Plan) -> Counter[str]:
    traffic = (simulation.Traffic(simulation.WORLDS[world], 100.0, seed) for seed in range(RUNS))
    return Counter(simulation.ours(each, plan)[0] for each in traffic)


@pytest.mark.parametrize("plan", [COPIES, SHARES], ids=["copies", "shares"])
@pytest.mark.parametrize("world", ["both fail at 2%", "both fail at the same 2%", "the old one fails at 2%"])
def test_what_fails_no_more_than_the_old_one_is_not_taken_back(simulation: Any, world: str, plan: Plan) -> None:
    assert states(simulation, world, plan)["aborted"] <= 1, "one in a hundred may be"


@pytest.mark.parametrize("plan", [COPIES, SHARES, BOTH], ids=["copies", "shares", "both"])
@pytest.mark.parametrize("world", ["fails at 10%", "fails always", "fails at 10%, and both fail at the same 30%"])
def test_what_fails_more_is_taken_back(simulation: Any, world: str, plan: Plan) -> None:
    assert states(simulation, world, plan) == {"aborted": RUNS}
