"""GET /rollouts: how far the releases are."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from serve.gateway.release.releases import Releases

__all__ = ["rollouts_router"]


def rollouts_router(releases: Releases) -> APIRouter:
    """The route, bound to a gateway's releases."""
    router = APIRouter(tags=["releases"])

    @router.get("/rollouts", summary="Rollouts that decide what is served")
    async def rollouts(request: Request) -> list[dict[str, Any]]:
        """The last one of each model that the key may ask: its state, step, weight in percent, and evidence, at most
        some seconds old."""
        identity = request.state.identity
        return [release for release in releases.shown() if identity.sees(release["model"])]

    return router
