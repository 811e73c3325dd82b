"""The histogram is HdrHistogram's: held against the reference implementation, value for value and byte for byte."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hdrh.histogram import HdrHistogram
from hypothesis import given
from hypothesis import strategies as st

from serve.load.figures.histogram import DIGITS, HIGHEST, Histogram

VALUES = st.lists(st.integers(0, HIGHEST - 1) | st.integers(0, 5000), max_size=60)
SOME = st.lists(st.integers(1, HIGHEST - 1) | st.integers(1, 5000), min_size=1, max_size=60)


def of(values: list[int]) -> Histogram:
    return Histogram.of(np.array(values, np.int64))


def reference(values: list[int]) -> HdrHistogram:
    histogram = HdrHistogram(1, HIGHEST, DIGITS)
    for value in values:
        histogram.record_value(value)
    return histogram


@given(SOME, st.sampled_from([1.0, 10.0, 50.0, 90.0, 99.0, 99.9, 100.0]))
def test_percentiles_are_the_references(values: list[int], percent: float) -> None:
    """Of rank ceil(n p / 100), as in the Java original; the reference in Python rounds, so that it is asked by rank."""
    rank = math.ceil(len(values) * percent / 100 - 1e-9)
    expected = reference(values).get_value_at_percentile(100 * rank / len(values))
    assert of(values).value_at(percent) == expected


@given(SOME)
def test_what_it_writes_the_reference_reads_and_the_other_way_round(values: list[int]) -> None:
    ours, theirs = of(values), reference(values)
    read = HdrHistogram.decode(ours.encode())
    assert read.get_total_count() == len(values)
    assert read.get_value_at_percentile(100) == ours.value_at(100)
    assert Histogram.decode(theirs.encode().decode()) == ours == Histogram.decode(ours.encode())


@given(VALUES, VALUES)
def test_merging_loses_nothing(first: list[int], second: list[int]) -> None:
    assert Histogram.merged([of(first), of(second)]) == of(first + second)


@given(VALUES)
def test_values_are_kept_to_a_thousandth(values: list[int]) -> None:
    histogram = of(values)
    assert histogram.total == len(values)
    kept = np.repeat(histogram.highest, histogram.counts)
    assert all(value <= high <= value * 1.001 + 1 for value, high in zip(sorted(values), kept.tolist(), strict=True))


@given(st.lists(st.integers(1, 50_000), min_size=1, max_size=30), st.integers(500, 20_000))
def test_the_correction_for_coordinated_omission_is_the_references(values: list[int], interval: int) -> None:
    theirs = HdrHistogram(1, HIGHEST, DIGITS)
    for value in values:
        theirs.record_corrected_value(value, interval)
    ours = of(values).corrected(interval)
    # the reference corrects each value, we the middle of its bucket: a request more or less where that decides
    assert abs(ours.total - theirs.get_total_count()) <= len(values)
    assert ours.value_at(100) == theirs.get_value_at_percentile(100)


def test_how_many_are_above() -> None:
    histogram = of([1_000_000, 2_000_000, 3_000_000])
    assert [histogram.above(bound) for bound in (500_000, 1_500_000, 3_100_000)] == [3, 2, 0]
    assert Histogram.empty().value_at(99) == 0


@pytest.mark.parametrize("text", ["", "HIST", "HISTFAAAAAQAAAAA", "{}", "HISTFAAAAB4=", of([1, 2]).encode()[:-8]])
def test_what_is_no_histogram(text: str) -> None:
    with pytest.raises(ValueError, match=r"histogram|layout|padd|bytes"):
        Histogram.decode(text)
