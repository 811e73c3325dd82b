"""A stream's way to Triton, and what is done at its end."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from serve.gateway.grpc.relay import Relay

__all__ = ["Way"]


class Way:
    """One of them.

    Args:
        late: done once what it waits for is not waited for any longer, with the reason.

    Attributes:
        call: to Triton.
        reading: what reads an answer of it.
        relay, channel: where answers may be long, and the stream has a connection of its own.
    """

    def __init__(self, late: asyncio.Future[None] | None = None) -> None:
        self._late = late
        self.call: Any = None
        self.reading: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.relay: Relay | None = None
        self.channel: Any = None
        self._thrown = 0

    async def answer(self) -> None:
        """Wait for what reads; raises MemoryFullError, and as `late` does."""
        full = None if self.relay is None else self.relay.full
        ends = [each for each in (self._late, full) if each is not None]
        await asyncio.wait((self.reading, *ends), return_when=asyncio.FIRST_COMPLETED)
        if not self.reading.done():
            for each in ends:
                if each.done():
                    each.result()

    def taken(self, size: int) -> None:
        """An answer is no longer held."""
        if self.relay is not None:
            self.relay.taken(size)

    async def read_to_its_end(self) -> int:
        """Nothing of it is held where answers may be long; gives the bytes that came."""
        if self.relay is not None:
            self.relay.discard()
        while (answer := await self.reading) is not grpc.aio.EOF:
            self._thrown += len(answer)
            self.reading = asyncio.ensure_future(self.call.read())
        return self.thrown

    @property
    def thrown(self) -> int:
        """Bytes of answers that nobody waited for."""
        return self._thrown + (0 if self.relay is None else self.relay.thrown)

    async def end(self) -> None:
        if self.call is not None:
            self.call.cancel()
        if self.channel is not None:
            await self.channel.close()
        if self.relay is not None:
            await self.relay.close()
