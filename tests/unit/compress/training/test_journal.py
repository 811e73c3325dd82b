"""What a training tells of its speed, and what a step's seed is for."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compress.training.journal import RECENT, Journal
from compress.training.machine.seeds import seed_device

CPU = torch.device("cpu")


@given(st.lists(st.tuples(st.floats(0.001, 2.0), st.integers(1, 512)), min_size=2, max_size=40))
def test_the_speed_is_of_the_samples_of_the_last_seconds(steps: list[tuple[float, int]]) -> None:
    journal, now, marks = Journal(len(steps), CPU), 1000.0, []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(time, "perf_counter", lambda: now)
        for nth, (seconds, samples) in enumerate(steps, start=1):
            now += seconds
            marks.append((now, samples))
            journal.step(nth, torch.zeros(()), samples, 0.1, read=True)
    recent = [mark for mark in marks if now - mark[0] <= RECENT]
    if len(recent) < 2:
        recent = marks[-2:]
    expected = sum(samples for _, samples in recent[1:]) / (recent[-1][0] - recent[0][0])
    assert journal.speed == pytest.approx(expected)


@pytest.mark.parametrize(
    "drawn", [lambda: torch.rand(3), lambda: torch.randperm(9), lambda: torch.bernoulli(torch.full((9,), 0.5))]
)
def test_a_steps_seed_gives_what_torchs_own_gives(drawn: Callable[[], torch.Tensor]) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(2**64 - 1)
        expected = drawn()
        seed_device(2**64 - 1, CPU)
        assert torch.equal(drawn(), expected)


def test_a_step_does_not_keep_the_stack_of_who_seeds_for_devices_that_nobody_uses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", asked.append)
    seed_device(7, CPU)
    assert asked == []
