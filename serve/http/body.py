"""A request body that is still coming while it is being sent on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

__all__ = ["GrowingBody", "add_part"]

SMALL_BYTES = 4096  # of a part, below which a copy costs less than an object of its own
JOINED_BYTES = 64 * 1024


def add_part(parts: list[bytes | bytearray], part: bytes) -> None:
    """Add it to the parts of a body, a small one to the end of the last: alone, a byte would take forty."""
    if len(part) >= SMALL_BYTES:
        parts.append(part)
    elif parts and isinstance(parts[-1], bytearray) and len(parts[-1]) < JOINED_BYTES:
        parts[-1] += part
    else:
        parts.append(bytearray(part))


class GrowingBody:
    """A body of known length that comes in parts; all of them are kept, so that it can be sent again.

    Args:
        first: what is there.
        length: of the whole.
    """

    __slots__ = ("_error", "_parts", "_size", "_waiter", "_write", "length")

    def __init__(self, first: bytes, length: int) -> None:
        self.length = length
        self._error: Exception | None = None
        self._parts: list[bytes | bytearray] = [first]
        self._size = len(first)
        self._write: Callable[[bytes], object] | None = None
        self._waiter: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        return self.length

    def __contains__(self, text: bytes) -> bool:
        return text in b"".join(self._parts)

    @property
    def whole(self) -> bool:
        """Whether all of it has come."""
        return self._size >= self.length

    def head(self, length: int) -> bytes:
        """Its first bytes, which are there from the beginning."""
        return bytes(self._parts[0][:length])

    def replace_head(self, length: int, head: bytes) -> None:
        """Put another head before what follows the first `length` bytes; nobody has been given any of it yet."""
        self._parts[0] = head + self._parts[0][length:]
        self.length += len(head) - length
        self._size += len(head) - length

    def add(self, part: bytes) -> None:
        """Another part has come."""
        add_part(self._parts, part)
        self._size += len(part)
        if self._write is not None:
            self._write(part)
        if self.whole and self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    @property
    def failed(self) -> bool:
        """Whether no more will come."""
        return self._error is not None

    def fail(self, error: Exception) -> None:
        """No more will come, and what came is of no use."""
        self._error = error
        self._parts, self._size = [], 0
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(error)

    def end(self) -> None:
        """Whoever asked for it is through: what has not come by now is not kept, nor what did."""
        if not self.whole and not self.failed:
            self.fail(ConnectionAbortedError("the request was answered before its body had come"))

    def attach(self, write: Callable[[bytes], object]) -> None:
        """Write what there is, and what comes as it comes."""
        for part in self._parts:
            write(bytes(part))  # what is written may be kept, and must not grow
        self._write = write

    def detach(self) -> None:
        """Write no more."""
        self._write = None

    def so_far(self) -> bytes:
        """What has come."""
        return b"".join(self._parts)

    async def wait(self) -> bytes:
        """All of it, once it has come; raises what `fail` was given."""
        if self._error is not None:
            raise self._error
        if not self.whole:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return b"".join(self._parts)
