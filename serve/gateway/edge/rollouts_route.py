"""GET /rollouts: how far the releases are; POST /rollouts/{model}/abort gives one back to its baseline."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from serve.gateway.release.releases import Releases

__all__ = ["rollouts_router"]

_PROBLEM: dict[str, Any] = {
    "description": "It is not aborted",
    "content": {"application/json": {"schema": {"type": "object", "required": ["error"]}}},
}


def rollouts_router(releases: Releases) -> APIRouter:
    """The routes, bound to a gateway's releases."""
    router = APIRouter(tags=["releases"])

    @router.get("/rollouts", summary="Rollouts that decide what is served")
    async def rollouts(request: Request) -> list[dict[str, Any]]:
        """The last one of each model that the key may ask: its state, step, weight in percent, and evidence, at most
        some seconds old."""
        identity = request.state.identity
        return [release for release in releases.shown() if identity.sees(release["model"])]

    @router.post(
        "/rollouts/{model}/abort", summary="Give everything back to the baseline now", responses={"4XX": _PROBLEM}
    )
    async def abort(request: Request, model: str) -> dict[str, Any]:
        """For keys with admin. It holds at once in this gateway, whether or not its state file can be written:
        `written` says so, and `why` not."""
        identity = request.state.identity
        identity.check_admin()
        identity.check_model(model)
        why = await releases.abort(model)
        return {"model": model, "state": "aborted", "written": not why, "why": why}

    return router
