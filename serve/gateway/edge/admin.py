"""What only a key with admin may do: load and unload models, shared memory, traces and logs of Triton's own.

With several Tritons each is told.
"""

from __future__ import annotations

import re

from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from serve.config.names import MODEL_NAME
from serve.gateway.access.gate import Gate
from serve.gateway.access.memory import LastingShare
from serve.gateway.edge.bodies import read_body
from serve.gateway.edge.routes import as_it_came
from serve.gateway.settings import Settings
from serve.gateway.upstream.loading import Loading
from serve.gateway.upstream.upstream import Upstream

__all__ = ["admin_router"]

# What of Triton's HTTP interface an administrator reaches, and nothing else below /v2.
REGION = r"(?:/region/[A-Za-z0-9_-]{1,128})?"
READ = re.compile(rf"logging|trace/setting|(?:system|cuda)sharedmemory{REGION}/status")
CONTROL = re.compile(rf"repository/models/{MODEL_NAME}/(?:load|unload)")
WRITE = re.compile(
    rf"logging|trace/setting|repository/index|{CONTROL.pattern}"
    rf"|(?:system|cuda)sharedmemory{REGION}/(?:register|unregister)"
)

INDEX = "repository/index"
RESTS = "it is loaded when it is asked for"
LOAD = re.compile(rf"repository/models/({MODEL_NAME})/load")
INFER = re.compile(rf"models/{MODEL_NAME}(?:/versions/[0-9]+)?/infer")
TO_READ = re.compile(
    rf"health/(?:live|ready)|models/stats|models/{MODEL_NAME}(?:/versions/[0-9]+)?(?:/(?:ready|config|stats|example))?"
    rf"|{READ.pattern}"
)


def admin_router(settings: Settings, upstream: Upstream, gate: Gate, loading: Loading) -> APIRouter:
    """The routes, bound to the upstreams; the last ones below /v2."""
    router = APIRouter(tags=["administration"])

    @router.get("/v2/{path:path}", include_in_schema=False)
    async def read(request: Request, path: str) -> Response:
        if not READ.fullmatch(path):
            to_write = WRITE.fullmatch(path) or INFER.fullmatch(path)
            raise HTTPException(405, headers={"allow": "POST"}) if to_write else HTTPException(404)
        request.state.identity.check_admin()
        return as_it_came(await upstream.get(f"/v2/{path}", administers=True))

    @router.post("/v2/{path:path}", include_in_schema=False)
    async def write(request: Request, path: str) -> Response:
        if not WRITE.fullmatch(path):
            raise HTTPException(405, headers={"allow": "GET"}) if TO_READ.fullmatch(path) else HTTPException(404)
        request.state.identity.check_admin()
        body = await read_body(request.scope, None, request.receive, settings.max_body_bytes, LastingShare(gate.memory))
        gate.keys.again(request.state.identity).check_admin()
        if CONTROL.fullmatch(path):
            gate.check_control()
        if load := LOAD.fullmatch(path):
            body = await loading.body(load[1], body)
        why = {**dict.fromkeys(upstream.resting(), RESTS), **dict(upstream.outages)} if path == INDEX else {}
        return as_it_came(await upstream.post_all(f"/v2/{path}", body), why.items())

    return router
