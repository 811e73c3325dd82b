"""What of Triton's HTTP interface a client may see, besides inference: health, metadata, configuration, statistics of
its models, and an example.

The rest (repository control, shared memory, logging, trace) is an administrator's.
"""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import Any

import orjson
from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from serve.gateway.access.gate import Gate
from serve.gateway.access.identity import KeyRing
from serve.gateway.edge.guard import key_headers
from serve.gateway.errors import GatewayError, Problem, UpstreamBrokenError, UpstreamDownError
from serve.gateway.observe.telemetry import Telemetry
from serve.gateway.oip.metadata import EXAMPLE_SOURCE, example_json
from serve.gateway.oip.tensors import ProtocolError
from serve.gateway.upstream.upstream import Upstream, model_path
from serve.http.client import Response as UpstreamResponse

Before = Callable[[str, str, str | None, Request], Awaitable[Response | None]]

__all__ = ["as_it_came", "health_router", "protocol_router"]

PARTS = {
    "ready": "Is the {} ready?",
    "config": "Configuration of the {}",
    "stats": "Statistics of the {}",
}
NOTES = {"stats": "Triton's own; with several Tritons, those of one."}
JSON_CONTENT: dict[str, Any] = {"content": {"application/json": {}}}
TEXT_CONTENT: dict[str, Any] = {"content": {"text/plain": {}, "application/json": {}}}
UPSTREAM: dict[int | str, dict[str, Any]] = {
    401: {"model": Problem, "description": "No key, or none that is known, where the gateway asks for one."},
    403: {"model": Problem, "description": "The key may not do this."},
    502: {"model": Problem, "description": "The model server's answer broke off."},
    503: {"model": Problem, "description": "The model server can't be reached, or has too much to do."},
    504: {"model": Problem, "description": "The model server took too long."},
}
OF_MODEL: dict[int | str, dict[str, Any]] = {
    200: TEXT_CONTENT,
    400: {"model": Problem, "description": "It is not there, or not ready.", "content": {"text/plain": {}}},
    404: {"model": Problem, "description": "No such model, or not this version.", "content": {"text/plain": {}}},
    **UPSTREAM,
}
OF_EXAMPLE: dict[int | str, dict[str, Any]] = {
    **OF_MODEL,
    413: {"model": Problem, "description": "It would be too long."},
}
HEALTH: dict[int | str, dict[str, Any]] = {
    200: TEXT_CONTENT,
    400: {"description": "It is not ready.", **TEXT_CONTENT},
    **UPSTREAM,
}
# Extensions of Triton's that only an administrator may use: another client must not be told that it can.
HIDDEN_EXTENSIONS = re.compile("model_repository|shared_memory|trace|logging")


def health_router(upstream: Upstream, telemetry: Telemetry, draining: Callable[[], bool], keys: KeyRing) -> APIRouter:
    """/healthz, /readyz and /metrics."""
    router = APIRouter(tags=["health"])

    @router.get("/healthz", summary="Is the process alive?")
    async def healthz() -> dict[str, str]:
        return {"status": "alive"}

    @router.get("/readyz", summary="Can it serve?", responses={503: {"description": "Not now.", **JSON_CONTENT}})
    async def readyz(request: Request) -> JSONResponse:
        """503 while the model server is not ready, and when the gateway is about to stop.

        Who asks with a key is told which of its models are down.
        """
        if draining():
            return JSONResponse({"status": "stopping"}, 503)
        ready = await upstream.ready()
        told: dict[str, Any] = {"status": "ready" if ready else "model server not ready"}
        if down := sorted(dict(upstream.outages)):  # why is for those who may see the models
            with suppress(GatewayError):
                identity = keys.identify(key_headers(request.scope["headers"]))
                told |= {"down": seen} if (seen := [name for name in down if identity.sees(name)]) else {}
        return JSONResponse(told, 200 if ready else 503)

    @router.get("/metrics", summary="Prometheus metrics", responses={200: {"content": {"text/plain": {}}}})
    async def metrics() -> Response:
        return Response(telemetry.page(), media_type="text/plain; version=0.0.4")

    return router


def protocol_router(upstream: Upstream, gate: Gate, timeout_s: float, draining: Callable[[], bool]) -> APIRouter:
    """The routes under /v2; answers are Triton's own, status and body."""
    router = APIRouter(tags=["Open Inference Protocol v2"])

    @router.get("/v2", summary="Server metadata", responses=UPSTREAM)
    async def server(request: Request) -> Response:
        answer = await upstream.get("/v2")
        if answer.status != 200 or request.state.identity.admin:
            return as_it_came(answer)
        try:
            data = orjson.loads(answer.body)
            data["extensions"] = [name for name in data.get("extensions", ()) if not HIDDEN_EXTENSIONS.search(name)]
        except (ValueError, TypeError, AttributeError) as err:
            raise UpstreamBrokenError("Triton's answer can't be read", why=repr(err)) from err
        return Response(orjson.dumps(data), media_type="application/json")

    @router.get("/v2/health/live", summary="Is the model server alive?", responses=HEALTH)
    async def live() -> Response:
        return as_triton_would("live", await upstream.live(), reached=await upstream.live())

    @router.get("/v2/health/ready", summary="Is the model server ready?", responses=HEALTH)
    async def ready() -> Response:
        if draining():
            return JSONResponse({"error": "the gateway is stopping"}, 503)
        return as_triton_would("ready", await upstream.ready(), reached=await upstream.live())

    @router.get("/v2/models/stats", summary="Statistics of all models", responses=UPSTREAM)
    async def all_statistics() -> Response:
        return as_it_came(await upstream.get("/v2/models/stats"))

    @router.get("/v2/models/{model}", summary="Model metadata", responses=OF_MODEL)
    async def metadata(model: str, request: Request) -> Response:
        await loaded(model, request)
        return as_it_came(await upstream.get(model_path(model)))

    @router.get("/v2/models/{model}/versions/{version}", summary="Metadata of a version", responses=OF_MODEL)
    async def metadata_of(model: str, version: str, request: Request) -> Response:
        await loaded(model, request)
        return as_it_came(await upstream.get(model_path(model, version)))

    async def loaded(model: str, request: Request) -> None:
        """Where models are loaded on demand, to ask about one is to ask for it."""
        await gate.bring(model, request.state.identity.id, time.monotonic() + timeout_s)

    async def before(part: str, model: str, version: str | None, request: Request) -> Response | None:
        """What is answered before Triton is asked, or has to be waited for."""
        if part == "ready":
            upstream.outages.check(model)
            if gate.will_come(model, version):
                return Response()  # whoever asks it will be answered
        elif part == "config":
            await loaded(model, request)
        return None

    for part, summary in PARTS.items():
        _add_part(router, upstream, part, summary, before)

    async def example_of(model: str, version: str | None, request: Request) -> Response:
        await loaded(model, request)
        known = await upstream.metadata(model, version)
        source = {EXAMPLE_SOURCE.decode(): "metadata" if known.example is None else "model"}
        try:
            return Response(example_json(known), headers=source, media_type="application/json")
        except ProtocolError as err:
            raise GatewayError(
                f"an example for the model {model!r} would be too long", why=str(err),
                mend="make one from the model's metadata, or pack the model with one", status=413,
            ) from err  # fmt: skip

    @router.get("/v2/models/{model}/example", summary="An infer request for the model", responses=OF_EXAMPLE)
    async def example(model: str, request: Request) -> Response:
        """The body of a POST to `/v2/models/{model}/infer`, from the model's own example or made of zeros.

        One with `base64` in place of `data`, the raw bytes of one BYTES element (an image, say), is no such body as it
        stands: these bytes are sent in the protocol's binary form, or to `/predict/{model}` as a file or as JSON,
        `{"image": {"base64": "..."}}` by the input's name.
        """
        return await example_of(model, None, request)

    @router.get(
        "/v2/models/{model}/versions/{version}/example",
        summary="An infer request for the version",
        responses=OF_EXAMPLE,
    )
    async def example_of_version(model: str, version: str, request: Request) -> Response:
        return await example_of(model, version, request)

    return router


def _add_part(router: APIRouter, upstream: Upstream, part: str, summary: str, before: Before) -> None:
    """What Triton answers below a model, and below a version of it."""

    async def of_model(model: str, request: Request) -> Response:
        if (told := await before(part, model, None, request)) is not None:
            return told
        return as_it_came(await upstream.get(f"{model_path(model)}/{part}"))

    async def of_version(model: str, version: str, request: Request) -> Response:
        if (told := await before(part, model, version, request)) is not None:
            return told
        return as_it_came(await upstream.get(f"{model_path(model, version)}/{part}"))

    router.add_api_route(
        f"/v2/models/{{model}}/{part}", of_model, summary=summary.format("model"), responses=OF_MODEL,
        description=NOTES.get(part),
    )  # fmt: skip
    router.add_api_route(
        f"/v2/models/{{model}}/versions/{{version}}/{part}", of_version, summary=summary.format("version"),
        responses=OF_MODEL, description=NOTES.get(part),
    )  # fmt: skip


def as_triton_would(what: str, healthy: bool, *, reached: bool) -> Response:
    """Triton's answer to a question after its health, by what it said when it was last probed.

    Raises:
        UpstreamDownError: no Triton answered.
    """
    if not reached:
        raise UpstreamDownError("the model server can't be reached", why="it did not answer when it was last probed")
    return JSONResponse({what: healthy}, 200 if healthy else 400)  # with a body, as the protocol has it


def as_it_came(answer: UpstreamResponse, down: Iterable[tuple[str, str]] = ()) -> Response:
    """Triton's answer, status and body; in an index of models, those that are down are told to be."""
    media = answer.header(b"content-type") or b"application/json"
    body, why = answer.body, dict(down)
    if why and answer.status == 200:
        rows = orjson.loads(body)
        body = orjson.dumps(
            [row | {"state": "UNAVAILABLE", "reason": why[row["name"]]} if row["name"] in why else row for row in rows]
        )
    return Response(body, answer.status, media_type=media.decode("latin-1"))
