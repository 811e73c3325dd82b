"""How a gateway is set up."""

from __future__ import annotations

from dataclasses import dataclass

from compress.errors import ServerError
from serve.http_message import Address

__all__ = ["Settings"]


@dataclass(frozen=True)
class Settings:
    """One gateway in front of one Triton.

    Raises:
        ServerError: a value that can't work.
    """

    upstream: str = "http://127.0.0.1:8000"
    """Triton's HTTP endpoint, http://host:port."""

    host: str = "127.0.0.1"
    """Address to listen on; only this machine reaches the default."""

    port: int = 8080
    """Port to listen on; 0 takes a free one."""

    max_body_bytes: int = 64 * 1024 * 1024
    """Longest request body that is accepted, in bytes."""

    timeout_s: float = 30.0
    """How long Triton may take for an answer, in seconds."""

    max_connections: int = 128
    """Most connections to Triton at a time; further requests wait."""

    drain_delay_s: float = 0.0
    """How long to go on accepting requests after readiness turned false, for load balancers to notice, in seconds."""

    drain_timeout_s: int = 30
    """How long requests in flight may take to end when the gateway stops, in seconds."""

    def __post_init__(self) -> None:
        try:
            Address.parse(self.upstream)
        except ValueError as err:
            raise ServerError(
                "the gateway has no upstream to talk to",
                why=str(err),
                mend="name Triton's HTTP endpoint as in http://127.0.0.1:8000",
            ) from err
        for name in ("max_body_bytes", "timeout_s", "max_connections", "drain_timeout_s"):
            if getattr(self, name) <= 0:
                raise ServerError(
                    "the gateway can't be set up",
                    why=f"{name} is {getattr(self, name)}",
                    mend=f"give {name} a value above 0",
                )
        if not 0 <= self.port <= 65535 or self.drain_delay_s < 0:
            raise ServerError(
                "the gateway can't be set up",
                why=f"port is {self.port}, drain_delay_s is {self.drain_delay_s}",
                mend="a port is 0 to 65535, a delay is 0 or more",
            )
