"""Room for the copy that gRPC has of a long message until it is sent to Triton."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from serve.gateway.access.memory import MemoryFullError, Share

__all__ = ["Sending"]

ROOM_S, LOOK_S = 2.0, 0.02


class Sending:
    """Of one gateway: one copy at a time is foreseen whatever there is (`footprint.PASSING`), further ones are counted.

    They count for no key: where a key has as much as it may, its messages are sent one after the other.
    """

    def __init__(self) -> None:
        self._one = False

    @asynccontextmanager
    async def copy(self, share: Share, size: int) -> AsyncIterator[None]:
        """While it lasts, there may be a copy; waits for it a while.

        Args:
            share: of the call that sends.
            size: bytes of the message.

        Raises:
            MemoryFullError: there is no room for it.
        """
        until = asyncio.get_running_loop().time() + ROOM_S
        with share.beside() as copy:
            while self._one and not copy.fits(size):
                if asyncio.get_running_loop().time() > until:
                    break
                await asyncio.sleep(LOOK_S)
            mine = not self._one
            try:
                if mine:
                    self._one = True
                else:
                    _take(copy, size)
                yield
            finally:
                if mine:
                    self._one = False


def _take(copy: Share, size: int) -> None:
    try:
        copy.take(size)
    except MemoryFullError as err:
        err.sent = False
        raise
