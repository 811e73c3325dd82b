"""A whole server in one command: a real Triton behind a gateway, started together and stopped in order."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import uvloop

from compress.errors import ServerError
from serve.gateway.server import check_port, forwarding_signals, serve_gateway
from serve.gateway.settings import Settings
from serve.repository import ModelInfo, read_models
from serve.triton.launch import Ports, TritonOptions, TritonServer
from serve.up_options import UpOptions

__all__ = ["Started", "up"]

# Triton is asked this often whether it still lives, in seconds.
WATCH_S = 0.25


@dataclass(frozen=True)
class Started:
    """What runs, for whoever shows it.

    Attributes:
        gateway: its URL.
        triton: the URL of Triton's HTTP endpoint.
        models: what is served.
        seconds: how long Triton took to be ready.
    """

    gateway: str
    triton: str
    models: tuple[ModelInfo, ...]
    seconds: float


def up(repository: Path, options: UpOptions, *, on_ready: Callable[[Started], None]) -> None:
    """Serve a repository until SIGINT or SIGTERM; then drain the gateway first and Triton after it.

    Args:
        repository: what `serve pack` wrote.
        options: ports and times.
        on_ready: called once, when requests are answered.

    Raises:
        RepositoryError: there is nothing to serve.
        ServerError: a port is taken, a model does not load, or Triton died.
    """
    models = tuple(read_models(repository))
    check_port(options.host, options.port)
    triton = TritonServer(
        repository,
        ports=Ports(options.triton_http_port, options.triton_grpc_port, options.triton_metrics_port),
        options=TritonOptions(
            start_timeout_s=options.start_timeout,
            stop_timeout_s=options.drain_timeout,
            explicit=options.model_control,
        ),
        log=options.log,
    )
    # Until the event loop takes the signals over, SIGTERM ends the start as Ctrl-C does: Triton is stopped, not left.
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    begun = time.perf_counter()
    try:
        with triton:
            seconds = time.perf_counter() - begun
            settings = Settings(
                upstream=f"http://{triton.http_address}",
                host=options.host,
                port=options.port,
                drain_timeout_s=max(1, round(options.drain_timeout)),
            )

            def ready(url: str) -> None:
                on_ready(Started(url, settings.upstream, models, seconds))

            uvloop.run(_serve(settings, triton, ready))
    finally:
        signal.signal(signal.SIGTERM, previous)


async def _serve(settings: Settings, triton: TritonServer, on_ready: Callable[[str], None]) -> None:
    stop, force = asyncio.Event(), asyncio.Event()
    watcher = asyncio.ensure_future(_until_dead(triton, stop))
    try:
        with forwarding_signals(stop, force):
            await serve_gateway(settings, stop=stop, on_ready=on_ready, force=force)
    finally:
        watcher.cancel()
    if not triton.running:
        raise ServerError(
            "Triton has died",
            why=f"the process ended by itself; its log is in {triton.log}",
            mend="look at the end of the log, then start again",
        )


async def _until_dead(triton: TritonServer, stop: asyncio.Event) -> None:
    while triton.running:  # noqa: ASYNC110  a process that ends sets no event
        await asyncio.sleep(WATCH_S)
    stop.set()
