"""How a call over gRPC ends that is refused, with the status that HTTP has; and the key that one carries."""

from __future__ import annotations

import re
from typing import Any, NoReturn

import grpc

from serve.gateway.errors import BadRequestError, GatewayError
from serve.gateway.identity import KEY_HEADERS
from serve.gateway.memory import MemoryFullError
from serve.gateway.outages import DEAD_STUB

__all__ = ["DEAD", "STATUSES", "Context", "abort", "keys_of", "refuse"]

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


async def refuse(context: Context, err: GatewayError) -> NoReturn:
    """End a call with what refuses it."""
    parts = [err.error, err.why, err.mend]
    metadata = tuple((name.decode(), value.decode()) for name, value in err.headers)
    code = CODES.get(err.status, grpc.StatusCode.INTERNAL)
    if isinstance(err, MemoryFullError):
        code = grpc.StatusCode.RESOURCE_EXHAUSTED
    await abort(context, code, "; ".join(part for part in parts if part), metadata)


async def abort(context: Context, code: Any, told: str, metadata: tuple[tuple[str, str], ...] = ()) -> NoReturn:
    """End a call; it does not return."""
    await context.abort(code, told, metadata)
    raise AssertionError("abort raises")
