"""Is it slower than before? Two results side by side, with the interval of each difference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from compress.errors import ServerError
from serve.load.figures.histogram import Histogram
from serve.load.figures.intervals import LEAST_BLOCKS, Blocks, blocks_of, blocks_of_rounds
from serve.load.figures.result import MIN_BEYOND, LoadResult
from serve.load.report.report import LoadReport

__all__ = ["Change", "Comparison", "compare", "compare_rounds"]

Word = Literal["worse", "no worse", "undecided"]
PERCENTS = (50.0, 90.0, 99.0)
LEAST_ROUNDS = 5


@dataclass(frozen=True)
class Change:
    """One figure before and after.

    Attributes:
        name: "p50", "p90", "p99", "throughput" or "errors".
        before, after: milliseconds, answers a second, a share.
        ratio: after / before. low, high: its 95% interval; None where it can't be had.
        word: whether it is worse by more than is allowed; "undecided" where the interval says neither.
    """

    name: str
    before: float
    after: float
    ratio: float
    low: float | None
    high: float | None
    word: Word


@dataclass(frozen=True)
class Comparison:
    """One load, before and after.

    Attributes:
        offered: the load in words.
        changes: of each figure.
        notes: what to think of when reading them.
    """

    offered: str
    changes: tuple[Change, ...]
    notes: tuple[str, ...] = ()

    @property
    def worse(self) -> bool:
        return any(change.word == "worse" for change in self.changes)

    @property
    def undecided(self) -> bool:
        return any(change.word == "undecided" for change in self.changes)


def compare(before: LoadReport, after: LoadReport, *, allowed: float, seed: int = 0) -> list[Comparison]:
    """Compare runs of the same load, by bootstrap over their seconds.

    Args:
        allowed: how much worse is no regression, as a share.
        seed: of the bootstrap.

    Raises:
        ServerError: they have no load in common.
    """
    earlier = {run.offered: run for run in before.runs}
    pairs = [(earlier[run.offered], run) for run in after.runs if run.offered in earlier]
    if not pairs:
        raise ServerError(
            "can't compare the two",
            why=f"one has {', '.join(earlier) or 'no run'}, the other {', '.join(run.offered for run in after.runs)}",
            mend="measure both under the same load",
        )
    found: list[Comparison] = []
    for old, new in pairs:
        notes = [
            "measured one after the other: what the machine did meanwhile is not in the intervals (--ab takes turns)"
        ]
        notes += [f"{name} is invalid: {why}" for name, run in (("before", old), ("after", new)) for why in run.invalid]
        found.append(
            Comparison(old.offered, _changes(blocks_of(old), blocks_of(new), [old], [new], allowed, seed, paired=False),
                       tuple(notes))
        )  # fmt: skip
    return found


def compare_rounds(
    before: Sequence[LoadResult], after: Sequence[LoadResult], *, allowed: float, seed: int = 0
) -> Comparison:
    """Compare rounds that took turns, by bootstrap over pairs of rounds.

    Args:
        before, after: as many of each, in the order of the rounds.
    """
    notes = [f"round {number + 1} is invalid: {run.invalid[0]}" for number, pair in
             enumerate(zip(before, after, strict=True)) for run in pair if run.invalid]  # fmt: skip
    if len(before) < LEAST_ROUNDS:
        notes.append(f"fewer than {LEAST_ROUNDS} rounds: too few for an interval")
    blocks = blocks_of_rounds(before), blocks_of_rounds(after)
    changes = _changes(*blocks, before, after, allowed, seed, paired=True)
    return Comparison(before[0].offered, changes, tuple(notes))


def _changes(
    old: Blocks,
    new: Blocks,
    before: Sequence[LoadResult],
    after: Sequence[LoadResult],
    allowed: float,
    seed: int,
    *,
    paired: bool,
) -> tuple[Change, ...]:
    generator = np.random.default_rng(seed)
    enough = min(len(old), len(new)) >= LEAST_BLOCKS
    drawn = old.draw(generator) if enough else np.ones((1, len(old)))
    again = (drawn if paired else new.draw(generator)) if enough else np.ones((1, len(new)))
    fewest = min(sum(run.count for run in before), sum(run.count for run in after))
    merged = [Histogram.merged(run.latency.samples() for run in runs) for runs in (before, after)]
    found: list[Change] = []
    for percent in PERCENTS:
        if fewest * (1 - percent / 100) < MIN_BEYOND:
            continue
        whole = [histogram.value_at(percent) / 1e6 for histogram in merged]
        ratios = new.percentiles(again, percent) / np.maximum(old.percentiles(drawn, percent), 1e-9)
        found.append(_change(f"p{percent:g}", whole[0], whole[1], ratios if enough else None, allowed, up=True))
    rates = [sum(run.count for run in runs) / sum(run.seconds for run in runs) for runs in (before, after)]
    ratios = new.throughput(again) / np.maximum(old.throughput(drawn), 1e-9)
    found.append(_change("throughput", rates[0], rates[1], ratios if enough else None, allowed, up=False))
    found.append(_errors(before, after, allowed))
    return tuple(found)


def _change(
    name: str,
    before: float,
    after: float,
    ratios: np.ndarray[tuple[int], np.dtype[np.float64]] | None,
    allowed: float,
    *,
    up: bool,
) -> Change:
    """`up`: whether more is worse."""
    ratio = after / max(before, 1e-9)
    if ratios is None:
        return Change(name, before, after, ratio, None, None, "undecided")
    low, high = (float(value) for value in np.percentile(ratios, [2.5, 97.5]))
    least, most = (low, high) if up else (1 / max(high, 1e-9), 1 / max(low, 1e-9))
    word: Word = "worse" if least > 1 + allowed else "no worse" if most <= 1 + allowed else "undecided"
    return Change(name, before, after, ratio, low, high, word)


def _errors(before: Sequence[LoadResult], after: Sequence[LoadResult], allowed: float) -> Change:
    """Failures as a share; worse where there are clearly more (two binomials, normal approximation)."""
    bad = [sum(run.error_count for run in runs) for runs in (before, after)]
    all_ = [max(sum(run.count for run in runs) + count, 1) for runs, count in zip((before, after), bad, strict=True)]
    shares = [count / whole for count, whole in zip(bad, all_, strict=True)]
    pooled = (sum(bad) + 1) / (sum(all_) + 2)
    spread = (pooled * (1 - pooled) * (1 / all_[0] + 1 / all_[1])) ** 0.5
    more = shares[1] - shares[0]
    word: Word = "worse" if more > 1.96 * spread and more > allowed * shares[0] and bad[1] > 1 else "no worse"
    return Change("errors", shares[0], shares[1], shares[1] / shares[0] if shares[0] else 1.0, None, None, word)
