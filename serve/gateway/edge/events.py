"""Streams of answers as server-sent events: POST /predict/{model}/stream, and Triton's generate_stream.

Each answer is an event (WHATWG HTML, section 9.2), sent as it comes. Nothing is sent before the first: until then what
is refused has a status, afterwards an event of the type "error". Triton is asked over gRPC, by the rules of streams
there: it computes no further ahead than a client that reads may have it.
"""

from __future__ import annotations

import asyncio
import importlib
import math
import os
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from serve.gateway.access.memory import Share
from serve.gateway.edge.asking import CLIENT_LEFT, unless_client_leaves, until_loaded
from serve.gateway.edge.bodies import read_unpacked
from serve.gateway.edge.event_values import asked_of, event_of, generated_of
from serve.gateway.edge.openai_errors import refusal
from serve.gateway.edge.predict import ANSWERS, BODY, LONG_ANSWER, is_json, message_asked
from serve.gateway.edge.way import Way
from serve.gateway.errors import (
    NO_ROOM,
    AnswerTooLargeError,
    BadRequestError,
    ClientGoneError,
    GatewayError,
    Problem,
    UpstreamBrokenError,
    UpstreamTimeoutError,
)
from serve.gateway.oip.apart import NoRoomError
from serve.gateway.oip.metadata import ModelMetadata
from serve.gateway.release.answering import models_of
from serve.gateway.settings import Settings
from serve.gateway.upstream.deadline import TIMEOUT_HEADER, EarlyTimeoutError, patience_s
from serve.hooks.packed.values import BAD_INPUT

__all__ = ["Streamed", "events_router"]

LONGEST_S = 1e6  # that a client may give a stream
TURN_S = 2.0  # what refuses a message that waits for its turn has the time-out and a second, and comes first
AS_JSON = 3  # times as long as its tensors, an answer is until it is written and told
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"x-accel-buffering", b"no"),  # of nginx, which would keep events back
]
EVENTS: dict[int | str, dict[str, Any]] = {
    **ANSWERS,
    200: {
        "description": "An event for each answer; one of the type `error` where it ends before the last.",
        "content": {"text/event-stream": {"schema": {"type": "string"}}},
    },
    501: {"model": Problem, "description": "The gateway knows no gRPC address of the model server."},
}
GENERATE = {
    "required": True,
    "content": {
        "application/json": {
            "schema": {"type": "object", "additionalProperties": True, "title": "Values by input name, parameters, id"}
        }
    },
}
GENERATED = (
    "As Triton's generate extension has it: the data of each event are the outputs, beside `model_name` and "
    "`model_version`."
)
Written = Callable[[bytes, bytes, ModelMetadata, bool], bytes]


class Streamed:
    """The streams of an application, whose library is not loaded before the first.

    Args:
        settings: of the gateway.
        way: of requests.

    Attributes:
        beside: streams over gRPC of the same keys; set by whoever serves them.
    """

    def __init__(self, settings: Settings, way: Way) -> None:
        self.beside: Any = None
        self._settings = settings
        self._way = way
        self._over_http: Any = None
        self._loading = asyncio.Lock()

    async def over_http(self) -> Any:
        """`serve.gateway.grpc.over_http.OverHttp`; raises GatewayError where Triton can't be asked so."""
        if not self._settings.grpc_upstream:
            raise GatewayError(
                "answers can't be streamed here",
                why="the gateway knows no gRPC address of the model server",
                mend="start it with --grpc-upstream host:port for each --upstream",
                status=501,
            )
        async with self._loading:
            if self._over_http is None:
                os.environ.setdefault("GRPC_VERBOSITY", "NONE")
                found = await asyncio.to_thread(importlib.import_module, "serve.gateway.grpc.over_http")
                way, balancer = self._way, self._way.upstream.balancer
                self._over_http = found.OverHttp(
                    self._settings, way.gate, way.releases, balancer, way.contracts, self.beside
                )
        return self._over_http

    async def close(self) -> None:
        if self._over_http is not None:
            await self._over_http.close()


def events_router(settings: Settings, way: Way, streamed: Streamed) -> APIRouter:
    """The routes, bound to one upstream."""
    router = APIRouter()

    @router.post(
        "/predict/{model}/stream",
        responses=EVENTS,
        openapi_extra={"requestBody": BODY},
        summary="Ask a model for a stream",
        tags=["predict"],
    )
    async def predict_stream(model: Annotated[str, Path(examples=["digits"])], request: Request) -> Response:
        """Takes what `/predict/{model}` takes; each answer is an event whose data is what that route answers.

        For decoupled models, which give any number of answers to a request; others give one. `X-Request-Timeout-Ms`
        bounds the whole; each answer has the gateway's time-out.
        """
        return _Events(settings, way, streamed, request, model, None, event_of)

    async def generate_stream(model: str, request: Request) -> Response:
        return _Events(settings, way, streamed, request, model, None, generated_of)

    async def generate_stream_of_version(model: str, version: str, request: Request) -> Response:
        return _Events(settings, way, streamed, request, model, version, generated_of)

    for place, of, answer in (
        ("{model}", "", generate_stream), ("{model}/versions/{version}", ", of a version", generate_stream_of_version),
    ):  # fmt: skip
        router.add_api_route(
            f"/v2/models/{place}/generate_stream",
            answer,
            methods=["POST"],
            responses=EVENTS,
            openapi_extra={"requestBody": GENERATE},
            summary=f"Triton's generate_stream{of}",
            description=GENERATED,
            tags=["Open Inference Protocol v2"],
        )
    return router


class _Events(Response):
    """One stream, from the request's body to the last event.

    Args:
        written: makes an event of an answer.
    """

    def __init__(
        self,
        settings: Settings,
        way: Way,
        streamed: Streamed,
        request: Request,
        model: str,
        version: str | None,
        written: Written,
    ) -> None:
        super().__init__()
        self._settings = settings
        self._way = way
        self._streamed = streamed
        self._request = request
        self._model = model
        self._version = version
        self._written = written
        self._begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._answer(scope, receive, send)
        except ClientGoneError:
            if not self._begun:
                await Response(status_code=CLIENT_LEFT)(scope, receive, send)
        except GatewayError as err:
            if not self._begun:
                await refusal(err, scope)(scope, receive, send)
                return
            told = b"event: error\ndata: " + err.body + b"\n\n"
            await send({"type": "http.response.body", "body": told, "more_body": False})

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        over_http = await self._streamed.over_http()
        gate, headers = self._way.gate, dict(scope["headers"])
        identity = scope["state"]["identity"]
        told = headers.get(TIMEOUT_HEADER)
        whole = None if told is None else time.monotonic() + patience_s(told, LONGEST_S)
        deadline = min(time.monotonic() + self._settings.timeout_s, whole or math.inf)
        gate.incidents.outages.check(self._model)
        share, lease = Share(gate.memory, identity.id), gate.lease()
        try:
            as_json = self._written is generated_of or is_json(self._request)
            most = self._settings.max_body_bytes
            body = await read_unpacked(scope, receive, most, share, gate.long_work, as_json=as_json)
            release = None if self._version else self._way.releases.get(self._model)
            models = models_of(self._model, release)
            await until_loaded(gate, lease, models, identity.id, deadline, scope, receive)
            metadata = await self._way.metadata(self._model, release, self._version)
            reading = self._read(metadata, body, deadline)
            del body
            asked, item = await unless_client_leaves(scope, receive, reading)
            # The stream has a lease of its own: who holds one and waits for another could wait for itself.
            lease.close()
            share.resize(0)  # the stream counts what it has
            client = scope.get("client")
            answers = over_http.answers(scope["headers"], tuple(client) if client else None, asked)
            del asked
            await unless_client_leaves(scope, receive, self._pass_on(answers, metadata, item, whole, share, send))
        finally:
            lease.close()
            share.close()

    async def _read(self, metadata: ModelMetadata, body: Any, deadline: float) -> tuple[bytes, bool]:
        """The message to Triton, and whether it is one item."""
        from serve.gateway.grpc.over_http import infer_request  # loaded by now

        identity, most, contracts = self._request.state.identity, self._settings.max_elements, self._way.contracts
        if self._written is event_of:
            message, item = await message_asked(contracts, metadata, self._request, body, most, identity, deadline)
            return infer_request(self._model, self._version, message), item
        message, item, name, parameters = await contracts.read_json(
            identity.digest, deadline, asked_of, body, metadata, most
        )
        return infer_request(self._model, self._version, message, name, parameters), item

    async def _pass_on(
        self,
        answers: AsyncGenerator[bytes],
        metadata: ModelMetadata,
        item: bool,
        whole: float | None,
        share: Share,
        send: Send,
    ) -> None:
        """Send an event for each answer, as soon as it has come and the one before was taken.

        Args:
            whole: when the last has to have come, on the monotonic clock; None where each has the gateway's time-out.
        """
        async with aclosing(answers):
            while (answer := await self._next(answers, whole)) is not None:
                share.take(AS_JSON * len(answer))
                event = await self._event(answer, metadata, item, whole)
                del answer
                share.resize(len(event))
                if not self._begun:
                    fields = [*HEADERS, *self._request.state.identity.limits()]
                    await send({"type": "http.response.start", "status": 200, "headers": fields})
                    self._begun = True
                await send({"type": "http.response.body", "body": event, "more_body": True})
                share.resize(0)
        if not self._begun:  # a model may give none
            await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
            self._begun = True
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _next(self, answers: AsyncGenerator[bytes], whole: float | None) -> bytes | None:
        each = self._settings.timeout_s + (0.0 if self._begun else TURN_S)
        seconds = max(0, min(each, math.inf if whole is None else whole - time.monotonic()))
        try:
            async with asyncio.timeout(seconds):
                return await anext(answers, None)
        except TimeoutError:
            late = EarlyTimeoutError if seconds < each else UpstreamTimeoutError
            raise late("the model server took too long", why=f"no answer came within {seconds:.1f} s") from None

    async def _event(self, answer: bytes, metadata: ModelMetadata, item: bool, whole: float | None) -> bytes:
        from serve.gateway.grpc.over_http import answer_parts  # loaded by now

        failed, body, length = answer_parts(answer)
        if failed.startswith(BAD_INPUT):
            told = failed.removeprefix(BAD_INPUT)
            raise BadRequestError(f"the model {self._model!r} refuses the request", why=told)
        if failed:
            raise UpstreamBrokenError(f"the model {self._model!r} failed", why=failed, status=500)
        arguments = body, b"%d" % length, metadata, item
        if len(body) <= LONG_ANSWER:
            return self._written(*arguments)
        deadline = time.monotonic() + self._settings.timeout_s if whole is None else whole
        try:
            digest = self._request.state.identity.digest
            return await self._way.contracts.apart.call(digest, deadline, self._written, *arguments)
        except NoRoomError:
            raise AnswerTooLargeError(NO_ROOM) from None
