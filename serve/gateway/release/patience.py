"""How long a candidate may keep a request to itself before the baseline is asked, and how many it gets after that.

All places of a name may be with a candidate that hangs. So a request is taken back from it after a multiple of the
longest answer that there was under its release, of either model; and until it answers one, it has one at a time, which
is enough to see that it hangs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

__all__ = ["FACTOR", "Patience"]

T = TypeVar("T")
LEAST_S, FACTOR = 1.0, 10.0
STALLED = 0.1  # of the time: where the loop looks so late, it stood still, and an answer may be there


class Patience:
    """With one candidate."""

    def __init__(self) -> None:
        self._longest_s = 0.0
        self._answers = self._there = 0
        self._in_vain = False  # whether the last one of which anything is known was

    @property
    def seconds(self) -> float:
        """That a request may be with the candidate."""
        return max(LEAST_S, FACTOR * self._longest_s)

    @property
    def is_spent(self) -> bool:
        """Whether the candidate has enough, as it answers none."""
        return self._in_vain and self._there > 0

    def saw(self, seconds: float) -> None:
        """One of the two has answered, after so long."""
        self._longest_s = max(self._longest_s, seconds)

    def hears(self, *, in_vain: bool) -> None:
        """The candidate has answered, with whatever, or was waited for `in_vain` as long as any answer may take."""
        self._answers += not in_vain
        self._in_vain = in_vain

    async def bear(self, answer: Coroutine[Any, Any, T]) -> T | None:
        """The candidate's answer; None where that takes too long: it is cancelled then."""
        loop = asyncio.get_running_loop()
        answers, began = self._answers, loop.time()
        task = asyncio.create_task(answer)
        self._there += 1
        try:
            due = began + self.seconds
            while not task.done():
                await asyncio.wait((task,), timeout=due - loop.time())
                now, wait_s = loop.time(), self.seconds
                if now - began >= wait_s and now - due <= STALLED * wait_s:
                    break
                due = max(began + wait_s, now + STALLED * wait_s)
        finally:
            self._there -= 1
            if not task.done():
                task.cancel()
                await asyncio.wait((task,))
        if not task.cancelled():
            return task.result()
        self._in_vain = self._answers == answers
        return None
