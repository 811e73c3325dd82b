"""The last rounds of a search: at the same load, in turns, and the winner once more against what is there.

A configuration that won a search did so by luck, too: it is the largest of many noisy numbers. So the winner and the
present configuration are measured again, with the same number in flight, by turns; a gain is one whose 95% interval
(Student's t over the logarithms of the rounds' ratios) lies above 1.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from serve.tune.candidate import Candidate
from serve.tune.trial import Point

__all__ = ["DUEL_ROUNDS", "Duel", "Final", "duel", "final", "winner"]

DUEL_ROUNDS = 5
"""At least so many pairs: with fewer, an interval says little."""
T_95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 10: 2.228,
        12: 2.179, 15: 2.131, 20: 2.086, 30: 2.042}  # fmt: skip
"""Two-sided 95% points of Student's t, by degrees of freedom."""

Measure = Callable[[Candidate, int], Point]


@dataclass(frozen=True)
class Final:
    """A configuration in the final, under one load.

    Attributes:
        candidate: it.
        points: one of each round, all with as many in flight.
    """

    candidate: Candidate
    points: tuple[Point, ...]

    @property
    def concurrency(self) -> int:
        """Requests in flight."""
        return self.points[0].concurrency

    def per_s(self) -> float:
        """The median of the rounds."""
        return statistics.median(point.per_s for point in self.points)

    def p99_ms(self) -> float | None:
        """The median of the rounds; None where one had too few answers."""
        known = [point.p99_ms for point in self.points if point.p99_ms is not None]
        return statistics.median(known) if len(known) == len(self.points) else None

    def within(self, bound_ms: float) -> bool:
        """Whether the bound holds in the median."""
        p99 = self.p99_ms()
        errors = any(point.errors for point in self.points)
        return not errors and (p99 <= bound_ms if p99 is not None else all(p.within(bound_ms) for p in self.points))


@dataclass(frozen=True)
class Duel:
    """The winner of the final against the present configuration, with the same number in flight.

    Attributes:
        winner, present: what each did.
        gain: the winner's answers a second over the present's; low, high: its 95% interval.
        better: whether that is more than noise.
    """

    winner: Final
    present: Final
    gain: float
    low: float
    high: float
    better: bool

    @classmethod
    def of(cls, winner: Final, present: Final, bound_ms: float) -> Duel:
        """Judge rounds that took turns, as many of each, in their order."""
        pairs = list(zip(winner.points, present.points, strict=True))
        usable = [(ours, theirs) for ours, theirs in pairs if ours.per_s > 0 and theirs.per_s > 0]
        if len(usable) < len(pairs):  # one of them answered nothing
            dead = all(theirs.per_s == 0 for _, theirs in pairs) and all(ours.per_s > 0 for ours, _ in pairs)
            return cls(winner, present, math.inf if dead else 0.0, 0.0, math.inf, dead and winner.within(bound_ms))
        gain, low, high = _interval([math.log(ours.per_s / theirs.per_s) for ours, theirs in usable])
        # Keeping the bound where the other never does is a gain, too, when each round says so.
        alone = all(ours.within(bound_ms) and not theirs.within(bound_ms) for ours, theirs in pairs)
        return cls(winner, present, gain, low, high, winner.within(bound_ms) and (low > 1.0 or alone))


def _interval(logs: Sequence[float]) -> tuple[float, float, float]:
    """The geometric mean, and the ends of its 95% interval."""
    mean = statistics.fmean(logs)
    if len(logs) < 2:
        return math.exp(mean), 0.0, math.inf
    freedom = max(each for each in T_95 if each <= len(logs) - 1)
    half = T_95[freedom] * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


def final(candidates: Sequence[Candidate], loads: Iterable[int], rounds: int, measure: Measure) -> tuple[Final, ...]:
    """All of them under each load, in turns, so that the machine's moods hit all.

    Args:
        candidates: the present one first.
        loads: numbers in flight.
        rounds: of each.
        measure: runs a candidate under a load.

    Returns:
        By load, ascending, in the order of the candidates.
    """
    order = sorted(set(loads))
    points: Mapping[tuple[Candidate, int], list[Point]] = {(each, load): [] for load in order for each in candidates}
    for number in range(rounds):
        for each in candidates if number % 2 == 0 else reversed(candidates):
            for load in order:
                points[each, load].append(measure(each, load))
    return tuple(Final(each, tuple(found)) for (each, _), found in points.items())


def winner(finals: Sequence[Final], bound_ms: float) -> Final | None:
    """The most throughput within the bound under any of the loads; None when none keeps it."""
    return max((each for each in finals if each.within(bound_ms)), key=Final.per_s, default=None)


def duel(best: Final, present: Candidate, rounds: int, bound_ms: float, measure: Measure) -> Duel:
    """The winner against the present one again, with as many in flight, in turns; what was measured before is not used.

    Args:
        best: of the final; not the present one.
        present: it.
        rounds: at least `DUEL_ROUNDS` are taken.
        bound_ms: on the p99 of latency.
        measure: runs a candidate under a load.
    """
    found: dict[Candidate, list[Point]] = {best.candidate: [], present: []}
    for number in range(max(rounds, DUEL_ROUNDS)):
        turns = (best.candidate, present) if number % 2 == 0 else (present, best.candidate)
        for each in turns:
            found[each].append(measure(each, best.concurrency))
    ours, theirs = (Final(each, tuple(found[each])) for each in (best.candidate, present))
    return Duel.of(ours, theirs, bound_ms)
