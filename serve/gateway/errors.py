"""What the gateway answers when a request can't be served: each error carries its HTTP status.

GatewayError
├── BadRequestError         400
├── UnauthorizedError       401
├── ForbiddenError          403
├── UnknownModelError       404
├── SlowBodyError           408
├── BodyTooLargeError       413
├── TooManyElementsError    413
├── UnsupportedMediaError   415
├── BadInputError           422
├── RateLimitedError        429
├── UpstreamBrokenError     502
│   └── AnswerTooLargeError
├── UpstreamDownError       503
├── OverloadedError         503
└── UpstreamTimeoutError    504

ClientGoneError is none of them: nobody is left to answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Sequence
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, Field
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

__all__ = [
    "NO_ROOM",
    "AnswerTooLargeError",
    "BadInputError",
    "BadRequestError",
    "BodyTooLargeError",
    "ClientGoneError",
    "EndsError",
    "ForbiddenError",
    "GatewayError",
    "NoRolloutError",
    "OverloadedError",
    "Problem",
    "RateLimitedError",
    "Refusal",
    "SlowBodyError",
    "TooManyElementsError",
    "UnauthorizedError",
    "UnknownModelError",
    "UnsupportedMediaError",
    "UpstreamBrokenError",
    "UpstreamDownError",
    "UpstreamTimeoutError",
    "bare",
]

E = TypeVar("E", bound=BaseException)
DISCARD_S, LONG_DISCARD_S = 2.0, 30.0
NO_ROOM = "there is no memory to write it as JSON"  # of an answer
DISCARD_BYTES = 256 * 1024 * 1024


class Problem(BaseModel):
    """Why there is no answer; Triton's own errors have the first part only."""

    error: str = Field(description="What failed.")
    why: str | None = Field(None, description="The cause.")
    mend: str | None = Field(None, description="What to do about it.")


class ClientGoneError(Exception):
    """The client closed its connection before it was answered."""


MOST_TOLD = 4096  # letters of each part: what a client sent must not come back at any length, counted by nobody


class GatewayError(Exception):
    """A request that can't be served.

    Args:
        error: what failed.
        why: the cause.
        mend: what the caller can do about it.
        status: in place of the class's own.
        headers: that go with the answer.
    """

    status = 500
    sent = True
    """Whether a model server may have got the request."""
    closes = False
    """Whether the connection ends with the answer, because the request was not read to its end."""

    def __init__(
        self,
        error: str,
        *,
        why: str = "",
        mend: str = "",
        status: int | None = None,
        headers: Sequence[tuple[bytes, bytes]] = (),
    ) -> None:
        super().__init__(error)
        self.headers = list(headers)
        self.error, self.why, self.mend = error[:MOST_TOLD], why[:MOST_TOLD], mend[:MOST_TOLD]
        self.status = status or type(self).status

    def __reduce__(self) -> tuple[Any, ...]:  # from another process: each class takes other arguments
        return _rebuilt, (type(self), self.__dict__)

    @property
    def body(self) -> bytes:
        """JSON: {"error": what, "why": ..., "mend": ...}, without the parts that are empty."""
        parts = {"error": self.error, "why": self.why, "mend": self.mend}
        return orjson.dumps({key: text for key, text in parts.items() if text})


def _rebuilt(kind: type[GatewayError], state: dict[str, Any]) -> GatewayError:
    error = kind.__new__(kind)
    error.__dict__.update(state)
    return error


class BadRequestError(GatewayError):
    """A request that is not well formed."""

    status = 400


class UnauthorizedError(GatewayError):
    """No key, or none that is valid."""

    status = 401

    def __init__(self, error: str, *, mend: str) -> None:
        super().__init__(error, mend=mend, headers=[(b"www-authenticate", b"Bearer")])


class ForbiddenError(GatewayError):
    """A valid key that may not do this."""

    status = 403


class UnknownModelError(GatewayError):
    """No such model, or not this version."""

    status = 404


class NoRolloutError(GatewayError):
    """There is no rollout under way that could be aborted."""

    status = 409

    def __init__(self, model: str, why: str = "none is under way") -> None:
        super().__init__(f"can't abort the rollout of {model!r}", why=why, mend="see GET /rollouts")


class _LaterError(GatewayError):
    """Not now: the answer says when.

    Args:
        retry_after_s: how long to wait, in seconds.
    """

    def __init__(
        self,
        error: str,
        *,
        why: str = "",
        mend: str = "",
        retry_after_s: float = 1.0,
        headers: Sequence[tuple[bytes, bytes]] = (),
    ) -> None:
        wait = b"%d" % max(1, math.ceil(retry_after_s))
        super().__init__(error, why=why, mend=mend, headers=[*headers, (b"retry-after", wait)])


class RateLimitedError(_LaterError):
    """The client has used up what it may ask."""

    status = 429
    sent = False


class HasItsConnectionsError(RateLimitedError):
    """The client has its share of the connections to a model server; this request was not sent."""

    def __init__(self, why: str) -> None:
        super().__init__(
            "too many requests of this key are with the model server",
            why=f"{why}, and the others are for other keys",
            mend="ask less at a time, or raise the gateway's max_connections",
        )


class OverloadedError(_LaterError):
    """More requests than can be answered in time: this one is turned away at once."""

    status = 503
    sent = False


class EndsError(_LaterError):
    """The gateway ends, and its time for what is under way is over."""

    status = 503

    def __init__(self) -> None:
        super().__init__("the gateway ends", mend="ask again, as another one may listen here soon", retry_after_s=1.0)


class SlowBodyError(GatewayError):
    """A body that was passed on as it came, and came too slowly."""

    status = 408


class BodyTooLargeError(GatewayError):
    """A request body over the bound."""

    status = 413
    closes = True

    def __init__(self, limit: int) -> None:
        super().__init__(
            "the request body is too large",
            why=f"it is over {limit} bytes",
            mend="send less at a time, or raise the gateway's max_body_bytes",
        )
        self.limit = limit


class TooManyElementsError(GatewayError):
    """An input tensor over the bound."""

    status = 413

    def __init__(self, name: str, elements: int, most: int) -> None:
        super().__init__(
            f"the input {name!r} is too large",
            why=f"it has {elements} elements, {most} are allowed",
            mend="send less at a time, or raise the gateway's max_elements",
        )


class UnsupportedMediaError(GatewayError):
    """A content type that the route does not read."""

    status = 415


class BadInputError(GatewayError):
    """A well-formed request whose values don't fit the model."""

    status = 422


class UpstreamBrokenError(GatewayError):
    """Triton's answer was not one."""

    status = 502


class AnswerTooLargeError(UpstreamBrokenError):
    """The model's answer is longer than the gateway holds of one.

    Args:
        why: how long it is, or may be.
    """

    def __init__(self, why: str) -> None:
        super().__init__(
            "the model's answer is too large",
            why=why,
            mend="ask for less at a time, or raise memory_bytes: an answer may take half of it, over gRPC a quarter",
        )


class UpstreamDownError(_LaterError):
    """Triton can't be reached, or takes no more connections.

    Attributes:
        sent: whether the request may have been with a server all the same, at an earlier try.
    """

    status = 503
    sent = False


class UpstreamTimeoutError(GatewayError):
    """Triton took too long."""

    status = 504


def bare(err: E) -> E:
    """An error without where it came from: its frames, and its causes', hold bodies.

    And such a frame may hold the error, in a future that it waited for: then only the garbage collector would free
    both.
    """
    found: list[BaseException | None] = [err]
    while found:
        one = found.pop()
        if one is not None:
            found += (one.__cause__, one.__context__)
            one.__cause__ = one.__context__ = one.__traceback__ = None
    return err


class Refusal(Response):
    """The answer that a GatewayError makes; `body` is what a route's own clients read in place of the error's."""

    def __init__(self, error: GatewayError, body: bytes | None = None) -> None:
        super().__init__(error.body if body is None else body, error.status, media_type="application/json")
        self.raw_headers += error.headers
        bare(error)  # this may take seconds
        self._discard_bytes, self._discard_s = 0, DISCARD_S
        if error.closes:
            self.headers["connection"] = "close"
        if isinstance(error, BodyTooLargeError):
            self._discard_bytes = 2 * error.limit
        elif error.closes:
            self._discard_bytes, self._discard_s = DISCARD_BYTES, LONG_DISCARD_S  # others are refused at the same time

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._discard_bytes:
            await super().__call__(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        # To close on unread bytes resets the connection, and the answer may be lost: discard some of them first.
        discarded = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._discard_s):
                while discarded < self._discard_bytes:
                    message = await receive()
                    discarded += len(message.get("body", b""))
                    if not message.get("more_body"):
                        break
        await send({"type": "http.response.body", "body": b""})
