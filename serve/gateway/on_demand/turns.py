"""Turns at models that others use: whose it is, at which models, and how long it waits for what they run to end.

Where keys use all that is loaded, and have as much each, nothing ever goes by itself. So a key that has next to nothing
has a model drained: it gets no new requests, what it has is answered, and then it goes. A key has one turn in `TURN_S`,
and each model has been there for that long: keys that want more than fits take turns, round robin by when a model came.

Who has most loses first, and who has less than the one that asks would have loses nothing, as long as others have
enough. Where none has, as one asks for a model that is larger than what others use, it has its turn for as much of the
time as a key's equal part of the memory is of that model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from serve.gateway.on_demand.loads import Load
from serve.gateway.on_demand.resident import (
    EQUAL,
    TURN_S,
    Claim,
    Reason,
    Resident,
    held_by,
    least_of,
    left_by,
    victim_of,
)

__all__ = ["DRAIN_S", "SEQUENCES_S", "SPARED_S", "Drain", "State", "Turns", "drained_of"]

DRAIN_S = 30.0  # that what runs may take to end, which is what an answer may take unless settings say another
SPARED_S = 300.0  # after which one that took longer is tried again
SEQUENCES_S = 300.0  # that a model has been there before sequences in it are cut short
KEPT = 4096


@dataclass(eq=False)
class Drain:
    """Models that go for another once they have answered what they have.

    Attributes:
        going: of them, each with why.
        who: the key whose turn it is.
        until: when it is given up, on the monotonic clock.
    """

    going: Sequence[tuple[Resident, Reason]]
    who: str
    until: float

    @property
    def residents(self) -> list[Resident]:
        """The same, alone."""
        return [each for each, _ in self.going]


@dataclass(frozen=True)
class State:
    """What a model that is loaded is doing.

    Attributes:
        may_go: whether it may go at all.
        is_free: whether nothing holds it.
        lasts: whether there may be sequences in it.
    """

    may_go: bool = True
    is_free: bool = False
    lasts: bool = False


@dataclass
class Turns:
    """When keys had theirs."""

    _until: dict[str, float] = field(default_factory=dict)  # when each may have the next
    _loaded: dict[str, float] = field(default_factory=dict)  # when a model was last loaded for each, the oldest first

    def begin(self, who: str, now: float, seconds: float = TURN_S) -> None:
        """One of a key's, which has the next after so long."""
        self._until = {each: until for each, until in self._until.items() if until > now}
        self._until[who] = now + seconds

    def give_back(self, who: str) -> None:
        """It came to nothing, and not for the key's doing."""
        self._until.pop(who, None)

    def wait_s(self, who: str, now: float) -> float:
        """Until a key may have one."""
        return max(0.0, self._until.get(who, now) - now)

    def loaded(self, who: str, now: float) -> None:
        """A model was loaded for a key."""
        self._loaded.pop(who, None)
        self._loaded[who] = now
        if len(self._loaded) > KEPT:
            del self._loaded[next(iter(self._loaded))]

    def first_of(self, claims: Iterable[tuple[Load, str]]) -> Load | None:
        """Whose turn it is among loads that lack room, each with its key: who had a model loaded last comes last."""
        found = min(claims, key=lambda each: self._loaded.get(each[1], 0.0), default=None)
        return None if found is None else found[0]


def drained_of(
    residents: Sequence[Resident], states: Callable[[Resident], State], claim: Claim, over: int, equal: float,
    now: float, size_of: Callable[[str, Iterable[str]], int],
) -> tuple[list[tuple[Resident, Reason]], float]:  # fmt: skip
    """Which go in a key's turn, each with why, and after how long it has the next; none where that would not do.

    First what goes without a turn. Then from whoever has most, of that what is free, of that what has been there for
    longest; what sequences may be in comes last.

    Args:
        residents: all that are loaded, and not pinned.
        states: what each is doing.
        claim: for whose sake.
        over: bytes that are lacking.
        equal: bytes of an equal part of the memory.
        now: on the monotonic clock.
        size_of: bytes that one's going would free, beside others that go.
    """
    going: list[tuple[Resident, Reason]] = []
    rest = {each: states(each) for each in residents}
    next_s = TURN_S
    while over > 0:
        names = [each.name for each, _ in going]
        sizes = {each.name: size_of(each.name, names) for each in rest}
        free = [each for each, state in rest.items() if state.may_go and state.is_free and sizes[each.name]]
        found = victim_of(rest.keys(), free, claim, now, sizes.__getitem__, trades=False)
        if found is not None:
            each, why = found
        elif (turn := _turn_of(rest, claim, over, now, sizes)) is not None:
            each, why = turn, "turn" if rest[turn].is_free else "drained"
            if not _has_more(each, claim, rest, now, sizes):
                next_s = TURN_S * max(1.0, claim.part / equal)
        else:
            return [], 0.0
        over -= sizes[each.name]
        going.append((each, why))
        del rest[each]
    return going, next_s


def _turn_of(
    rest: dict[Resident, State], claim: Claim, over: int, now: float, sizes: dict[str, int]
) -> Resident | None:
    """Which goes next in a key's turn."""
    held = held_by(rest, now, sizes.__getitem__)
    others = [
        each for each, state in rest.items()
        if state.may_go and sizes[each.name] and each.keys(now) != [claim.who]
    ]  # fmt: skip
    rich = [each for each in others if _has_more(each, claim, rest, now, sizes)]
    if sum(sizes[each.name] for each in rich) < over:
        if not _is_poor(claim, held):
            return None
        rich = rich or others

    def may(each: Resident) -> bool:
        if now < each.spared or rest[each].lasts:
            return now >= each.spared and now - each.loaded > SEQUENCES_S
        # Where its keys have more afterwards, too, they have no claim to it, however short it was there.
        return now - each.loaded > TURN_S or left_by(each, claim, held, sizes[each.name], now) > EQUAL

    def rank(each: Resident) -> tuple[bool, float, bool, float]:
        return rest[each].lasts, -least_of(each, claim, held, now), not rest[each].is_free, each.loaded

    return min(filter(may, rich), key=rank, default=None)


def _is_poor(claim: Claim, held: dict[str, float]) -> bool:
    """Whether a key has next to nothing beside what it asks for."""
    return held.get(claim.who, 0.0) < claim.part / 2


def _has_more(each: Resident, claim: Claim, rest: dict[Resident, State], now: float, sizes: dict[str, int]) -> bool:
    """Whether each other key that uses a model has more than the one that asks would, or, if that is poor, as much."""
    held = held_by(rest, now, sizes.__getitem__)
    if _is_poor(claim, held):
        return least_of(each, claim, held, now) >= claim.part - EQUAL
    part = sizes[each.name] / max(1, len(each.keys(now)))
    return left_by(each, claim, held, sizes[each.name], now) + part > EQUAL
