"""What the gateway answers when a request can't be served: each error carries its HTTP status.

GatewayError
├── BadRequestError         400
├── UnknownModelError       404
├── BodyTooLargeError       413
├── UnsupportedMediaError   415
├── BadInputError           422
├── UpstreamBrokenError     502
├── UpstreamDownError       503
└── UpstreamTimeoutError    504

ClientGoneError is none of them: nobody is left to answer.
"""

from __future__ import annotations

import asyncio
import contextlib

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

__all__ = [
    "BadInputError",
    "BadRequestError",
    "BodyTooLargeError",
    "ClientGoneError",
    "GatewayError",
    "Refusal",
    "UnknownModelError",
    "UnsupportedMediaError",
    "UpstreamBrokenError",
    "UpstreamDownError",
    "UpstreamTimeoutError",
]

DISCARD_S = 2.0


class ClientGoneError(Exception):
    """The client closed its connection before it was answered."""


class GatewayError(Exception):
    """A request that can't be served.

    Args:
        error: what failed.
        why: the cause.
        mend: what the caller can do about it.
        status: in place of the class's own.
    """

    status = 500

    def __init__(self, error: str, *, why: str = "", mend: str = "", status: int | None = None) -> None:
        super().__init__(error)
        self.error = error
        self.why = why
        self.mend = mend
        self.status = status or type(self).status

    @property
    def body(self) -> bytes:
        """JSON: {"error": what, "why": ..., "mend": ...}, without the parts that are empty."""
        parts = {"error": self.error, "why": self.why, "mend": self.mend}
        return orjson.dumps({key: text for key, text in parts.items() if text})


class BadRequestError(GatewayError):
    """A request that is not well formed."""

    status = 400


class UnknownModelError(GatewayError):
    """No such model, or not this version."""

    status = 404


class BodyTooLargeError(GatewayError):
    """A request body over the bound."""

    status = 413

    def __init__(self, limit: int) -> None:
        super().__init__(
            "the request body is too large",
            why=f"it is over {limit} bytes",
            mend="send less at a time, or raise the gateway's max_body_bytes",
        )
        self.limit = limit


class UnsupportedMediaError(GatewayError):
    """A content type that the route does not read."""

    status = 415


class BadInputError(GatewayError):
    """A well-formed request whose values don't fit the model."""

    status = 422


class UpstreamBrokenError(GatewayError):
    """Triton's answer was not one."""

    status = 502


class UpstreamDownError(GatewayError):
    """Triton can't be reached, or takes no more connections."""

    status = 503


class UpstreamTimeoutError(GatewayError):
    """Triton took too long."""

    status = 504


class Refusal(Response):
    """The answer that a GatewayError makes."""

    def __init__(self, error: GatewayError) -> None:
        super().__init__(error.body, error.status, media_type="application/json")
        self._discard_bytes = 0
        if isinstance(error, BodyTooLargeError):
            self.headers["connection"] = "close"
            self._discard_bytes = error.limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._discard_bytes:
            await super().__call__(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        # To close on unread bytes resets the connection, and the answer may be lost: discard some of them first.
        discarded = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DISCARD_S):
                while discarded < self._discard_bytes:
                    message = await receive()
                    discarded += len(message.get("body", b""))
                    if not message.get("more_body"):
                        break
        await send({"type": "http.response.body", "body": b""})
