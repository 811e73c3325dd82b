"""Schedules: drawn once from a seed, of the right rate, and the same however many processes share them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compress.errors import ServerError
from serve.load.send.arrivals import Arrivals, Kind, Leg, parse_arrivals, parse_rate, read_trace


def times(arrivals: Arrivals, part: int = 0, parts: int = 1) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.concatenate([chunk for chunk, _ in arrivals.chunks(part, parts)])


LEGS = st.lists(st.builds(Leg, st.floats(0, 500), st.floats(0.5, 500), st.floats(0.1, 5)), min_size=1, max_size=4).map(
    tuple
)


@given(LEGS, st.sampled_from(["poisson", "constant", "burst"]), st.integers(1, 5), st.integers(0, 100))
def test_processes_together_send_what_one_alone_would(legs: tuple[Leg, ...], kind: Kind, parts: int, seed: int) -> None:
    arrivals = Arrivals(kind, legs, seed, 3 if kind == "burst" else 1)
    whole = times(arrivals)
    shared = [list(arrivals.chunks(part, parts)) for part in range(parts)]
    assert np.array_equal(np.sort(np.concatenate([t for each in shared for t, _ in each])), whole)
    numbers = np.sort(np.concatenate([n for each in shared for _, n in each]))
    assert np.array_equal(numbers, np.arange(len(whole)))
    assert (np.diff(whole) >= 0).all()
    assert not len(whole) or 0 <= whole[0] <= whole[-1] <= arrivals.seconds * 1e9 + 1


def test_poisson_arrivals_are_poisson() -> None:
    arrivals = Arrivals("poisson", (Leg(1000, 1000, 100),), 7)
    gaps = np.sort(np.diff(times(arrivals)) / 1e6)
    # Kolmogorov-Smirnov against the exponential distribution of mean 1 ms, at 1 in 1,000
    shares = (np.arange(len(gaps)) + 0.5) / len(gaps)
    assert np.abs(1 - np.exp(-gaps) - shares).max() < 1.95 / np.sqrt(len(gaps))
    counts = np.bincount(times(arrivals) // 10**9, minlength=100)
    assert counts.var() / counts.mean() == pytest.approx(1, abs=0.5)


def test_a_ramp_is_poisson_with_a_rising_rate() -> None:
    arrivals = Arrivals("poisson", (Leg(0, 1000, 10),), 3)
    counts = np.bincount(times(arrivals) // 10**9, minlength=10)[:10]
    for second, count in enumerate(counts):
        mean = 100 * second + 50
        assert abs(count - mean) < 5 * np.sqrt(mean)


def test_constant_arrivals_are_evenly_spaced_and_bursts_come_at_once() -> None:
    even = times(Arrivals("constant", (Leg(200, 200, 2),)))
    assert len(even) == 400
    assert np.allclose(np.diff(even), 5e6, atol=1)
    bursts = times(Arrivals("burst", (Leg(1000, 1000, 10),), 1, burst=10))
    moments, sizes = np.unique(bursts, return_counts=True)
    assert set(sizes[:-1]) == {10}
    assert 850 < len(moments) < 1150


@pytest.mark.parametrize(
    ("text", "legs"),
    [
        ("500", (Leg(500, 500, 8),)),
        ("100..500", (Leg(100, 500, 8),)),
        ("100:2,100..500:4,500:2", (Leg(100, 100, 2), Leg(100, 500, 4), Leg(500, 500, 2))),
        ("10,20", (Leg(10, 10, 4), Leg(20, 20, 4))),
        ("0..5:2", (Leg(0, 5, 2),)),
    ],
)
def test_rates(text: str, legs: tuple[Leg, ...]) -> None:
    assert parse_rate(text, 8) == legs


@pytest.mark.parametrize("text", ["", "x", "1..", "nan", "inf", "-5", "5:0", "5:-1", "1:2:3", "0"])
def test_what_is_no_rate(text: str) -> None:
    with pytest.raises(ServerError, match="rate"):
        parse_rate(text, 10)


def test_kinds() -> None:
    assert parse_arrivals("poisson") == ("poisson", 1, None)
    assert parse_arrivals("burst") == ("burst", 10, None)
    assert parse_arrivals("burst:3") == ("burst", 3, None)
    assert parse_arrivals("trace:a:b.csv") == ("trace", 1, Path("a:b.csv"))


def test_traces(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text("# made up\ntimestamp;status\n12.5;200\n10;200\n11;500\n")
    assert read_trace(path) == (0, 1, 2.5)
    assert read_trace(path, rate=3) == (0, 0.4, 1.0)
    for text, says in (("a\nb\n", "no time"), ("1\n1\n", "no two different"), ("", "no two different")):
        path.write_text(text)
        with pytest.raises(ServerError, match=says):
            read_trace(path)
