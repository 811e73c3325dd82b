"""What `serve up` can be asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["UpOptions"]


@dataclass(frozen=True)
class UpOptions:
    """Where things listen; all on loopback unless --host says otherwise."""

    host: str = "127.0.0.1"
    """Address of the gateway; Triton itself is never reachable from outside."""

    port: int = 8080
    """Port of the gateway; here and below, 0 takes a free one."""

    triton_http_port: int = 8000
    """Triton's HTTP endpoint."""

    triton_grpc_port: int = 8001
    """Triton's gRPC endpoint."""

    triton_metrics_port: int = 8002
    """Triton's Prometheus metrics."""

    model_control: bool = False
    """Let `serve models` load and unload through Triton's own port; then any process of this machine can."""

    log: Path | None = None
    """Keep Triton's own log in this file; otherwise it is kept only when something fails."""

    start_timeout: float = 120.0
    """How long all models together may take to load and warm up, in seconds."""

    drain_timeout: float = 30.0
    """How long requests in flight may take to end when the server stops, in seconds."""
