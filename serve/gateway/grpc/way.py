"""A stream's way to Triton, and what is done at its end."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from serve.gateway.grpc.relay import Relay

__all__ = ["Way"]

HEARD_S = 2.0  # in which a model that heeds a cancellation has ended


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
        self._stopped: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def stop(self) -> None:
        """Nobody is to wait for answers any more. Triton does not hear of it: it may go on for long after that."""
        if not self._stopped.done():
            self._stopped.set_result(None)

    async def answer(self) -> None:
        """Wait for what reads.

        Raises:
            MemoryFullError: there is no room for it.
            GatewayError: what `late` says.
            asyncio.CancelledError: it was stopped.
        """
        full = None if self.relay is None else self.relay.full
        ends = [each for each in (self._late, full) if each is not None]
        await asyncio.wait((self.reading, self._stopped, *ends), return_when=asyncio.FIRST_COMPLETED)
        if self._stopped.done():
            raise asyncio.CancelledError
        if not self.reading.done():
            for each in ends:
                if each.done():
                    each.result()

    def taken(self, size: int) -> None:
        """An answer is no longer held."""
        if self.relay is not None:
            self.relay.taken(size)

    async def read_to_its_end(self, patience_s: float, *, heeds: bool) -> int | None:
        """Take the answers that nobody waits for, until Triton says that there are no more.

        Nothing of them is held where they may be long. A stream that is cancelled ends at once here, and says no more
        of what Triton still does; while a decoupled model answers it, this may end Triton 24.10.

        Args:
            patience_s: how long that may take; then the stream is cancelled.
            heeds: whether the model ends soon then.

        Returns:
            The bytes that came; None where it has not come to its end, for all that is known.
        """
        try:
            async with asyncio.timeout(patience_s):
                if self.relay is not None:
                    self.relay.discard()
                while (answer := await self.reading) is not grpc.aio.EOF:
                    self._thrown += len(answer)
                    self.reading = asyncio.ensure_future(self.call.read())
        except TimeoutError:
            if not heeds:
                return None
            self.call.cancel()
            await asyncio.sleep(HEARD_S)
        except (grpc.aio.AioRpcError, grpc.aio.UsageError):
            pass
        return self._thrown + (0 if self.relay is None else self.relay.thrown)

    async def end(self) -> None:
        if self.call is not None:
            self.call.cancel()
        if self.channel is not None:
            await self.channel.close()
        if self.relay is not None:
            await self.relay.close()
