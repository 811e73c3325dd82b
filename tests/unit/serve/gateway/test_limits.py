"""What keeps one client from harming the others: rates, sizes, times, and requests that are not HTTP."""

from __future__ import annotations

import asyncio
import gzip
import zlib
from collections.abc import Callable
from typing import Any

import orjson
import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from serve.gateway.access.rate_limit import TokenBucket
from serve.gateway.errors import (
    BadRequestError,
    BodyTooLargeError,
    GatewayError,
    TooManyElementsError,
    UnsupportedMediaError,
)
from serve.gateway.oip.bare_contract import BareContract
from serve.gateway.oip.encoding import unpacked
from serve.gateway.oip.request import read_request
from serve.gateway.settings import Settings
from serve.gateway.upstream.deadline import patience_s
from serve.http.client import Address
from tests.serve_http import Received, answer, gateway, scripted_server
from tests.unit.serve.gateway.test_upstream import INFER, ask, echo

pytestmark = pytest.mark.clock


@given(
    rate=st.floats(0.1, 1000),
    burst=st.integers(1, 50),
    gaps=st.lists(st.floats(0, 5), min_size=1, max_size=200),
)
def test_a_bucket_never_gives_more_than_its_burst_and_its_rate(rate: float, burst: int, gaps: list[float]) -> None:
    bucket = TokenBucket(rate, burst, 0.0)
    now = 0.0
    for taken, gap in enumerate(gaps, 1):
        now += gap
        wait = bucket.take(now)
        if wait:
            assert bucket.take(now + wait * 0.99) > 0
            now += wait * 1.01
            assert bucket.take(now) == 0
        assert taken <= burst + rate * now + 1e-6 * taken


def test_a_bucket_without_a_burst_takes_a_second_of_its_rate() -> None:
    assert TokenBucket(2.5, None, 0).burst == 3
    assert TokenBucket(0.1, None, 0).burst == 1


def packed(body: bytes) -> bytes:
    return gzip.compress(body, mtime=0)  # or the cases of a table would differ from one process to the next


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "x-gzip", "GZIP", "identity", ""])
def test_a_packed_body_is_unpacked(encoding: str) -> None:
    body = b"tensor" * 1000
    packers: dict[str, Callable[[bytes], bytes]] = {"gzip": packed, "x-gzip": packed, "deflate": zlib.compress}
    sent = packers.get(encoding.lower(), bytes)(body)
    assert unpacked(sent, encoding.encode(), len(body)) == body


@pytest.mark.parametrize(
    ("body", "encoding", "wrong"),
    [
        (packed(bytes(50_000_000)), b"gzip", BodyTooLargeError),
        (packed(b"abc")[:-1], b"gzip", BadRequestError),
        (packed(b"abc") + b"more", b"gzip", BadRequestError),
        (b"abc", b"gzip", BadRequestError),
        (b"", b"deflate", BadRequestError),
        (b"abc", b"br", UnsupportedMediaError),
        (packed(packed(b"abc")), b"gzip, gzip", UnsupportedMediaError),
    ],
)
def test_a_body_that_can_not_be_unpacked_is_refused(body: bytes, encoding: bytes, wrong: type[GatewayError]) -> None:
    with pytest.raises(wrong):
        unpacked(body, encoding, 1_000_000)


@pytest.mark.parametrize("value", [b"", b"-1", b"0", b"1.5", b"abc", b"1" * 30, b" 5", "½".encode()])
def test_a_time_out_that_is_no_number_is_refused(value: bytes) -> None:
    with pytest.raises(BadRequestError):
        patience_s(value, 30.0)


def test_a_client_can_only_shorten_the_time_out() -> None:
    assert patience_s(b"250", 30.0) == 0.25
    assert patience_s(b"60000", 30.0) == 30.0
    assert patience_s(None, 30.0) == 30.0


@pytest.mark.parametrize("asked", [None, 0, 5, 10**9])
def test_a_deadline_goes_on_to_triton_in_its_parameter(asked: int | None) -> None:
    request: dict[str, Any] = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [1]}], "id": "7"}
    if asked is not None:
        request["parameters"] = {"timeout": asked, "priority": 1}
    within = read_request(orjson.dumps(request), None, BareContract()).json_within(0.2)
    assert within is not None
    sent = orjson.loads(within)
    assert sent.pop("parameters") == request.pop("parameters", {}) | {"timeout": min(asked or 10**9, 200_000)}
    assert sent == request


def through(check: Any, respond: Any = echo, **settings: Any) -> None:
    async def main() -> None:
        async with (
            scripted_server(respond) as triton,
            gateway(Settings(upstream=(triton.url,), port=0, **settings)) as address,
        ):
            await check(address, triton)

    uvloop.run(main())


def test_a_deadline_ends_a_request() -> None:
    async def silent(_: Received, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(5)

    async def check(address: Address, triton: Any) -> None:
        begun = asyncio.get_running_loop().time()
        late = await ask(address, INFER, b"{}", (b"x-request-timeout-ms", b"150"))
        assert late.status == 504
        assert asyncio.get_running_loop().time() - begun < 2
        assert orjson.loads(triton.requests[0].body)["parameters"]["timeout"] == 150_000
        assert (await ask(address, INFER, b"{}", (b"x-request-timeout-ms", b"soon"))).status == 400

    through(check, silent)


def test_a_packed_request_reaches_triton_unpacked_and_a_bomb_does_not() -> None:
    async def check(address: Address, triton: Any) -> None:
        fine = await ask(address, INFER, packed(b'{"a": 1}'), (b"content-encoding", b"gzip"))
        assert (fine.status, fine.body) == (200, b'{"a": 1}')
        assert "content-encoding" not in triton.requests[0].headers
        bomb = await ask(address, INFER, packed(bytes(10_000_000)), (b"content-encoding", b"gzip"))
        assert bomb.status == 413
        assert len(triton.requests) == 1

    through(check, max_body_bytes=1_000_000)


@pytest.mark.parametrize("shape", [[1, 101], [11, 10], [2**40, 2**40]])
def test_a_tensor_may_not_have_more_elements_than_allowed(shape: list[int]) -> None:
    contract = BareContract(100)
    for most in ([1, 100], [10, 10], [], [0, 7]):
        assert contract.elements("x", "FP32", most) <= 100
    item: dict[str, Any] = {"name": "x", "datatype": "FP32", "shape": shape, "data": [0.0]}
    with pytest.raises(TooManyElementsError):
        read_request(orjson.dumps({"inputs": [item]}), None, contract)
    item = {"name": "x", "datatype": "FP32", "shape": shape, "parameters": {"binary_data_size": 4}}
    with pytest.raises(TooManyElementsError):
        read_request(orjson.dumps({"inputs": [item]}), 4, contract)


async def raw(address: Address, *parts: bytes | float) -> bytes:
    """Send bytes, with pauses in seconds; everything that comes back until the connection closes."""
    reader, writer = await asyncio.open_connection(address.host, address.port)
    try:
        for part in parts:
            if isinstance(part, float):
                await asyncio.sleep(part)
            else:
                writer.write(part)
                await writer.drain()
        return await asyncio.wait_for(reader.read(), 10)
    except ConnectionError:
        return b""
    finally:
        writer.close()


HEAD = b"POST /v2/models/m/infer HTTP/1.1\r\nhost: a\r\n"


def test_a_client_that_is_slow_is_cut_off_and_others_are_not() -> None:
    async def check(address: Address, triton: Any) -> None:
        silent, head, fine = await asyncio.gather(
            raw(address),
            raw(address, HEAD[:9], 0.2, HEAD[9:12], 0.2, HEAD[12:20]),
            ask(address, INFER, b"{}"),
        )
        assert silent == b""
        assert head.startswith(b"HTTP/1.1 408 ")
        assert b"head did not come in time" in head
        assert fine.status == 200
        late = await raw(address, HEAD + b"content-length: 50\r\n\r\n", b"x", 0.1, b"x", 0.1, b"x")
        assert late.startswith(b"HTTP/1.1 408 ")
        assert b"body did not come in time" in late
        assert len(triton.requests) == 1
        for _ in range(3):  # a connection that was in time once may be slow later
            again = await raw(address, HEAD + b"content-length: 0\r\n\r\n", 0.1, HEAD)
            assert again.count(b"HTTP/1.1 ") == 2
            assert b"408" in again

    through(check, head_timeout_s=0.5, body_timeout_s=0.5)


@pytest.mark.parametrize(
    "lines",
    [
        b"content-length: 5\r\ntransfer-encoding: chunked\r\n",
        b"transfer-encoding: chunked\r\ncontent-length: 5\r\n",
        b"content-length: 5\r\ncontent-length: 6\r\n",
        b"content-length: 5, 6\r\n",
        b"content-length: +5\r\n",
        b"content-length: 0x5\r\n",
        b"content-length: -5\r\n",
        b"content-length : 5\r\n",
        b"transfer-encoding: chunked, identity\r\n",
        b"transfer-encoding : chunked\r\n",
        b"transfer-encoding: xchunked\r\n",
        b"x: y\nz: 1\r\n",
        b"x: a\x00b\r\n",
        b"\x0bx: y\r\n",
        b": empty\r\n",
    ],
)
def test_no_request_hides_in_another(lines: bytes) -> None:
    async def check(address: Address, triton: Any) -> None:
        smuggled = b"0\r\n\r\nPOST /v2/models/hidden/infer HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\n{}"
        came = await raw(address, HEAD + lines + b"\r\n" + smuggled, 0.2)
        assert b"HTTP/1.1 200" not in came or came.count(b"HTTP/1.1 ") == 1
        assert not [request for request in triton.requests if "hidden" in request.target]

    through(check, head_timeout_s=0.5, body_timeout_s=0.5, keep_alive_s=1)


def test_a_head_without_end_is_refused() -> None:
    async def check(address: Address, _: Any) -> None:
        came = await raw(address, HEAD, *[b"x-%d: " % number + b"y" * 1000 + b"\r\n" for number in range(400)])
        assert b"200" not in came

    through(check)


def test_pipelined_requests_are_answered_in_order() -> None:
    async def check(address: Address, _: Any) -> None:
        requests = [HEAD + b"content-length: 3\r\n\r\n%03d" % number for number in range(20)]
        last = HEAD + b"content-length: 4\r\nconnection: close\r\n\r\nlast"
        came = await raw(address, b"".join([*requests, last]))
        bodies = [part.partition(b"\r\n\r\n")[2] for part in came.split(b"HTTP/1.1 200 OK\r\n")[1:]]
        assert bodies == [b"%03d" % number for number in range(20)] + [b"last"]

    through(check)


def test_answers_say_that_they_are_not_to_be_guessed_kept_or_framed() -> None:
    async def check(address: Address, _: Any) -> None:
        for target in (b"/healthz", b"/v2", b"/docs", b"/nothing"):
            response = await ask(address, target)
            assert response.header(b"x-content-type-options") == b"nosniff"
            assert response.header(b"cache-control") == b"no-store"
            assert response.header(b"x-frame-options") == b"DENY"
        assert (await ask(address, INFER, b"{}")).header(b"cache-control") == b"no-store"

    through(check)


def test_more_clients_than_allowed_are_refused() -> None:
    async def check(address: Address, _: Any) -> None:
        idle = [await asyncio.open_connection(address.host, address.port) for _ in range(4)]
        assert (await ask(address, b"/healthz")).status == 503
        for _, writer in idle:
            writer.close()
        await asyncio.sleep(0.1)
        assert (await ask(address, b"/healthz")).status == 200

    through(check, max_clients=4, max_address_share=1)


def test_whole_answers_are_sent_to_clients_that_read_slowly() -> None:
    async def large(_: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(answer(bytes(5_000_000)))

    async def check(address: Address, _: Any) -> None:
        reader, writer = await asyncio.open_connection(address.host, address.port, limit=1024)
        writer.write((HEAD + b"content-length: 0\r\n\r\n") * 2)
        await asyncio.sleep(0.5)
        size = 0
        async with asyncio.timeout(10):
            while size < 10_000_000:
                size += len(await reader.read(65536))
        writer.close()

    through(check, large)
