"""Requests whose sequence waits for a slot: they stand beside their model's places, a bounded number of each key.

How long one waits for its slot tells how long others keep theirs, and not how busy the model is: in a place, it would
keep from the model what runs, and teach the limit that answers are slow. Over HTTP each has a connection to Triton all
the same, until Triton is through with it: all keys' together are bounded, so that what runs finds one.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

from serve.gateway.access.left_behind import leave_once_through
from serve.gateway.access.memory import Share
from serve.gateway.access.slots import MOST_WAITING
from serve.gateway.errors import RateLimitedError
from serve.gateway.health.flights import At

__all__ = ["Slotless", "Waiting"]


class Waiting:
    """Those of one gateway, by model and key.

    Args:
        most: of one model.
    """

    def __init__(self, most: int = 192) -> None:
        self._most = most
        self.counts: Counter[tuple[str, str]] = Counter()
        self._by_model: Counter[str] = Counter()

    def of(self, model: str, who: str) -> Slotless:
        """Where those of a key with a model stand."""
        return Slotless(self, model, who)

    def most_of(self, model: str) -> int:
        """How many one key may have now: as many as are left, so that something is left for who comes next."""
        return max(1, min(MOST_WAITING, self._most - self._by_model[model]))

    def count(self, whose: tuple[str, str], by: int) -> None:
        """So many more of a key with a model; fewer where below 0."""
        self.counts[whose] += by
        if not self.counts[whose]:
            del self.counts[whose]
        self._by_model[whose[0]] += by
        if not self._by_model[whose[0]]:
            del self._by_model[whose[0]]


class Slotless:
    """Used as the model's places are, by requests whose sequence waits for a slot."""

    def __init__(self, waiting: Waiting, model: str, who: str) -> None:
        self._waiting = waiting
        self._whose = model, who

    def try_enter(self, _who: str = "", _priority: int = 5) -> bool:
        """Stand here; each leaves by one of the methods below.

        Raises:
            RateLimitedError: the key has as many here as may be.
        """
        waiting = self._waiting.counts[self._whose]
        if waiting >= self._waiting.most_of(self._whose[0]):
            raise RateLimitedError(
                "too many requests of this key wait for their sequences to begin",
                why=f"{waiting} of them wait for slots of {self._whose[0]!r}",
                mend="end the sequences that are done (sequence_end), and wait for the first answer of one that begins",
            )
        self.stand()
        return True

    def stand(self) -> None:
        """One is here that has been elsewhere, however many there are."""
        self._waiting.count(self._whose, 1)

    async def enter(self, _priority: int, _patience_s: float, _who: str = "") -> None:
        """Nothing is waited for; see `try_enter`."""
        self.try_enter()

    def sent(self, _who: str, _was: At, _at: At) -> None:
        """It stands in nobody's way."""

    def leave(self, _seconds: float | None, _size: int = 0, _who: str = "", _at: At | None = None) -> None:
        """Its time says nothing of the model."""
        self._waiting.count(self._whose, -1)

    def leave_after(
        self,
        ended: Sequence[asyncio.Future[Any]],
        _started: float,
        size: int = 0,
        held: Share | None = None,
        _who: str = "",
        _through: Sequence[asyncio.Future[Any]] = (),
        _at: At | None = None,
    ) -> None:
        """What its client left stands here until the model server is through with it; arguments as of `Admission`."""
        leave_once_through(ended, lambda _: self.leave(None), size, held)

    def outlast(
        self,
        _seconds: float | None,
        _size: int = 0,
        _who: str = "",
        _through: Sequence[asyncio.Future[Any]] = (),
        _at: At | None = None,
    ) -> None:
        """It got no slot in time, and nobody is at work on it."""
        self.leave(None)

    def abandon(
        self, _seconds: float, _who: str = "", _ended: Sequence[asyncio.Future[Any]] = (), _size: int = 0
    ) -> None:
        """Nothing tells when the server is through: it counts where it was left (`Asides`), or nowhere."""
        self.leave(None)
