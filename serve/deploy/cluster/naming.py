"""How the parts of a deployment are named, and the ports they have."""

from __future__ import annotations

from typing import Any, Protocol

from serve.deploy.monitoring.scope import SERIES_LABELS, Scope
from serve.deploy.options import RenderOptions

__all__ = ["GATEWAY_PORT", "PART_OF", "SERIES_LABELS", "TRITON_PORTS", "labels", "meta", "scope_of"]

TRITON_PORTS = {"http": 8000, "grpc": 8001, "metrics": 8002}
GATEWAY_PORT = 8080
PART_OF = "app.kubernetes.io/part-of"


class Named(Protocol):
    """What is rendered, by its name."""

    @property
    def name(self) -> str:
        """Of all its parts."""


def labels(options: Named, part: str) -> dict[str, str]:
    return {"app.kubernetes.io/name": part, PART_OF: options.name}


def meta(options: Named, part: str) -> dict[str, Any]:
    return {"name": f"{options.name}-{part}", "labels": labels(options, part)}


def scope_of(options: RenderOptions, asked: tuple[str, ...]) -> Scope:
    """The application's series.

    Args:
        options: what runs where.
        asked: names of the models that clients ask for.
    """
    return Scope(tuple(zip(SERIES_LABELS, (options.namespace, options.name), strict=True)), asked)
