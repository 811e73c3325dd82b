"""Run the gateway: a socket that is ours, uvicorn in the caller's event loop, and an orderly end."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import gc
import logging
import os
import resource
import signal
import socket
import ssl
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import uvicorn

from compress.errors import ServerError
from compress.host.cores import cores_here
from serve.gateway.access.ending import Ending, by_model
from serve.gateway.access.handshakes import Handshakes, handshake_s
from serve.gateway.access.identity import KeyRing
from serve.gateway.access.memory import CONNECTION_BYTES, Memory
from serve.gateway.app import create_app
from serve.gateway.edge.accepting import MOST_WAITING
from serve.gateway.edge.connections import connection_class
from serve.gateway.edge.rounds import Rounds
from serve.gateway.edge.serving import Serving, first
from serve.gateway.grpc.clients import Clients, Greetings
from serve.gateway.health.incidents import Incidents
from serve.gateway.on_demand.residency import Residency
from serve.gateway.release.users_rules import UsersRules
from serve.gateway.settings import Settings
from serve.gateway.upstream.loading import Loading
from serve.gateway.whose import check_whose
from serve.http.tls import server_context

__all__ = ["check_port", "check_settings", "forwarding_signals", "run_gateway", "serve_gateway"]

SPARE_FILES = 512
TOLD_CLIENTS = 64  # beyond the bound, whose requests are read before they are refused; of the spare files
GRPC_CONNECTION_BYTES = 64 * 1024  # that gRPC's own part holds for one without a call
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
COLLECTOR = (20_000, 20, 20)
FEWEST_SILENT = 64  # connections over TLS that may be greeting at a time, however few there may be in all
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

logger = logging.getLogger(__name__)


def run_gateway(settings: Settings, *, on_ready: Callable[[str], None] | None = None) -> None:
    """Serve until SIGINT or SIGTERM, in an event loop of its own; a second signal ends it at once.

    Raises:
        ServerError: it can't listen.
    """
    import uvloop

    uvloop.run(_until_signal(settings, on_ready))


async def serve_gateway(
    settings: Settings,
    *,
    stop: asyncio.Event,
    on_ready: Callable[[str], None] | None = None,
    force: asyncio.Event | None = None,
    incidents: Incidents | None = None,
    loading: Loading | None = None,
    residency: Residency | None = None,
) -> None:
    """Serve until `stop` is set: readiness turns false, requests in flight end, then it returns.

    Signals are the caller's affair.

    Args:
        stop: ends it in order.
        on_ready: called once with the URL, when the port takes connections.
        force: ends it without waiting for requests in flight.
        incidents: of the Triton behind it, from whoever runs that.
        loading: what has to hold before Triton is asked to load a model.
        residency: of models that are loaded on demand; None where all are loaded for good.

    Raises:
        ServerError: it can't listen.
    """
    check_settings(settings)
    uvicorn_log = logging.getLogger("uvicorn.error")
    uvicorn_log.setLevel(logging.ERROR)  # not a line for each client that sends rubbish
    uvicorn_log.addFilter(_of_no_cut)
    # As many threads as the machine has cores would be asyncio's own choice, whatever a container may use.
    most = min(32, cores_here().count + 4)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(most, "gateway"))
    settings, files = _with_files(settings)
    app = create_app(settings, incidents, loading, residency)
    listener = _listen(settings.host, settings.port, reuse_port=settings.reuse_port)
    clients, grpc_clients = _clients(settings, files)
    memory = app.state.parts.gate.memory
    memory.most_connections = clients + TOLD_CLIENTS
    if settings.max_address_share < 1:
        room = min(clients, memory.bound // 4 // CONNECTION_BYTES)
        memory.most_of_address = max(1, int(room * settings.max_address_share))
    stopping = asyncio.Event()
    server = Serving(
        uvicorn.Config(
            app,
            http=connection_class(
                settings.head_timeout_s,
                settings.body_timeout_s,
                settings.write_timeout_s,
                memory,
                stopping,
                app.state.direct,
                Rounds(app.state.parts.gate.keys),
            ),
            ws="none",
            lifespan="on",
            access_log=False,
            proxy_headers=False,
            log_config=None,
            server_header=False,
            date_header=False,
            backlog=2048,
            timeout_graceful_shutdown=settings.drain_timeout_s,
            timeout_keep_alive=settings.keep_alive_s,
            limit_concurrency=clients,
            ssl_certfile=settings.tls_certificate,
            ssl_keyfile=settings.tls_key,
        ),
        lambda: 0 if app.state.direct is None else len(app.state.direct.calls),
        lambda: by_model(app.state.parts.gate),
        memory,
        partial(_handshakes, settings, memory),
        settings.head_timeout_s,
        lambda: app.state.parts.telemetry.in_flight > 0,
    )
    proxy = None
    if settings.grpc_port:
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # or clients without a key could fill the log
        from serve.gateway.grpc.proxy import GrpcProxy  # grpcio takes a while to import

        parts = app.state.parts
        proxy = GrpcProxy(
            settings,
            parts.gate,
            parts.releases,
            parts.upstream.balancer,
            parts.telemetry,
            parts.contracts,
            parts.loading,
            most_connections=grpc_clients,
        )
        parts.streamed.beside = proxy.streams
        try:
            await proxy.start()
        except ServerError:
            listener.close()
            raise
    prepare_memory()
    watching = None
    if settings.tls_certificate is not None:  # a connection is told of once it has greeted, which may take a minute
        most = min(memory.most_of_address, memory.most_connections)
        greetings = Greetings(server.greeted, most=max(FEWEST_SILENT, clients // 8), seconds=settings.head_timeout_s)
        watching = asyncio.create_task(Clients(most, 1, greetings=greetings).watch(listener.getsockname()[1]))
    running = asyncio.ensure_future(server.serve(sockets=[listener]))
    ending: Ending | None = None
    try:
        await first(running, server.listening)
        if server.started and on_ready is not None:
            on_ready(_url(settings, listener))
        await first(running, stop)
        app.state.draining = True
        stopping.set()
        if settings.drain_delay_s and not running.done():
            await first(running, force or asyncio.Event(), timeout_s=settings.drain_delay_s)
        if not running.done():
            await server.stop_listening()
        ending = Ending(app.state.parts.gate, settings.drain_timeout_s)
        if proxy is None or (force and force.is_set()):
            server.should_exit = True
        else:  # both end side by side; what they stand on is closed when both have
            app.state.others_ended.clear()
            server.should_exit = True
            stopping_calls = asyncio.ensure_future(proxy.stop(settings.drain_timeout_s))
            try:
                await first(stopping_calls, force or asyncio.Event())
                if not stopping_calls.done():
                    await proxy.stop(0.0)
                await stopping_calls
            finally:
                app.state.others_ended.set()
        if force is not None:
            await first(running, force)
            if force.is_set():
                server.hurry.set()
        await running
    finally:
        if ending is not None:
            ending.over()
        if watching is not None:
            watching.cancel()
        server.should_exit = server.force_exit = True
        await asyncio.gather(running, return_exceptions=True)
        listener.close()


def check_settings(settings: Settings) -> int:
    """Read keys, certificate and the file of --agree-module as a gateway would, without listening; the number of keys.

    Raises:
        ServerError: one of them, or the state file, can't be used, or other users may have a say in it.
    """
    check_whose(settings)
    if settings.tls_certificate is not None:
        server_context(settings.tls_certificate, settings.tls_key)
    if settings.agree_module is not None:
        UsersRules(settings.agree_module).close()
    return len(KeyRing(settings.keys))


def check_port(host: str, port: int) -> None:
    """Raise ServerError unless the gateway could listen there; for callers with much to do before it does."""
    _listen(host, port).close()


@contextmanager
def forwarding_signals(stop: asyncio.Event, force: asyncio.Event) -> Iterator[None]:
    """While it lasts, the first of `STOP_SIGNALS` sets `stop`, the next one `force`; in the main thread only.

    A terminal that closes says SIGHUP, the shell in it once more, and systemd beside SIGTERM: it hurries nobody. Where
    it is ignored, as by nohup, nothing ends.
    """
    loop = asyncio.get_running_loop()
    numbers = [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]

    def received(number: signal.Signals) -> None:
        if not stop.is_set():
            stop.set()
        elif number != signal.SIGHUP:
            force.set()

    for number in numbers:
        loop.add_signal_handler(number, received, number)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def _of_no_cut(record: logging.LogRecord) -> bool:
    """Whether a line of uvicorn's is of something else than the requests that the end has cut: those have one line."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, asyncio.CancelledError) and not str(record.msg).startswith("Cancel %s running task")


def _handshakes(settings: Settings, memory: Memory, context: ssl.SSLContext) -> Handshakes:
    """What bounds handshakes with this certificate, measured now."""
    memory.handshakes = Handshakes(handshake_s(context), bounded=settings.max_address_share < 1)
    return memory.handshakes


def _listen(host: str, port: int, *, reuse_port: bool = False) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if reuse_port:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind((host, port))
    except OSError as err:
        listener.close()
        reasons = {
            errno.EADDRINUSE: "another program listens there",
            errno.EACCES: "ports below 1024 need special rights",
            errno.EADDRNOTAVAIL: "this machine does not have that address",
        }
        raise ServerError(
            f"the gateway can't listen on {host}:{port}",
            why=reasons.get(err.errno or 0, str(err.strerror or err)),
            mend="give another with --port (0 takes a free one) or --host, or end the other program",
        ) from err
    return listener


def _url(settings: Settings, listener: socket.socket) -> str:
    name = f"[{settings.host}]" if ":" in settings.host else settings.host
    scheme = "http" if settings.tls_certificate is None else "https"
    return f"{scheme}://{name}:{listener.getsockname()[1]}"


def prepare_memory() -> None:
    """Garbage and freed memory are handled for a process that only passes bytes on.

    Cycles of garbage are looked for rarely, and never among what is here for good: that took a seventh of the time.
    And glibc keeps what large bodies have used, up to 128 MiB: given back, each page of the next body costs a fault,
    which made 600 KB three times as slow.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECTOR)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # other C libraries have none
        mallopt(M_MMAP_THRESHOLD, 32 * 1024 * 1024)
        mallopt(M_TRIM_THRESHOLD, 128 * 1024 * 1024)


def _with_files(settings: Settings) -> tuple[Settings, int]:
    """The settings, with connections to Tritons for at most a quarter of the files that may be open; how many may."""
    upstream = len(settings.upstream) * settings.max_connections
    reserve = SPARE_FILES + MOST_WAITING + upstream
    wanted = (2 * settings.max_clients if settings.grpc_port else settings.max_clients) + reserve
    files = _allow_files(max(4 * upstream, wanted * 16 // 13 + 1 if settings.grpc_upstream else wanted))
    most = max(1, files // 4 // len(settings.upstream))
    if most >= settings.max_connections:
        return settings, files
    logger.warning(
        "at most %d connections to each Triton at a time, not max_connections %d: the process may have %d files open; "
        "raise that (ulimit -n, LimitNOFILE of systemd, --ulimit nofile of docker), or set max_connections to %d",
        most, settings.max_connections, files, most,
    )  # fmt: skip
    return replace(settings, max_connections=most), files


def _clients(settings: Settings, files: int) -> tuple[int, int]:
    """Connections of clients that there may be, over HTTP and over gRPC; what works beside them keeps files.

    A process without files can't look after its Triton, read its keys or start anything.

    Args:
        files: that the process may have open.
    """
    reserve = SPARE_FILES + MOST_WAITING + len(settings.upstream) * settings.max_connections
    asked = settings.max_clients
    if settings.grpc_upstream:
        reserve += files * 3 // 16  # for streams that have connections of their own: `serve.gateway.grpc.relay`
    room = files - min(reserve, files // 2)
    grpc = min(asked, room // 2) if settings.grpc_port else 0
    clients = min(asked, room - grpc)
    if clients < asked or (grpc < asked and settings.grpc_port):
        logger.warning(
            "at most %d connections%s at a time, not max_clients %d: the process may have %d files open; raise that "
            "(ulimit -n, LimitNOFILE of systemd, --ulimit nofile of docker), or set max_clients to %d",
            clients, f", and {grpc} over gRPC" if settings.grpc_port else "", asked, files, clients,
        )  # fmt: skip
    return clients, max(1, min(grpc, settings.memory_bytes // 4 // GRPC_CONNECTION_BYTES))


def _allow_files(files: int) -> int:
    """As many open files as connections may need, as far as the system lets us; how many there may be now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = files if hard == resource.RLIM_INFINITY else min(files, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return files if soft == resource.RLIM_INFINITY else soft


async def _until_signal(settings: Settings, on_ready: Callable[[str], None] | None) -> None:
    stop, force = asyncio.Event(), asyncio.Event()
    with forwarding_signals(stop, force):
        await serve_gateway(settings, stop=stop, on_ready=on_ready, force=force)
