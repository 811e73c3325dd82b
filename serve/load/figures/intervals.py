"""How sure a figure is: bootstrap over whole seconds or rounds, because latencies that follow each other are alike.

Source: Künsch 1989, "The jackknife and the bootstrap for general stationary observations" (blocks); Efron and
Tibshirani 1993, chapter 13 (percentile intervals).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from serve.load.figures.histogram import Histogram
from serve.load.figures.result import LoadResult

__all__ = ["Blocks", "blocks_of", "blocks_of_rounds", "interval", "share_above"]

DRAWS = 2000
LEAST_BLOCKS = 5
Floats = np.ndarray[Any, np.dtype[np.float64]]


class Blocks:
    """Histograms of latencies, drawn again with replacement.

    Args:
        histograms: one a block.
        answers: successes of each.
        seconds: how long each lasted.
    """

    def __init__(self, histograms: Sequence[Histogram], answers: Sequence[int], seconds: Sequence[float]) -> None:
        whole = Histogram.merged(histograms)
        self._highest = whole.highest
        self._counts = np.zeros((len(histograms), len(whole.indices)), np.float64)
        for row, histogram in enumerate(histograms):
            self._counts[row, np.searchsorted(whole.indices, histogram.indices)] = histogram.counts
        self._answers = np.asarray(answers, np.float64)
        self._seconds = np.asarray(seconds, np.float64)

    def __len__(self) -> int:
        return len(self._answers)

    def draw(self, generator: np.random.Generator, draws: int = DRAWS) -> Floats:
        """How often each block is taken, a row for each draw."""
        drawn: Floats = generator.multinomial(len(self), [1 / len(self)] * len(self), size=draws).astype(np.float64)
        return drawn

    def percentiles(self, drawn: Floats, percent: float) -> Floats:
        """The percentile of each draw, in milliseconds."""
        found: list[float] = []
        for weights in np.array_split(drawn, max(len(drawn) // 100, 1)):
            below = np.cumsum(weights @ self._counts, axis=1)
            rank = np.ceil(percent / 100 * below[:, -1:] - 1e-9)
            at = np.minimum((below < rank).sum(axis=1), len(self._highest) - 1)
            found += (self._highest[at] / 1e6).tolist()
        return np.array(found)

    def throughput(self, drawn: Floats) -> Floats:
        """Answers a second of each draw."""
        found: Floats = drawn @ self._answers / (drawn @ self._seconds)
        return found

    def above(self, drawn: Floats, bound_ms: float) -> Floats:
        """The share of each draw that is slower than a bound."""
        slow = self._counts @ (self._highest > bound_ms * 1e6).astype(np.float64)
        found: Floats = drawn @ slow / np.maximum(drawn @ self._counts.sum(axis=1), 1)
        return found


def blocks_of(result: LoadResult) -> Blocks:
    """A run's whole seconds."""
    whole = [second for second in result.series if second.second < int(result.seconds)] or list(result.series)
    histograms = [Histogram.decode(second.latency) if second.latency else Histogram.empty() for second in whole]
    return Blocks(histograms, [second.successes for second in whole], [1.0] * len(whole))


def blocks_of_rounds(results: Sequence[LoadResult]) -> Blocks:
    """Whole runs, a block each."""
    return Blocks(
        [run.latency.samples() for run in results], [run.count for run in results], [run.seconds for run in results]
    )


def interval(result: LoadResult, percent: float, *, seed: int = 0) -> tuple[float, float] | None:
    """The 95% interval of a run's percentile in milliseconds; None with fewer than five seconds, or too few samples."""
    blocks = blocks_of(result)
    if len(blocks) < LEAST_BLOCKS or result.latency.at(f"p{percent:g}") is None:
        return None
    found = blocks.percentiles(blocks.draw(np.random.default_rng(seed)), percent)
    low, high = np.percentile(found, [2.5, 97.5])
    return float(low), float(high)


def share_above(results: Sequence[LoadResult], bound_ms: float, *, seed: int = 0) -> tuple[float, float]:
    """The share of answers slower than a bound, of several runs together, and its upper 95% bound (one-sided)."""
    histograms: list[Histogram] = []
    answers: list[int] = []
    for result in results:
        for second in result.series:
            if second.latency:
                histograms.append(Histogram.decode(second.latency))
                answers.append(second.successes)
    if not histograms:
        return 0.0, 1.0
    blocks = Blocks(histograms, answers, [1.0] * len(answers))
    whole = float(blocks.above(np.ones((1, len(blocks))), bound_ms)[0])
    drawn = blocks.above(blocks.draw(np.random.default_rng(seed)), bound_ms)
    count = sum(histogram.total for histogram in histograms)
    none_seen = 1 - 0.05 ** (1 / count)  # what a share may be that shows none in so many
    return whole, max(float(np.percentile(drawn, 95)), none_seen)
