"""What a client may send around a request's body: headers, the frames of chunks, and trailers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from serve.gateway.access.keys import add_key
from serve.gateway.edge.connections import FIELD_BYTES, MAX_HEAD_BYTES, MAX_HEAD_FIELDS, PIPELINED_BYTES
from serve.gateway.settings import Settings
from serve.http.client import Address
from tests.serve_http import gateway, in_loop, scripted_server
from tests.unit.serve.gateway.test_connections import ABOUT, PATIENCE_S, held_bytes, held_gateway
from tests.unit.serve.gateway.test_upstream import echo

CHUNKED = b"transfer-encoding: chunked\r\n\r\n"
POST = b"POST /v2/models/m/infer HTTP/1.1\r\nhost: a\r\n"
MUCH = 64 * MAX_HEAD_BYTES


async def came_back(address: Address, *parts: bytes) -> bytes:
    """Send parts for as long as they are taken; what comes back until the connection closes."""
    reader, writer = await asyncio.open_connection(address.host, address.port)
    came = asyncio.create_task(reader.read())
    try:
        async with asyncio.timeout(PATIENCE_S):
            for part in parts:
                writer.write(part)
                await writer.drain()
            return await came
    except ConnectionError:
        return came.result() if came.done() and not came.exception() else b"HTTP/1.1 cut"
    finally:
        came.cancel()
        writer.close()


@pytest.mark.parametrize("target", [POST, b"POST / HTTP/1.1\r\nhost: a\r\n"])
@pytest.mark.parametrize(
    ("begin", "more"),
    [
        (b"0\r\n", b"a:b\r\n" * 1000),
        (b"1\r\nx\r\n0\r\nlong: ", b"y" * 5000),
        (b"1;", b"y" * 5000),
        (b"1\r\nx\r\n1; a=", b"y" * 5000),
        (b"", b"0" * 5000),
    ],
    ids=["trailers", "a trailer", "an extension", "a later extension", "a length"],
)
@in_loop
async def test_what_stands_around_a_body_has_an_end(target: bytes, begin: bytes, more: bytes) -> None:
    """The connection is closed, by the gateway, long before the time-out of a body."""
    async with scripted_server(echo) as triton:
        settings = Settings(upstream=(triton.url,), port=0, body_timeout_s=10 * PATIENCE_S, max_body_bytes=2 * MUCH)
        async with gateway(settings) as address:
            came = await came_back(address, target + CHUNKED + begin, *[more] * (MUCH // len(more)))
            assert came.startswith(b"HTTP/1.1 ")
            assert b"HTTP/1.1 200" not in came
            assert not triton.requests


@in_loop
async def test_chunks_of_a_byte_and_a_few_trailers_are_a_request_like_others() -> None:
    size = 3 * MAX_HEAD_BYTES // 6  # with its frames, over the bound on what stands around it
    async with scripted_server(echo) as triton:
        settings = Settings(upstream=(triton.url,), port=0, validate=False)
        async with gateway(settings) as address:
            body = b"1\r\n[\r\n" + b"1\r\n \r\n" * size + b"1\r\n]\r\n"
            request = POST + b"connection: close\r\n" + CHUNKED + body + b"0\r\nx-a: b\r\nx-b: c\r\n\r\n"
            came = await came_back(address, request)
            assert came.startswith(b"HTTP/1.1 ")
            assert b"too much" not in came
            assert b"Invalid HTTP" not in came


@in_loop
async def test_a_key_in_a_trailer_is_none(tmp_path: Path) -> None:
    secret, _ = add_key(tmp_path / "keys.json", "mine")
    async with scripted_server(echo) as triton:
        settings = Settings(upstream=(triton.url,), port=0, keys=tmp_path / "keys.json")
        async with gateway(settings) as address:
            key = b"x-api-key: %b\r\n" % secret.encode()
            body = b"2\r\n{}\r\n0\r\n"
            came = await came_back(address, POST + b"connection: close\r\n" + CHUNKED + body + key + b"\r\n")
            assert came.startswith(b"HTTP/1.1 401 ")
            came = await came_back(address, POST + key + b"connection: close\r\n" + CHUNKED + body + b"\r\n")
            assert not came.startswith(b"HTTP/1.1 401 ")


@pytest.mark.parametrize("offer", [b"", b"connection: upgrade\r\nupgrade: h2c\r\n"])
@pytest.mark.parametrize(
    "head", [b"a:b\r\n" * (MAX_HEAD_FIELDS + 1), b"a: %b\r\n" % (b"y" * MAX_HEAD_BYTES)], ids=["many", "long"]
)
@in_loop
async def test_a_head_in_one_piece_is_bounded_as_one_in_many(head: bytes, offer: bytes) -> None:
    async with scripted_server(echo) as triton, gateway(Settings(upstream=(triton.url,), port=0)) as address:
        for request in (b"GET /healthz HTTP/1.1\r\n", POST + b"content-length: 0\r\n"):
            came = await came_back(address, request + b"connection: close\r\n" + offer + head + b"\r\n")
            assert came.startswith(b"HTTP/1.1 400 ")
        came = await came_back(address, b"GET /healthz?%b HTTP/1.1\r\n\r\n" % (b"y" * MAX_HEAD_BYTES))
        assert came.startswith(b"HTTP/1.1 400 ")
        fine = b"connection: close\r\n" + offer + b"a:b\r\n" * (MAX_HEAD_FIELDS - 3)
        assert (await came_back(address, b"GET /healthz HTTP/1.1\r\n" + fine + b"\r\n")).startswith(b"HTTP/1.1 200 ")


@in_loop
async def test_headers_of_requests_that_wait_on_a_connection_are_counted() -> None:
    fields = MAX_HEAD_FIELDS - 1
    async with held_gateway() as (triton, address, go):
        _, writer = await asyncio.open_connection(address.host, address.port)
        async with asyncio.timeout(PATIENCE_S):
            writer.write(ABOUT % b"held")
            await triton.met.wait()
            alone = await held_bytes(address)
            writer.write(b"GET /healthz HTTP/1.1\r\n" + b"a:b\r\n" * fields + b"\r\n")
            assert await held_bytes(address, lambda held: held > alone) == alone + fields * FIELD_BYTES
            assert fields * FIELD_BYTES > PIPELINED_BYTES
            writer.transport.abort()
            go.set()
            await held_bytes(address, lambda held: held < alone)


@in_loop
async def test_long_heads_are_counted_until_the_next_one() -> None:
    line = b"a: %b\r\n" % (b"y" * 1000)
    async with scripted_server(echo) as triton, gateway(Settings(upstream=(triton.url,), port=0)) as address:
        async with asyncio.timeout(PATIENCE_S):
            reader, writer = await asyncio.open_connection(address.host, address.port)
            whole = b"GET /healthz HTTP/1.1\r\nhost: a\r\n\r\n"
            writer.write(whole)
            await reader.readuntil(b"alive")
            alone = await held_bytes(address)
            writer.write(whole[:-2] + line * 40)
            await held_bytes(address, lambda held: held >= alone + 35_000)
            writer.write(b"\r\n")
            await reader.readuntil(b"alive")
            writer.write(whole)
            await reader.readuntil(b"alive")
            await held_bytes(address, lambda held: held <= alone)
            writer.write(whole[:-2] + line * 40)
            await held_bytes(address, lambda held: held >= alone + 35_000)
            writer.transport.abort()
            await held_bytes(address, lambda held: held < alone)
