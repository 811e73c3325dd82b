"""Latency: several models in turns, each median and each ratio with its interval, for as long as that takes.

Models take turns in rounds, so that a drift of the machine hits all of them alike. What a round gives of a model is the
median of a block of calls; two models are compared round by round, which takes out what made a round slow for both. The
interval of a median over rounds is the one between order statistics: it assumes no distribution (Le Boudec,
Performance Evaluation of Computer and Communication Systems, 2010, section 2.2.2; Conover, Practical Nonparametric
Statistics, 1999, section 3.2). That rounds be independent it does assume. Measuring ends when the intervals are narrow
(Chow & Robbins, On the Asymptotic Theory of Fixed-Width Sequential Confidence Intervals, 1965), or at a limit; since
ending just then favours intervals that are narrow by chance, they are made for 97%, and hold 95%
(benchmarks/latency_intervals.py).
"""

from __future__ import annotations

import functools
import math
import os
import random
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from compress.console.wording import counted
from compress.errors import RecipeError
from compress.model import Arrays
from compress.runtime.backends import Backend
from compress.runtime.backends.in_turns import InTurns

__all__ = [
    "BLOCK_SECONDS",
    "Latency",
    "Ratio",
    "Turns",
    "block_of",
    "interleave",
    "latency",
    "measuring_seconds",
    "median_interval",
    "ratio",
]

CONFIDENCE = 0.97  # before stopping takes its part
# Two sessions of one and the same file differ by up to 2%, by where their memory lies, for as long as they live: no
# interval of theirs holds it.
ALIKE = 0.03
WIDTH = 0.03  # half of an interval, as a share of its value
FEWEST, MOST = 7, 24  # rounds: with fewer, none of their values bound their median
# After these rounds it can be seen how narrow intervals get before a limit. Where that is far from narrow enough,
# further rounds are spent only on ratios of less than `FAR`, of which it may be asked which of the two is faster.
FORESEEN, FAR_OFF, FAR = 10, 1.4, 1.5
SECONDS = 20.0  # after these no further round begins, once there are the fewest
SETTING = "COMPRESS_MEASURE_SECONDS"
BLOCK_SECONDS = 0.06
LEAST_BLOCK_SECONDS = 0.01  # where no time is given to measuring
# Of a block, at least and at most: one call that is held up does not move the median of three. More rounds tell more
# than longer blocks do: the interval is one over rounds, and what hits a whole block no call in it takes out.
CALLS = (3, 200)
LONGEST_BLOCK = 0.3  # …but no more calls than fit in these seconds, and one where a single one does not
# A call of these seconds is not warmed up: it finds nothing of what the one before it left in the caches (six models of
# ResNet-50 in turns: the first call of a block takes the processor time of the later ones, within 1%; see decision 49).
LONG_CALL = 0.02
WARMED = 10  # calls in a block of which a tenth, at least three, warm it up; one where they are fewer


@dataclass(frozen=True)
class Ratio:
    """How many times as fast one model is as another, with its 95% interval; None where there were too few rounds."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def faster(self) -> bool:
        """Beyond doubt: by more than two sessions of one file may differ."""
        return self.low is not None and self.low > 1 + ALIKE

    @property
    def slower(self) -> bool:
        """Beyond doubt, likewise."""
        return self.high is not None and self.high < 1 / (1 + ALIKE)


@dataclass(frozen=True)
class Latency:
    """Of one call of a model, in milliseconds.

    Attributes:
        p50_ms: median over the rounds of the median of a round's calls; `low_ms` and `high_ms` bound its 95% interval,
            None with too few rounds.
        p99_ms: of all calls.
        samples_ms: every call, for plots.
        rounds_ms: the median of each round's calls, in order.
    """

    p50_ms: float
    p99_ms: float
    samples_ms: tuple[float, ...]
    rounds_ms: tuple[float, ...] = ()
    low_ms: float | None = None
    high_ms: float | None = None


@dataclass(frozen=True)
class Turns(Mapping[str, Latency]):
    """What models that took turns gave, by name, and why measuring ended.

    Attributes:
        found: by name.
        seconds: all of it took.
        spread: the widest interval of the ratios that were wanted: half of it, as a share of the ratio; of the p50
            where one model was measured alone. None with too few rounds.
        claimed: the models whose ratios these are, where they are not all.
        narrow: whether that is why measuring ended.
        foreseen: whether it ended because no limit would have let it get there.
    """

    found: Mapping[str, Latency] = field(default_factory=dict)
    seconds: float = 0.0
    spread: float | None = None
    narrow: bool = False
    claimed: tuple[str, ...] = ()
    foreseen: bool = False

    def __getitem__(self, name: str) -> Latency:
        return self.found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.found)

    def __len__(self) -> int:
        return len(self.found)

    @property
    def rounds(self) -> int:
        return max((len(found.rounds_ms) for found in self.found.values()), default=0)

    @property
    def told(self) -> str:
        """One clause: after how many rounds, and how sure."""
        if self.spread is None:
            return f"stopped after {counted(self.rounds, 'rounds')}: too few for intervals"
        what = (
            "interval" if len(self.found) == 1 else f"ratios of {', '.join(self.claimed)}" if self.claimed else "ratios"
        )
        if self.narrow:
            return f"stopped after {counted(self.rounds, 'rounds')}: {what} within ±{self.spread:.1%}"
        if self.foreseen:
            rounds = counted(self.rounds, "rounds")
            return f"stopped after {rounds}: {what} within ±{self.spread:.1%}, more would not have brought ±{WIDTH:.0%}"
        return f"stopped at the limit, after {counted(self.rounds, 'rounds')}: {what} only within ±{self.spread:.1%}"

    def to_dict(self) -> dict[str, Any]:
        """As JSON values; `calls` is how many of each model count: its p99 is of so many."""
        return {
            "rounds": self.rounds, "seconds": self.seconds, "spread": self.spread, "narrow": self.narrow,
            "told": self.told, "calls": {name: len(found.samples_ms) for name, found in self.found.items()},
        }  # fmt: skip


@functools.cache
def _rank(count: int) -> int:
    """The k for which the k-th smallest and the k-th largest of `count` bound their median at 97%; 0: there is none.

    A value is below the median with probability 1/2, so that the k-th smallest is above it when fewer than k are.
    """
    tail, k = 0.0, 0
    for below in range(count // 2 + 1):
        tail += math.comb(count, below) / 2**count
        if 2 * tail > 1 - CONFIDENCE:
            break
        k = below + 1
    return k


def median_interval(values: Sequence[float]) -> tuple[float, float, float] | None:
    """The median and a distribution-free interval of at least 97% for that of where they come from.

    Args:
        values: independent, in any order.

    Returns:
        Median, lower and upper end; None for fewer than 7, which bound nothing so surely.
    """
    k = _rank(len(values))
    if k == 0:
        return None
    ordered = sorted(values)
    return statistics.median(ordered), ordered[k - 1], ordered[-k]


def ratio(reference_ms: Sequence[float], ms: Sequence[float]) -> Ratio | None:
    """How many times as fast as a reference, from both models' `rounds_ms`, paired by round.

    Returns:
        Above 1 for faster; None where the rounds are not the same.
    """
    if not ms or len(reference_ms) != len(ms):
        return None
    by_round = [before / max(after, 1e-9) for before, after in zip(reference_ms, ms, strict=True)]
    found = median_interval(by_round)
    return Ratio(statistics.median(by_round)) if found is None else Ratio(*found)


def measuring_seconds() -> float:
    """After how many seconds models take no further turns, once there have been 7: COMPRESS_MEASURE_SECONDS, or 20.

    Raises:
        RecipeError: it is no number of 0 or more.
    """
    said = os.environ.get(SETTING, "").strip()
    try:
        seconds = float(said) if said else SECONDS
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        why = "it says for how many seconds models are measured in turns: a number of 0 or more"
        raise RecipeError(f"{SETTING} can't be {said!r}", why=why, mend=f"give {SECONDS:g}, or less where time matters")
    return seconds


def interleave(
    blocks: Mapping[str, Callable[[], Sequence[float]]],
    *,
    references: Collection[str] = (),
    claimed: Collection[str] = (),
    rounds: int = MOST,
    width: float = WIDTH,
    seconds: float | None = None,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Turns:
    """Blocks of calls in rounds, in a new random order each, until every wanted interval is narrow.

    It ends earlier where, by how the intervals narrow (with the square root of the rounds), a limit will come before
    that, and all ratios are far from 1: of those that are claimed alone, since whoever names none may compare any two.
    That is judged by widths, and ends on wide intervals: it costs no coverage.

    Args:
        blocks: by model, what makes a block of calls and gives the milliseconds of each.
        references: models that all others are compared with; the first, if none is named.
        claimed: models whose ratios must be narrow: of the others no figure is claimed; all, if none is named.
        rounds: at most. With 7 or fewer exactly these, whatever they give.
        width: half of an interval, as a share of its value, that is narrow enough.
        seconds: after these no further round begins, once there have been 7; by default what the user says.
        progress: called with rounds done and in all; at the end both are what there were.

    Raises:
        RecipeError: `measuring_seconds`.
    """
    seconds = measuring_seconds() if seconds is None else seconds
    order, shuffle = list(blocks), random.Random(0)  # noqa: S311  an order, not a secret
    calls: dict[str, list[float]] = {name: [] for name in blocks}
    medians: dict[str, list[float]] = {name: [] for name in blocks}
    if not blocks:
        return Turns()
    firsts = [name for name in references if name in blocks] or order[:1]
    told = tuple(name for name in claimed if name in blocks)
    pairs = [(first, name) for first in firsts for name in told or blocks if name != first]
    begun = time.perf_counter()
    spread: float | None = None
    narrow = foreseen = False
    for done in range(1, rounds + 1):
        shuffle.shuffle(order)
        for name in order:
            block = blocks[name]()
            calls[name] += block
            medians[name].append(statistics.median(block))
        spread = _spread(medians, pairs) if done >= min(FEWEST, rounds) else None
        passed = time.perf_counter() - begun
        narrow = spread is not None and spread <= width
        left = min(rounds, int(done * seconds / max(passed, 1e-9)))  # rounds, until a limit comes
        foreseen = (
            bool(told) and not narrow and FORESEEN <= done < left
            and _in_vain(medians, pairs, spread, width, done / left)
        )  # fmt: skip
        over = done >= FEWEST and (passed > seconds or narrow or foreseen)
        progress(done, done if over else rounds)
        if over:
            break
    found = {}
    for name, taken in medians.items():
        interval = median_interval(taken)
        low, high = (None, None) if interval is None else interval[1:]
        p99 = float(np.percentile(calls[name], 99))
        found[name] = Latency(statistics.median(taken), p99, tuple(calls[name]), tuple(taken), low, high)
    return Turns(found, time.perf_counter() - begun, spread, narrow, told, foreseen)


def _ratios(medians: Mapping[str, Sequence[float]], pairs: Sequence[tuple[str, str]]) -> list[Ratio | None]:
    return [ratio(medians[before], medians[after]) for before, after in pairs]


def _spread(medians: Mapping[str, Sequence[float]], pairs: Sequence[tuple[str, str]]) -> float | None:
    """The widest of the wanted intervals: half of it, as a share of its value; without pairs, of each model alone."""
    if not pairs:
        found = [median_interval(values) for values in medians.values()]
    else:
        found = [
            None if each is None or each.low is None or each.high is None else (each.value, each.low, each.high)
            for each in _ratios(medians, pairs)
        ]
    known = [(high - low) / 2 / max(value, 1e-12) for value, low, high in filter(None, found)]
    return max(known) if len(known) == len(found) else None


def _in_vain(
    medians: Mapping[str, Sequence[float]],
    pairs: Sequence[tuple[str, str]],
    spread: float | None,
    width: float,
    share: float,
) -> bool:
    """Whether the rounds so far, this share of all there will be, show that the rest will not make them narrow enough.

    Never where a ratio is near 1: there a somewhat narrower interval may tell which of the two is faster.
    """
    if spread is None or not pairs or spread * math.sqrt(share) <= FAR_OFF * width:
        return False
    return all(each is not None and not 1 / FAR < each.value < FAR for each in _ratios(medians, pairs))


def latency(
    models: Mapping[str, Backend],
    inputs: Arrays,
    *,
    references: Collection[str] = (),
    claimed: Collection[str] = (),
    rounds: int = MOST,
    block_seconds: float | None = None,
    seconds: float | None = None,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Turns:
    """Time single calls of several models, interleaved.

    Each round takes the models in a new random order and gives each a block of calls; the calls before it (a tenth of
    it, at least three, one where few fit, and none where a call takes 20 ms) warm it up and do not count.

    Args:
        models: by name.
        inputs: one batch, by input name.
        references: models that the others are compared with; the first, if none is named.
        claimed: models whose ratios must be narrow; all, if none is named.
        rounds: blocks for each at most; fewer where the intervals are narrow earlier.
        block_seconds: how long a block lasts: of 3 to 200 calls, or as many as fit in 0.3 s, at least one. By default
            0.06, or 0.01 where `seconds` are 0: enough to tell, not to decide what a model becomes.
        seconds: in all; what takes longer ends after 7 rounds. By default what the user says.
        progress: called with rounds done and in all.

    Raises:
        RecipeError: `measuring_seconds`.
    """
    seconds = measuring_seconds() if seconds is None else seconds
    if block_seconds is None:
        block_seconds = BLOCK_SECONDS if seconds else LEAST_BLOCK_SECONDS
    return interleave(
        {name: block_of(model, inputs, block_seconds) for name, model in models.items()},
        references=references, claimed=claimed, rounds=rounds, seconds=seconds, progress=progress,
    )  # fmt: skip


def block_of(model: Backend, inputs: Arrays, block_seconds: float) -> Callable[[], list[float]]:
    """What makes a block of calls, for `interleave`, where models take inputs of their own; see `latency`."""

    def timed() -> float:
        start_ns = time.perf_counter_ns()
        model.infer(inputs)
        return (time.perf_counter_ns() - start_ns) / 1e6

    model.infer(inputs)  # the first makes ready what the others find: it may take a hundred times as long
    once = min(timed(), timed()) / 1e3
    if once < LONG_CALL:
        once = min(timed() / 1e3 for _ in range(3))
    fewest, most = CALLS
    fits = int(min(fewest, LONGEST_BLOCK / max(once, 1e-9)))
    calls = max(1, min(most, max(fits, int(block_seconds / max(once, 1e-9)))))
    warming = 0 if once >= LONG_CALL else max(3, calls // 10) if calls >= WARMED else 1
    if isinstance(model, InTurns):  # its first call may have to open it
        warming = max(1, warming)

    def block() -> list[float]:
        for _ in range(warming):
            model.infer(inputs)
        return [timed() for _ in range(calls)]

    return block
