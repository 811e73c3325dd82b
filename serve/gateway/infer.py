"""The inference path: a request's bytes go to Triton, the answer's bytes come back, and no tensor is parsed.

It stands in front of the routes as plain ASGI, because their cost is several times that of the whole exchange. On its
way a request passes, in this order: its key, the key's models and rate, a look at whether it would wait too long
(before its body is read), its body, a place among those with Triton, and the exchange.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Iterable
from typing import TypeVar

from starlette.types import ASGIApp, Receive, Scope, Send

from serve.gateway.deadline import TIMEOUT_HEADER, patience_s, with_timeout
from serve.gateway.elements import check_elements
from serve.gateway.encoding import unpacked
from serve.gateway.errors import (
    BadRequestError,
    BodyTooLargeError,
    ClientGoneError,
    GatewayError,
    Refusal,
    SlowClientError,
    UpstreamTimeoutError,
)
from serve.gateway.gate import Gate
from serve.gateway.identity import Identity
from serve.gateway.protocol import BINARY_HEADER
from serve.gateway.settings import Settings
from serve.gateway.telemetry import INFER_ROUTE, Telemetry
from serve.gateway.upstream import MODEL_NAME, VERSION, Upstream
from serve.http_client import Response

__all__ = ["InferMiddleware", "ask_model", "read_body", "unless_client_leaves"]

T = TypeVar("T")

_PATH = re.compile(rf"/v2/models/({MODEL_NAME})(?:/versions/{VERSION})?/infer".encode())
_FORWARDED = frozenset((b"content-type", b"accept-encoding", b"traceparent", b"tracestate", BINARY_HEADER))
_RETURNED = frozenset((b"content-type", b"content-encoding", BINARY_HEADER))
_SAFE = [(b"x-content-type-options", b"nosniff"), (b"cache-control", b"no-store")]
CLIENT_LEFT = 499
PATIENCE_S = 0.05  # an answer within this time is not worth a watch on the client


class InferMiddleware:
    """Answers POST /v2/models/{model}[/versions/{version}]/infer, and passes everything else on."""

    def __init__(self, app: ASGIApp, settings: Settings, gate: Gate, upstream: Upstream, telemetry: Telemetry) -> None:
        self.app = app
        self._settings = settings
        self._gate = gate
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
        model = match[1].decode()
        started = time.perf_counter()
        self._telemetry.in_flight.inc()
        identity = None
        try:
            identity = self._gate.enter(scope["headers"], model)
            code = await self._infer(match[0].decode(), model, identity, scope, receive, send)
        except GatewayError as err:
            code = err.status
            await Refusal(err)(scope, receive, send)
        except ClientGoneError:
            code = CLIENT_LEFT
        finally:
            self._telemetry.in_flight.dec()
            key = identity.name if identity is not None else ""
            self._telemetry.observe(model, INFER_ROUTE, code, time.perf_counter() - started, key)

    async def _infer(
        self, path: str, model: str, identity: Identity, scope: Scope, receive: Receive, send: Send
    ) -> int:
        settings = self._settings
        forwarded = []
        timeout = encoding = length = None
        for header in scope["headers"]:
            name = header[0]
            if name in _FORWARDED:
                forwarded.append(header)
                if name == BINARY_HEADER:
                    length = header[1]
            elif name == TIMEOUT_HEADER:
                timeout = header[1]
            elif name == b"content-encoding":
                encoding = header[1]
        if length is not None and not (length.isdigit() and len(length) < 20):
            raise BadRequestError("Inference-Header-Content-Length is not a number of bytes")
        patience = patience_s(timeout, settings.timeout_s)
        deadline = asyncio.get_running_loop().time() + patience
        self._gate.places(model).check(identity.priority, patience)
        body = await read_body(scope["headers"], receive, settings.max_body_bytes, settings.body_timeout_s)
        if encoding is not None:
            body = unpacked(body, encoding, settings.max_body_bytes)
        header_length = int(length) if length is not None else None
        if settings.max_elements:
            check_elements(body, header_length, settings.max_elements)
        if timeout is not None:
            body, changed = with_timeout(body, header_length, patience)
            if changed is not None:
                forwarded = [header for header in forwarded if header[0] != BINARY_HEADER]
                forwarded.append((BINARY_HEADER, b"%d" % changed))
        response = await ask_model(
            self._gate, self._upstream, identity, model, path, forwarded, body, receive, deadline
        )
        returned = [header for header in response.headers if header[0] in _RETURNED]
        returned += _SAFE
        if identity.bucket is not None:
            returned += identity.limits()
        returned.append((b"content-length", b"%d" % len(response.body)))
        await send({"type": "http.response.start", "status": response.status, "headers": returned})
        await send({"type": "http.response.body", "body": response.body})
        return response.status


async def ask_model(
    gate: Gate,
    upstream: Upstream,
    identity: Identity,
    model: str,
    path: str,
    headers: list[tuple[bytes, bytes]],
    body: bytes,
    receive: Receive,
    deadline: float,
) -> Response:
    """Wait for a place, ask Triton, and give the place back.

    Args:
        path: of the infer request.
        deadline: on the event loop's clock.

    Raises:
        OverloadedError: there was no place in time.
        ClientGoneError: the client left.
        GatewayError: Triton gave no answer.
    """
    loop = asyncio.get_running_loop()
    places = gate.places(model)
    if not places.try_enter():
        await unless_client_leaves(receive, places.enter(identity.priority, deadline - loop.time()))
    started = loop.time()
    seconds: float | None = None
    try:
        asking = upstream.post(path, headers, body, timeout_s=deadline - started)
        response = await unless_client_leaves(receive, asking)
        if response.status == 200:
            seconds = loop.time() - started
            gate.known(model)
        return response
    except UpstreamTimeoutError:
        seconds = loop.time() - started
        raise
    finally:
        places.leave(seconds)


async def read_body(
    headers: Iterable[tuple[bytes, bytes]], receive: Receive, limit: int, timeout_s: float = 30.0
) -> bytes:
    """A request's whole body.

    Raises:
        BodyTooLargeError: it is, or says that it is, over `limit` bytes; the rest was not read.
        SlowClientError: it was not there in time.
        ClientGoneError: the client left before its end.
    """
    for name, value in headers:
        if name == b"content-length" and int(value) > limit:
            raise BodyTooLargeError(limit)
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(timeout_s):
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
    except TimeoutError:
        raise SlowClientError(
            "the request's body did not come in time",
            why=f"{size} bytes came within {timeout_s:g} s",
            mend="send it faster, or less of it",
        ) from None


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
