"""Turns on a model: for a while it serves the requests of one owner at a time, so that a death tells whose it was.

They are taken where a death was shared by several. Each owner that waits has the next turn, first come first served; it
lasts `TURN_S` while others wait, and those that do not end are not waited for longer than `overrun_s`: what one owner
can keep the others waiting for is bounded, and so is the share of the time that turns may take.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection

from serve.gateway.errors import OverloadedError

__all__ = ["BusyTurnError", "Turns"]

TURN_S = 0.25
OVERRUN_S, LONGEST_OVERRUN_S = 2.0, 16.0
WAIT_S = 10.0
MOST_WAITING = 1024
LONGEST_DOWN_S = 120.0
REST = 4.0  # times as long as turns were taken for one suspect, none are taken for another


class BusyTurnError(OverloadedError):
    """The turn did not come in time."""

    def __init__(self, model: str) -> None:
        super().__init__(
            f"the model {model!r} is asked by one client at a time for the moment",
            why="its process has ended, and it is being found out which request did it",
            mend="try again when Retry-After says",
        )


class Turns:
    """Who may ask, while requests are held apart.

    Args:
        strangers: whether a request that has no turn, and is not this owner's, is with one of these models (None for
            any).
        clock: seconds that never go back.
    """

    def __init__(
        self,
        strangers: Callable[[str, frozenset[str] | None], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.overrun_s = OVERRUN_S
        self.holding: Counter[str] = Counter()
        self._strangers = strangers
        self._clock = clock
        self._taken = False
        self._models: frozenset[str] | None = frozenset()
        self._until = self._begun = self._rested = 0.0
        self._guests = 0  # suspects for which turns are taken beyond that time
        self._owner = ""
        self._since = self._asked = 0.0
        self._down: set[str | None] = set()  # models that are not served again yet; None for all
        self._queue: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def taken(self) -> bool:
        """Whether there are turns at all."""
        if self._taken and not self._guests and self._clock() >= self._until:
            self._close()
        return self._taken

    @property
    def lasting(self) -> bool:
        """Whether they are taken for a time, not for single suspects alone."""
        return self._taken and self._clock() < self._until

    def covers(self, model: str) -> bool:
        """Whether a request for this model needs a turn."""
        return self.taken and (self._models is None or model in self._models)

    def begin(self, models: Collection[str] | None, seconds: float) -> None:
        """Requests for these models (None for all) take turns for so long."""
        now = self._clock()
        if not self.taken:
            self._taken, self._models, self._begun = True, frozenset(), now
        both = None if self._models is None or models is None else self._models | frozenset(models)
        self._models = both
        self._until = max(self._until, now + seconds)

    def suspend(self, models: Collection[str] | None) -> None:
        """These models died, of a request that is not known: turns begin when they are served again."""
        self.begin(models, LONGEST_DOWN_S)
        self._down.update({None} if models is None else models)

    def resume(self, models: Collection[str] | None, seconds: float) -> None:
        """These models (None for all) are served again: there are turns for so long, where they had died."""
        back = self._down if models is None else self._down.intersection(models)
        if back:
            self.begin(None if None in back else {each for each in back if each is not None}, seconds)
            self._down = self._down - back
            self._until = self._clock() + seconds
            self._advance()

    def invite(self, models: Collection[str] | None, *, at_once: bool = False) -> bool:
        """Take turns for one suspect, unless they were taken for others a moment ago; `excuse` must follow.

        Args:
            models: that it is suspected to end; None for all.
            at_once: whether turns were taken a moment ago or not. For one that shared several deaths: whoever invites
                it spends one of these for each invitation.
        """
        now = self._clock()
        rests = (self._guests and now >= self._until) if self.taken else now < self._rested
        if rests and not at_once:
            return False
        self.begin(models, 0.0)
        self._guests += 1
        return True

    def excuse(self) -> None:
        """The suspect is over."""
        self._guests -= 1
        self._advance()

    async def take(self, owner: str, model: str, patience_s: float) -> bool:
        """Wait for a turn; False where none is needed, else `leave` must follow.

        Raises:
            BusyTurnError: it did not come in time, or too many wait.
        """
        if not self.covers(model):
            return False
        if self._joins(owner):
            self._let_in(owner)
            return True
        if sum(map(len, self._queue.values())) >= MOST_WAITING:
            raise BusyTurnError(model)
        turn = asyncio.get_running_loop().create_future()
        if not self._queue:
            self._asked = self._clock()
        self._queue.setdefault(owner, deque()).append(turn)
        self._advance()
        try:
            async with asyncio.timeout(min(patience_s, max(WAIT_S, 2 * self.overrun_s))):
                await turn
        except BaseException as err:
            if turn.done() and not turn.cancelled():
                self.leave(owner)
            else:
                self._drop(owner, turn)
            if isinstance(err, TimeoutError):
                raise BusyTurnError(model) from None
            raise
        return True

    def leave(self, owner: str) -> None:
        """A request that had a turn is over."""
        self.holding[owner] -= 1
        if self.holding[owner] <= 0:
            del self.holding[owner]
        self._advance()

    def moved(self) -> None:
        """A request without a turn is over."""
        if self._taken:
            self._advance()

    def _joins(self, owner: str) -> bool:
        now = self._clock()
        if self._queue and (self._owner != owner or now - self._since >= TURN_S):
            return False
        if self.holding.keys() <= {owner} and not self._strangers(owner, self._models):
            if not self.holding:
                self._since = now
            return True
        return False

    def _let_in(self, owner: str) -> None:
        self._owner = owner
        self.holding[owner] += 1

    def _drop(self, owner: str, turn: asyncio.Future[None]) -> None:
        waiting = self._queue.get(owner)
        if waiting is not None and turn in waiting:
            waiting.remove(turn)
            if not waiting:
                del self._queue[owner]
        self._advance()

    def _advance(self, *, late: bool = False) -> None:
        if not self.taken:
            return
        if self._timer is not None and not late:
            self._timer.cancel()
        self._timer = None
        if not self._queue:
            return
        now = self._clock()
        owner = next(iter(self._queue))
        free = not self.holding and not self._strangers(owner, self._models)
        if free or late:
            self._since = self._asked = now
            for turn in self._queue.pop(owner):
                if not turn.done():
                    self._let_in(owner)
                    turn.set_result(None)
        if self._queue or not free:
            ends = max(self._asked, self._begun) + self.overrun_s
            left = max(ends - now, 0.01)
            if self._until > now and not self._guests:
                left = min(left, self._until - now + 0.01)
            self._timer = asyncio.get_running_loop().call_later(left, self._late)

    def _late(self) -> None:
        now = self._clock()
        self._advance(late=now >= max(self._asked, self._begun) + self.overrun_s)

    def _close(self) -> None:
        self._taken = False
        now = self._clock()
        self._rested = now + REST * min(now - self._begun, LONGEST_OVERRUN_S)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        queue, self._queue = self._queue, OrderedDict()
        for owner, waiting in queue.items():
            for turn in waiting:
                if not turn.done():
                    self.holding[owner] += 1  # they leave as those do that had their turn
                    turn.set_result(None)
