"""Connections of clients: those that leave with requests under way, and how many one address may have."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import socket
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from serve.gateway import server as server_module
from serve.gateway.access.admission import Admission
from serve.gateway.edge.connections import MOST_PIPELINED, PIPELINED_BYTES, connection_class
from serve.gateway.settings import Settings
from serve.http.client import Address
from tests.serve_http import Received, Scripted, answer, gateway, in_loop, scripted_server
from tests.unit.serve.gateway.test_upstream import ask, metric

PATIENCE_S = 60
INFER = b"POST /v2/models/%b/infer HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\n{}"
CHUNKED = b"POST /v2/models/m/infer HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
ABOUT = b"GET /v2/models/%b HTTP/1.1\r\nhost: a\r\n\r\n"
PREDICT = b"POST /predict/%b HTTP/1.1\r\nhost: a\r\ncontent-type: image/png\r\ncontent-length: 1\r\n\r\nx"


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not holds():  # noqa: ASYNC110  # nobody tells
            await asyncio.sleep(0.01)


async def held_bytes(address: Address, fits: Callable[[float], bool] = lambda _: True) -> float:
    """What the gateway holds, once it fits."""
    async with asyncio.timeout(PATIENCE_S):
        while not fits(found := await metric(address, "gateway_memory_bytes")):  # noqa: ASYNC110  # nobody tells
            await asyncio.sleep(0.01)
    return found


def noting_connections(monkeypatch: pytest.MonkeyPatch, **calls: Callable[[Any], None]) -> None:
    """Gateways from here on call this with a connection after the method of that name."""

    def noting(*arguments: Any, **named: Any) -> type:
        base = connection_class(*arguments, **named)

        def method(name: str, call: Callable[[Any], None]) -> Callable[..., None]:
            def called(self: Any, *given: Any) -> None:
                getattr(base, name)(self, *given)
                call(self)

            return called

        return type("Noting", (base,), {name: method(name, call) for name, call in calls.items()})

    monkeypatch.setattr(server_module, "connection_class", noting)


@pytest.fixture
def lost(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The connections that have ended."""
    found: list[Any] = []
    noting_connections(monkeypatch, connection_lost=found.append)
    return found


@contextlib.asynccontextmanager
async def connected(address: Address, source: str = "127.0.0.1") -> Any:
    with socket.socket() as client:
        client.setblocking(False)
        client.bind((source, 0))
        await asyncio.get_running_loop().sock_connect(client, (address.host, address.port))
        yield client


@pytest.mark.parametrize("requests", [[ABOUT] * 3, [INFER] * 3, [PREDICT] * 3, [INFER, ABOUT, PREDICT]])
def test_a_client_that_leaves_what_it_pipelined_is_no_failure(
    requests: list[bytes], lost: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    """It leaves while the second of them is answered: the first was, and the third waits."""
    sent = b"".join(part % name for part, name in zip(requests, (b"first", b"second", b"third"), strict=True))
    second, gone = asyncio.Event(), asyncio.Event()

    async def held(asked: Received, writer: asyncio.StreamWriter) -> None:
        if "/second" in asked.target:
            second.set()
            await gone.wait()
        writer.write(answer(b"{}"))

    async def main() -> None:
        async with scripted_server(held) as triton, gateway(Settings(upstream=(triton.url,), port=0)) as address:
            async with asyncio.timeout(PATIENCE_S):
                async with connected(address) as client:
                    await asyncio.get_running_loop().sock_sendall(client, sent)
                    await second.wait()
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            await until(lambda: bool(lost))
            gone.set()
            await until(lambda: not lost[0].tasks)
            assert (await ask(address, b"/healthz")).status == 200
            assert await metric(address, "gateway_requests_total", code="500") == 0
            assert await metric(address, "gateway_requests_in_flight") == 1  # it itself

    with caplog.at_level(logging.INFO):
        in_loop(main)()
    assert not [record.message for record in caplog.records if record.levelno >= logging.ERROR or record.exc_info]
    assert not lost[0].pipeline


def test_a_connection_that_closes_before_its_turn_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its request is told in the turn in which it closes, before the server is."""
    made: list[Any] = []

    async def enter(*_: object) -> None:
        made[0].transport.abort()

    async def main() -> None:
        async with gateway(Settings(upstream=("http://127.0.0.1:1",), port=0)) as address:
            async with connected(address) as client, asyncio.timeout(PATIENCE_S):
                loop = asyncio.get_running_loop()
                await loop.sock_sendall(client, CHUNKED)
                with contextlib.suppress(ConnectionError):
                    assert await loop.sock_recv(client, 1) == b""
            assert (await ask(address, b"/healthz")).status == 200

    noting_connections(monkeypatch, connection_made=made.append)
    monkeypatch.setattr(Admission, "try_enter", lambda *_: False)
    monkeypatch.setattr(Admission, "enter", enter)
    in_loop(main)()
    assert not [record.message for record in caplog.records if record.levelno >= logging.ERROR]


async def alive(address: Address, source: str) -> int:
    """The status of /healthz, asked from an address of this machine."""
    loop = asyncio.get_running_loop()
    came = b""
    async with asyncio.timeout(PATIENCE_S), connected(address, source) as client:
        # One that is refused may be closed before it has asked.
        with contextlib.suppress(ConnectionError):
            await loop.sock_sendall(client, b"GET /healthz HTTP/1.1\r\nhost: a\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            while b"\r\n" not in came and (part := await loop.sock_recv(client, 4096)):
                came += part
    return int(came.split(b" ", 2)[1]) if came else 0


@in_loop
async def test_an_address_with_many_idle_connections_keeps_no_other_out() -> None:
    settings = Settings(upstream=("http://127.0.0.1:1",), port=0, max_clients=40)
    async with gateway(settings) as address, contextlib.AsyncExitStack() as stack:
        for _ in range(60):
            await stack.enter_async_context(connected(address))
        assert await alive(address, "127.0.0.2") == 200
        assert await alive(address, "127.0.0.1") in (503, 0)
        await stack.aclose()
        async with asyncio.timeout(PATIENCE_S):
            while await alive(address, "127.0.0.1") != 200:  # its connections are closed one by one
                pass
        refused = "gateway_connections_refused_total"
        assert await metric(address, refused, why="address") > 40
        assert await metric(address, refused, why="all") == 0


@in_loop
async def test_behind_a_proxy_one_address_may_have_all_connections() -> None:
    settings = Settings(upstream=("http://127.0.0.1:1",), port=0, max_clients=40, max_address_share=1)
    async with gateway(settings) as address, contextlib.AsyncExitStack() as stack:
        for _ in range(38):
            await stack.enter_async_context(connected(address))
        assert await alive(address, "127.0.0.1") == 200
        await stack.enter_async_context(connected(address))
        assert await alive(address, "127.0.0.1") == 503


@contextlib.asynccontextmanager
async def held_gateway() -> AsyncIterator[tuple[Scripted, Address, asyncio.Event]]:
    """A gateway whose model server answers once the event is set."""
    go = asyncio.Event()

    async def held(_: Received, writer: asyncio.StreamWriter) -> None:
        await go.wait()
        writer.write(answer(b"{}"))

    async with scripted_server(held) as triton, gateway(Settings(upstream=(triton.url,), port=0)) as address:
        yield triton, address, go


@pytest.mark.parametrize("first", [ABOUT % b"held", INFER % b"held"])
@in_loop
async def test_only_so_many_requests_wait_on_one_connection(first: bytes) -> None:
    """Each is answered that was taken, and the connection closes: what follows is to be sent anew."""
    async with held_gateway() as (triton, address, go):
        reader, writer = await asyncio.open_connection(address.host, address.port)
        async with asyncio.timeout(PATIENCE_S):
            writer.write(first)
            await triton.met.wait()
            alone = await held_bytes(address)
            writer.write(b"GET /healthz HTTP/1.1\r\nhost: a\r\n\r\n" * 5000)
            all_that_wait = alone + MOST_PIPELINED * PIPELINED_BYTES
            await held_bytes(address, lambda held: held == all_that_wait)  # what is still to be parsed counts, too
            go.set()
            came = await reader.read()
        writer.close()
        assert came.count(b"HTTP/1.1 200 OK") == 1 + MOST_PIPELINED
        assert came.count(b"HTTP/1.1 ") == 1 + MOST_PIPELINED
        assert came.count(b"connection: close") == 1
        await held_bytes(address, lambda held: held <= alone)


@in_loop
async def test_bodies_of_requests_that_wait_on_a_connection_are_counted() -> None:
    async with held_gateway() as (triton, address, go):
        _, writer = await asyncio.open_connection(address.host, address.port)
        async with asyncio.timeout(PATIENCE_S):
            writer.write(ABOUT % b"held")
            await triton.met.wait()
            alone = await held_bytes(address)
            writer.write(b"POST /predict/m HTTP/1.1\r\nhost: a\r\ncontent-length: 20000\r\n\r\n" + bytes(20000))
            await held_bytes(address, lambda held: held >= alone + PIPELINED_BYTES + 20000)
            writer.transport.abort()
            go.set()
            await held_bytes(address, lambda held: held < alone)


def test_who_gets_fewer_connections_than_asked_for_is_told_what_to_do() -> None:
    """In a process of its own, as a limit on open files is the whole process's."""
    script = """
import resource
from serve.gateway.server import _clients, _with_files
from serve.gateway.settings import Settings
resource.setrlimit(resource.RLIMIT_NOFILE, (1000, 1000))
print(_clients(*_with_files(Settings(upstream=("http://127.0.0.1:1",), max_clients=20000)))[0])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "at most" in done.stderr
    assert "the process may have 1000 files open; raise that (ulimit -n, " in done.stderr
    assert f"or set max_clients to {int(done.stdout)}" in done.stderr
    assert "or set max_connections to 250" in done.stderr


@pytest.mark.parametrize("path", ["/healthz", "/docs"])
@in_loop
async def test_requests_that_have_waited_are_gone_when_they_are_over_without_the_collector(path: str) -> None:
    def there() -> int:
        return sum(isinstance(each, RequestResponseCycle) for each in gc.get_objects())

    async with gateway(Settings(upstream=("http://127.0.0.1:9",), port=0)) as address:
        gc.collect()
        gc.disable()
        try:
            before = there()
            for _ in range(3):
                _, writer = await asyncio.open_connection(address.host, address.port)
                writer.write(f"GET {path} HTTP/1.1\r\nhost: a\r\n\r\n".encode() * MOST_PIPELINED)
                await until(lambda: there() > before + 1)
                await asyncio.sleep(0.5)
                writer.transport.abort()
            await until(lambda: there() <= before + 1)
        finally:
            gc.enable()
