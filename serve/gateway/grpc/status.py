"""How a call over gRPC ends that is refused, with the status that HTTP has; and the key that one carries."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, NoReturn

import grpc

from serve.gateway.access.identity import KEY_HEADERS
from serve.gateway.access.memory import MemoryFullError
from serve.gateway.errors import AnswerTooLargeError, BadRequestError, GatewayError, bare
from serve.gateway.health.outages import DEAD_STUB

__all__ = ["DEAD", "STATUSES", "Context", "EndedCallError", "keys_of", "refuse", "streaming", "too_large", "unary"]

CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    409: grpc.StatusCode.FAILED_PRECONDITION,
    413: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
STATUSES = {code: status for status, code in CODES.items() if status not in (408, 413)}
DEAD = re.compile(rb"(?:in ensemble '[^']*', )?" + DEAD_STUB)
TOO_LARGE = re.compile(r"CLIENT: Received message larger than max \((\d+) vs\. (\d+)\)")  # gRPC's own words
Context = Any  # grpc.aio.ServicerContext, whose types are not published


def keys_of(metadata: Any) -> dict[bytes, bytes]:
    """The headers that carry a key, from a call's metadata."""
    found: dict[bytes, bytes] = {}
    for name, value in metadata or ():
        header = name.encode()
        # HTTP drops the blanks around a header's value, gRPC keeps them: `-H "x-api-key: KEY"` of a client has one.
        if header in KEY_HEADERS and found.setdefault(header, value.encode().strip()) != value.encode().strip():
            raise BadRequestError(f"the metadata {name} comes twice, with different values")
    return found


def too_large(err: grpc.aio.AioRpcError) -> AnswerTooLargeError | None:
    """What it means where Triton's answer was longer than is taken; None where it says something else."""
    if err.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
        return None
    found = TOO_LARGE.search(err.details() or "")
    return None if found is None else AnswerTooLargeError(f"it has {found[1]} bytes, and at most {found[2]} are taken")


class EndedCallError(Exception):
    """A call ends with a status that is no answer.

    Attributes:
        status: code, details and metadata.
        refused: what refuses it; None where it came from Triton.
    """

    def __init__(
        self,
        code: Any,
        told: str,
        metadata: tuple[tuple[str, str], ...] = (),
        refused: GatewayError | None = None,
    ) -> None:
        super().__init__(told)
        self.status = code, told, metadata
        self.refused = refused


def refuse(err: GatewayError) -> NoReturn:
    """End a call with what refuses it."""
    parts = [err.error, err.why, err.mend]
    metadata = tuple((name.decode(), value.decode()) for name, value in err.headers)
    code = CODES.get(err.status, grpc.StatusCode.INTERNAL)
    if isinstance(err, MemoryFullError | AnswerTooLargeError):
        code = grpc.StatusCode.RESOURCE_EXHAUSTED
    raise EndedCallError(code, "; ".join(part for part in parts if part), metadata, bare(err))


def unary(answer: Callable[[Context], Awaitable[bytes]], taken_up: Callable[[Context], None]) -> Any:
    """The handler of a call with one answer, which raises EndedCallError for none; `taken_up` is told of each first.

    It takes a stream: the handler of a unary call is only called with its whole message, which gRPC then holds
    uncounted. That of a stream reads the message itself, or leaves it alone.
    """

    async def handle(_: AsyncIterator[bytes], context: Context) -> bytes:
        taken_up(context)
        try:
            return await answer(context)
        except EndedCallError as err:
            status = err.status
        await context.abort(*status)  # here: what it raises is kept by the call, with all frames between, in a circle
        raise AssertionError("abort raises")

    return grpc.stream_unary_rpc_method_handler(handle)


def streaming(answers: Callable[[Context], AsyncGenerator[bytes, None]], taken_up: Callable[[Context], None]) -> Any:
    """The handler of a call with many answers; as `unary`.

    Messages are to be read from the context: the iterator keeps the last one, in a circle with itself.
    """

    async def handle(_: AsyncIterator[bytes], context: Context) -> AsyncIterator[bytes]:
        taken_up(context)
        try:
            async with aclosing(answers(context)) as found:
                async for answer in found:
                    yield answer
            return
        except EndedCallError as err:
            status = err.status
        await context.abort(*status)

    return grpc.stream_stream_rpc_method_handler(handle)
