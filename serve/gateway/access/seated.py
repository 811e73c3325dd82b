"""Requests of sequences among the places of their model.

One that begins a sequence while a slot is free has a place like any other, and counts for its key. But a free slot may
be another's by the time that Triton has the request: of a sequence whose first request was quicker, or that came by
another gateway. Then it waits there for what others do, perhaps for the end of a sequence that needs a place itself. So
it gives its place back, and says nothing of what its key's requests take, from when all slots are known to be
others', or when it has waited longer than an answer would need.

One whose sequence has a slot is waited for: it waits for a place as long as its client does, and not for what begins.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from serve.gateway.access.admission import Admission
from serve.gateway.access.begins import SLOT_S, Begins
from serve.gateway.access.left_behind import leave_once_through
from serve.gateway.access.memory import Share
from serve.gateway.access.slotless import Slotless
from serve.gateway.access.slots import Turn
from serve.gateway.health.flights import At

__all__ = ["Seated"]


class Seated:
    """Used as the model's places are, by one request of a sequence.

    Args:
        places: of the model.
        beside: where the key's requests stand whose sequences wait for slots.
        turn: of the request.
        begins: those of the gateway that have places.
    """

    def __init__(self, places: Admission, beside: Slotless, turn: Turn, begins: Begins) -> None:
        self._places = places
        self._beside = beside
        self._turn = turn
        self._begins = begins
        self._begun = 0.0
        self._aside = self._over = self._left = False
        self._timer: asyncio.TimerHandle | None = None

    def try_enter(self, who: str = "", priority: int = 5) -> bool:
        """As of `Admission`."""
        if not self._places.try_enter(who, priority):
            return False
        self._enters(who)
        return True

    async def enter(self, priority: int, patience_s: float, who: str = "") -> None:
        """As of `Admission`; the request is patient where others may wait for it."""
        if self._turn.begins:
            await self._enter_or_stand(priority, patience_s, who)
            return
        with self._begins.held_up(self._places):
            await self._places.enter(priority, patience_s, who, patient=self._turn.patient)
        self._enters(who)

    async def _enter_or_stand(self, priority: int, patience_s: float, who: str) -> None:
        """Wait for a place, or stand beside them as soon as it is known that it would wait there for its slot."""
        entering = asyncio.ensure_future(self._places.enter(priority, patience_s, who))
        self._turn.on_wait(entering.cancel)
        try:
            await asyncio.wait((entering,))
        except asyncio.CancelledError:
            if not entering.cancel() and not entering.cancelled() and entering.exception() is None:
                self._places.take_back(who)
            raise
        if entering.cancelled():
            self._aside = True
            self._beside.stand()
        else:
            entering.result()
            self._enters(who)

    def _enters(self, who: str) -> None:
        self._begun = self._places.now
        if self._turn.begins:
            self._begins.enter(self._places, self._turn)
            self._timer = asyncio.get_running_loop().call_later(SLOT_S, self._waited, who)
            self._turn.on_wait(partial(self._set_aside, who))

    def _waited(self, who: str) -> None:
        self._turn.waited()
        self._set_aside(who)

    def _set_aside(self, who: str) -> None:
        if not (self._aside or self._over):
            self._aside = True
            self._begins.leave(self._places, self._turn)
            self._beside.stand()
            self._comes_back()
            self._places.take_back(who, self._begun)

    def sent(self, who: str, was: At, at: At) -> None:
        """As of `Admission`."""
        if not self._aside:
            self._places.sent(who, was, at)

    def leave(self, seconds: float | None, size: int = 0, who: str = "", at: At | None = None) -> None:
        """As of `Admission`."""
        self._ends()
        if self._aside:
            self._beside.leave(None)
        else:
            self._comes_back()
            self._places.leave(seconds, size, who, at, self._begun)

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
        """As of `Admission`; until the server is through it may still be set aside."""

        def leave(answered: bool) -> None:
            if answered or all(each.done() for each in through):
                self.leave(time.monotonic() - started if answered else None, size, who, at)
            else:
                self.outlast(None, size, who, through, at)

        if not self._aside:
            self._left = True
            self._places.left += 1
        leave_once_through(ended, leave, size, held)

    def abandon(self, seconds: float, who: str = "", ended: Sequence[asyncio.Future[Any]] = (), size: int = 0) -> None:
        """As of `Admission`."""
        self._ends()
        if self._aside:
            self._beside.leave(None)
        else:
            self._places.abandon(seconds, who, ended, size)

    def outlast(
        self,
        seconds: float | None,
        size: int = 0,
        who: str = "",
        through: Sequence[asyncio.Future[Any]] = (),
        at: At | None = None,
    ) -> None:
        """As of `Admission`."""
        self._ends()
        if self._aside:
            self._beside.leave(None)
        else:
            self._comes_back()
            self._places.outlast(seconds, size, who, through, at, self._begun)

    def _comes_back(self) -> None:
        """Its place is about to be free, which its client may have left."""
        if self._left:
            self._left = False
            self._places.left -= 1

    def _ends(self) -> None:
        self._over = True
        self._begins.leave(self._places, self._turn)
        if self._timer is not None:
            self._timer.cancel()
