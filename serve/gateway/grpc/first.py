"""First messages of the sequences of one stream: each is answered within a bound, as over HTTP, or the stream ends."""

from __future__ import annotations

import asyncio

from serve.gateway.access.slots import NoSlotError, Turn

__all__ = ["First"]


class First:
    """Those that are with Triton.

    Args:
        seconds: that one may wait for its answer, and so for its slot; may be infinite.

    Attributes:
        late: done, with NoSlotError, once one was not answered in time.
    """

    def __init__(self, seconds: float) -> None:
        self.late: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._seconds = seconds
        self._timers: dict[Turn, asyncio.TimerHandle] = {}

    def sent(self, turn: Turn) -> None:
        """A message of a sequence goes to Triton."""
        if turn.begins and self._seconds < float("inf"):
            self._timers[turn] = asyncio.get_running_loop().call_later(self._seconds, self._is_late)

    def answered(self, turn: Turn) -> None:
        """Its last answer has come."""
        if (timer := self._timers.pop(turn, None)) is not None:
            timer.cancel()

    def end(self) -> None:
        """The stream is over."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        self.late.cancel()

    def _is_late(self) -> None:
        if not self.late.done():
            self.late.set_exception(NoSlotError(self._seconds))
            self.late.exception()  # whoever reads may be busy with the client
