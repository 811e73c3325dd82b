"""Bytes that no client of good will would send: the gateway answers or closes, never fails, and goes on."""

from __future__ import annotations

import asyncio

import orjson
import uvloop
from hypothesis import example, given, settings
from hypothesis import strategies as st

from serve.gateway.settings import Settings
from serve.http.client import Address
from tests.serve_http import gateway, scripted_server
from tests.unit.serve.gateway.test_upstream import ask, echo

HEADER = orjson.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4]}], "parameters": {"a": 1}})
REQUESTS = [
    (
        b"POST /v2/models/m/infer HTTP/1.1\r\nhost: a\r\ncontent-type: application/octet-stream\r\n"
        b"inference-header-content-length: %d\r\nx-request-timeout-ms: 500\r\ncontent-length: %d\r\n\r\n%b"
        % (len(HEADER), len(HEADER) + 16, HEADER + bytes(16))
    ),
    (
        b"POST /predict/m HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-encoding: gzip\r\n"
        b"transfer-encoding: chunked\r\n\r\n4\r\nabcd\r\n0\r\n\r\n"
    ),
    b"GET /v2/models/m/versions/1/config HTTP/1.1\r\nhost: a\r\nauthorization: Bearer k\r\n\r\n",
]


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A request with some of its bytes replaced, removed or added."""
    request = bytearray(draw(st.sampled_from(REQUESTS)))
    for _ in range(draw(st.integers(1, 6))):
        at = draw(st.integers(0, len(request) - 1))
        piece = draw(
            st.sampled_from([b"", b"\r\n", b"\0", b":", b" ", b"%00", b"\xff", b"9" * 30, b"-", b"\r", b"\n", b"{"])
        )
        request[at : at + draw(st.integers(0, 3))] = piece
    return bytes(request)


async def send(address: Address, payload: bytes) -> bytes:
    """What comes back before the connection closes; nothing more is sent."""
    reader, writer = await asyncio.open_connection(address.host, address.port)
    try:
        writer.write(payload)
        await writer.drain()
        async with asyncio.timeout(60):
            return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


@settings(max_examples=10, deadline=None)
@example([b"\r\n", b"\n", b"\r\n\r\n", b"\r\n" * 500, REQUESTS[2] + b"\r\n", REQUESTS[0] + b"\n\r\n"])
@given(st.lists(damaged() | st.binary(max_size=300), min_size=8, max_size=16))
def test_no_bytes_make_the_gateway_fail(payloads: list[bytes]) -> None:
    async def main() -> None:
        limits = {"head_timeout_s": 0.2, "body_timeout_s": 0.2, "keep_alive_s": 1, "max_elements": 1000}
        async with (
            scripted_server(echo) as triton,
            gateway(Settings(upstream=(triton.url,), port=0, **limits)) as address,  # type: ignore[arg-type]
        ):
            for came in await asyncio.gather(*(send(address, payload) for payload in payloads)):
                for line in came.split(b"HTTP/1.1 ")[1:]:
                    assert line[:3] not in (b"500",), came
            assert (await ask(address, b"/v2/models/m/infer", HEADER)).status == 200
            for request in triton.requests:  # whatever reached Triton was one of its own paths
                assert request.target.startswith("/v2/models/")

    uvloop.run(main())
