"""Evidence by betting holds what it promises: it is seldom wrong however often one looks, and it is quick."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.rollout.evidence import Bet

FIFTY = math.log(50)


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("share", [0.01, 0.3])
def test_a_true_claim_is_seldom_refuted_at_any_time(share: float, window: int | None) -> None:
    draw = random.Random(0)
    wrong = 0
    for _ in range(200):
        bet = Bet(share, low=0.0, high=1.0, window=window)
        highest = 0.0
        for _ in range(400):
            bet.add(float(draw.random() < share))
            highest = max(highest, bet.log_wealth)
        wrong += highest >= math.log(10)
    assert wrong / 200 < 0.1 + 0.04, "a share of 1/10 at most, and some for the draw"


@pytest.mark.parametrize(("share", "most"), [(1.0, 15), (0.5, 50), (0.1, 300)])
def test_a_false_claim_is_refuted_soon(share: float, most: int) -> None:
    draw = random.Random(0)
    bet = Bet(0.01, low=-1.0, high=1.0, window=100)
    while bet.log_wealth < FIFTY and bet.count < 10_000:
        bet.add(float(draw.random() < share))
    assert bet.count <= most


def test_with_a_window_a_late_fault_is_seen_as_fast_as_an_early_one() -> None:
    bet = Bet(0.01, low=-1.0, high=1.0, window=100)
    for _ in range(5000):
        bet.add(0.0)
    quiet = bet.count
    while bet.log_wealth < FIFTY:
        bet.add(1.0)
    assert bet.count - quiet <= 20


@given(st.lists(st.floats(-2, 3, allow_nan=False), max_size=60), st.floats(0.001, 0.999))
def test_wealth_is_never_lost_whole(values: list[float], bound: float) -> None:
    bet = Bet(bound, low=0.0, high=1.0, window=10)
    for value in values:
        bet.add(value)
    assert math.isfinite(bet.log_wealth)
    assert bet.count == len(values)


@pytest.mark.parametrize("bound", [0.0, 1.0, -0.5, 7.0])
def test_a_bound_that_every_value_meets_or_none_is_refused(bound: float) -> None:
    with pytest.raises(ValueError, match="not between"):
        Bet(bound, low=0.0, high=1.0)
