"""The inference path: a request's bytes go to Triton, the answer's bytes come back, and no tensor is parsed.

It stands in front of the routes as plain ASGI, because their cost is several times that of the whole exchange.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Iterable
from typing import TypeVar

from starlette.types import ASGIApp, Receive, Scope, Send

from serve.gateway.errors import BadRequestError, BodyTooLargeError, ClientGoneError, GatewayError, Refusal
from serve.gateway.protocol import BINARY_HEADER
from serve.gateway.settings import Settings
from serve.gateway.telemetry import INFER_ROUTE, Telemetry
from serve.gateway.upstream import MODEL_NAME, VERSION, Upstream

__all__ = ["InferMiddleware", "read_body", "unless_client_leaves"]

T = TypeVar("T")

_PATH = re.compile(rf"/v2/models/({MODEL_NAME})(?:/versions/{VERSION})?/infer".encode())
_FORWARDED = frozenset((b"content-type", b"content-encoding", b"accept-encoding", b"traceparent", BINARY_HEADER))
_RETURNED = frozenset((b"content-type", b"content-encoding", BINARY_HEADER))
CLIENT_LEFT = 499
PATIENCE_S = 0.05  # an answer within this time is not worth a watch on the client


class InferMiddleware:
    """Answers POST /v2/models/{model}[/versions/{version}]/infer, and passes everything else on."""

    def __init__(self, app: ASGIApp, settings: Settings, upstream: Upstream, telemetry: Telemetry) -> None:
        self.app = app
        self._max_body_bytes = settings.max_body_bytes
        self._upstream = upstream
        self._telemetry = telemetry

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        match = None
        if scope["type"] == "http" and scope["method"] == "POST":
            match = _PATH.fullmatch(scope["raw_path"])
        if match is None:
            await self.app(scope, receive, send)
            return
        code = 500
        started = time.perf_counter()
        self._telemetry.in_flight.inc()
        try:
            code = await self._infer(match[0].decode(), scope, receive, send)
        except GatewayError as err:
            code = err.status
            await Refusal(err)(scope, receive, send)
        except ClientGoneError:
            code = CLIENT_LEFT
        finally:
            self._telemetry.in_flight.dec()
            self._telemetry.observe(match[1].decode(), INFER_ROUTE, code, time.perf_counter() - started)

    async def _infer(self, path: str, scope: Scope, receive: Receive, send: Send) -> int:
        headers = scope["headers"]
        body = await read_body(headers, receive, self._max_body_bytes)
        forwarded = [header for header in headers if header[0] in _FORWARDED]
        for name, value in forwarded:
            if name == BINARY_HEADER and not (value.isdigit() and len(value) < 20):
                raise BadRequestError("Inference-Header-Content-Length is not a number of bytes")
        response = await unless_client_leaves(receive, self._upstream.post(path, forwarded, body))
        returned = [header for header in response.headers if header[0] in _RETURNED]
        returned.append((b"content-length", b"%d" % len(response.body)))
        await send({"type": "http.response.start", "status": response.status, "headers": returned})
        await send({"type": "http.response.body", "body": response.body})
        return response.status


async def read_body(headers: Iterable[tuple[bytes, bytes]], receive: Receive, limit: int) -> bytes:
    """A request's whole body.

    Raises:
        BodyTooLargeError: it is, or says that it is, over `limit` bytes; the rest was not read.
        ClientGoneError: the client left before its end.
    """
    for name, value in headers:
        if name == b"content-length" and int(value) > limit:
            raise BodyTooLargeError(limit)
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
        chunks.append(chunk)
        if not message.get("more_body"):
            return chunks[0] if len(chunks) == 1 else b"".join(chunks)


async def unless_client_leaves(receive: Receive, work: Awaitable[T]) -> T:
    """Await `work`, and cancel it when the client closes its connection meanwhile.

    Raises:
        ClientGoneError: the client left.
    """
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    watcher: asyncio.Task[None] | None = None
    left = False

    async def watch() -> None:
        nonlocal left
        while (await receive())["type"] != "http.disconnect":
            pass
        left = True
        if task is not None:
            task.cancel()

    def start() -> None:
        nonlocal watcher
        watcher = loop.create_task(watch())

    timer = loop.call_later(PATIENCE_S, start)
    try:
        return await work
    except asyncio.CancelledError:
        if left and task is not None and task.uncancel() == 0:
            raise ClientGoneError from None
        raise
    finally:
        timer.cancel()
        if watcher is not None:
            watcher.cancel()
