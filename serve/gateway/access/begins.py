"""What begins sequences, and has a place of its model: it may wait there for a slot that looked free.

What is asked of a sequence that has its slot is what others wait for, and never waits for those. So while one such
waits for its turn, what begins has its place for no longer than an answer may take: whatever has not been answered by
then waits for a slot, and stands beside the places.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from serve.gateway.access.admission import Admission
from serve.gateway.access.slots import Turn

__all__ = ["SLOT_S", "Begins"]

SLOT_S = 5.0  # that a first request keeps its place in any case: as long as one guards its model's time from heavy ones
LOOK_S = 0.05


@dataclass(slots=True)
class _OfModel:
    since: dict[Turn, float] = field(default_factory=dict)  # the oldest first
    held_up: int = 0  # requests of sequences that have their slots, and wait
    looks: bool = False


class Begins:
    """Of one gateway."""

    def __init__(self) -> None:
        self._of: dict[Admission, _OfModel] = {}

    def enter(self, places: Admission, turn: Turn) -> None:
        """One has a place from now on, and may have been sent; more than once does no harm."""
        self._of.setdefault(places, _OfModel()).since.setdefault(turn, places.now)
        self._look(places)

    def leave(self, places: Admission, turn: Turn) -> None:
        """It has none any more; more than once does no harm."""
        found = self._of.get(places)
        if found is not None:
            found.since.pop(turn, None)
            self._forget(places, found)

    @contextmanager
    def held_up(self, places: Admission) -> Iterator[None]:
        """While it lasts, a request waits that others may wait for."""
        found = self._of.setdefault(places, _OfModel())
        found.held_up += 1
        self._look(places)
        try:
            yield
        finally:
            found.held_up -= 1
            self._forget(places, found)

    def _look(self, places: Admission) -> None:
        found = self._of.get(places)
        if found is None or found.looks or not (found.held_up and found.since):
            return
        turn, since = next(iter(found.since.items()))
        if places.now - since >= min(SLOT_S, places.target_s):
            del found.since[turn]
            turn.waited()
        found.looks = True
        asyncio.get_running_loop().call_later(LOOK_S, self._look_again, places, found)

    def _look_again(self, places: Admission, found: _OfModel) -> None:
        found.looks = False
        self._look(places)

    def _forget(self, places: Admission, found: _OfModel) -> None:
        if not (found.since or found.held_up) and self._of.get(places) is found:
            del self._of[places]
