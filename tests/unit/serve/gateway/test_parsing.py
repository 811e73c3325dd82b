"""What is cheap to send and dear to parse: it is parsed in slices, by address in turns, and tiny chunks are refused."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.gateway.access.memory import Memory
from serve.gateway.edge.connections import FEW_BYTES, MOST_CHUNKS
from serve.gateway.edge.parsing import BEGINNING, MOST_CALLS, SLICE_LINES, Parsing, slice_end
from serve.gateway.settings import Settings
from serve.http.body import GrowingBody, add_part
from serve.http.client import Address
from tests.serve_http import Received, answer, gateway, in_loop, scripted_server
from tests.unit.serve.gateway.test_connections import connected, held_bytes, noting_connections, until
from tests.unit.serve.gateway.test_upstream import metric

HEALTH = b"GET /healthz HTTP/1.1\r\nhost: a\r\n\r\n"
POST = b"POST %b HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
INFER = b"/v2/models/m/infer"
FIELDS = b"".join(b"x-%d: %b\r\n" % (at, b"a" * 400) for at in range(118))


def chunks(body: bytes, size: int) -> bytes:
    parts = (body[at : at + size] for at in range(0, len(body), size))
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


async def say(address: Address, data: bytes, answers: int = 1) -> bytes:
    """What the gateway answers, until it has done so often or closes."""
    loop, found = asyncio.get_running_loop(), b""
    async with asyncio.timeout(60), connected(address) as client:
        sending = asyncio.ensure_future(loop.sock_sendall(client, data))
        while found.count(b"HTTP/1.1 ") < answers or not found.endswith((b"}", b"\n")):
            if not (part := await loop.sock_recv(client, 1 << 16)):
                break
            found += part
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
    return found


@given(st.lists(st.sampled_from([b"\n", b"a", b"\r\n", b"x" * 50])).map(b"".join), st.integers(0, 3))
def test_slices_are_of_few_lines_and_together_are_the_whole(data: bytes, times: int) -> None:
    data, at, parts = data * 4**times, 0, list[bytes]()
    while at < len(data):
        end = slice_end(data, at)
        parts.append(data[at:end])
        at = end
    assert b"".join(parts) == data
    assert all(part and part.count(b"\n") <= SLICE_LINES for part in parts)
    assert all(part.count(b"\n") == SLICE_LINES for part in parts[:-1])


@in_loop
async def test_an_address_waits_for_one_slice_of_each_other_and_what_waits_is_counted() -> None:
    memory = Memory(1 << 20)
    parsing, parsed = Parsing(memory, most=10), list[str]()

    def wait(address: str, who: int, left: int) -> None:
        def call() -> None:
            parsed.append(address)
            parsing.spend(10)
            parsing.leave(address, who)
            if left > 1:
                wait(address, who, left - 1)

        assert parsing.wait(address, who, 1000, call)

    parsing.spend(10)
    for who in range(5):
        wait("many", who, 3)
    wait("one", 9, 2)
    assert memory.used == 6000
    await until(lambda: len(parsed) == 17)
    assert parsed[:4].count("one") == 2
    assert (memory.used, parsing.waiting) == (0, 0)


@in_loop
async def test_more_than_an_eighth_does_not_wait_and_of_one_address_not_more_than_half_of_that() -> None:
    memory = Memory(800)
    parsing = Parsing(memory)
    assert parsing.wait("a", 1, 50, lambda: None)
    assert not parsing.wait("a", 2, 1, lambda: None)
    assert parsing.wait("b", 3, 50, lambda: None)
    assert not parsing.wait("c", 4, 1, lambda: None)
    assert (memory.used, memory.refused_frames) == (100, 2)
    parsing.leave("a", 1)
    assert parsing.wait("c", 4, 50, lambda: None)
    parsing.leave("b", 3)
    parsing.leave("c", 4)
    assert (memory.used, parsing.waiting) == (0, 0)


@pytest.mark.parametrize("size", [1, FEW_BYTES - 1, FEW_BYTES + 1, 16, 100, 5000])
@in_loop
async def test_tiny_chunks_are_refused_and_short_lines_go_on(size: int) -> None:
    came = list[bytes]()

    async def respond(asked: Received, writer: asyncio.StreamWriter) -> None:
        if asked.body:
            came.append(asked.body)
        writer.write(answer(b"{}"))

    body = b'{"inputs":[]}' + b" " * (size * (MOST_CHUNKS + 1000))
    async with scripted_server(respond) as triton, gateway(Settings(upstream=(triton.url,), port=0)) as address:
        found = await say(address, POST % INFER + chunks(body, size) + HEALTH, 1 if size < FEW_BYTES else 2)
        cut = await metric(address, "gateway_connections_cut_total")
        if size < FEW_BYTES:
            assert found.startswith(b"HTTP/1.1 400 ")
            told = json.loads(found.partition(b"\r\n\r\n")[2])
            assert "chunks" in told["error"]
            assert set(told) == {"error", "why", "mend"}
            assert (came, cut) == ([], 1)
        else:
            assert found.count(b"HTTP/1.1 200 ") == 2
            assert (came, cut) == ([body], 0)


@in_loop
async def test_few_tiny_chunks_are_a_body_as_others() -> None:
    async def respond(asked: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(answer(asked.body))

    body = b'{"inputs":[%b]}' % (b" " * (MOST_CHUNKS - 100))
    async with scripted_server(respond) as triton, gateway(Settings(upstream=(triton.url,), port=0)) as address:
        found = await say(address, POST % INFER + chunks(body, 1) + HEALTH, 2)
    assert body in found
    assert found.count(b"HTTP/1.1 200 ") == 2


SENT = {
    "chunks of a byte": POST % b"/healthz" + b"1\r\n \r\n" * 200_000,
    "chunks of two bytes, with extensions": POST % INFER + b"2;a=b\r\n  \r\n" * 100_000,
    "short lines": POST % INFER + b"10\r\n" + b"\r\n10\r\n".join([b" " * 16] * 50_000),
    "line breaks": b"\r\n" * 30_000,
    "trailers": POST % INFER + b"0\r\n" + b"a:b\r\n" * 12_000,
    "heads of many fields": b"GET /healthz HTTP/1.1\r\n%b\r\n" % FIELDS * 40,
    "tiny requests": b"GET /healthz HTTP/1.1\r\n\r\n" * 10_000,
    "tiny requests with tiny bodies": (POST % b"/healthz" + b"1\r\n \r\n" * 50 + b"0\r\n\r\n") * 60,
}


@pytest.mark.parametrize("kind", list(SENT))
@in_loop
async def test_no_parser_is_given_much_at_a_time(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Whatever is sent: between two pauses the parsers make few calls; and somebody else is answered meanwhile."""
    connections, most = set[Any](), 0
    calls = before = 0

    def note(connection: Any) -> None:
        connections.add(connection)

    async def watch() -> None:
        nonlocal most, calls, before
        while True:
            calls = sum(each._calls for each in connections)
            most, before = max(most, calls - before), calls
            await asyncio.sleep(0)

    noting_connections(monkeypatch, data_received=note)
    async with gateway(Settings(upstream=("http://127.0.0.1:1",), port=0)) as address:
        watching = asyncio.create_task(watch())
        sending = [asyncio.create_task(say(address, SENT[kind], 10_000)) for _ in range(4)]
        await until(lambda: len(connections) == 4)
        assert b"HTTP/1.1 200 " in await say(address, HEALTH)
        for each in (watching, *sending):
            each.cancel()
        await asyncio.gather(watching, *sending, return_exceptions=True)
        assert 0 < most <= MOST_CALLS + 4 * SLICE_LINES * BEGINNING
        await held_bytes(address, lambda held: held <= 32 * 1024)


@in_loop
async def test_what_waits_of_a_connection_that_leaves_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    found, lost = list[Any](), list[Any]()
    noting_connections(monkeypatch, data_received=found.append, connection_lost=lost.append)
    async with gateway(Settings(upstream=("http://127.0.0.1:1",), port=0)) as address:
        with socket.create_connection((address.host, address.port)) as client:
            client.sendall(POST % INFER)
            await until(lambda: bool(found))
            client.setblocking(False)
            client.send(b"10\r\n" + b"\r\n10\r\n".join([b" " * 16] * 8000))
            await until(lambda: bool(found[0]._unparsed))
            found[0].transport.abort()
        await until(lambda: bool(lost))
        assert not found[0]._unparsed
        await held_bytes(address, lambda held: held <= 32 * 1024)


@given(st.lists(st.integers(0, 9000).map(lambda size: bytes([size % 251]) * size), max_size=30))
def test_parts_are_joined_as_they_came_and_small_ones_are_few_objects(parts: list[bytes]) -> None:
    kept = list[bytes | bytearray]()
    for part in parts:
        add_part(kept, part)
    assert b"".join(kept) == b"".join(parts)
    assert len(kept) <= 2 * sum(len(part) >= 4096 for part in parts) + sum(map(len, parts)) // (64 * 1024) + 1


def test_what_a_growing_body_has_written_does_not_grow() -> None:
    body, written = GrowingBody(b"first", 1000), list[bytes]()
    for _ in range(3):
        body.add(b"abc")
    body.attach(written.append)
    body.add(b"d")
    assert written == [b"first", b"abcabcabc", b"d"]
    assert all(type(each) is bytes for each in written)
