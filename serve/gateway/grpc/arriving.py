"""Long answers on their way from Triton over gRPC: of one key, one at a time.

The library reads a message whole before it can be seen. But until it is asked to, it takes no more of one than the
first 64 KiB: so that an answer has begun to come is known, and it is only read when its turn has come, and counted
before the next one's. What of a key's answers is not counted is then one of them, however many it asks for at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc

from serve.gateway.access.long_work import LongWork
from serve.gateway.access.memory import MemoryFullError, Share

__all__ = ["UNREAD_STAYS", "Arriving", "last_of"]

ROOM_S, LOOK_S = 0.5, 0.02

# Else the library takes ever more of what nobody has asked for, where the network is fast.
UNREAD_STAYS = ("grpc.http2.bdp_probe", 0)


class Arriving:
    """Whose turn it is, by key.

    Args:
        long_work: has the turns of what holds the event loop; its own by default.
    """

    def __init__(self, long_work: LongWork | None = None) -> None:
        self._turns: dict[str, asyncio.Lock] = {}
        self._lengths: dict[str, int] = {}  # of the last answer of each that has turns
        self._long_work = long_work or LongWork()

    async def answer(self, call: Any, share: Share, wanted: Sequence[bool] = (True,)) -> bytes:
        """The one answer of a call, which was begun with `unary_stream`; the call is not cancelled before it ends.

        Args:
            share: counts the answer, for its key.
            wanted: empty once nobody waits for it any more: the share is closed then, or will be.

        Raises:
            grpc.aio.AioRpcError: there is none.
            MemoryFullError: there is no room for it.
        """
        await call.initial_metadata()
        turn = self._turns.setdefault(share.key, asyncio.Lock())
        try:
            async with turn:
                await self._room(share, wanted)
                answer = await self._long_work.steps(share.key, call.read(), first=False)
                try:
                    if isinstance(answer, bytes) and wanted:
                        self._lengths[share.key] = len(answer)
                        share.take(len(answer))
                except MemoryFullError:
                    answer = None
                    await call.code()
                    raise
        finally:
            if not turn.locked() and self._turns.get(share.key) is turn:
                del self._turns[share.key]
                self._lengths.pop(share.key, None)
        return await last_of(call, answer)

    async def _room(self, share: Share, wanted: Sequence[bool]) -> None:
        """Wait a while for room for another one like the last, of which gRPC has a copy once it goes to its client."""
        until = asyncio.get_running_loop().time() + ROOM_S
        while wanted and not share.fits(2 * self._lengths.get(share.key, 0)):
            if asyncio.get_running_loop().time() > until:
                return  # it may be shorter
            await asyncio.sleep(LOOK_S)


async def last_of(call: Any, answer: object) -> bytes:
    """The one answer of a call, once that is over; raises grpc.aio.AioRpcError for none."""
    if not isinstance(answer, bytes):
        raise grpc.aio.AioRpcError(
            grpc.StatusCode.INTERNAL, grpc.aio.Metadata(), grpc.aio.Metadata(), "there was no answer"
        )
    await call.code()
    return answer
