"""Real sockets for tests of what speaks HTTP: a server that answers as it is told, and a gateway that runs."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, ParamSpec
from unittest.mock import patch

import uvloop

from serve.gateway.health.incidents import Incidents
from serve.gateway.oip.contracts import Contracts
from serve.gateway.oip.encoding import Packed
from serve.gateway.oip.protocol import SEQUENCE
from serve.gateway.oip.sequence import Named
from serve.gateway.server import serve_gateway
from serve.gateway.settings import Settings
from serve.http.body import GrowingBody
from serve.http.client import Address
from serve.rollout.plan import Target


@dataclass(frozen=True)
class Received:
    """A request as it came; header names in lower case."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes


READY = "/v2/health/ready"
P = ParamSpec("P")


def in_loop(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """A test that is a coroutine, run in an event loop of its own."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        uvloop.run(test(*args, **kwargs))

    return run


Respond = Callable[[Received, asyncio.StreamWriter], Awaitable[None]]


@dataclass
class Scripted:
    """A server that answers as it is told."""

    address: Address
    connections: int = 0
    probes: int = 0
    """Requests for its readiness, which are not among the others."""
    requests: list[Received] = field(default_factory=list)
    met: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a request came."""
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a client closed its connection."""

    @property
    def url(self) -> str:
        return f"http://{self.address}"


def answer(body: bytes = b"ok", status: str = "200 OK", *headers: str) -> bytes:
    """A whole response with a length."""
    lines = [f"HTTP/1.1 {status}", f"content-length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


@asynccontextmanager
async def scripted_server(respond: Respond) -> AsyncIterator[Scripted]:
    """Serve on a free port; `respond` writes an answer, or half of one, or closes the writer."""
    handlers: set[asyncio.Task[None]] = set()
    scripted = Scripted(Address("127.0.0.1", 0))

    def left(coming: asyncio.Future[Received | None]) -> None:
        if not coming.cancelled() and coming.result() is None:
            scripted.lost.set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        handlers.add(task)
        scripted.connections += 1
        coming = asyncio.ensure_future(_read(reader))
        try:
            while (request := await coming) is not None:
                if request.target == READY:
                    scripted.probes += 1
                else:
                    scripted.requests.append(request)
                    scripted.met.set()
                coming = asyncio.ensure_future(_read(reader))  # so that a client's leaving is seen at once
                coming.add_done_callback(left)
                await respond(request, writer)
                if writer.is_closing():
                    return
        except ConnectionError:
            pass
        finally:
            handlers.discard(task)
            coming.cancel()
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    scripted.address = Address("127.0.0.1", server.sockets[0].getsockname()[1])
    try:
        yield scripted
    finally:
        server.close()
        for task in list(handlers):
            task.cancel()
        await asyncio.gather(*handlers, return_exceptions=True)
        await asyncio.sleep(0)


async def _read(reader: asyncio.StreamReader) -> Received | None:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = head.strip().split("\r\n")
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        body = await reader.readexactly(int(headers.get("content-length", "0")))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    method, target, _ = first.split(" ")
    return Received(method, target, headers, body)


class _Unread(Contracts):
    """Lets what need not be read go on as it came."""

    async def fitted(
        self, target: Target, body: bytes | GrowingBody | Packed, header_length: int | None, **more: Any
    ) -> tuple[bytes | GrowingBody, int | None, Named | None]:
        if isinstance(body, Packed):
            body = body.unpacked()
        if more["seconds"] is None and SEQUENCE not in body and b"\\u" not in body:
            return body, header_length, None
        return await super().fitted(target, body, header_length, **more)

    def at_hand(
        self, target: Target, body: bytes, header_length: int | None, *, shared_memory: bool
    ) -> tuple[bytes, int | None] | None:
        return body, header_length


@asynccontextmanager
async def gateway(
    settings: Settings, *, validate: bool = False, incidents: Incidents | None = None
) -> AsyncIterator[Address]:
    """A gateway in this event loop; stopped in order at the end, and at once where a test says nothing else.

    A scripted server tells no metadata, and takes what no model would: requests are held against a model only where
    `validate` says so, and else go on as they come, but for sequences and time-outs, which have to be read.
    """
    settings = dataclasses.replace(settings, validate=validate)
    if settings.drain_delay_s == Settings().drain_delay_s:
        settings = dataclasses.replace(settings, drain_delay_s=0.0)
    stop = asyncio.Event()
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    with patch("serve.gateway.app.Contracts", Contracts if validate else _Unread):
        serving = serve_gateway(settings, stop=stop, on_ready=ready.set_result, incidents=incidents)
        running = asyncio.ensure_future(serving)
        await asyncio.wait((running, ready), return_when=asyncio.FIRST_COMPLETED)
    if running.done():
        running.result()
    try:
        yield Address.parse(ready.result())
    finally:
        stop.set()
        await running


@contextmanager
def gateway_thread(settings: Settings, incidents: Incidents | None = None) -> Iterator[str]:
    """The URL of a gateway in a thread of its own, for clients that block."""
    started = threading.Event()
    found: list[str] = []
    ends: list[Callable[[], object]] = []

    async def serve() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        ends.append(lambda: loop.call_soon_threadsafe(stop.set))

        def ready(url: str) -> None:
            found.append(url)
            started.set()

        await serve_gateway(settings, stop=stop, on_ready=ready, incidents=incidents)

    thread = threading.Thread(target=lambda: uvloop.run(serve()), name="gateway")
    thread.start()
    try:
        assert started.wait(120), "the gateway did not start"
        yield found[0]
    finally:
        if ends:
            ends[0]()
        thread.join(120)
