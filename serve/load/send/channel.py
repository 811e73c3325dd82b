"""A connection between a load's coordinator and one generator process: each notices when the other is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from serve.load.send.wire import LENGTHS, MOST_BYTES, WireError, lengths_of, message_of, pack

__all__ = ["SILENCE_S", "Channel"]

BEAT_S = 1.0
SILENCE_S = 15.0
"""Who has sent nothing for so long is gone: frozen, or behind a dead link, which TCP tells after hours or never."""
PIECE = 1 << 20
HANG_UP_S = 1.0
_BEAT = {"is": "alive"}


class Channel:
    """Frames both ways. Whatever ends it is a WireError for who listens, and nothing for who speaks.

    Args:
        reader, writer: of the connection.

    Attributes:
        lost: why it has ended, for a sentence about the other side; "" while it has not.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._beating: asyncio.Task[None] | None = None
        self.lost = ""

    def beat(self) -> None:
        """Say from now on, each second, that this side is there."""
        if self._beating is None:
            self._beating = asyncio.ensure_future(self._beat())

    def tell(self, message: Mapping[str, Any], blob: bytes = b"") -> None:
        self.tell_frame(pack(message, blob))

    def tell_frame(self, frame: bytes) -> None:
        """Send what `pack` made. Where the other side is gone, who listens to it learns that."""
        if self.lost:
            return
        try:
            self._writer.write(frame)
        except (OSError, RuntimeError) as err:  # uvloop's, of a transport that is closed
            self.lose(f"the connection broke: {err}")

    async def hear(self, most: int = MOST_BYTES, silence_s: float | None = None) -> tuple[dict[str, Any], bytes]:
        """The next frame.

        Args:
            most: bytes that it may have.
            silence_s: how long nothing may come, not a beat, until the other side is gone; None for `SILENCE_S`.

        Raises:
            WireError: none comes, or it is no frame.
        """
        silence_s = SILENCE_S if silence_s is None else silence_s
        while True:
            text_bytes, blob_bytes = lengths_of(await self._exactly(LENGTHS.size, silence_s), most)
            message = message_of(await self._exactly(text_bytes, silence_s))
            blob = await self._exactly(blob_bytes, silence_s)
            if message != _BEAT:
                return message, blob

    def lose(self, why: str) -> None:
        """Give the other side up; who waits to hear from it gets `why`."""
        self.lost = self.lost or why
        if self._beating is not None:
            self._beating.cancel()
        self._writer.transport.abort()

    async def close(self) -> None:
        """Send what is still to be sent, for a second at most, and see to it that the connection is closed.

        TLS says farewell first, which an event loop that ends cuts off.
        """
        if self._beating is not None:
            self._beating.cancel()
        with suppress(OSError, RuntimeError, TimeoutError):
            async with asyncio.timeout(HANG_UP_S):
                self._writer.close()
                await self._writer.wait_closed()
        self.lose("the connection was closed")

    async def _exactly(self, count: int, silence_s: float) -> bytes:
        pieces = []
        try:
            while count:
                async with asyncio.timeout(silence_s):
                    piece = await self._reader.read(min(count, PIECE))
                if not piece:
                    raise WireError(self.lost or "the connection was closed")
                pieces.append(piece)
                count -= len(piece)
        except TimeoutError as err:
            self.lose(f"nothing was heard of it for {silence_s:g} s")
            raise WireError(self.lost) from err
        except (OSError, RuntimeError) as err:
            self.lose(f"the connection broke: {err}")
            raise WireError(self.lost) from err
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            self.tell(_BEAT)
