"""Clients' connections: uvicorn's protocol, which by itself would wait for ever for the rest of a request's head."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

__all__ = ["connection_class"]

SLOW = b'{"error":"the request\'s head did not come in time","mend":"send it at once"}'
ANSWER = (
    b"HTTP/1.1 408 Request Timeout\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
    % len(SLOW)
) + SLOW
MAX_HEAD_BYTES = 64 * 1024


def connection_class(head_timeout_s: float, stopping: asyncio.Event) -> type[HttpToolsProtocol]:
    """The class of a gateway's connections.

    Args:
        head_timeout_s: for a request's head, and for the first byte of a fresh connection.
        stopping: once it is set, each answer is its connection's last: clients come back to whoever listens then.
    """

    class Connection(HttpToolsProtocol):
        _timer: asyncio.TimerHandle | None = None
        _in_head = False
        _head_bytes = 0

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._timer = self.loop.call_later(head_timeout_s, self._slow)

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timer()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            self._head_bytes += len(data)
            super().data_received(data)
            if not self._in_head:
                if self._timer is not None:
                    self._stop_timer()
            elif self._head_bytes > MAX_HEAD_BYTES:
                self.send_400_response("The request's head is too long.")
            elif self._timer is None:
                self._timer = self.loop.call_later(head_timeout_s, self._slow)

        def on_message_begin(self) -> None:
            self._in_head = True
            self._head_bytes = 0
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            self._in_head = False
            super().on_headers_complete()
            if stopping.is_set() and self.cycle is not None:
                self.cycle.keep_alive = False

        def _stop_timer(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _slow(self) -> None:
            self._timer = None
            if not self.transport.is_closing():
                if self._in_head:
                    self.transport.write(ANSWER)
                self.transport.close()

    return Connection
