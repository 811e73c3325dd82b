"""What reading JSON may take of one round of the event loop, of each key.

The short way reads while a connection is read, before anybody knows how many others of its key have something to say in
the same round. A key that has had its time goes the long way, where its requests begin in turns, and where one JSON is
read in a round that follows: what is refused, or does not fit the short way, is counted like what is answered.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import TypeVar

__all__ = ["ROUND_S", "LoopTime"]

ROUND_S = 0.001

T = TypeVar("T")


class LoopTime:
    """Of one gateway."""

    def __init__(self) -> None:
        self._used: dict[str, float] = {}
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._turning = False

    def is_up(self, who: str) -> bool:
        """Whether a key has had its time of this round."""
        return self._used.get(who, 0.0) >= ROUND_S

    def use(self, who: str, seconds: float) -> None:
        """Count what a key has used."""
        self._used[who] = self._used.get(who, 0.0) + seconds
        self._go_on()

    async def call(self, who: str, work: Callable[[], T]) -> T:
        """Do a key's work in the first round that has time for it; each key's in the order that it came in."""
        if who in self._waiting or self.is_up(who):
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(who, deque()).append(turn)
            self._go_on()
            await turn
        began = perf_counter()
        try:
            return work()
        finally:
            self.use(who, perf_counter() - began)

    def _go_on(self) -> None:
        if not self._turning:
            self._turning = True
            asyncio.get_running_loop().call_soon(self._next_round)

    def _next_round(self) -> None:
        """One of each key that waits goes on; it needs no pause, so that a key that is alone loses nothing."""
        self._turning = False
        self._used.clear()
        for who, turns in list(self._waiting.items()):
            while turns and (turn := turns.popleft()).done():  # its client has left
                pass
            if not turn.done():
                turn.set_result(None)
            if not turns:
                del self._waiting[who]
        if self._waiting:
            self._go_on()
