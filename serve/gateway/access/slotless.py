"""Requests whose sequence waits for a slot: they stand beside their model's places, a bounded number of each key.

How long one waits for its slot tells how long others keep theirs, and not how busy the model is: in a place, it would
keep from the model what runs, and teach the limit that answers are slow.
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

__all__ = ["Slotless", "Waiting"]


class Waiting:
    """Those of one gateway, by model and key."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()

    def of(self, model: str, who: str) -> Slotless:
        """Where those of a key with a model stand."""
        return Slotless(self.counts, model, who)


class Slotless:
    """Used as the model's places are, by requests whose sequence waits for a slot."""

    def __init__(self, counts: Counter[tuple[str, str]], model: str, who: str) -> None:
        self._counts = counts
        self._whose = model, who

    def try_enter(self, _who: str = "", _priority: int = 5) -> bool:
        """Stand here; each leaves by one of the methods below.

        Raises:
            RateLimitedError: the key has as many here as may be.
        """
        if self._counts[self._whose] >= MOST_WAITING:
            raise RateLimitedError(
                "too many requests of this key wait for their sequences to begin",
                why=f"{MOST_WAITING} of them wait for slots of {self._whose[0]!r}",
                mend="end the sequences that are done (sequence_end), and wait for the first answer of one that begins",
            )
        self.stand()
        return True

    def stand(self) -> None:
        """One is here that has been elsewhere, however many there are."""
        self._counts[self._whose] += 1

    async def enter(self, _priority: int, _patience_s: float, _who: str = "") -> None:
        """Nothing is waited for; see `try_enter`."""
        self.try_enter()

    def leave(self, _seconds: float | None, _size: int = 0, _who: str = "") -> None:
        """Its time says nothing of the model."""
        self._counts[self._whose] -= 1
        if not self._counts[self._whose]:
            del self._counts[self._whose]

    def leave_after(
        self,
        ended: Sequence[asyncio.Future[Any]],
        _started: float,
        size: int = 0,
        held: Share | None = None,
        _who: str = "",
    ) -> None:
        """What its client left stands here until the model server is through with it; arguments as of `Admission`."""
        leave_once_through(ended, lambda _: self.leave(None), size, held)

    def abandon(
        self, _seconds: float, _who: str = "", _ended: Sequence[asyncio.Future[Any]] = (), _size: int = 0
    ) -> None:
        """Nothing tells when the server is through: it counts where it was left (`Asides`), or nowhere."""
        self.leave(None)
