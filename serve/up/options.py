"""What `serve up` can be asked for."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from compress.errors import ServerError
from serve.triton.ports import Ports
from serve.up.memory import check_flags

__all__ = ["UpOptions", "cpus_of"]


@dataclass(frozen=True)
class UpOptions:
    """Where things listen; all on loopback unless --host, or the gateway's own settings, say otherwise.

    A flag that the gateway has a setting for is None by default: only what was given comes before its file.
    """

    host: str | None = None
    """Address of the gateway; by default what --gateway's file or the environment says, else 127.0.0.1. Triton itself
    is never reachable from outside."""

    port: int | None = None
    """Port of the gateway; by default what --gateway's file or the environment says, else 8080; here and below, 0 takes
    a free one."""

    gateway: Path | None = None
    """TOML file with more settings of the gateway, as for `serve gateway --config`: keys, limits, TLS; those of the
    environment (SERVE_GATEWAY_...) hold, too."""

    agree_module: Path | None = None
    """A Python file of yours with functions that `serve rollout start --agree OUTPUT:function=NAME` may name."""

    triton: str | None = None
    """URL of a Triton that runs already, in place of a repository; only the gateway is started."""

    triton_http_port: int = 8000
    """Triton's HTTP endpoint."""

    triton_grpc_port: int = 8001
    """Triton's gRPC endpoint."""

    triton_metrics_port: int = 8002
    """Triton's Prometheus metrics."""

    model_control: bool = False
    """Let `serve models` load and unload through Triton's own port; then any process of this machine can."""

    public_key: Path | None = None
    """Serve only what `serve sign` signed with this key's other half (PEM)."""

    trust_changes: bool = False
    """Serve files that were changed since `serve pack` wrote them."""

    watch: bool = False
    """Load what changes in the repository; implies --model-control, unless there is --memory."""

    memory: str | None = None
    """Memory that Triton and its models may have resident, such as 8GiB: a model is then loaded when it is asked for,
    and the one that was used longest ago goes for it; by default all are loaded at the start."""

    pin: tuple[str, ...] = ()
    """With --memory, a model that is loaded at the start and stays; may be given again."""

    restarts: int = 5
    """How often Triton is started again in a row when it dies, after 0.5 s, 1 s, 2 s and so on; 0 for never. Deaths
    that one client's requests are to blame for don't count, and starts that fail have a row of their own."""

    cpus: str | None = None
    """The cores that Triton and its models may run on, as in 0-3,6; all by default."""

    cache_mb: int = 64
    """Memory for answers, where a model was packed with --response-cache, in MiB."""

    docker: Literal["print", "run"] | None = None
    """Print the command that serves the repository in NVIDIA's container, or run it in place of the embedded Triton."""

    image: str | None = None
    """The container image for --docker."""

    log: Path | None = None
    """Triton's own log; by default a file among the temporary ones, which stays."""

    start_timeout: float = 120.0
    """How long all models together may take to load and warm up, in seconds."""

    drain_timeout: float | None = None
    """How long requests in flight may take to end when the server stops, in seconds; by default what --gateway's file
    or the environment says, else 30."""

    @property
    def given(self) -> dict[str, Any]:
        """What was given of the gateway's settings, by their names."""
        drain = None if self.drain_timeout is None else max(1, round(self.drain_timeout))
        flags = {"host": self.host, "port": self.port, "drain_timeout_s": drain, "agree_module": self.agree_module}
        return {name: value for name, value in flags.items() if value is not None}

    @property
    def ports(self) -> Ports:
        """Triton's."""
        return Ports(self.triton_http_port, self.triton_grpc_port, self.triton_metrics_port)

    def __post_init__(self) -> None:
        if self.restarts < 0 or self.cache_mb < 1:
            name, value = ("restarts", self.restarts) if self.restarts < 0 else ("cache-mb", self.cache_mb)
            raise ServerError(f"can't serve with --{name} {value}", why="it is too small", mend="give a larger number")
        cpus_of(self.cpus)
        check_flags(self.memory, self.pin, triton=self.triton, docker=self.docker, model_control=self.model_control)


def cpus_of(text: str | None) -> tuple[int, ...]:
    """The cores that "0-3,6" names; () for None.

    Raises:
        ServerError: it is no list of cores.
    """
    if text is None:
        return ()
    cores: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if match is None:
            raise ServerError(f"can't run on the cores {text!r}", why="it is no list", mend="write it as in 0-3,6")
        cores |= set(range(int(match[1]), int(match[2] or match[1]) + 1))
    return tuple(sorted(cores))
