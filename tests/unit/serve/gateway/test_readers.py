"""Answers that their clients don't read: what they hold is their key's."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from pathlib import Path

import pytest

from serve.gateway.access.footprint import MIB
from serve.gateway.access.keys import add_key
from serve.gateway.settings import Settings
from tests.serve_http import Received, answer, gateway, in_loop, scripted_server
from tests.unit.serve.gateway.test_connections import PATIENCE_S

LONG = 8 * MIB
BOUND = 64 * MIB


@pytest.mark.parametrize("more", [b"", b"x-request-timeout-ms: 60000\r\n"], ids=["the short way", "the long way"])
@in_loop
async def test_answers_that_one_key_does_not_read_leave_room_for_those_of_others(tmp_path: Path, more: bytes) -> None:
    keys = tmp_path / "keys.json"
    slow, good = (add_key(keys, name)[0].encode() for name in ("slow", "good"))

    async def long(_: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(answer(bytes(LONG)))

    def request(key: bytes) -> bytes:
        head = b"POST /v2/models/m/infer HTTP/1.1\r\nhost: a\r\nx-api-key: %b\r\n%bcontent-length: 2\r\n\r\n{}"
        return head % (key, more)

    async with contextlib.AsyncExitStack() as stack:
        triton = await stack.enter_async_context(scripted_server(long))
        settings = Settings(
            upstream=(triton.url,), port=0, keys=keys, memory_bytes=BOUND, write_timeout_s=10 * PATIENCE_S
        )
        address = await stack.enter_async_context(gateway(settings))
        async with asyncio.timeout(PATIENCE_S):
            beginnings = []
            loop = asyncio.get_running_loop()
            for _ in range(16):
                client = stack.enter_context(socket.socket())
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                client.setblocking(False)
                await loop.sock_connect(client, (address.host, address.port))
                await loop.sock_sendall(client, request(slow))
                beginnings.append((await loop.sock_recv(client, 12))[-3:])
            assert set(beginnings) == {b"200", b"503"}
            reader, writer = await asyncio.open_connection(address.host, address.port)
            try:
                writer.write(request(good))
                head = await reader.readuntil(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 200 ")
                assert len(await reader.readexactly(LONG)) == LONG
            finally:
                writer.close()
