"""The inference path: a request's bytes go to Triton, the answer's bytes come back, and no tensor is parsed.

It stands in front of the routes and their layers as plain ASGI: they cost several times as much as the whole exchange.
On its way a request passes, in this order: its key, the key's models and rate, a look at whether it would wait too
long (before its body is read), its body, a place among those with Triton, and the exchange.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TypeVar

from starlette.types import Receive, Scope, Send

from serve.gateway.connections import BODY, DROP, GROWING, LEAVING, RESPOND
from serve.gateway.contracts import Contracts
from serve.gateway.deadline import TIMEOUT_HEADER, EarlyTimeoutError, patience_s, with_timeout
from serve.gateway.elements import check_elements
from serve.gateway.encoding import unpack
from serve.gateway.errors import (
    BadRequestError,
    BodyTooLargeError,
    ClientGoneError,
    GatewayError,
    Refusal,
    SlowBodyError,
    UpstreamTimeoutError,
)
from serve.gateway.gate import Gate
from serve.gateway.identity import Identity
from serve.gateway.infer_head import JSON, PATH, RETURNED, SAFE, answer_lines, split_headers
from serve.gateway.memory import SMALL_BYTES, MemoryFullError, Share
from serve.gateway.protocol import BINARY_HEADER
from serve.gateway.released import Released
from serve.gateway.settings import Settings
from serve.gateway.suspects import Flight
from serve.gateway.telemetry import INFER_ROUTE, Observed, Telemetry
from serve.gateway.tracing import Trace
from serve.http_body import GrowingBody
from serve.http_client import Response
from serve.rollout.plan import Target

__all__ = ["InferEndpoint", "ask_model", "read_body", "unless_client_leaves"]

T = TypeVar("T")
logger = logging.getLogger(__name__)

CLIENT_LEFT = 499
GROWING_BYTES = 128 * 1024


class InferEndpoint:
    """POST /v2/models/{model}[/versions/{version}]/infer."""

    def __init__(
        self, settings: Settings, gate: Gate, contracts: Contracts, released: Released, telemetry: Telemetry
    ) -> None:
        self._settings = settings
        self._contracts = contracts
        self._gate = gate
        self._released = released
        self._telemetry = telemetry

    async def answered(self, scope: Scope, receive: Receive, send: Send) -> bool:
        """Answer the request if it is one for this endpoint."""
        if scope["method"] != "POST" or (match := PATH.fullmatch(scope["raw_path"])) is None:
            return False
        code = 500
        path, model = match[0], match[1].decode()
        version = match[2].decode() if match[2] is not None else None
        client = scope.get("client")
        observed = self._telemetry.begin(
            INFER_ROUTE, model, client[0] if client else "", _parent(scope) if self._telemetry.tracing else None
        )
        try:
            forwarded, read = split_headers(scope["headers"])
            identity = self._gate.keys.identify(read)
            observed.key = identity.name
            identity.take()  # what it may not ask is counted, too
            identity.check_model(model)
            self._gate.incidents.outages.check(model)
            if observed.trace is not None:
                observed.trace.done("auth")
            share = Share(self._gate.memory, identity.id)
            try:
                code = await self._infer(
                    path, model, version, identity, observed, forwarded, read, scope, receive, send, share
                )
            finally:
                share.close()
        except GatewayError as err:
            code = err.status
            if err.closes:
                await Refusal(err)(scope, receive, send)
            else:  # cheap, because under overload this is what most requests come to
                await _answer(scope, send, code, [JSON], err.headers, err.body)
        except ClientGoneError:
            code = CLIENT_LEFT
        except Exception as err:
            logger.exception("an infer request failed inside the gateway")
            await Refusal(GatewayError("the gateway failed", why=type(err).__name__))(scope, receive, send)
        finally:
            self._telemetry.observe(observed, code)
        return True

    async def _infer(
        self,
        path: bytes,
        model: str,
        version: str | None,
        identity: Identity,
        observed: Observed,
        forwarded: list[tuple[bytes, bytes]],
        read: Mapping[bytes, bytes],
        scope: Scope,
        receive: Receive,
        send: Send,
        share: Share,
    ) -> int:
        settings = self._settings
        length = read.get(BINARY_HEADER)
        if length is not None and not (length.isdigit() and len(length) < 20):
            raise BadRequestError("Inference-Header-Content-Length is not a number of bytes")
        header_length = int(length) if length is not None else None
        timeout = read.get(TIMEOUT_HEADER)
        patience = patience_s(timeout, settings.timeout_s)
        deadline = time.monotonic() + patience
        self._gate.places(model).check(identity.priority, patience)
        release = self._gate.releases.get(model) if version is None else None
        body: bytes | GrowingBody | None = None
        if (
            header_length is not None
            and release is None
            and timeout is None
            and (settings.validate or not settings.max_elements)
            and not self._gate.incidents.suspects.watches(identity.id, model)
        ):
            body = _growing(scope, read, header_length, settings.max_body_bytes, share)
        if body is None:
            body = await read_body(scope, read.get(b"content-length"), receive, settings.max_body_bytes, share)
        observed.received = len(body)
        changed: int | None = None
        trace = observed.trace
        if trace is not None:
            forwarded = [header for header in forwarded if header[0] != b"traceparent"]
            forwarded.append((b"traceparent", trace.header))
            trace.done("receive")
        if isinstance(body, bytes) and b"content-encoding" in read:
            body = await unpack(body, read[b"content-encoding"], settings.max_body_bytes, share)
        if settings.validate:
            kept = release.kept if release is not None else Target(model, version)
            seconds = None if timeout is None else patience
            body, changed = await self._contracts.fitted(
                kept, body, header_length, shared_memory=identity.admin, seconds=seconds
            )
        elif isinstance(body, bytes):
            if settings.max_elements:
                check_elements(body, header_length, settings.max_elements)
            if timeout is not None:
                body, changed = with_timeout(body, header_length, patience)
        if changed is not None and changed != header_length:
            forwarded = [header for header in forwarded if header[0] != BINARY_HEADER]
            forwarded.append((BINARY_HEADER, b"%d" % changed))

        async def ask(body: bytes | GrowingBody) -> Response:
            left = deadline - time.monotonic()
            return await self._released.infer(release, path, identity, scope["headers"], forwarded, body, left)

        send_it = partial(
            ask_model, self._gate, identity, model, scope=scope, receive=receive, deadline=deadline, size=len(body)
        )
        try:
            response = await send_it(partial(ask, body), body=body, trace=trace)
        except SlowBodyError:
            if isinstance(body, bytes):
                raise
            whole = await body.wait()
            response = await send_it(partial(ask, whole), body=whole, trace=trace)
        returned = [header for header in response.headers if header[0] in RETURNED]
        observed.sent = len(response.body)
        await _answer(scope, send, response.status, returned, identity.limits(), response.body)
        return response.status


def _growing(
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


async def _answer(
    scope: Scope,
    send: Send,
    status: int,
    headers: list[tuple[bytes, bytes]],
    own: list[tuple[bytes, bytes]],
    body: bytes,
) -> None:
    """Answer in one piece where the server can, else by ASGI's messages.

    Args:
        headers: that may come from elsewhere; they are checked.
        own: headers of the gateway's making.
    """
    respond = scope.get("extensions", {}).get(RESPOND)
    if respond is not None and respond(status, answer_lines(headers, own), body):
        return
    headers = [*headers, *own, *SAFE, (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _parent(scope: Scope) -> bytes | None:
    return next((value for name, value in scope["headers"] if name == b"traceparent"), None)


async def ask_model(
    gate: Gate,
    identity: Identity,
    model: str,
    ask: Callable[[], Awaitable[Response]],
    scope: Scope,
    receive: Receive,
    deadline: float,
    body: bytes | GrowingBody,
    trace: Trace | None = None,
    size: int = 0,
) -> Response:
    """Wait for a place, ask Triton, and give the place back.

    Args:
        ask: sends the request.
        deadline: on the monotonic clock.
        body: that is sent, to know the request by where the model's process dies of it.
        trace: gets the parts "queue" and "upstream".
        size: of the request, in bytes.

    Raises:
        OverloadedError: there was no place in time, or the model is down.
        PoisonError: the model's process has died of this request.
        ClientGoneError: the client left.
        GatewayError: Triton gave no answer.
    """
    places = gate.places(model)
    started = time.monotonic()
    seconds: float | None = None
    answered = entered = False
    suspects = gate.incidents.suspects
    flight = Flight(identity.id, model, body)
    given_up = False
    try:
        if suspects.watches(identity.id, model):  # before it holds a place, which others could use
            await unless_client_leaves(scope, receive, suspects.examine(flight, deadline - time.monotonic()))
        if not places.try_enter():
            await unless_client_leaves(scope, receive, places.enter(identity.priority, deadline - time.monotonic()))
        entered = True
        if trace is not None:
            trace.done("queue")
        started = time.monotonic()
        gate.incidents.outages.check(model)
        suspects.take_off(flight)
        response = await unless_client_leaves(scope, receive, ask())
        answered = True
        if response.status == 200:
            seconds = time.monotonic() - started
            gate.known(model)
        return response
    except (ClientGoneError, EarlyTimeoutError):
        given_up = True
        raise
    except UpstreamTimeoutError:
        seconds = time.monotonic() - started
        raise
    finally:
        suspects.land(flight, answered=answered)
        if entered:
            if given_up:
                places.abandon(time.monotonic() - started)
            else:
                places.leave(seconds, size)
            if trace is not None:
                trace.done("upstream")


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
    """
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


async def unless_client_leaves(scope: Scope, receive: Receive, work: Awaitable[T]) -> T:
    """Await `work`, and cancel it when the client closes its connection meanwhile.

    Raises:
        ClientGoneError: the client left.
    """
    task = asyncio.current_task()
    left = False

    def leave() -> None:
        nonlocal left
        left = True
        if task is not None:
            task.cancel()

    watch = scope.get("extensions", {}).get(LEAVING) or partial(_watch, receive, [])
    watch(leave)
    try:
        return await work
    except asyncio.CancelledError:
        if left and task is not None and task.uncancel() == 0:
            raise ClientGoneError from None
        raise
    finally:
        watch(None)


def _watch(receive: Receive, watchers: list[asyncio.Task[None]], leave: Callable[[], None] | None) -> None:
    """The client's leaving by ASGI's own means, where the server does not tell: a task that waits for it."""

    async def wait(leave: Callable[[], None]) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        leave()

    if leave is not None:
        watchers.append(asyncio.get_running_loop().create_task(wait(leave)))
        return
    for watcher in watchers:
        watcher.cancel()
