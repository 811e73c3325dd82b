"""The page /docs: Swagger UI from installed files, with no request to any other host."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from importlib.resources import files

import orjson
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from serve.gateway.access.gate import Gate
from serve.gateway.access.identity import Identity
from serve.gateway.edge.guard import key_headers
from serve.gateway.errors import GatewayError, UnauthorizedError
from serve.gateway.oip.described import described
from serve.gateway.oip.metadata import ModelMetadata
from serve.gateway.oip.tensors import ProtocolError
from serve.gateway.site.openapi import with_models
from serve.gateway.upstream.upstream import Upstream

__all__ = ["add_docs"]

ASSETS = {
    "swagger-ui-bundle.js": "text/javascript",
    "swagger-ui.css": "text/css",
    "favicon.png": "image/png",
}
# The browser itself then refuses whatever an asset might want to load from elsewhere, and what stands in the page.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
COST = 10  # of /openapi.json to a key: it asks for each model


def add_docs(app: FastAPI, gate: Gate, upstream: Upstream) -> None:
    """Add /docs and the files that it needs, and /openapi.json with the models that whoever asks may use."""
    general = app.openapi()

    def schema(models: list[ModelMetadata]) -> bytes:
        return orjson.dumps(with_models(general, models, keys=not gate.keys.open))

    without = schema([])

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi(request: Request) -> Response:
        shown: list[ModelMetadata] = []
        identity: Identity | None = None
        with suppress(UnauthorizedError):  # who has no key sees what is the same for all
            identity = gate.keys.identify(key_headers(request.scope["headers"]))
        if identity is not None:
            identity.ask(COST)
            for name, info in (await upstream.askable()).items():
                if identity.sees(name):
                    with suppress(GatewayError, ProtocolError):  # it has been unloaded meanwhile
                        shown.append(described(info) if info is not None else await upstream.metadata(name))
        shown = [model for model in shown if not model.part_of]
        # A hundred models take some 60 ms.
        told = await asyncio.to_thread(schema, shown) if shown else without
        return Response(told, media_type="application/json")

    static = files("fastapi_offline") / "static"
    page = (files("serve.gateway.site") / "ui" / "docs.html").read_bytes()

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(page, headers={"content-security-policy": POLICY})

    for name, media in ASSETS.items():
        _add_asset(app, name, (static / name).read_bytes(), media)


def _add_asset(app: FastAPI, name: str, content: bytes, media: str) -> None:
    @app.get(f"/docs/{name}", include_in_schema=False)
    async def asset() -> Response:  # not in ranges, of which one request may ask for any number
        return Response(content, media_type=media, headers={"cache-control": "public, max-age=3600"})
