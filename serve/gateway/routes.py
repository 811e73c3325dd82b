"""What of Triton's HTTP interface a client may see, besides inference: health, metadata, configuration, statistics of
its models, and an example.

The rest (repository control, shared memory, logging, trace) is an administrator's.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import orjson
from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from serve.gateway.errors import UpstreamBrokenError
from serve.gateway.metadata import EXAMPLE_SOURCE, example_request
from serve.gateway.telemetry import Telemetry
from serve.gateway.upstream import Upstream, model_path
from serve.http_client import Response as UpstreamResponse

__all__ = ["as_it_came", "health_router", "protocol_router"]

# Extensions of Triton's that only an administrator may use: another client must not be told that it can.
HIDDEN_EXTENSIONS = re.compile("model_repository|shared_memory|trace|logging")


def health_router(upstream: Upstream, telemetry: Telemetry, draining: Callable[[], bool]) -> APIRouter:
    """/healthz, /readyz and /metrics."""
    router = APIRouter(tags=["health"])

    @router.get("/healthz", summary="Is the process alive?")
    async def healthz() -> dict[str, str]:
        return {"status": "alive"}

    @router.get("/readyz", summary="Can it serve?")
    async def readyz() -> JSONResponse:
        """503 while the model server is not ready, and when the gateway is about to stop."""
        if draining():
            return JSONResponse({"status": "stopping"}, 503)
        ready = await upstream.ready()
        return JSONResponse({"status": "ready" if ready else "model server not ready"}, 200 if ready else 503)

    @router.get("/metrics", summary="Prometheus metrics")
    async def metrics() -> Response:
        return Response(telemetry.page(), media_type="text/plain; version=0.0.4")

    return router


def protocol_router(upstream: Upstream, draining: Callable[[], bool]) -> APIRouter:
    """The routes under /v2; answers are Triton's own, status and body."""
    router = APIRouter(tags=["Open Inference Protocol v2"])

    @router.get("/v2", summary="Server metadata")
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

    @router.get("/v2/health/live", summary="Is the model server alive?")
    async def live() -> Response:
        return as_it_came(await upstream.get("/v2/health/live"))

    @router.get("/v2/health/ready", summary="Is the model server ready?")
    async def ready() -> Response:
        if draining():
            return JSONResponse({"error": "the gateway is stopping"}, 503)
        return as_it_came(await upstream.get("/v2/health/ready"))

    @router.get("/v2/models/stats", summary="Statistics of all models")
    async def all_statistics() -> Response:
        return as_it_came(await upstream.get("/v2/models/stats"))

    @router.get("/v2/models/{model}", summary="Model metadata")
    @router.get("/v2/models/{model}/versions/{version}", summary="Metadata of a version")
    async def metadata(model: str, version: str | None = None) -> Response:
        return as_it_came(await upstream.get(model_path(model, version)))

    @router.get("/v2/models/{model}/ready", summary="Is the model ready?")
    @router.get("/v2/models/{model}/versions/{version}/ready", summary="Is the version ready?")
    async def model_ready(model: str, version: str | None = None) -> Response:
        return as_it_came(await upstream.get(f"{model_path(model, version)}/ready"))

    @router.get("/v2/models/{model}/config", summary="Configuration of the model")
    @router.get("/v2/models/{model}/versions/{version}/config", summary="Configuration of the version")
    async def config(model: str, version: str | None = None) -> Response:
        return as_it_came(await upstream.get(f"{model_path(model, version)}/config"))

    @router.get("/v2/models/{model}/stats", summary="Statistics of the model")
    @router.get("/v2/models/{model}/versions/{version}/stats", summary="Statistics of the version")
    async def statistics(model: str, version: str | None = None) -> Response:
        """Triton's own; with several Tritons, those of one."""
        return as_it_came(await upstream.get(f"{model_path(model, version)}/stats"))

    @router.get("/v2/models/{model}/example", summary="An infer request for the model")
    @router.get("/v2/models/{model}/versions/{version}/example", summary="An infer request for the version")
    async def example(model: str, version: str | None = None) -> Response:
        """The body of a POST to `/v2/models/{model}/infer`, from the model's own example or made of zeros.

        An input with `base64` in place of `data` holds the raw bytes of one BYTES element (an image, say): it goes
        out in the protocol's binary form, or to `/predict/{model}` as a file.
        """
        known = await upstream.metadata(model, version)
        source = {EXAMPLE_SOURCE.decode(): "metadata" if known.example is None else "model"}
        return Response(orjson.dumps(example_request(known)), headers=source, media_type="application/json")

    return router


def as_it_came(answer: UpstreamResponse) -> Response:
    """Triton's answer, status and body."""
    media = answer.header(b"content-type") or b"application/json"
    return Response(answer.body, answer.status, media_type=media.decode("latin-1"))
