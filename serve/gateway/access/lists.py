"""Parts of lists of texts with a model: they have a few places of their own, and are short, as others wait for them.

In Triton's queue, first come is first served: what comes alone waits for every part that came before it, and parts that
held the same places would keep it out, and have its wait foretold by their time. Here lists wait for each other, a part
of each at a time, and the model has hardly more of them at once than it works on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from serve.gateway.access.admission import Admission, Beside
from serve.gateway.access.memory import Share
from serve.gateway.health.flights import At

__all__ = ["ListPart", "Lists", "Turns"]

FACTOR = 2  # times the fastest, that an answer to a part may take: a part fills the model by itself
BEGIN = 4
YIELDS = 0.25  # of the places, while something that came alone is with the model: an instance is to be free for it
PART_S = 0.1  # of the model's time that one part is to take
LEAST = 2048  # bytes of a part: with fewer tokens than these, a CPU is slower by the token
KEPT = 0.95  # of the rate, with each slower answer


class Lists:
    """Of one model.

    Args:
        places: of what comes alone. Both together are bounded as these are.
        clock: as of `Admission`.

    Attributes:
        places: of parts.
    """

    def __init__(self, places: Admission, clock: Callable[[], float] = time.monotonic) -> None:
        self.places = Admission(places.model, replace(places.bounds, factor=FACTOR), clock, places.fairness)
        self.places.limit = min(self.places.limit, BEGIN)
        places.beside, self.places.beside = Beside(self.places, excused=True), Beside(places, yields=YIELDS)
        self._rate = 0.0  # bytes a second of one part, of the fastest lately

    @property
    def budget(self) -> int:
        """Bytes that a part may have."""
        return max(LEAST, int(PART_S * self._rate))

    def learn(self, cost: int, seconds: float) -> None:
        """A part of so many bytes took so long; what waited in Triton's queue seems slow, and hardly counts."""
        self._rate = max(cost / max(seconds, 1e-6), KEPT * self._rate)


class Turns:
    """One list: of its parts, one waits for a place at a time, so that lists take turns.

    Args:
        of: the model's.
        at_once: of its parts. The first may wait for as long as so many requests; the others as long as the client.
    """

    def __init__(self, of: Lists, at_once: int) -> None:
        self.of, self.at_once = of, at_once
        self.turn = asyncio.Lock()
        self.begun = False

    def check(self, priority: int, patience_s: float, who: str) -> None:
        """Raises OverloadedError where the list would wait too long for its first turn; arguments as of Admission."""
        if not self.begun:
            self.of.places.check(priority, patience_s, who, times=self.at_once)


class ListPart:
    """One part; used as the model's places are.

    Args:
        turns: of its list.
        cost: its bytes, each text taken for as long as the longest.
    """

    def __init__(self, turns: Turns, cost: int) -> None:
        self._turns, self._places, self._cost = turns, turns.of.places, cost

    def try_enter(self, who: str = "", priority: int = 5) -> bool:
        """See `Admission`."""
        if self._turns.turn.locked() or not self._places.try_enter(who, priority):
            return False
        self._turns.begun = True
        return True

    async def enter(self, priority: int, patience_s: float, who: str = "") -> None:
        """See `Admission`; it waits for its list's turn first."""
        until = time.monotonic() + patience_s
        async with self._turns.turn:
            left = max(0.0, until - time.monotonic())
            self._turns.check(priority, left, who)
            await self._places.enter(priority, left, who, patient=True)
            self._turns.begun = True

    def sent(self, who: str, was: At, at: At) -> None:
        """See `Admission`."""
        self._places.sent(who, was, at)

    def leave(self, seconds: float | None, size: int = 0, who: str = "", at: At | None = None) -> None:
        """See `Admission`."""
        if seconds is not None:
            self._turns.of.learn(self._cost, seconds)
        self._places.leave(seconds, size, who, at)

    def leave_after(
        self,
        ended: Sequence[asyncio.Future[Any]],
        started: float,
        size: int = 0,
        held: Share | None = None,
        who: str = "",
        through: Sequence[asyncio.Future[Any]] = (),
        at: At | None = None,
    ) -> None:
        """See `Admission`."""
        self._places.leave_after(ended, started, size, held, who, through, at)

    def outlast(
        self,
        seconds: float | None,
        size: int = 0,
        who: str = "",
        through: Sequence[asyncio.Future[Any]] = (),
        at: At | None = None,
    ) -> None:
        """See `Admission`."""
        if seconds is not None:
            self._turns.of.learn(self._cost, seconds)
        self._places.outlast(seconds, size, who, through, at)

    def abandon(self, seconds: float, who: str = "", ended: Sequence[asyncio.Future[Any]] = (), size: int = 0) -> None:
        """See `Admission`."""
        self._places.abandon(seconds, who, ended, size)
