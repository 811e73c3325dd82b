"""Of two models that are the same, neither is taken for worse by what its clients do; of two that are not, the bad one.

By the gateway's own classes on a simulated clock, whatever clients, inputs and the machine do to both models alike.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.rollout.plan import Plan
from tests.unit.serve.rollout.two_models import Faults, Protocol, World, follow

SHARES = Plan(steps=(50.0,), shadow=0.0, step_s=5.0, max_error_increase=0.05)
BOTH = replace(SHARES, shadow=50.0)
RUNS, LONGEST_S = 2, 900.0
ALIKE = {
    "nothing": World(),
    "clients in a hurry": World(hurried=0.5, hurry_s=0.05),
    "inputs that fail late in the time of clients in a hurry": World(
        poisoned=0.2, poison_s=0.6, hurried=0.7, hurry_s=1.0
    ),
    "slow phases": World(slow_s=10.0, hurried=0.5, hurry_s=0.5),
    "no room": World(no_room=0.2),
    "inputs that fail": World(poisoned=0.2),
    "clients that leave": World(leaving=0.5, leave_s=0.02),
    "inputs that hang": World(hanging=0.05),
    "inputs that hang, and clients in a hurry": World(hanging=0.05, hurried=0.7),
    "inputs that hang, and failures": World(hanging=0.05, both=Faults(fails=0.1)),
    "hangs": World(both=Faults(hangs=0.04)),  # with more, in line the baseline's are cut short: see decision 19
}
WORSE = {
    "fails": Faults(fails=0.2),
    "refuses": Faults(refuses=0.2),
    "hangs": Faults(hangs=0.2),
}


@pytest.mark.parametrize("protocol", ["HTTP", "gRPC"])
@pytest.mark.parametrize("alike", ALIKE)
def test_the_same_model_is_not_taken_back_and_no_step_waits_for_ever(alike: str, protocol: Protocol) -> None:
    ended = Counter(_state(ALIKE[alike], SHARES, protocol, seed) for seed in range(RUNS))
    assert ended["aborted"] == 0, "one in a hundred may be"
    assert ended["promoted"] > 0


@pytest.mark.parametrize("protocol", ["HTTP", "gRPC"])
@pytest.mark.parametrize("worse", WORSE)
@pytest.mark.parametrize("alike", ALIKE)
def test_what_is_worse_is_not_promoted(alike: str, worse: str, protocol: Protocol) -> None:
    world = replace(ALIKE[alike], extra=WORSE[worse])
    assert _state(world, SHARES, protocol, 1) != "promoted"


@pytest.mark.parametrize("alike", ["inputs that fail late in the time of clients in a hurry", "inputs that hang"])
def test_copies_say_no_more_of_the_same_model(alike: str) -> None:
    assert "aborted" not in {_state(ALIKE[alike], BOTH, "HTTP", seed) for seed in range(RUNS)}


@settings(max_examples=6)
@given(
    world=st.builds(
        World,
        hurried=st.sampled_from([0.0, 0.5, 1.0]),
        hurry_s=st.sampled_from([0.05, 1.0, 5.0]),
        leaving=st.sampled_from([0.0, 0.3]),
        leave_s=st.sampled_from([0.02, 2.0]),
        poisoned=st.sampled_from([0.0, 0.2]),
        poison_s=st.sampled_from([0.02, 0.6, 2.0]),
        hanging=st.sampled_from([0.0, 0.05]),
        no_room=st.sampled_from([0.0, 0.2]),
        slow_s=st.sampled_from([0.0, 10.0]),
    ),
    protocol=st.sampled_from(["HTTP", "gRPC"]),
    seed=st.integers(0, 1000),
)
def test_whatever_both_meet_the_same_model_is_not_taken_back(world: World, protocol: Protocol, seed: int) -> None:
    assert _state(world, replace(SHARES, error_rate=1e-4), protocol, seed, 300.0) != "aborted"


def _state(world: World, plan: Plan, protocol: Protocol, seed: int, longest_s: float = LONGEST_S) -> str:
    release = follow(world, plan, protocol, seed, longest_s)
    assert release.course is not None
    return release.course.state
