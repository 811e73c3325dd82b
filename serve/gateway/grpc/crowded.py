"""Messages that have come while others have the room: copies on their way to Triton, and what is about to be refused.

Both are gone within milliseconds, and belong to whoever has much; who has room of its own is not refused for them.
"""

from __future__ import annotations

import asyncio

from serve.gateway.access.memory import Memory, Share

__all__ = ["Crowded"]

ROOM_S, LOOK_S = 0.5, 0.01


class Crowded:
    """Counts messages once they were read.

    Args:
        memory: of the gateway.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._one_waits = False

    async def take(self, share: Share, size: int) -> None:
        """Hold so many bytes more, which are there already.

        One message at a time waits for its room, and is counted meanwhile: so what is over the bound is one of them.

        Raises:
            MemoryFullError: its key has as much as it may, or there was no room for a while.
        """
        if self._one_waits or not share.crowded(size):
            share.take(size)
            return
        before = share.size
        self._one_waits = True
        try:
            share.hold(before + size)
            until = asyncio.get_running_loop().time() + ROOM_S
            while self._memory.used > self._memory.most_long:
                if asyncio.get_running_loop().time() > until:
                    break
                await asyncio.sleep(LOOK_S)
        except asyncio.CancelledError:
            share.resize(before)
            raise
        finally:
            self._one_waits = False
        share.resize(before)
        share.take(size)
