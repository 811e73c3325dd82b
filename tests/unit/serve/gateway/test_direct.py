"""The short way of infer requests: the same answers, counts and bounds as the long one, whatever bytes come."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, ParamSpec

import orjson
import pytest

import serve
from serve.gateway import server as server_module
from serve.gateway.access.keys import add_key, revoke_key
from serve.gateway.edge import direct as short
from serve.gateway.edge.asking import unless_client_leaves
from serve.gateway.edge.connections import connection_class
from serve.gateway.edge.extensions import LEAVING
from serve.gateway.errors import ClientGoneError
from serve.gateway.settings import Settings
from serve.http.client import Address, ExchangeError, Pool
from tests.serve_http import Received, answer, gateway, in_loop, scripted_server
from tests.unit.serve.gateway.test_upstream import metric

pytestmark = pytest.mark.clock

P = ParamSpec("P")
RAW = bytes(range(16))
TENSOR = {"name": "x", "datatype": "FP32", "shape": [1, 4], "parameters": {"binary_data_size": len(RAW)}}
JSON = orjson.dumps({"inputs": [TENSOR]})
BODY = JSON + RAW
OURS = tuple(f"{Path(serve.__file__).parent / each}" for each in ("gateway", "http"))
SENT, ROUNDS, MOST_CALLS = 5, 400, 168


def request(body: bytes = BODY, *lines: str) -> bytes:
    head = ["POST /v2/models/m/infer HTTP/1.1", "host: x", f"inference-header-content-length: {len(JSON)}", *lines]
    return "\r\n".join([*head, f"content-length: {len(body)}", "", ""]).encode() + body


async def triton(asked: Received, writer: asyncio.StreamWriter) -> None:
    """Says what it was sent."""
    if asked.target.endswith("/config"):
        writer.write(answer(b'{"max_batch_size": 8, "input": []}'))
    elif asked.method == "GET":
        tensors = [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}]
        writer.write(answer(orjson.dumps({"name": "m", "versions": ["1"], "inputs": tensors, "outputs": tensors})))
    else:
        writer.write(answer(asked.body, "200 OK", "Content-Type: a/b", "Server: secret"))


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each request that might have gone the short way did so."""
    found: list[bool] = []
    begin = short.Direct.begin

    def noted(self: short.Direct, *arguments: Any) -> bool:
        found.append(begin(self, *arguments))
        return found[-1]

    monkeypatch.setattr(short.Direct, "begin", noted)
    return found


class Client:
    """A connection that is given bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def to(cls, address: Address) -> Client:
        client = cls(*await asyncio.open_connection(address.host, address.port))
        OPEN.append(client)
        return client

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        async with asyncio.timeout(30):
            first, *lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
            headers = dict(line.split(": ", 1) for line in lines)
            return int(first.split()[1]), headers, await self.reader.readexactly(int(headers["content-length"]))

    async def ask(self, data: bytes) -> tuple[int, dict[str, str], bytes]:
        self.send(data)
        return await self.answer()

    async def closed(self) -> None:
        async with asyncio.timeout(30):
            assert await self.reader.read() == b""

    async def warm(self, data: bytes | None = None) -> None:
        """Have the gateway learn the model, and open a connection to Triton."""
        for _ in range(3):
            assert (await self.ask(data or request()))[0] == 200


OPEN: list[Client] = []


def with_clients(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """A test in a loop of its own, whose clients are closed at its end."""

    @functools.wraps(test)
    async def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            await test(*args, **kwargs)
        finally:
            for client in OPEN:
                client.writer.close()
            OPEN.clear()
            await asyncio.sleep(0.01)

    return in_loop(run)


async def until(holds: Callable[[], bool | Awaitable[bool]]) -> None:
    async with asyncio.timeout(30):
        while True:
            found = holds()
            if found if isinstance(found, bool) else await found:
                return
            await asyncio.sleep(0.02)


def has_answered(connection: Any, before: int) -> bool:
    return bool(connection.server_state.total_requests > before)


async def is_metric(address: Address, value: float, name: str, **labels: str) -> bool:
    return await metric(address, name, **labels) == value


@pytest.mark.parametrize("validate", [True, False])
@pytest.mark.parametrize("form", ["binary", "json"])
@with_clients
async def test_both_ways_answer_alike(tmp_path: Path, taken: list[bool], form: str, validate: bool) -> None:
    log = tmp_path / "log"
    body = BODY if form == "binary" else orjson.dumps({"inputs": [{**TENSOR, "parameters": {}, "data": [1, 2, 3, 4]}]})
    data = request(body) if form == "binary" else request(body).replace(b"inference-header-", b"x-")
    async with scripted_server(triton) as server:
        settings = Settings(upstream=(server.url,), port=0, access_log=log)
        async with gateway(settings, validate=validate) as address:
            client = await Client.to(address)
            answers = [await client.ask(data) for _ in range(20)]
            assert answers == answers[:1] * 20
            assert answers[0][1] == {
                "content-type": "a/b", "x-content-type-options": "nosniff", "cache-control": "no-store",
                "content-length": str(len(answers[0][2])),
            }  # fmt: skip
            assert taken[0] is False
            assert taken.count(True) >= 10
            assert await metric(address, "gateway_requests_total", model="m", code="200") == 20
            assert await metric(address, "gateway_request_duration_seconds_count", model="m") == 20
            assert await metric(address, "gateway_model_in_flight") == 0
            assert await metric(address, "gateway_requests_in_flight") == 1  # this question
        sent = {received.body for received in server.requests if received.method == "POST"}
        assert sent == {answers[0][2]}
    lines = [orjson.loads(line) for line in log.read_bytes().splitlines()]
    lines = [{**line, "time": 0, "ms": 0} for line in lines if line["model"] == "m"]
    assert lines == lines[:1] * 20
    assert lines[0]["bytes_in"] == len(body)


@with_clients
async def test_the_short_way_stays_short(tmp_path: Path, taken: list[bool]) -> None:
    """Each check added costs some: its calls are counted, as they are the same on any machine, and time is not."""
    keys = tmp_path / "keys.json"
    secret, _ = add_key(keys, "load", rate=1e6, burst=10**6)
    calls, rounds = 0, list[float]()

    def count(frame: FrameType, event: str, _: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call") and frame.f_code.co_filename.startswith(OURS)

    async with (
        scripted_server(triton) as server,
        gateway(Settings(upstream=(server.url,), port=0, keys=keys), validate=True) as address,
    ):
        client = await Client.to(address)
        asked = request(BODY, f"x-api-key: {secret}")
        await client.warm(asked)
        assert taken[-1] is True
        for _ in range(ROUNDS):  # on a busy machine more of what is done by the clock falls among them
            calls = 0
            taken.clear()
            sys.setprofile(count)
            try:
                for _ in range(SENT):
                    await client.ask(asked)
            finally:
                sys.setprofile(None)
            if taken == [True] * SENT:
                rounds.append(calls / SENT)
                if rounds[-1] <= MOST_CALLS:
                    break
    assert min(rounds) <= MOST_CALLS


@with_clients
async def test_a_request_in_any_pieces(taken: list[bool]) -> None:
    data = request()
    async with scripted_server(triton) as server, gateway(Settings(upstream=(server.url,), port=0)) as address:
        client = await Client.to(address)
        await client.warm()
        for at in range(1, len(data), 7):
            client.send(data[:at])
            await asyncio.sleep(0.002)
            assert (await client.ask(data[at:]))[2] == BODY
            assert (await client.ask(data))[2] == BODY
    assert taken.count(True) > len(data) // 7


@pytest.mark.parametrize("other", [b"Z" * len(RAW), b"", b"1", b"\r\n\r\n", b"POST / HTTP/1.1\r\n\r\n"])
@with_clients
async def test_a_known_head_means_what_it_meant(other: bytes) -> None:
    """Other bodies, several requests at once, and others between them: each is answered by its own, in order."""

    async def late(asked: Received, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.02 if asked.body == BODY else 0)
        await triton(asked, writer)

    second = request(JSON + other)
    async with scripted_server(late) as server, gateway(Settings(upstream=(server.url,), port=0)) as address:
        client = await Client.to(address)
        await client.warm()
        client.send(request() + second + request())
        assert [(await client.answer())[2] for _ in range(3)] == [BODY, JSON + other, BODY]
        for body in (BODY, JSON + other, BODY, BODY):
            assert (await client.ask(request(body)))[2] == body
        client.send(b"\r\n" + request() + b"\r\n" + second)
        assert [(await client.answer())[2] for _ in range(2)] == [BODY, JSON + other]
        client.send(request())
        await asyncio.sleep(0.01)
        client.send(second)
        assert [(await client.answer())[2] for _ in range(2)] == [BODY, JSON + other]
        # Bytes that the parser does not take are not taken because they are as long as what came before.
        status, _, _ = await client.ask(b"X" * len(request()))
        assert status == 400


PIECES = (
    request(), request(), request(), request(JSON + b"Z" * len(RAW)), request(JSON), request(BODY * 3),
    request(BODY, "x-id: 1"), request()[:40], request()[40:], request()[:-1], request()[-1:], request() + request(),
    b"\r\n", b"\n", b"\r\n\r\n", request().replace(b"\r\n", b"\n"), request().replace(b"host: x", b"host: x\r\n y: z"),
    request()[: -len(BODY)], BODY, RAW, request().replace(b"content-length", b"Content-Length"), b"GET /healthz HTTP/1.1\r\n\r\n",
    request().replace(b"1.1", b"1.0"), request(BODY, "connection: close"), request(BODY, "transfer-encoding: chunked"),
    request(BODY, "expect: 100-continue"), b"X" * len(request()), request().replace(b"/m/", b"/%6d/"),
    request(BODY, f"content-length: {len(BODY)}"), request(BODY, "content-length: 1"), request().replace(b"/infer", b"/infer?a=b"),
)  # fmt: skip


async def spoken(address: Address, pieces: Sequence[bytes], few: asyncio.Semaphore) -> bytes:
    """All that the gateway says to these pieces, sent one after the other; few connections begin at a time."""
    async with few:  # or a model that nobody has asked before would have too many questions to answer in time
        client = await Client.to(address)
        await client.warm()
    said: list[bytes] = []

    async def listen() -> None:
        with contextlib.suppress(ConnectionError):  # closed on what it has not read
            while part := await client.reader.read(65536):
                said.append(part)

    listening = asyncio.ensure_future(listen())
    for piece in pieces:
        if not listening.done():
            client.send(piece)
        await asyncio.wait((listening,), timeout=0.05)
    async with asyncio.timeout(30):
        await listening
    return b"".join(said)


@pytest.mark.parametrize("seed", range(3))
@with_clients
async def test_whatever_comes_both_ways_say_the_same(
    monkeypatch: pytest.MonkeyPatch, taken: list[bool], seed: int
) -> None:
    chosen = random.Random(seed)
    cases = [chosen.choices(PIECES, k=chosen.randint(1, 5)) for _ in range(60)]
    few = asyncio.Semaphore(16)
    cases += [[b"".join(case)] for case in cases]  # in one read, as they may come in a moment that is busy
    async with scripted_server(triton) as server:
        settings = Settings(upstream=(server.url,), port=0, head_timeout_s=1.0, body_timeout_s=1.0, keep_alive_s=1)
        async with gateway(settings) as address:
            told = await asyncio.gather(*(spoken(address, case, few) for case in cases))
        assert taken.count(True) > len(cases)
        monkeypatch.setattr(short.Direct, "read", lambda *_: None)
        async with gateway(settings) as address:
            long = await asyncio.gather(*(spoken(address, case, few) for case in cases))
    assert len(set(long)) > 10
    for case, said, other in zip(cases, told, long, strict=True):
        assert said == other, case
    assert told[:60] == told[60:]


CHUNKED = b"POST /v2/models/m/infer HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize("query", [b"", b"?a=b"], ids=["short", "long"])
@pytest.mark.parametrize("before", [1, 3])
@pytest.mark.parametrize(
    ("bad", "status"),
    [
        (b"X" * 10, 400), (request(BODY, "content-length: 1"), 400), (b"GET /healthz HTTP/1.1\r\n\x00", 400),
        (CHUNKED + b"no number\r\n", 400),
        (b"CONNECT x:1 HTTP/1.1\r\nhost: x\r\n\r\n", 400),
        (b"GET /healthz HTTP/1.1\r\n", 408), (CHUNKED + b"5\r\n", 408),
    ],
)  # fmt: skip
@with_clients
async def test_what_is_refused_unread_waits_for_its_turn(query: bytes, before: int, bad: bytes, status: int) -> None:
    """A client that gets it earlier takes it for the answer to what it asked before."""
    go = asyncio.Event()
    go.set()

    async def held(asked: Received, writer: asyncio.StreamWriter) -> None:
        await go.wait()
        await triton(asked, writer)

    good = request().replace(b"/infer", b"/infer" + query)
    async with scripted_server(held) as server:
        settings = Settings(upstream=(server.url,), port=0, head_timeout_s=0.2, body_timeout_s=0.2)
        async with gateway(settings) as address:
            for pieces in ([good * before + bad], [good * before, bad], [good] * before + [bad[:5], bad[5:]]):
                client = await Client.to(address)
                await client.warm()
                go.clear()
                for piece in pieces:
                    client.send(piece)
                    await asyncio.sleep(0.01)
                await asyncio.sleep(0.5)
                go.set()
                assert [(await client.answer())[::2] for _ in range(before)] == [(200, BODY)] * before
                assert (await client.answer())[0] == status
                await client.closed()
            assert await metric(address, "gateway_model_in_flight") == 0
            assert await metric(address, "gateway_requests_total", model="m", code="200") >= 3 * before


@with_clients
async def test_what_waits_for_its_turn_is_not_slow() -> None:
    """Behind two requests nothing is read: what has begun to come can't go on."""
    go = asyncio.Event()
    go.set()

    async def held(asked: Received, writer: asyncio.StreamWriter) -> None:
        await go.wait()
        await triton(asked, writer)

    async with scripted_server(held) as server:
        settings = Settings(upstream=(server.url,), port=0, head_timeout_s=0.2, body_timeout_s=0.2)
        async with gateway(settings) as address:
            client = await Client.to(address)
            await client.warm()
            for cut in (40, len(request()) - 5):
                go.clear()
                client.send(2 * request() + request()[:cut])
                await asyncio.sleep(0.05)
                client.send(request()[cut:])
                await asyncio.sleep(0.5)
                go.set()
                assert [(await client.answer())[0] for _ in range(3)] == [200] * 3


@with_clients
async def test_a_key_that_is_revoked_and_a_rate_that_is_used_up(tmp_path: Path, taken: list[bool]) -> None:
    keys = tmp_path / "keys.json"
    secret, _ = add_key(keys, "mine", rate=0.001, burst=8)
    data = request(BODY, f"x-api-key: {secret}")
    async with (
        scripted_server(triton) as server,
        gateway(Settings(upstream=(server.url,), port=0, keys=keys), validate=True) as address,
    ):
        client = await Client.to(address)
        answers = [await client.ask(data) for _ in range(10)]
        assert [status for status, _, _ in answers] == [200] * 8 + [429] * 2
        left = [headers["ratelimit"].split(";")[1] for _, headers, _ in answers]
        assert left == [f"r={number}" for number in (7, 6, 5, 4, 3, 2, 1, 0, 0, 0)]
        assert True in taken
        assert (await client.ask(request()))[0] == 401
        revoke_key(keys, "mine")

        async def refused() -> bool:
            return (await client.ask(data))[0] == 401

        await until(refused)


@with_clients
async def test_a_client_that_leaves(taken: list[bool]) -> None:
    """Triton does not hear of it: the place is taken until it answers, or for as long as it may take."""
    hang, works = False, asyncio.Event()

    async def slow(asked: Received, writer: asyncio.StreamWriter) -> None:
        if hang:
            await works.wait()
        await triton(asked, writer)

    async with scripted_server(slow) as server, gateway(Settings(upstream=(server.url,), port=0)) as address:
        client = await Client.to(address)
        await client.warm()
        hang = True
        before = len(server.requests)
        client.send(request())
        await until(lambda: len(server.requests) > before)
        assert taken[-1] is True
        client.writer.close()
        await until(lambda: is_metric(address, 1, "gateway_requests_total", code="499"))
        assert await is_metric(address, 1, "gateway_model_in_flight")
        works.set()
        await until(lambda: is_metric(address, 0, "gateway_model_in_flight"))


@pytest.mark.parametrize("times", [1, 2])
@in_loop
async def test_a_client_that_leaves_while_its_connection_is_closing(times: int) -> None:
    """It is told when a request begins on a connection that is closing, and again when that is closed."""

    def leaving(call: Callable[[], None] | None) -> None:
        for _ in range(times if call is not None else 0):
            call()  # type: ignore[misc]

    async def receive() -> Any:
        raise AssertionError

    with pytest.raises(ClientGoneError):
        await unless_client_leaves({"extensions": {LEAVING: leaving}}, receive, asyncio.sleep(60))
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


@pytest.mark.parametrize(("losses", "status"), [(1, 200), (2, 502)])
@with_clients
async def test_a_connection_that_triton_closes_unanswered(losses: int, status: int) -> None:
    left = 0

    async def closing(asked: Received, writer: asyncio.StreamWriter) -> None:
        nonlocal left
        if left:
            left -= 1
            writer.close()
            return
        await triton(asked, writer)

    async with scripted_server(closing) as server, gateway(Settings(upstream=(server.url,), port=0)) as address:
        client = await Client.to(address)
        await client.warm()
        before, left = len(server.requests), losses
        assert (await client.ask(request()))[0] == status
        assert len(server.requests) - before == 2  # asked twice, and no more
        assert (await client.ask(request()))[0] == 200
        assert await metric(address, "gateway_model_in_flight") == 0


@with_clients
async def test_an_answer_that_does_not_come(taken: list[bool]) -> None:
    hang = False

    async def slow(asked: Received, writer: asyncio.StreamWriter) -> None:
        if hang:
            await asyncio.sleep(60)
        await triton(asked, writer)

    async with scripted_server(slow) as server:
        settings = Settings(upstream=(server.url,), port=0, timeout_s=1.0)
        async with gateway(settings) as address:
            client = await Client.to(address)
            await client.warm()
            hang = True
            assert (await client.ask(request()))[0] == 504
            assert taken[-1] is True
            assert await metric(address, "gateway_upstream_errors_total", kind="timeout") == 1
            hang = False
            assert (await client.ask(request()))[0] == 200


@with_clients
async def test_the_last_answer_of_a_gateway_that_stops(taken: list[bool]) -> None:
    go = asyncio.Event()
    go.set()

    async def held(asked: Received, writer: asyncio.StreamWriter) -> None:
        await go.wait()
        await triton(asked, writer)

    async with scripted_server(held) as server:
        async with gateway(Settings(upstream=(server.url,), port=0)) as address:
            client, idle = await Client.to(address), await Client.to(address)
            await client.warm()
            await idle.warm()
            go.clear()
            before = len(server.requests)
            client.send(request())
            await until(lambda: len(server.requests) > before)
            assert taken[-1] is True
            asyncio.get_running_loop().call_later(0.5, go.set)
        status, headers, body = await client.answer()
        assert (status, body, headers["connection"]) == (200, BODY, "close")
        await client.closed()
        await idle.closed()


@with_clients
async def test_a_gateway_that_stops_does_not_wait_for_ever(taken: list[bool], tmp_path: Path) -> None:
    hang = False

    async def slow(asked: Received, writer: asyncio.StreamWriter) -> None:
        if hang:
            await asyncio.sleep(60)
        await triton(asked, writer)

    async with scripted_server(slow) as server:
        settings = Settings(upstream=(server.url,), port=0, drain_timeout_s=1, access_log=tmp_path / "log")
        async with gateway(settings) as address:
            client = await Client.to(address)
            await client.warm()
            hang = True
            before = len(server.requests)
            client.send(request())
            await until(lambda: len(server.requests) > before)
            assert taken[-1] is True
        assert (await client.answer())[0] == 503
        await client.closed()
    assert orjson.loads((tmp_path / "log").read_bytes().splitlines()[-1])["status"] == 503


@with_clients
async def test_an_idle_connection_is_closed_and_a_busy_one_is_not(taken: list[bool]) -> None:
    async with (
        scripted_server(triton) as server,
        gateway(Settings(upstream=(server.url,), port=0, keep_alive_s=1)) as address,
    ):
        client, begun = await Client.to(address), time.monotonic()
        await client.warm()
        while time.monotonic() - begun < 2.5:
            assert (await client.ask(request()))[0] == 200
            await asyncio.sleep(0.05)
        assert taken.count(True) > 5
        await client.closed()


@with_clients
async def test_a_pause_after_the_long_way_ends_no_request_on_the_short_one(taken: list[bool]) -> None:
    async def slow(asked: Received, writer: asyncio.StreamWriter) -> None:
        if asked.body.endswith(b"slow"):
            await asyncio.sleep(2.5)
        await triton(asked, writer)

    async with (
        scripted_server(slow) as server,
        gateway(Settings(upstream=(server.url,), port=0, keep_alive_s=1)) as address,
    ):
        client = await Client.to(address)
        await client.warm()
        assert (await client.ask(b"GET /v2/health/live HTTP/1.1\r\nhost: x\r\n\r\n"))[0] == 200
        taken.clear()
        assert (await client.ask(request(JSON + b"123456789012slow")))[0] == 200
        assert taken == [True]
        await client.closed()


@pytest.mark.parametrize("warm", [True, False])
@pytest.mark.parametrize("path", ["/v2/models/m/infer", "/predict/m"])
@with_clients
async def test_an_offer_of_another_protocol_changes_nothing(warm: bool, path: str) -> None:
    """Its body is no request, whatever it looks like; Java's client offers HTTP/2 so."""
    offer = "connection: Upgrade, HTTP2-Settings", "upgrade: h2c", "http2-settings: AAMAAABkAAQBAAAAAAIAAAAA"
    secret = JSON + b"hidden  hidden  "
    hidden = request(secret)
    looks = request(hidden, *offer).replace(b"/v2/models/m/infer", path.encode(), 1)
    asked = request(BODY, *offer)
    async with scripted_server(triton) as server, gateway(Settings(upstream=(server.url,), port=0)) as address:
        client = await Client.to(address)
        if warm:
            await client.warm()
        for split in (len(asked), len(asked) - len(BODY), len(asked) - 3, 20):
            client.send(asked[:split])
            await asyncio.sleep(0.05)
            client.send(asked[split:] + request())
            for _ in range(2):
                status, _, body = await client.answer()
                assert (status, body) == (200, BODY)
        client.send(looks[: -len(hidden)])
        await asyncio.sleep(0.05)
        client.send(hidden)
        assert (await client.answer())[2] != secret
        assert (await client.ask(request()))[2] == BODY
        assert not any(received.body == secret for received in server.requests)
        client.send(b"CONNECT x:80 HTTP/1.1\r\nhost: x\r\n\r\n" + request())
        assert (await client.reader.readuntil(b"\r\n")).split()[1] == b"400"


@with_clients
async def test_a_closed_connection_does_not_wait_for_its_client_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less than what the transport holds is left unread, and the connection is closed for its pause."""
    made: list[Any] = []
    lost: list[Any] = []

    def noting(*arguments: Any) -> type:
        class Noting(connection_class(*arguments)):  # type: ignore[misc]
            def connection_made(self, transport: Any) -> None:
                made.append(self)
                super().connection_made(transport)

            def connection_lost(self, exc: Exception | None) -> None:
                lost.append(self)
                super().connection_lost(exc)

        return Noting

    monkeypatch.setattr(server_module, "connection_class", noting)
    body = JSON + bytes(30_000)
    async with scripted_server(triton) as server:
        settings = Settings(upstream=(server.url,), port=0, keep_alive_s=1, write_timeout_s=1)
        async with gateway(settings) as address:
            loop = asyncio.get_running_loop()
            with socket.socket() as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                client.setblocking(False)
                await loop.sock_connect(client, (address.host, address.port))
                await until(lambda: len(made) == 1)
                (connection,) = made
                left = connection.transport.get_write_buffer_size
                while not left():
                    before = connection.server_state.total_requests
                    await loop.sock_sendall(client, request(body))
                    await until(partial(has_answered, connection, before))
                    await asyncio.sleep(0.001)
                assert left() < 64 * 1024
                await until(lambda: lost == made)


@with_clients
async def test_a_known_answer_is_no_other() -> None:
    """Answers whose heads came before, in pieces, too long, too short, and with something behind them."""
    whole = answer(b"hello")
    scripts = [
        [whole], [whole], [whole[:10], whole[10:]], [whole], [answer(b"other")], [whole[:-2], b"lo"],
        [whole.replace(b"hello", b"")], [whole + b"x"], [whole],
    ]  # fmt: skip
    bodies = [b"hello"] * 4 + [b"other", b"hello", None, b"hello", b"hello"]
    turn = iter(scripts)

    async def scripted(_: Received, writer: asyncio.StreamWriter) -> None:
        for part in next(turn):
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.02)

    async with scripted_server(scripted) as server:
        pool = Pool(server.address, max_connections=1, timeout_s=1.0)
        for body in bodies:
            if body is None:
                with pytest.raises(ExchangeError, match="in time"):
                    await pool.request(b"GET", b"/")
                continue
            response = await pool.request(b"GET", b"/")
            assert response.body == body
            assert response.headers == [(b"content-length", b"5")]
        assert server.connections == 3  # one more after the time-out, and after the byte too many
        await pool.close()


@with_clients
async def test_known_answers_in_any_order() -> None:
    """Several heads on one connection, each as it was said, whichever came before it."""
    answers = [
        (200, b"hello", answer(b"hello")),
        (404, b"hello", answer(b"hello", "404 Not Found")),
        (200, b"other", answer(b"other", "200 OK", "X-A: 1")),
        (200, b"longer", answer(b"longer")),
        (200, b"\r\n\r\n12", answer(b"\r\n\r\n12")),
    ]
    turns = random.Random(0).choices(range(len(answers)), k=60)
    turn = iter(turns)

    async def scripted(_: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(answers[next(turn)][2])

    async with scripted_server(scripted) as server:
        pool = Pool(server.address, max_connections=1)
        for which in turns:
            status, body, wire = answers[which]
            response = await pool.request(b"GET", b"/")
            assert (response.status, response.body, response.wire_bytes) == (status, body, len(wire))
            assert dict(response.headers) == {
                b"content-length": b"%d" % len(body), **({b"x-a": b"1"} if b"X-A" in wire else {})
            }  # fmt: skip
        assert server.connections == 1
        await pool.close()
