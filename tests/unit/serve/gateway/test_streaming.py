"""Large bodies go to Triton while they come, and nobody pays for a client that stops halfway."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from serve.gateway.settings import Settings
from serve.http.client import Address
from tests.serve_http import answer, gateway, in_loop

pytestmark = pytest.mark.clock

HEAD = b'{"inputs":[]}'
BODY = HEAD + bytes(index % 251 for index in range(600_000))
HALF = 300_000


@dataclass
class Seen:
    """What a server has met.

    Attributes:
        begun: set when the head of a request has come.
        bodies: those that came whole.
        broken: how many requests ended before their body did.
    """

    url: str = ""
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    bodies: list[bytes] = field(default_factory=list)
    broken: int = 0
    gone: asyncio.Event = field(default_factory=asyncio.Event)


Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter, int], Awaitable[bool]]


async def never(*_: object) -> bool:
    return False


@asynccontextmanager
async def listening(early: Answer = never) -> AsyncIterator[Seen]:
    """A server that tells when a request begins; `early` may answer it before its body has come."""
    seen = Seen()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                if head.startswith(b"GET"):
                    writer.write(answer(b""))
                    continue
                length = int(head.lower().partition(b"\r\ncontent-length: ")[2].partition(b"\r\n")[0])
                seen.begun.set()
                if await early(reader, writer, length):
                    return
                try:
                    seen.bodies.append(await reader.readexactly(length))
                except asyncio.IncompleteReadError:
                    seen.broken += 1
                    seen.gone.set()
                    raise
                writer.write(answer(b'{"outputs":[]}'))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    seen.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield seen
    finally:
        server.close()


@dataclass
class Client:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def begin(self, part: bytes, *lines: str) -> None:
        head = ["POST /v2/models/m/infer HTTP/1.1", "Host: x", f"Content-Length: {len(BODY)}", *lines]
        head.append(f"Inference-Header-Content-Length: {len(HEAD)}")
        self.writer.write("\r\n".join(head).encode() + b"\r\n\r\n" + part)
        await self.writer.drain()

    async def send(self, part: bytes) -> None:
        self.writer.write(part)
        await self.writer.drain()

    async def status(self) -> int:
        head = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), 10)
        length = int(head.lower().partition(b"\r\ncontent-length: ")[2].partition(b"\r\n")[0])
        await self.reader.readexactly(length)
        return int(head.split()[1])


@asynccontextmanager
async def client(address: Address) -> AsyncIterator[Client]:
    reader, writer = await asyncio.open_connection(address.host, address.port)
    try:
        yield Client(reader, writer)
    finally:
        writer.close()


def settings(folder: Path, *upstream: str) -> Settings:
    return Settings(upstream=upstream, port=0, state=folder / "none.db")


@in_loop
async def test_the_first_part_is_sent_on_before_the_last_has_come(tmp_path: Path) -> None:
    async with listening() as seen, gateway(settings(tmp_path, seen.url)) as address, client(address) as one:
        for _ in range(3):
            seen.begun.clear()
            await one.begin(BODY[:HALF])
            await asyncio.wait_for(seen.begun.wait(), 5)
            await one.send(BODY[HALF:])
            assert await one.status() == 200
        assert seen.bodies == [BODY] * 3
        assert seen.broken == 0


@in_loop
async def test_a_client_that_pauses_holds_no_connection_to_triton(tmp_path: Path) -> None:
    async with listening() as seen, gateway(settings(tmp_path, seen.url)) as address, client(address) as one:
        await one.begin(BODY[:HALF])
        await asyncio.wait_for(seen.gone.wait(), 5)
        assert (seen.broken, seen.bodies) == (1, [])
        await one.send(BODY[HALF:])
        assert await one.status() == 200
        assert seen.bodies == [BODY]


@in_loop
async def test_a_client_that_leaves_halfway_ends_the_request(tmp_path: Path) -> None:
    async with listening() as seen, gateway(settings(tmp_path, seen.url)) as address:
        async with client(address) as one:
            await one.begin(BODY[:HALF])
            await asyncio.wait_for(seen.begun.wait(), 5)
        await asyncio.wait_for(seen.gone.wait(), 5)
        async with client(address) as other:
            await other.begin(BODY)
            assert await other.status() == 200
        assert seen.bodies == [BODY]


@in_loop
async def test_what_one_server_loses_another_gets_whole(tmp_path: Path) -> None:
    async def close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _: int) -> bool:
        await reader.readexactly(100_000)
        writer.transport.abort()
        return True

    async with listening(close) as bad, listening() as good:
        for order in ((bad.url, good.url), (good.url, bad.url)):
            async with gateway(settings(tmp_path, *order)) as address, client(address) as one:
                for _ in range(4):
                    await one.begin(BODY[:HALF])
                    await asyncio.sleep(0.02)
                    await one.send(BODY[HALF:])
                    assert await one.status() == 200
        assert good.bodies == [BODY] * 8
        assert bad.begun.is_set()


@in_loop
async def test_an_answer_that_comes_early_is_passed_on(tmp_path: Path) -> None:
    async def refuse(_: asyncio.StreamReader, writer: asyncio.StreamWriter, __: int) -> bool:
        writer.write(answer(b'{"error":"no"}', "400 Bad Request"))
        await writer.drain()
        await asyncio.sleep(1)
        return True

    async with listening(refuse) as seen, gateway(settings(tmp_path, seen.url)) as address, client(address) as one:
        await one.begin(BODY[:HALF])
        assert await one.status() == 400
        await one.send(BODY[HALF:])
        await one.begin(BODY)
        assert await one.status() == 400


@pytest.mark.parametrize("lines", [["X-Request-Timeout-Ms: 5000"], ["Content-Encoding: identity"]])
@in_loop
async def test_a_body_that_has_to_be_read_is_waited_for(tmp_path: Path, lines: list[str]) -> None:
    async with listening() as seen, gateway(settings(tmp_path, seen.url)) as address, client(address) as one:
        await one.begin(BODY[:HALF], *lines)
        await asyncio.sleep(0.1)
        assert not seen.begun.is_set()
        await one.send(BODY[HALF:])
        assert await one.status() in (200, 400)
