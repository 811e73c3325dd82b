"""A stream of messages as its model server gets it: each message in a stream of its own.

Triton 24.10 dies (SIGSEGV) within seconds of streams of several messages to models that are not decoupled, while it
answers streams to decoupled ones, whoever's they are; of streams with one message it does not. Answers come in the
order of the messages all the same, and the messages of one sequence go in theirs: each waits until the one before is
answered.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

import grpc

from serve.gateway.grpc.parcel import Parcel

__all__ = ["Singly"]


class Singly:
    """Such a stream, with what is used of a call of grpc.aio's.

    Args:
        method: of the server's, that begins a stream with an iterator of messages.
        requests: the messages; ends without an error.
        sequence: of the message that was yielded last; None for none.
        one_by_one: send a message of no sequence only when all answers before it were read.
    """

    def __init__(
        self,
        method: Callable[[AsyncIterator[Parcel]], Any],
        requests: AsyncIterator[Parcel],
        sequence: Callable[[], bytes | None],
        *,
        one_by_one: bool,
    ) -> None:
        self._method = method
        self._sequence = sequence
        self._one_by_one = one_by_one
        self._messages: deque[_Message] = deque()  # whose answers are not all read
        self._last: dict[bytes, _Message] = {}  # of each sequence
        self._more = asyncio.Event()
        self._cancelled = False
        self._taking = asyncio.ensure_future(self._take(requests))

    async def read(self) -> Any:
        """The next answer, or grpc.aio.EOF; raises AioRpcError where a message's stream failed."""
        while True:
            while not self._messages:
                if self._cancelled:
                    raise asyncio.CancelledError
                if self._taking.done():
                    return grpc.aio.EOF
                self._more.clear()
                await self._more.wait()
            message = self._messages[0]
            answer = await (await message.call).read()
            if answer is not grpc.aio.EOF:
                return answer
            self._messages.popleft()
            message.over.set_result(None)
            if message.sequence is not None and self._last.get(message.sequence) is message:
                del self._last[message.sequence]

    def cancel(self) -> None:
        """End it, whatever is under way."""
        self._cancelled = True
        self._taking.cancel()
        for message in self._messages:
            message.cancel()
        self._more.set()

    async def _take(self, requests: AsyncIterator[Parcel]) -> None:
        try:
            async for request in requests:
                sequence = self._sequence()
                before: asyncio.Future[None] | None = None
                if sequence is not None:
                    before = self._last[sequence].begun if sequence in self._last else None
                elif self._one_by_one and self._messages:
                    before = self._messages[-1].over
                message = _Message(self._method, request, sequence, before)
                if sequence is not None:
                    self._last[sequence] = message
                self._messages.append(message)
                self._more.set()
        finally:
            self._more.set()


class _Message:
    """One message.

    Attributes:
        call: its stream, once it was sent.
        begun: done when its answer has begun to come, or none will.
        over: done when its answers were read.
    """

    def __init__(
        self,
        method: Callable[[AsyncIterator[Parcel]], Any],
        request: Parcel,
        sequence: bytes | None,
        before: asyncio.Future[None] | None,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.sequence = sequence
        self.call: asyncio.Future[Any] = loop.create_future()
        self.over: asyncio.Future[None] = loop.create_future()
        self.begun: asyncio.Future[None] = asyncio.ensure_future(self._send(method, request, before))

    async def _send(
        self,
        method: Callable[[AsyncIterator[Parcel]], Any],
        request: Parcel,
        before: asyncio.Future[None] | None,
    ) -> None:
        if before is not None:
            await asyncio.wait((before,))
        call = method(_once(request))
        self.call.set_result(call)
        with contextlib.suppress(grpc.aio.AioRpcError):  # whoever reads is told
            await call.initial_metadata()

    def cancel(self) -> None:
        self.begun.cancel()
        if self.call.done() and not self.call.cancelled():
            self.call.result().cancel()
        self.call.cancel()
        self.over.cancel()


async def _once(request: Parcel) -> AsyncGenerator[Parcel]:
    yield request
