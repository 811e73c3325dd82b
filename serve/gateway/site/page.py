"""The page at /: what is served, a place to try it, what has happened in the last minutes, and how releases go.

Three files that come with the package; what they show they ask for with the visitor's own key.
"""

from __future__ import annotations

from contextlib import suppress
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from serve.gateway.access.identity import Identity
from serve.gateway.errors import GatewayError
from serve.gateway.observe.history import EVERY_S, History
from serve.gateway.oip.described import described
from serve.gateway.oip.metadata import ModelMetadata, TensorMetadata
from serve.gateway.oip.tensors import ProtocolError
from serve.gateway.on_demand.residency import Residency
from serve.gateway.site.openapi import example_values
from serve.gateway.upstream.upstream import Upstream

__all__ = ["add_page"]

FILES = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/ui/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/ui/plot.js": ("plot.js", "text/javascript; charset=utf-8"),
    "/ui/docs.js": ("docs.js", "text/javascript; charset=utf-8"),
    "/ui/page.css": ("page.css", "text/css; charset=utf-8"),
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def add_page(app: FastAPI, upstream: Upstream, history: History, residency: Residency | None = None) -> None:
    """Add the page, its files, and what it asks for."""
    for path, (name, media) in FILES.items():
        _add_file(app, path, (files("serve.gateway.site") / "ui" / name).read_bytes(), media)

    @app.get("/ui/models", include_in_schema=False)
    async def models(request: Request) -> list[dict[str, Any]]:
        identity: Identity = request.state.identity
        states: dict[str, str] = {}
        for name, state in await upstream.index():
            if identity.sees(name) and (name not in states or state == "READY"):
                states[name] = state
        if residency is not None:
            steps = {name for name, known in residency.known.items() if known.part_of}
            states = {name: residency.state(name) or state for name, state in states.items() if name not in steps}
        resting = upstream.resting()
        shown = []
        for name, state in sorted(states.items()):
            known = None
            if state == "READY":
                with suppress(GatewayError):  # it has been unloaded meanwhile
                    known = await upstream.metadata(name)
            elif (info := resting.get(name)) is not None:
                with suppress(ProtocolError):
                    known = described(info)
            if known is None or not known.part_of:
                shown.append(_model(name, state or "UNAVAILABLE", known))
        return shown

    @app.get("/ui/memory", include_in_schema=False)
    async def memory(request: Request) -> dict[str, Any] | None:
        """Null where all models are loaded for good."""
        return None if residency is None else _memory(residency, request.state.identity)

    @app.get("/ui/history", include_in_schema=False)
    async def last_minutes(request: Request) -> dict[str, Any]:
        identity: Identity = request.state.identity
        points = {model: points for model, points in history.shown().items() if identity.sees(model)}
        return {"every_s": EVERY_S, "models": points}


def _memory(residency: Residency, identity: Identity) -> dict[str, Any]:
    """What the models that somebody may ask have, and how often they came and went; of the others, their sum."""
    used, counts = residency.units.used, residency.counts
    rows: dict[str, dict[str, Any]] = {}
    for step, known in residency.known.items():
        name = known.part_of if known.part_of in residency.known else step
        if identity.sees(name):
            row = rows.setdefault(name, {"name": name, "bytes": 0, "pinned": name in residency.pins})
            row["bytes"] += used.by_model.get(step, 0)
    for name, row in rows.items():
        row |= {what: counts[what, name] for what in ("loaded", "evicted", "failed", "waited")}
    shown = [row for row in rows.values() if row["bytes"] or row["loaded"] or row["failed"]]
    others = used.total - used.own - sum(row["bytes"] for row in shown)
    return {
        "limit_bytes": residency.budget,
        "bytes": used.total,
        "server_bytes": used.own,
        "other_bytes": max(0, others),
        "models": sorted(shown, key=lambda row: (-row["bytes"], row["name"])),
    }


def _model(name: str, state: str, known: ModelMetadata | None) -> dict[str, Any]:
    if known is None:
        return {"name": name, "state": state}
    return {
        "name": name,
        "state": state,
        "versions": known.versions,
        "inputs": [_tensor(tensor) for tensor in known.inputs],
        "outputs": [_tensor(tensor) for tensor in known.outputs],
        "batched": known.batched,
        "file": len(known.inputs) == 1 and known.inputs[0].datatype == "BYTES",
        "example": example_values(known),
    }


def _tensor(tensor: TensorMetadata) -> dict[str, Any]:
    return {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape}


def _add_file(app: FastAPI, path: str, content: bytes, media: str) -> None:
    @app.get(path, include_in_schema=False)
    async def file() -> Response:
        return Response(content, media_type=media, headers={"content-security-policy": POLICY})
