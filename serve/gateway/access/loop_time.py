"""What the short way may take of one round of the event loop, of each key.

It is taken while a connection is read, before anybody knows how many others of its key have something to say in the
same round. A key that has had its time goes the long way, where its requests begin in turns.
"""

from __future__ import annotations

import asyncio

__all__ = ["ROUND_S", "LoopTime"]

ROUND_S = 0.001


class LoopTime:
    """Of one gateway."""

    def __init__(self) -> None:
        self._used: dict[str, float] = {}

    def is_up(self, who: str) -> bool:
        """Whether a key has had its time of this round."""
        return self._used.get(who, 0.0) >= ROUND_S

    def use(self, who: str, seconds: float) -> None:
        """Count what a key has used."""
        if not self._used:
            asyncio.get_running_loop().call_soon(self._used.clear)
        self._used[who] = self._used.get(who, 0.0) + seconds
