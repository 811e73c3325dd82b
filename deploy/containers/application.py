"""Where an application stands on this machine, whatever plays it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from deploy.containers.engine import Engine

__all__ = ["Application"]


@dataclass(frozen=True)
class Application:
    """One application on this machine.

    Attributes:
        engine: Podman or Docker.
        folder: for keys, and what is written for the engine.
        gateway_port: on 127.0.0.1.
        prometheus_port: on 127.0.0.1.
    """

    engine: Engine
    folder: Path
    gateway_port: int = 8080
    prometheus_port: int = 9090

    @property
    def url(self) -> str:
        """The gateway's."""
        return f"http://127.0.0.1:{self.gateway_port}"

    @property
    def prometheus(self) -> str:
        """The URL of Prometheus."""
        return f"http://127.0.0.1:{self.prometheus_port}"

    @property
    def key(self) -> str:
        """What clients show to the gateway."""
        return (self.folder / "client-key").read_text().strip()
