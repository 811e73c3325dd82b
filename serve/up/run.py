"""A whole server in one command: a real Triton behind a gateway, started together and stopped in order."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import uvloop

from compress.errors import ServerError
from compress.host.cores import Cores, cores_here
from serve.config.threads import threads_of
from serve.gateway.health.incidents import Incidents
from serve.gateway.on_demand.residency import Residency
from serve.gateway.server import check_port, check_settings, forwarding_signals, serve_gateway
from serve.gateway.settings import Settings
from serve.gateway.settings_file import load_settings
from serve.gateway.upstream.loading import Loading
from serve.lint.advice import core_advice
from serve.lint.model import read
from serve.repository.folders import folders_of, recover
from serve.repository.needs import used_by
from serve.repository.read import ModelInfo, read_models
from serve.repository.served import Served, serving
from serve.triton.control import Loaded, list_models
from serve.triton.heal import Healer
from serve.triton.launch import TritonOptions, TritonServer
from serve.triton.memory import region_bytes
from serve.triton.on_demand import TritonHost
from serve.triton.ports import HOST
from serve.triton.ports import claim as claim_ports
from serve.triton.supervisor import Backoff, supervise
from serve.up.claim import claimed
from serve.up.container import container_command
from serve.up.memory import bytes_of
from serve.up.on_demand import ChangedOnDemand, pinned_of, started_of
from serve.up.options import UpOptions, cpus_of
from serve.up.preflight import check_models
from serve.up.watch import Acts, TellTriton, follow

__all__ = ["Started", "up"]

AT_ONCE_S = 1.0
LOOK_S = 0.25


@dataclass(frozen=True)
class Started:
    """What runs, for whoever shows it.

    Attributes:
        gateway: its URL.
        triton: the URL of Triton's HTTP endpoint.
        loaded: the models that it has, with their state.
        models: those of the repository; empty for a Triton that ran already.
        seconds: how long Triton took to be ready.
        endpoints: its other addresses, by name.
        grpc: the gateway's address for gRPC; "" where it listens to none.
        log: the file that it writes; None for a Triton elsewhere.
        warnings: what to mend.
        cores: how many there are, what says so, and how many threads each model computes with.
    """

    gateway: str
    triton: str
    loaded: tuple[Loaded, ...]
    models: tuple[ModelInfo, ...] = ()
    seconds: float = 0.0
    endpoints: tuple[tuple[str, str], ...] = ()
    log: Path | None = None
    warnings: tuple[str, ...] = ()
    cores: str = ""
    grpc: str = ""


def up(
    repository: Path | None,
    options: UpOptions,
    *,
    on_ready: Callable[[Started], None],
    on_event: Callable[[str], None] = lambda _: None,
) -> None:
    """Serve until SIGINT or SIGTERM; then drain the gateway first and Triton after it.

    Args:
        repository: what `serve pack` wrote; None for a Triton that runs already.
        options: ports and times.
        on_ready: called once, when requests are answered.
        on_event: told what happens later: a restart, a reload. Where it, or on_ready, fails, serving goes on.

    Raises:
        RepositoryError: there is nothing to serve.
        ServerError: a port is taken, a model does not load, or Triton died too often.
    """
    if (repository is None) == (options.triton is None):
        raise ServerError(
            "can't tell what to serve",
            why="there is neither a repository nor a Triton" if repository is None else "both are given",
            mend="name a model repository, or give --triton URL",
        )
    settings = _settings(options, options.triton or "http://127.0.0.1", "127.0.0.1:1")
    check_settings(settings)
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    grpc = f"{host}:{settings.grpc_port}" if settings.grpc_port else ""

    def event(text: str) -> None:
        """What can't be told, to a disk that is full or a pipe that nobody reads, ends nothing."""
        with suppress(Exception, SystemExit):
            on_event(text)

    def ready(started: Started) -> None:
        with suppress(Exception, SystemExit):
            on_ready(replace(started, grpc=grpc))

    drain_s = float(settings.drain_timeout_s) if options.drain_timeout is None else options.drain_timeout
    # Until the event loop takes the signals over, they end the start as Ctrl-C does: Triton is stopped, not left.
    previous = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in previous.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)
    try:
        if options.triton is not None:
            loaded = tuple(list_models(options.triton))
            url = options.triton
            _gateway(options, url, "", lambda at: ready(Started(at, url, loaded)))
        elif repository is not None:
            container = options.docker == "run"
            serve = _container if container else _embedded
            changes = options.trust_changes
            recover(repository)
            folders_of(repository)  # whether it is there comes first, then who serves it already, then the ports
            at = f"http{'s' * bool(settings.tls_certificate)}://{host}:{settings.port}" if settings.port else ""
            with claimed(repository, at):
                check_port(settings.host, settings.port)
                if not container:
                    claim_ports(options.ports)
                with serving(repository, options.public_key, trust_changes=changes) as served:
                    check_models(repository, container=container, trust_changes=changes)
                    event(f"starting Triton on {repository} …")
                    serve(served, options, drain_s, ready, event)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _embedded(
    served: Served,
    options: UpOptions,
    drain_s: float,
    on_ready: Callable[[Started], None],
    on_event: Callable[[str], None],
) -> None:
    repository = served.repository
    models = tuple(read_models(repository))
    cpus = cpus_of(options.cpus)
    memory = None if options.memory is None else bytes_of(options.memory)
    known, first = ({}, None) if memory is None else pinned_of(repository, memory, options.pin)
    triton = TritonServer(
        repository,
        ports=options.ports,
        options=TritonOptions(
            start_timeout_s=options.start_timeout,
            stop_timeout_s=drain_s,
            explicit=options.model_control or (options.watch and memory is None),
            only=first,
            heal=True,
            cache_bytes=options.cache_mb * 1024 * 1024,
            cpus=cpus,
        ),
        log=options.log or Path(tempfile.gettempdir()) / f"serve-up-{os.getpid()}.log",
        served=served,
    )
    begun = time.perf_counter()
    with triton:
        seconds = time.perf_counter() - begun
        url = f"http://{triton.http_address}"
        endpoints = (("Triton gRPC", triton.grpc_address), ("metrics", f"http://{triton.metrics_address}/metrics"))
        cores = cores_here(cpus)
        warnings = tuple(_advice(repository, cores))
        incidents = Incidents(control=triton.control)
        healer = Healer(
            triton,
            lambda: used_by(read_models(repository)),
            incidents.outages,
            incidents.suspects,
            on_event,
            served.renew,
        )
        residency: Residency | None = None
        if memory is not None:
            check = (lambda _models: None) if served.signed else served.renew  # what is signed is a copy of our own
            host = TritonHost(triton, region_bytes(list(models)), options.start_timeout, check)
            residency = Residency(host, known, memory, options.pin, on_event)
            warnings += tuple(started_of(residency, host.used_now()))
        tells = TellTriton(triton.grpc_address, triton.control, served)
        watching = [_followed(repository, tells, on_event, served, residency)] if options.watch else []
        watching.append(healer.run())
        enough = False

        async def supervised() -> None:
            nonlocal enough
            died = (lambda: None) if residency is None else residency.started
            await supervise(triton, Backoff(options.restarts), incidents.outages, incidents.suspects, on_event, died)
            enough = True

        watching.insert(0, supervised())

        def ready(gateway: str) -> None:
            loaded = tuple(list_models(url, triton.control))
            if residency is not None:
                loaded = tuple(_on_demand(row, residency) for row in loaded)
            on_ready(
                Started(gateway, url, loaded, models, seconds, endpoints, triton.log, warnings, shares(models, cores))
            )

        loading = Loading(served.renew, bare=served.signed)
        if not _gateway(
            options, url, triton.grpc_address, ready, *watching,
            incidents=incidents, loading=loading, residency=residency,
        ):  # fmt: skip
            triton.stop(within_s=AT_ONCE_S)
        if enough:  # not where it was told to stop while Triton was down
            raise ServerError(
                "Triton has died",
                why=f"it ended more often than --restarts {options.restarts} allows; its log is in {triton.log}",
                mend="look at the end of the log, then start again",
            )


async def _followed(
    repository: Path, tells: Acts, on_event: Callable[[str], None], served: Served, residency: Residency | None
) -> None:
    acts = tells if residency is None else ChangedOnDemand(residency, repository)  # which needs the loop that runs
    await follow(repository, acts, on_event, served=served)


def _on_demand(row: Loaded, residency: Residency) -> Loaded:
    return row if row.state == "READY" else replace(row, state=residency.state(row.name))


def shares(models: Sequence[ModelInfo], cores: Cores) -> str:
    """The cores, and of each model that computes: its instances, times the threads that each starts."""
    said = []
    for model in models:
        if (threads := threads_of(model.config)) is not None:
            each = threads.within(cores.count)
            asked = f" ({threads.each} asked for)" if threads.each > each else ""
            said.append(f"{model.name} {threads.instances} x {each} thread{'s' * (each != 1)}{asked}")
    return "; ".join([cores.told(), *said])


def _advice(repository: Path, cores: Cores) -> list[str]:
    """Instances and threads that are more than the cores."""
    models = [read(folder) for folder in sorted(repository.iterdir()) if (folder / "config.pbtxt").is_file()]
    return [f"{finding.model}: {finding.what}; {finding.mend}" for finding in core_advice(models, cores)]


def _container(
    served: Served,
    options: UpOptions,
    drain_s: float,
    on_ready: Callable[[Started], None],
    _on_event: Callable[[str], None],
) -> None:
    models = read_models(served.repository)
    # A mount is of what a link stands for now: in a container, what is loaded stays what was verified at the start.
    command = container_command(served.folder.resolve(), models, options)
    url = f"http://127.0.0.1:{options.triton_http_port}"
    begun = time.perf_counter()
    try:
        process = subprocess.Popen(command, start_new_session=True)
    except OSError as err:
        raise ServerError(
            "can't run the container", why=str(err), mend="install docker, or leave --docker out"
        ) from err
    try:
        while not _answers(url):
            if process.poll() is not None:
                raise ServerError(
                    "can't serve in the container",
                    why=f"docker ended with code {process.returncode}",
                    mend="see what it said above",
                )
            if time.perf_counter() - begun > options.start_timeout:
                raise ServerError(
                    "can't serve in the container", why=f"not ready after {options.start_timeout:g} s",
                    mend="see what it said above, or give --start-timeout",
                )  # fmt: skip
            time.sleep(LOOK_S)
        seconds = time.perf_counter() - begun
        ended = _until_ended(process)
        _gateway(
            options,
            url,
            f"{HOST}:{options.triton_grpc_port}",
            lambda at: on_ready(Started(at, url, tuple(list_models(url)), tuple(models), seconds)),
            ended,
            loading=Loading(bare=served.signed) if served.signed else Loading(served.renew),
        )
    finally:
        process.terminate()
        process.wait(drain_s + 10)


def _answers(url: str) -> bool:
    try:
        return all(row.state == "READY" for row in list_models(url))
    except ServerError:
        return False


async def _until_ended(process: subprocess.Popen[bytes]) -> None:
    while process.poll() is None:  # noqa: ASYNC110  a process that ends sets no event
        await asyncio.sleep(LOOK_S)


def _gateway(
    options: UpOptions,
    url: str,
    grpc: str,
    on_ready: Callable[[str], None],
    *beside: Coroutine[Any, Any, None],
    incidents: Incidents | None = None,
    loading: Loading | None = None,
    residency: Residency | None = None,
) -> bool:
    """Run the gateway, and what works beside it; it ends with the first of these, or with a signal.

    Returns:
        Whether requests were waited for; not where a second signal came.
    """
    return uvloop.run(_serve(_settings(options, url, grpc), on_ready, beside, incidents, loading, residency))


def _settings(options: UpOptions, url: str, grpc: str) -> Settings:
    ours: dict[str, Any] = {} if options.triton is not None else {"grpc_upstream": (grpc,)}
    return load_settings(options.gateway, os.environ, upstream=(url,), **ours, **options.given)


async def _serve(
    settings: Settings,
    on_ready: Callable[[str], None],
    beside: Sequence[Coroutine[Any, Any, None]],
    incidents: Incidents | None,
    loading: Loading | None,
    residency: Residency | None,
) -> bool:
    stop, force = asyncio.Event(), asyncio.Event()
    with forwarding_signals(stop, force):
        async with _working(beside, stop):
            await serve_gateway(
                settings, stop=stop, on_ready=on_ready, force=force, incidents=incidents, loading=loading,
                residency=residency,
            )  # fmt: skip
    return not force.is_set()


@asynccontextmanager
async def _working(beside: Sequence[Coroutine[Any, Any, None]], stop: asyncio.Event) -> AsyncIterator[None]:
    tasks = [asyncio.ensure_future(each) for each in beside]
    for task in tasks:
        task.add_done_callback(lambda _: stop.set())
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(outcome, Exception):
                raise outcome
