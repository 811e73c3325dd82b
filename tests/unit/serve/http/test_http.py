"""The client against real servers, most of which misbehave; on both event loops."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop

from serve.http.client import Address, ExchangeError, Pool, encode_head
from tests.serve_http import Received, answer, scripted_server

pytestmark = pytest.mark.clock

Run = Callable[[Coroutine[Any, Any, None]], None]
LOCAL = Address("127.0.0.1", 8000)


@pytest.fixture(params=[asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    runner: Run = request.param
    return runner


def sends(*parts: bytes, close: bool = False) -> Any:
    """Answer every request with these parts, a moment apart."""

    async def respond(_: Received, writer: asyncio.StreamWriter) -> None:
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.01)
        if close:
            writer.close()

    return respond


async def failure(pool: Pool, **kwargs: Any) -> ExchangeError:
    with pytest.raises(ExchangeError) as caught:
        await pool.request(b"GET", b"/", **kwargs)
    return caught.value


CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("parts", "close", "body"),
    [
        ([answer(b"hello")], False, b"hello"),
        ([answer(b"hello")[:-3], b"llo"], False, b"hello"),
        ([answer(b"", "200 OK")], False, b""),
        ([b"HTTP/1.1 204 No Content\r\n\r\n"], False, b""),
        ([b"HTTP/1.1 304 Not Modified\r\n\r\n"], False, b""),
        (
            [CHUNKED + b"3\r\nabc\r\n", b"2\r\nde\r\n0\r\n\r\n"],
            False,
            b"abcde",
        ),
        ([b"HTTP/1.1 200 OK\r\n\r\nuntil", b" close"], True, b"until close"),
        ([b"HTTP/1.1 100 Continue\r\n\r\n" + answer(b"after 100")], False, b"after 100"),
        ([answer(b"x" * 300_000)], False, b"x" * 300_000),
    ],
    ids=["length", "parts", "empty", "204", "304", "chunked", "until-close", "100", "large"],
)
def test_reads_responses(run: Run, parts: list[bytes], close: bool, body: bytes) -> None:
    async def main() -> None:
        async with scripted_server(sends(*parts, close=close)) as server:
            pool = Pool(server.address)
            for _ in range(2):
                response = await pool.request(b"GET", b"/")
                assert response.body == body
                assert response.wire_bytes == sum(map(len, parts))
            assert server.connections == (2 if close else 1)
            await pool.close()

    run(main())


def test_sends_the_request_whole(run: Run) -> None:
    async def main() -> None:
        async with scripted_server(sends(answer(b"", "404 Not Found", "X-Reason: none"))) as server:
            pool = Pool(server.address)
            body = bytes(200_000)
            response = await pool.request(b"POST", b"/a?b=c", [(b"accept", b"x/y")], body)
            assert (response.status, response.header(b"x-reason"), response.header(b"other")) == (404, b"none", None)
            (request,) = server.requests
            assert (request.method, request.target, request.body) == ("POST", "/a?b=c", body)
            assert request.headers == {"host": str(server.address), "accept": "x/y", "content-length": "200000"}
            await pool.close()

    run(main())


@pytest.mark.parametrize(
    ("parts", "kind"),
    [
        ([answer(b"hello")[:-2]], "closed"),
        ([b"HTTP/1.1 200 OK\r\ncontent-le"], "closed"),
        ([CHUNKED + b"3\r\nab"], "closed"),
        ([], "closed"),
        ([b"SSH-2.0-OpenSSH_9.2\r\n"], "malformed"),
        ([b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\nab"], "malformed"),
        ([b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n"], "malformed"),
        ([answer(b"x" * 1001)], "too_large"),
        ([b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 1001], "too_large"),
        ([b"HTTP/1.1 200 OK\r\nx: " + b"x" * 70_000], "too_large"),
    ],
)
def test_tells_what_went_wrong(run: Run, parts: list[bytes], kind: str) -> None:
    async def main() -> None:
        async with scripted_server(sends(*parts, close=True)) as server:
            pool = Pool(server.address, max_response_bytes=1000)
            assert (await failure(pool)).kind == kind
            assert server.connections == 1  # a fresh connection is not tried again
            await pool.close()

    run(main())


def test_refused_and_timeout(run: Run) -> None:
    async def never(_: Received, __: asyncio.StreamWriter) -> None:
        await asyncio.sleep(60)

    async def main() -> None:
        async with scripted_server(never) as server:
            pool = Pool(server.address)
            assert (await failure(pool, timeout_s=0.05)).kind == "timeout"
            await asyncio.wait_for(server.lost.wait(), 5)  # the connection is not kept
        assert (await failure(pool)).kind == "refused"
        await pool.close()
        assert (await failure(pool)).kind == "refused"

    run(main())


def test_a_connection_that_closed_meanwhile_is_replaced_once(run: Run) -> None:
    async def main() -> None:
        async def close_second(_: Received, writer: asyncio.StreamWriter) -> None:
            if len(server.requests) != 2:
                writer.write(answer())
            else:
                writer.close()  # after the request came, before a byte of an answer

        async with scripted_server(close_second) as server:
            pool = Pool(server.address)
            for _ in range(3):
                assert (await pool.request(b"POST", b"/", (), b"body")).body == b"ok"
            assert (server.connections, len(server.requests)) == (2, 4)
            await pool.close()

    run(main())


def test_a_half_answer_is_never_asked_for_again(run: Run) -> None:
    async def main() -> None:
        async def half_second(_: Received, writer: asyncio.StreamWriter) -> None:
            writer.write(answer() if len(server.requests) == 1 else b"HTTP/1.1 2")
            if len(server.requests) == 2:
                writer.close()

        async with scripted_server(half_second) as server:
            pool = Pool(server.address)
            await pool.request(b"GET", b"/")
            assert (await failure(pool)).kind == "closed"
            assert len(server.requests) == 2
            await pool.close()

    run(main())


@pytest.mark.parametrize("extra", [answer(b"spare"), b"rubbish"])
def test_bytes_that_nobody_asked_for_end_the_connection(run: Run, extra: bytes) -> None:
    async def main() -> None:
        async with scripted_server(sends(answer(b"mine") + extra)) as server:
            pool = Pool(server.address)
            for _ in range(2):
                assert (await pool.request(b"GET", b"/")).body == b"mine"
            assert server.connections == 2
            await pool.close()

    run(main())


def test_pool_is_bounded_and_fair(run: Run) -> None:
    running = most = 0

    async def slow(_: Received, writer: asyncio.StreamWriter) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        writer.write(answer())

    async def main() -> None:
        async with scripted_server(slow) as server:
            pool = Pool(server.address, max_connections=3)
            order: list[int] = []

            async def one(number: int) -> None:
                await pool.request(b"GET", b"/")
                order.append(number)

            await asyncio.gather(*(one(number) for number in range(12)))
            assert (server.connections, most) == (3, 3)
            assert [number // 3 for number in order] == sorted(number // 3 for number in range(12))
            await pool.close()

    run(main())


def test_a_full_pool_gives_up_in_time_and_recovers(run: Run) -> None:
    go = asyncio.Event()

    async def wait(_: Received, writer: asyncio.StreamWriter) -> None:
        await go.wait()
        writer.write(answer())

    async def main() -> None:
        async with scripted_server(wait) as server:
            pool = Pool(server.address, max_connections=1)
            first = asyncio.ensure_future(pool.request(b"GET", b"/"))
            await asyncio.sleep(0.05)
            assert (await failure(pool, timeout_s=0.05)).kind == "busy"
            go.set()
            assert (await first).status == 200
            assert (await pool.request(b"GET", b"/")).status == 200
            await pool.close()

    run(main())


def test_a_cancelled_request_closes_its_connection_and_frees_its_slot(run: Run) -> None:
    async def never(request: Received, writer: asyncio.StreamWriter) -> None:
        if request.target == "/never":
            await asyncio.sleep(60)
        writer.write(answer())

    async def main() -> None:
        async with scripted_server(never) as server:
            pool = Pool(server.address, max_connections=1)
            stuck = asyncio.ensure_future(pool.request(b"GET", b"/never"))
            waiting = asyncio.ensure_future(pool.request(b"GET", b"/"))
            given_up = asyncio.ensure_future(pool.request(b"GET", b"/"))
            await asyncio.sleep(0.05)
            given_up.cancel()
            stuck.cancel()
            assert (await asyncio.wait_for(waiting, 5)).status == 200
            assert server.connections == 2
            assert len(server.requests) == 2
            await asyncio.gather(stuck, given_up, return_exceptions=True)
            await pool.close()

    run(main())


@pytest.mark.parametrize(
    ("method", "target", "header"),
    [
        (b"GET", b"/a b", (b"x", b"y")),
        (b"GET", b"/a\r\nx: y", (b"x", b"y")),
        (b"GET", b"*", (b"x", b"y")),
        (b"GE T", b"/", (b"x", b"y")),
        (b"GET", b"/", (b"x", b"y\r\nz: 1")),
        (b"GET", b"/", (b"x", b"y\n")),
        (b"GET", b"/", (b"x\r\n", b"y")),
        (b"GET", b"/", (b"x", b"\0")),
        (b"GET", b"/", (b"Content-Length", b"1")),
        (b"GET", b"/", (b"transfer-encoding", b"chunked")),
    ],
)
def test_no_line_break_gets_into_a_head(method: bytes, target: bytes, header: tuple[bytes, bytes]) -> None:
    with pytest.raises(ValueError, match="not a"):
        encode_head(method, target, LOCAL, [header], 0)


def test_address() -> None:
    assert Address.parse("http://localhost:81/") == Address("localhost", 81)
    assert Address.parse("http://[::1]") == Address("::1", 80)
    assert Address.parse("http://localhost", default_port=8000) == Address("localhost", 8000)
    assert str(Address("::1", 80)) == "[::1]:80"
    for wrong in ("localhost:80", "https://a", "http://", "http://a/b", "http://u:p@a", "http://a:b", "http://a?q"):
        with pytest.raises(ValueError, match="http"):
            Address.parse(wrong)
