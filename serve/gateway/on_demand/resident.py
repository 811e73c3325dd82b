"""A model that is loaded: who used it when, and which of several goes where another needs its memory.

By last use (least recently used first), and so that no key empties the memory of the others' models: what only one key
has used lately counts as that key's, and is taken for another's sake only as far as both then have as much (max-min
fairness); what several have used lately is not taken for one's sake at all. But a key that has nothing of its own gets
a turn: what has been there for longest goes for it, once it has had its time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

__all__ = ["LATELY_S", "TURN_S", "Reason", "Resident", "held_by", "victim_of"]

LATELY_S = 30.0
TURN_S = 30.0
# Why one went: memory was over the limit; nobody had used it lately; its key had more than who asked, or had asked for
# another itself; a key with nothing had its turn; the same, and it was in use.
Reason = Literal["memory", "idle", "share", "own", "turn", "drained"]


@dataclass(slots=True, eq=False)
class Resident:
    """One.

    Attributes:
        name: of it.
        used: when it was used last, on the monotonic clock.
        who: by which key.
        before: when another key than that used it last; what one key uses alone, that key alone has a say in.
        leases: requests that need it, and are not counted elsewhere.
        loaded: when it was; when it was used first, where nothing is said.
        spared: until when it is not drained, as what it ran did not end in time.
    """

    name: str
    used: float
    who: str
    before: float = -1e9
    leases: int = 0
    loaded: float = math.nan
    spared: float = 0.0

    def __post_init__(self) -> None:
        if math.isnan(self.loaded):
            self.loaded = self.used

    def touch(self, who: str, now: float) -> None:
        """A request of a key's uses it."""
        if who != self.who:
            self.before, self.who = self.used, who
        self.used = now

    def idle(self, now: float) -> bool:
        """Whether nobody has used it lately."""
        return now - self.used > LATELY_S

    def has_had_its_turn(self, now: float) -> bool:
        """Whether it has been there for as long as a key with nothing waits for another's."""
        return now - self.loaded > TURN_S

    def owner(self, now: float) -> str | None:
        """The one key that has used it lately; None where several have."""
        return None if now - self.before <= LATELY_S else self.who


def held_by(residents: Iterable[Resident], now: float, size_of: Callable[[str], int]) -> dict[str, int]:
    """Bytes of what each key alone has used lately."""
    held: dict[str, int] = {}
    for each in residents:
        if not each.idle(now) and (owner := each.owner(now)) is not None:
            held[owner] = held.get(owner, 0) + size_of(each.name)
    return held


def victim_of(
    residents: Iterable[Resident], free: Iterable[Resident], who: str | None, size: int, now: float,
    size_of: Callable[[str], int],
) -> tuple[Resident, Reason] | None:  # fmt: skip
    """Which goes next, and why; None where none may.

    Args:
        residents: all that are loaded.
        free: those that nothing holds.
        who: for whose sake; None for everybody's.
        size: bytes that it needs.
        now: on the monotonic clock.
        size_of: bytes that a resident's going would free.
    """
    by_age = sorted(free, key=lambda each: each.used)
    if who is None:
        return (by_age[0], "memory") if by_age else None
    for each in by_age:
        if each.idle(now):
            return each, "idle"
    held = held_by(residents, now, size_of)
    for each in by_age:
        owner = each.owner(now)
        if owner not in (None, who) and held[owner] - size_of(each.name) >= held.get(who, 0) + size:
            return each, "share"
    for each in by_age:
        if each.owner(now) == who:
            return each, "own"
    if held.get(who):
        return None
    for each in sorted(free, key=lambda each: each.loaded):
        if each.has_had_its_turn(now):
            return each, "turn"
    return None
