"""Answers of a length that nobody knows, to clients of HTTP/1.0: these know no chunks (RFC 9112, section 6.1).

The end of the connection is the answer's end there (section 6.3). One that was cut short can't be told from it.
"""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

__all__ = ["UntilClosed"]


class UntilClosed:
    """What an application sends, in place of the cycle's `send`.

    Args:
        cycle: of one request.
    """

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._send = cycle.send
        self._unframed = False

    async def __call__(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            told = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            bodiless = self._cycle.scope["method"] == "HEAD" or message["status"] in (204, 304)
            if not (told or bodiless):
                self._unframed, self._cycle.chunked_encoding, self._cycle.keep_alive = True, False, False
        elif self._unframed:
            self._cycle.expected_content_length = len(message.get("body", b""))
        await self._send(message)
