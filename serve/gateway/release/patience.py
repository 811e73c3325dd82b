"""How long a client waits for a candidate before the baseline is asked, and how many that gets while it answers none.

All places of a name may be with a candidate that hangs. So its client gets the baseline's answer where the candidate
has not answered in twice the longest answer of late, and in a second; and until the candidate answers one, it is asked
one at a time. What it was asked goes on meanwhile, and counts for or against it as if its client had waited: what was
in the way of one is not known before it is answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

__all__ = ["Patience", "ended"]

T = TypeVar("T")
LEAST_S, FACTOR = 1.0, 2.0
FADES = 63 / 64  # the longest answer, with each one
STALLED = 0.1  # of the time: where the loop looks so late, it stood still, and an answer may be there
MOST = 16  # that a candidate has which answers none: some 12 failures prove that it is worse
MOST_GOING_ON = 64  # whose clients have the baseline's answer


class Patience:
    """With one candidate."""

    def __init__(self) -> None:
        self._longest_s = 0.0
        self._answers = self._awaited = 0
        self._in_vain = False  # whether the last one of which anything is known was
        self._going_on: set[asyncio.Task[Any]] = set()

    @property
    def seconds(self) -> float:
        """That a client waits for the candidate."""
        return max(LEAST_S, FACTOR * self._longest_s)

    @property
    def is_spent(self) -> bool:
        """Whether the candidate has enough, as it answers none, or many late."""
        going_on = len(self._going_on)
        return going_on >= MOST_GOING_ON or (self._in_vain and (self._awaited > 0 or going_on >= MOST))

    def saw(self, seconds: float) -> None:
        """One of the two has answered, after so long."""
        self._longest_s = max(self._longest_s * FADES, seconds)

    def hears(self, *, in_vain: bool) -> None:
        """The candidate has answered, with whatever, or was waited for `in_vain` as long as any answer may take."""
        self._answers += not in_vain
        self._in_vain = in_vain

    async def bear(self, answer: Coroutine[Any, Any, T]) -> T | asyncio.Task[T]:
        """The candidate's answer; where that takes too long, what goes on to wait for it."""
        loop = asyncio.get_running_loop()
        answers, began = self._answers, loop.time()
        task = asyncio.create_task(answer)
        self._awaited += 1
        try:
            due = began + self.seconds
            while not task.done():
                await asyncio.wait((task,), timeout=due - loop.time())
                now, wait_s = loop.time(), self.seconds
                if now - began >= wait_s and now - due <= STALLED * wait_s:
                    break
                due = max(began + wait_s, now + STALLED * wait_s)
        except asyncio.CancelledError:  # its client has left
            await ended(task)
            raise
        finally:
            self._awaited -= 1
        if task.done():
            return task.result()
        self._in_vain = self._answers == answers
        self._going_on.add(task)
        task.add_done_callback(self._going_on.discard)
        return task


async def ended(task: asyncio.Task[Any]) -> None:
    """Cancel it, and wait until it has cleared up."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
