"""How the parts of a deployment are named, and the ports they have."""

from __future__ import annotations

from typing import Any

from serve.deploy.options import RenderOptions

__all__ = ["GATEWAY_PORT", "TRITON_PORTS", "labels", "meta"]

TRITON_PORTS = {"http": 8000, "grpc": 8001, "metrics": 8002}
GATEWAY_PORT = 8080


def labels(options: RenderOptions, part: str) -> dict[str, str]:
    return {"app.kubernetes.io/name": part, "app.kubernetes.io/part-of": options.name}


def meta(options: RenderOptions, part: str) -> dict[str, Any]:
    return {"name": f"{options.name}-{part}", "labels": labels(options, part)}
