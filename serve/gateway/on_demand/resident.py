"""A model that is loaded: who used it when, and which of several goes where another needs its memory.

By last use (least recently used first), and so that no key empties the memory of the others' models. What several keys
have used lately counts as a part for each of them, as in FairRide (Pu et al., NSDI 2016), and one goes for another's
sake only where each key that uses it has as much left as the one who asks would have (max-min fairness). What is in
nobody's way so is a matter of turns (`turns.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

__all__ = [
    "EQUAL",
    "LATELY_S",
    "TURN_S",
    "Claim",
    "Reason",
    "Resident",
    "held_by",
    "least_of",
    "left_by",
    "surplus_of",
    "victim_of",
]

LATELY_S = 30.0
TURN_S = 30.0
EQUAL = 1e-3  # bytes that equal parts may differ by, as they are computed
# Why one went: memory was over the limit; nobody had used it lately; its keys had more than who asked, or only those
# who asked for another used it; a key with less had its turn; the same, and it was in use.
Reason = Literal["memory", "idle", "share", "own", "turn", "drained"]


@dataclass(slots=True, eq=False)
class Resident:
    """One.

    Attributes:
        name: of it.
        used: when it was used last, on the monotonic clock.
        users: when each key has asked for it last; older ones than `LATELY_S` don't count.
        leases: requests that need it, and are not counted elsewhere.
        loaded: when it was; when it was used first, where nothing is said.
        spared: until when it is not drained, as what it ran did not end in time.
    """

    name: str
    used: float
    users: dict[str, float] = field(default_factory=dict)
    leases: int = 0
    loaded: float = math.nan
    spared: float = 0.0

    def __post_init__(self) -> None:
        if math.isnan(self.loaded):
            self.loaded = self.used

    def touch(self, who: str, now: float) -> None:
        """A request of a key's uses it."""
        self.users[who] = self.used = now

    def idle(self, now: float) -> bool:
        """Whether nobody has used it lately."""
        return now - self.used > LATELY_S

    def keys(self, now: float) -> list[str]:
        """Those that have used it lately."""
        return [who for who, at in self.users.items() if now - at <= LATELY_S]


@dataclass(frozen=True, slots=True)
class Claim:
    """What a key asks memory for.

    Attributes:
        who: the key.
        size: bytes that the model needs.
        sharers: keys that have asked for it lately, this one among them.
    """

    who: str
    size: int
    sharers: Collection[str] = ()

    @property
    def part(self) -> float:
        """Bytes that will count as the key's."""
        return self.size / max(1, len({self.who, *self.sharers}))

    def gives(self, who: str) -> float:
        """What another key gains by it, too."""
        return self.part if self.trades((who,)) else 0.0

    def trades(self, keys: Iterable[str]) -> bool:
        """Whether all of these keys are among those that ask."""
        return all(who == self.who or who in self.sharers for who in keys)


def held_by(residents: Iterable[Resident], now: float, size_of: Callable[[str], int]) -> dict[str, float]:
    """Bytes of what each key has used lately; of what several have, a part each."""
    held: dict[str, float] = {}
    for each in residents:
        if not each.idle(now) and (keys := each.keys(now)):
            part = size_of(each.name) / len(keys)
            for who in keys:
                held[who] = held.get(who, 0.0) + part
    return held


def least_of(each: Resident, claim: Claim, held: dict[str, float], now: float) -> float:
    """Bytes that the poorest key has of those that use a model, besides the one that asks: who has most loses first."""
    return round(min((held[who] for who in each.keys(now) if who != claim.who), default=math.inf), 3)


def left_by(each: Resident, claim: Claim, held: dict[str, float], size: int, now: float) -> float:
    """By how much more the poorest other key that uses a model would have than the one that asks, if the model went.

    Infinite where only the one that asks uses it.
    """
    keys = each.keys(now)
    part = size / len(keys) if keys else 0.0
    after = held.get(claim.who, 0.0) + claim.part - (part if claim.who in keys else 0.0)
    others = (held[who] - part + claim.gives(who) for who in keys if who != claim.who)
    return min(others, default=math.inf) - after


def surplus_of(
    residents: Iterable[Resident], held: Mapping[str, float], is_free: Callable[[Resident], bool], now: float,
    size_of: Callable[[str], int], growth: Callable[[str], int],
) -> Resident | None:  # fmt: skip
    """Which goes where all together are too large: what nobody has used lately, then what grew, then of whoever has
    most.

    What grew goes in use or not, and whoever uses it: what others have has had its room. One that is in use goes, too,
    before what keys with less have.

    Args:
        residents: that may go, in use or not.
        held: as of `held_by`.
        is_free: whether nothing holds one.
        now: on the monotonic clock.
        size_of: bytes that a resident has.
        growth: bytes that it has beyond what it was loaded with.
    """

    def rank(each: Resident) -> tuple[bool, int, float, bool, float]:
        free = is_free(each)
        whole = 0.0 if free else float(size_of(each.name))  # of what has computed for longer than keys are known
        least = min((held.get(who, whole) for who in each.keys(now)), default=whole)
        return not (free and each.idle(now)), -growth(each.name), -round(least, 3), not free, each.used

    return min(residents, key=rank, default=None)


def victim_of(
    residents: Collection[Resident], free: Iterable[Resident], claim: Claim | None, now: float,
    size_of: Callable[[str], int], *, trades: bool = True,
) -> tuple[Resident, Reason] | None:  # fmt: skip
    """Which goes next, and why; None where none may.

    Args:
        residents: all that are loaded.
        free: those that nothing holds.
        claim: for whose sake; None for everybody's.
        now: on the monotonic clock.
        size_of: bytes that a resident's going would free.
        trades: whether what only those use who ask for another may go, too.
    """
    by_age = sorted(free, key=lambda each: each.used)
    if claim is None:
        return (by_age[0], "memory") if by_age else None
    for each in by_age:
        if each.idle(now):
            return each, "idle"
    held = held_by(residents, now, size_of)
    may = [each for each in by_age if left_by(each, claim, held, size_of(each.name), now) >= -EQUAL]
    if share := [each for each in may if not claim.trades(each.keys(now))]:
        return max(share, key=lambda each: least_of(each, claim, held, now)), "share"
    own = [each for each in may if claim.trades(each.keys(now))]
    return (own[0], "own") if trades and own else None
