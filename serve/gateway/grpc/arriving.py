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

from serve.gateway.access.memory import MemoryFullError, Share

__all__ = ["UNREAD_STAYS", "Arriving"]

# Else the library takes ever more of what nobody has asked for, where the network is fast.
UNREAD_STAYS = ("grpc.http2.bdp_probe", 0)


class Arriving:
    """Whose turn it is, by key."""

    def __init__(self) -> None:
        self._turns: dict[str, asyncio.Lock] = {}

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
                answer = await call.read()
                try:
                    if isinstance(answer, bytes) and wanted:
                        share.take(len(answer))
                except MemoryFullError:
                    answer = None
                    await call.code()
                    raise
        finally:
            if not turn.locked() and self._turns.get(share.key) is turn:
                del self._turns[share.key]
        if not isinstance(answer, bytes):
            raise grpc.aio.AioRpcError(
                grpc.StatusCode.INTERNAL, grpc.aio.Metadata(), grpc.aio.Metadata(), "there was no answer"
            )
        await call.code()
        return answer
