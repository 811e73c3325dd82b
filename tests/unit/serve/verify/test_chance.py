"""What chance explains of two shares: by the examples of who proposed the interval, and by another's code."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from serve.verify.chance import difference
from serve.verify.run import VerifiedPart


@pytest.mark.parametrize(
    ("one", "of_one", "other", "of_other", "low", "high"),
    [(56, 70, 48, 80, 0.0524, 0.3339), (9, 10, 3, 10, 0.1705, 0.8090), (10, 10, 0, 10, 0.6075, 1.0)],
)
def test_it_is_newcombes_method_10(one: int, of_one: int, other: int, of_other: int, low: float, high: float) -> None:
    """Table II of Newcombe, Statistics in Medicine 17 (1998)."""
    found = difference(one / of_one, of_one, other / of_other, of_other)
    assert found == pytest.approx((low, high), abs=5e-5)


@given(st.integers(1, 5000), st.data())
def test_against_an_exact_share_it_is_wilsons(count: int, data: st.DataObject) -> None:
    right = data.draw(st.integers(0, count))
    wilson = binomtest(right, count).proportion_ci(0.95, method="wilson")
    assert difference(right / count, count, 0.25, None) == pytest.approx((wilson.low - 0.25, wilson.high - 0.25))


@pytest.mark.parametrize(
    ("right", "tolerance", "holds"),
    [
        (900, None, True),
        (893, None, True),  # of other samples 0.7 points are nothing
        (850, None, False),
        (950, None, False),  # better by more than chance is another model, too
        (899, 0.0, False),
        (900, 0.0, True),
        (890, 0.01, True),
    ],
)
def test_a_part_holds_where_chance_or_the_tolerance_explains_it(
    right: int, tolerance: float | None, holds: bool
) -> None:
    assert VerifiedPart("", 1000, right, 0.9, tolerance, (), True, 1000).holds is holds


def test_of_the_very_same_share_nothing_is_asked() -> None:
    """However few samples there are, and however narrow an interval at the end of the scale may be."""
    assert VerifiedPart("", 5000, 5000, 1.0, None, (), True, None).holds
