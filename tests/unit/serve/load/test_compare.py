"""Comparisons: a difference is one when its interval says so, and noise is none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from compress.errors import ServerError
from serve.load.figures.compare import Comparison, compare, compare_rounds
from serve.load.figures.intervals import interval, share_above
from serve.load.figures.result import LoadResult
from serve.load.interleave import interleave
from serve.load.report.report import LoadReport
from tests.load_servers import at_once, options, result_of, served
from tests.serve_http import Received, answer

pytestmark = pytest.mark.clock


def run(seed: int, scale: float = 1.0, seconds: int = 12, per_s: int = 200, **changes: Any) -> LoadResult:
    generator = np.random.default_rng(seed)
    drift = generator.normal(1, 0.05, seconds)  # seconds that belong together are alike
    return result_of([scale * each * generator.lognormal(2, 0.4, per_s) for each in drift], **changes)


def words(comparison: Comparison) -> dict[str, str]:
    return {change.name: change.word for change in comparison.changes}


def test_the_same_server_is_rarely_found_slower() -> None:
    found = [compare_two(run(seed), run(1000 + seed)) for seed in range(30)]
    assert sum(each.worse for each in found) <= 1


def compare_two(before: LoadResult, after: LoadResult, allowed: float = 0.05) -> Comparison:
    return compare(LoadReport((before,), "a"), LoadReport((after,), "b"), allowed=allowed)[0]


def test_a_server_that_is_a_third_slower_is_found_and_what_is_allowed_is_allowed() -> None:
    comparison = compare_two(run(1), run(2, 1.33))
    assert words(comparison)["p50"] == "worse"
    assert comparison.worse
    p50 = comparison.changes[0]
    assert p50.low is not None
    assert p50.high is not None
    assert p50.low < 1.33 < p50.high
    assert words(compare_two(run(1), run(2, 1.33), allowed=0.8))["p50"] == "no worse"


def test_less_throughput_and_more_errors_are_worse() -> None:
    assert words(compare_two(run(1, per_s=300), run(2, per_s=200)))["throughput"] == "worse"
    assert words(compare_two(run(1, per_s=200), run(2, per_s=300)))["throughput"] == "no worse"
    assert words(compare_two(run(1, errors=2), run(2, errors=60)))["errors"] == "worse"
    assert words(compare_two(run(1, errors=3), run(2, errors=4)))["errors"] == "no worse"


def test_too_little_is_undecided() -> None:
    assert words(compare_two(run(1, seconds=3), run(2, seconds=3)))["p50"] == "undecided"


def test_rounds_that_took_turns_see_past_what_happened_to_both() -> None:
    """Each round the machine is another: by half faster or slower; the second server is a tenth slower all the time."""
    moods = np.random.default_rng(5).uniform(0.7, 1.5, 8)
    before = [run(number, mood, seconds=2) for number, mood in enumerate(moods)]
    after = [run(100 + number, 1.1 * mood, seconds=2) for number, mood in enumerate(moods)]
    comparison = compare_rounds(before, after, allowed=0.0)
    assert words(comparison)["p50"] == "worse"
    p50 = comparison.changes[0]
    assert p50.low is not None
    assert p50.high is not None
    assert p50.low < 1.1 < p50.high
    assert p50.high - p50.low < 0.2


def test_loads_are_paired_and_strangers_are_refused() -> None:
    before = LoadReport((run(1), run(2, concurrency=8)), "a")
    assert [each.offered for each in compare(before, LoadReport((run(3, concurrency=8),), "b"), allowed=0.1)] == [
        "8 at a time"
    ]
    with pytest.raises(ServerError, match="can't compare"):
        compare(before, LoadReport((run(3, concurrency=9),), "b"), allowed=0.1)


def test_intervals_hold_what_they_promise() -> None:
    """95 of 100 intervals hold the true median, give or take what 100 tries tell."""
    hits = 0
    for seed in range(100):
        generator = np.random.default_rng(seed)
        between = interval(result_of([generator.lognormal(2, 0.4, 100) for _ in range(20)]), 50)
        assert between is not None
        hits += between[0] <= np.exp(2) <= between[1]
    assert 88 <= hits <= 100
    assert interval(run(1, seconds=4), 50) is None


def test_the_share_of_slow_answers_has_an_upper_bound() -> None:
    share, bound = share_above([result_of([np.array([1.0] * 98 + [50.0, 60.0])] * 10)], 20)
    assert share == pytest.approx(0.02)
    assert bound >= share
    share, bound = share_above([result_of([np.full(100, 1.0)] * 10)], 20)
    assert share == 0
    assert bound == pytest.approx(3 / 1000, rel=0.05)  # the rule of three


def test_turns_find_the_slower_of_two_servers() -> None:
    import asyncio

    async def slower(_: Received, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.004)
        writer.write(answer())

    with served(at_once) as one, served(slower) as two:
        sides = [options(server, concurrency=2, duration=0.2, warmup=0.05) for server in (one, two)]
        (before, after), comparison = interleave(sides, rounds=5, allowed=0.05)
        same, _ = interleave([sides[0], sides[0]], rounds=1, allowed=0.05)
    assert words(comparison)["p50"] == words(comparison)["throughput"] == "worse"
    assert (len(before.runs), len(after.runs), len(same[0].runs)) == (5, 5, 1)
    with served(at_once) as one, pytest.raises(ServerError, match="rounds is 0"):
        interleave([options(one)] * 2, rounds=0, allowed=0.05)
