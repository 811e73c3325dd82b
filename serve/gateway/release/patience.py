"""How long a client waits for a candidate before the baseline is asked, and how many that gets while it answers none.

All places of a name may be with a candidate that hangs. So its client gets the baseline's answer where the candidate
has not answered in twice the longest answer of late, and in a second; where that is more than half of the client's
time, in that, or a quarter longer than the longest, but in 80% of its time. Until the candidate answers one, it is
asked one at a time. What it was asked goes on meanwhile, and counts for or against it as if its client had waited: what
was in the way of one is not known before it is answered.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

__all__ = ["IN_LINE", "InLine", "Patience", "ended"]

T = TypeVar("T")
LEAST_S, FACTOR, LONG_FACTOR = 1.0, 2.0, 1.25
FADES = 63 / 64  # the longest answer, with each one
HURRIED = 0.1  # of the least that others wait
MOST_OF_TIME = 0.8  # that a client has
STALLED_S = 0.005
STALLED = 0.1  # of the time: where the loop looks so late, it stood still, and an answer may be there
MOST = 16  # that a candidate has which answers none: some 12 failures prove that it is worse
MOST_GOING_ON = 64  # whose clients have the baseline's answer


class InLine:
    """For how long a request waits for its turn, as a suspect: that says nothing of the model."""

    def __init__(self) -> None:
        self._waited_s = 0.0
        self._since: float | None = None

    @property
    def seconds(self) -> float:
        """So far."""
        return self._waited_s + (0.0 if self._since is None else time.monotonic() - self._since)

    def enter(self) -> None:
        """It begins to wait."""
        self._since = time.monotonic()

    def leave(self) -> None:
        """It waits no more; again does no harm."""
        self._waited_s, self._since = self.seconds, None

    @classmethod
    @contextmanager
    def watched(cls) -> Iterator[InLine]:
        """That of a model that the task at hand asks, where whoever waits for it doesn't watch that already."""
        if (given := IN_LINE.get()) is not None:
            yield given
            return
        own = cls()
        above = IN_LINE.set(own)
        try:
            yield own
        finally:
            IN_LINE.reset(above)


IN_LINE: ContextVar[InLine | None] = ContextVar("in_line", default=None)


class Patience:
    """With one candidate.

    Attributes:
        in_vain: whether the last of its answers that anything is known of was waited for in vain.
    """

    def __init__(self) -> None:
        self._longest_s = 0.0
        self._answers = self._awaited = 0
        self._answered_at = -math.inf
        self._left_s = math.inf  # after which clients left that it did not answer
        self.in_vain = False
        self._going_on: set[asyncio.Task[Any]] = set()
        self._of_key: Counter[str] = Counter()

    @property
    def going_on(self) -> int:
        """Requests that the candidate has, and whose clients have the baseline's answer."""
        return len(self._going_on)

    def seconds(self, left_s: float = math.inf) -> float:
        """That a client waits for the candidate which has so many left."""
        longest_s, left_s = self._longest_s, min(left_s, self._left_s)
        most_s = min(LONG_FACTOR * longest_s, MOST_OF_TIME * left_s)
        return max(0.0, min(max(LEAST_S, FACTOR * longest_s), max(left_s / 2, most_s)))

    def is_spent(self, key: str) -> bool:
        """Whether the candidate has enough of a key, with this id, as it answers none, or many late."""
        if len(self._going_on) >= MOST_GOING_ON or self._of_key[key] >= MOST:
            return True
        return self.in_vain and (self._awaited > 0 or len(self._going_on) >= MOST)

    def _waited_in_vain(self, answers: int, waited_s: float) -> bool:
        """Note whether none was answered, while a client waited, since there were so many answers."""
        if self._answers != answers:
            self.in_vain = False
        elif waited_s >= max(self._longest_s / 2, HURRIED * LEAST_S):  # whoever is in a hurry can't tell
            self.in_vain = True
            return True
        return False

    def saw(self, seconds: float) -> None:
        """One of the two has answered, after so long."""
        self._longest_s = max(self._longest_s * FADES, seconds)

    def hears(self, late_s: float | None = None) -> None:
        """The candidate has answered, with whatever; or not in `late_s`, which is as long as any answer may take."""
        now = time.monotonic()
        if late_s is None:
            self._answers += 1
            self._answered_at = now
            self._left_s = math.inf
            self.in_vain = False
        elif now - self._answered_at >= late_s:  # else it has answered others since
            self.in_vain = True

    async def bear(
        self, answer: Coroutine[Any, Any, T], left_s: float = math.inf, key: str = ""
    ) -> T | asyncio.Task[T]:
        """The candidate's answer; where that takes too long, what goes on to wait for it.

        Args:
            left_s: seconds that its client has.
            key: the id of that client's key.
        """
        loop = asyncio.get_running_loop()
        answers, began, in_line = self._answers, loop.time(), InLine()
        above = IN_LINE.set(in_line)
        try:
            task = asyncio.create_task(answer)
        finally:
            IN_LINE.reset(above)
        self._awaited += 1
        try:
            due = began + self.seconds(left_s)
            while not task.done():
                await asyncio.wait((task,), timeout=due - loop.time())
                now, wait_s = loop.time(), self.seconds(left_s)
                slack_s = max(STALLED * wait_s, STALLED_S)
                if now - began >= left_s or (now - began >= wait_s and now - due <= slack_s):
                    break
                due = max(began + wait_s, now + slack_s)
        except asyncio.CancelledError:  # its client has left
            waited_s = loop.time() - began - in_line.seconds
            if self._waited_in_vain(answers, waited_s):
                self._left_s = min(self._left_s, waited_s)
            await ended(task)
            raise
        finally:
            self._awaited -= 1
        if task.done():
            return task.result()
        self._waited_in_vain(answers, loop.time() - began - in_line.seconds)
        self._going_on.add(task)
        self._of_key[key] += 1

        def over(_: object) -> None:
            self._going_on.discard(task)
            self._of_key[key] -= 1
            if not self._of_key[key]:
                del self._of_key[key]

        task.add_done_callback(over)
        return task


async def ended(*tasks: asyncio.Task[Any]) -> None:
    """Cancel them, and wait until they have cleared up."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
