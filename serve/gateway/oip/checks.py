"""What is looked at element by element: away from the event loop where it is long, and one at a time.

A thread that walks millions of elements keeps Python's lock for 5 ms whenever the event loop wants it. So it lets go of
it about every millisecond, for as long as the loop needs to take it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial

from serve.gateway.access.long_work import LongWork

__all__ = ["Checks"]

LONG_BYTES = 16 * 1024  # some thousands of empty texts
REST_S = 0.0002


class Checks:
    """Of one gateway."""

    def __init__(self) -> None:
        self._turns = LongWork()

    async def check(self, who: str, size: int, check: Callable[[Callable[[], object]], None]) -> None:
        """Have something checked, keys in turn; raises what that raises.

        Args:
            who: a key, or an address.
            size: bytes that are walked.
            check: gets what to call about every millisecond.
        """
        if size <= LONG_BYTES:
            check(_nothing)
            return
        turn = await self._turns.turn(who)
        work = asyncio.ensure_future(asyncio.to_thread(check, partial(time.sleep, REST_S)))

        def over(done: asyncio.Future[None]) -> None:
            turn.end()
            if not done.cancelled():
                done.exception()  # whoever waited for it may have left

        work.add_done_callback(over)
        await asyncio.shield(work)


def _nothing() -> None:
    """It is short."""
