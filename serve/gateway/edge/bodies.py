"""Bodies of requests for an endpoint: whole, or while they come."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.types import Receive, Scope

from serve.gateway.access.long_work import LongWork
from serve.gateway.access.memory import SMALL_BYTES, MemoryFullError, Share
from serve.gateway.edge.extensions import BODY, DROP, GROWING, STILL
from serve.gateway.errors import BodyTooLargeError, ClientGoneError
from serve.gateway.oip.encoding import Packed, is_long, unpack
from serve.http.body import GrowingBody

__all__ = ["check_still", "growing_body", "read_body", "read_unpacked"]

GROWING_BYTES = 128 * 1024


def growing_body(
    scope: Scope, read: Mapping[bytes, bytes], header_length: int, limit: int, share: Share
) -> GrowingBody | None:
    """A large body while it comes; None where it is read whole.

    A client that has sent its first part will most likely send the rest at once: while it does, the first part goes to
    Triton. One that then stops is asked again when all has come.
    """
    length = read.get(b"content-length", b"")
    if not length.isdigit() or not GROWING_BYTES <= int(length) <= limit or b"content-encoding" in read:
        return None
    growing = scope.get("extensions", {}).get(GROWING)
    body: GrowingBody | None = None if growing is None else growing(int(length), header_length, share)
    return body


async def read_body(scope: Scope, content_length: bytes | None, receive: Receive, limit: int, share: Share) -> bytes:
    """A request's whole body; a client that sends too slowly is cut off by its connection.

    Args:
        content_length: as the client said.
        limit: bytes at most.
        share: counts it.

    Raises:
        BodyTooLargeError: it is, or is said to be, longer; the rest was not read.
        MemoryFullError: there is no room for it; the rest was not read.
        ClientGoneError: the client left before its end.
        UnauthorizedError, ForbiddenError: its key may no longer ask for this.
    """
    body = await _whole(scope, content_length, receive, limit, share)
    scope.setdefault("state", {})["received"] = len(body)  # for whoever counts
    check_still(scope)
    return body


async def read_unpacked(
    scope: Scope, receive: Receive, limit: int, share: Share, long_work: LongWork, *, as_json: bool
) -> bytes | Packed:
    """A request's whole body, unpacked; of a long JSON that is packed, as it came, to be unpacked where it is read.

    Args:
        limit: bytes at most, unpacked ones, too.
        share: counts it.
        long_work: has the turns of what is long once it is unpacked.
        as_json: whether it is to be read as JSON.

    Raises:
        GatewayError, ClientGoneError: as `read_body` and `unpack`.
    """
    headers = dict(scope["headers"])
    came = await read_body(scope, headers.get(b"content-length"), receive, limit, share)
    encoding = headers.get(b"content-encoding")
    if not encoding:
        return came
    if as_json and is_long(came):
        return Packed(came, encoding, limit)
    return await unpack(came, encoding, limit, share, long_work)


def check_still(scope: Scope) -> None:
    """Look again whether the key may ask for this, after what took its time to come.

    Raises:
        UnauthorizedError, ForbiddenError: not any more.
    """
    still = scope.get("state", {}).get(STILL)
    if still is not None:
        still()


async def _whole(scope: Scope, content_length: bytes | None, receive: Receive, limit: int, share: Share) -> bytes:
    if content_length is not None and int(content_length) > limit:
        raise BodyTooLargeError(limit)
    if content_length is not None and int(content_length) > SMALL_BYTES:
        try:
            share.check(int(content_length))
        except MemoryFullError:
            scope.get("extensions", {}).get(DROP, bool)()
            raise
    if (whole := scope.get("extensions", {}).get(BODY)) is not None:
        body: bytes = await whole(limit, share)
        return body
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise ClientGoneError
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > limit:
            raise BodyTooLargeError(limit)
        share.take(len(chunk))
        chunks.append(chunk)
        if not message.get("more_body"):
            return chunks[0] if len(chunks) == 1 else b"".join(chunks)
