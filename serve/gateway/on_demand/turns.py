"""Turns at models that are in use: whose it is, at which models, and how long it waits for what they run to end.

Where all that is loaded is in use all the time, nothing ever goes by itself. So a key that has no model loaded has one
drained: it gets no new requests, what it has is answered, and then it goes. A key has one turn in `TURN_S`, and each
model has been there for that long: keys that want more than fits take turns, round robin by when a model came.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from serve.gateway.on_demand.loads import Load
from serve.gateway.on_demand.resident import TURN_S, Resident, held_by

__all__ = ["DRAIN_S", "SEQUENCES_S", "SPARED_S", "Drain", "Turns", "drained_of"]

DRAIN_S = 30.0  # that what runs may take to end, which is what an answer may take unless settings say another
SPARED_S = 300.0  # after which one that took longer is tried again
SEQUENCES_S = 300.0  # that a model has been there before sequences in it are cut short
KEPT = 4096


@dataclass(eq=False)
class Drain:
    """Models that go for another once they have answered what they have.

    Attributes:
        residents: of them.
        who: the key whose turn it is.
        until: when it is given up, on the monotonic clock.
    """

    residents: Sequence[Resident]
    who: str
    until: float


@dataclass
class Turns:
    """When keys had theirs."""

    _begun: dict[str, float] = field(default_factory=dict)
    _loaded: dict[str, float] = field(default_factory=dict)  # when a model was last loaded for each, the oldest first

    def begin(self, who: str, now: float) -> None:
        """One of a key's."""
        self._begun = {each: at for each, at in self._begun.items() if now - at < TURN_S}
        self._begun[who] = now

    def give_back(self, who: str) -> None:
        """It came to nothing, and not for the key's doing."""
        self._begun.pop(who, None)

    def wait_s(self, who: str, now: float) -> float:
        """Until a key may have one."""
        return max(0.0, self._begun[who] + TURN_S - now) if who in self._begun else 0.0

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
    residents: Sequence[Resident], may_go: Callable[[Resident], bool], is_free: Callable[[Resident], bool],
    lasts: Callable[[Resident], bool], over: int, size: int, now: float,
    size_of: Callable[[str, Iterable[str]], int],
) -> list[Resident]:  # fmt: skip
    """Which are drained for a key that has nothing; none where that would not do.

    What is free goes first, then what a key can spare that would have as much left (max-min fairness), of those what
    has been there for longest; what sequences may be in comes last.

    Args:
        residents: all that are loaded, and not pinned.
        may_go: whether one may.
        is_free: whether nothing holds one.
        lasts: whether there may be sequences in one.
        over: bytes that are lacking.
        size: bytes that the model needs for which they go.
        now: on the monotonic clock.
        size_of: bytes that one's going would free, beside others that go.
    """
    may = [each for each in residents if may_go(each) and now >= each.spared]
    may = [each for each in may if now - each.loaded > (SEQUENCES_S if lasts(each) else TURN_S)]
    if not may:
        return []
    sizes = {each.name: size_of(each.name, ()) for each in residents}
    held = held_by(residents, now, sizes.__getitem__)

    def rank(each: Resident) -> tuple[bool, bool, bool, float]:
        owner = each.owner(now)
        spare = owner is not None and held.get(owner, 0) - sizes[each.name] >= size
        return lasts(each), not is_free(each), not spare, each.loaded

    going: list[Resident] = []
    for each in sorted(may, key=rank):
        if over <= 0:
            break
        if frees := size_of(each.name, [other.name for other in going]):
            over -= frees
            going.append(each)
    return going if over <= 0 else []
