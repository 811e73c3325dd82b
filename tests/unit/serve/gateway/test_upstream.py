"""The gateway in front of a server that misbehaves, and of none."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from typing import Any

import orjson
import pytest
import uvloop
from prometheus_client.parser import text_string_to_metric_families

from compress.errors import ServerError
from serve.gateway.observe.telemetry import Telemetry
from serve.gateway.settings import Settings
from serve.gateway.upstream import upstream as module
from serve.http.client import Address, Pool, Response
from tests.serve_http import Received, Scripted, answer, gateway, scripted_server

pytestmark = pytest.mark.clock

INFER = b"/v2/models/m/infer"


def dead() -> str:
    """A URL where nobody listens."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{sock.getsockname()[1]}"


async def ask(address: Address, target: bytes, body: bytes | None = None, *headers: tuple[bytes, bytes]) -> Response:
    pool = Pool(address)
    try:
        return await pool.request(b"GET" if body is None else b"POST", target, headers, body or b"")
    finally:
        await pool.close()


def error(response: Response) -> dict[str, Any]:
    data: dict[str, Any] = orjson.loads(response.body)
    assert data["error"]
    return data


async def metric(address: Address, name: str, key: str = "", **labels: str) -> float:
    headers = [(b"x-api-key", key.encode())] if key else []
    page = (await ask(address, b"/metrics", None, *headers)).body.decode()
    samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
    return sum(s.value for s in samples if s.name == name and labels.items() <= s.labels.items())


def test_refused() -> None:
    async def main() -> None:
        async with gateway(Settings(upstream=(dead(),), port=0)) as address:
            for target, body in ((INFER, b"{}"), (b"/v2/models/m", None), (b"/predict/m", b"x"), (b"/v2", None)):
                response = await ask(address, target, body, (b"content-type", b"image/png"))
                assert response.status == 503
                assert "can't be reached" in error(response)["error"]
                assert "127.0.0.1" not in response.body.decode()  # where Triton stands is nobody's business
            assert (await ask(address, b"/healthz")).status == 200
            assert (await ask(address, b"/readyz")).status == 503
            assert await metric(address, "gateway_upstream_errors_total", kind="refused") >= 4
            assert await metric(address, "gateway_requests_total", model="unknown", code="503") == 3
            assert await metric(address, "gateway_requests_total", model="m") == 0

    uvloop.run(main())


@pytest.mark.parametrize(
    "broken", [b"", b"HTTP/1.1 200 OK\r\n", answer(b"hello")[:-2], b"\x15\x03\x01\x00\x02\x02P", b"rubbish\r\n\r\n"]
)
def test_broken_answers(broken: bytes) -> None:
    async def respond(_: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(broken)
        writer.close()

    async def main() -> None:
        async with scripted_server(respond) as triton, gateway(Settings(upstream=(triton.url,), port=0)) as address:
            response = await ask(address, INFER, b"{}")
            assert response.status == 502
            error(response)

    uvloop.run(main())


def test_timeout() -> None:
    async def never(_: Received, __: asyncio.StreamWriter) -> None:
        await asyncio.sleep(60)

    async def main() -> None:
        async with (
            scripted_server(never) as triton,
            gateway(Settings(upstream=(triton.url,), port=0, timeout_s=0.1)) as address,
        ):
            response = await ask(address, INFER, b"{}")
            assert response.status == 504
            error(response)
            await asyncio.wait_for(triton.lost.wait(), 5)

    uvloop.run(main())


async def echo(request: Received, writer: asyncio.StreamWriter) -> None:
    writer.write(answer(request.body, "200 OK", "Content-Type: a/b", "Server: secret", "Set-Cookie: x=y"))


def test_bytes_in_bytes_out_and_only_the_headers_that_matter() -> None:
    async def main() -> None:
        async with scripted_server(echo) as triton, gateway(Settings(upstream=(triton.url,), port=0)) as address:
            body = bytes(range(256)) * 4000
            sent = {
                b"content-type": b"application/octet-stream",
                b"Inference-Header-Content-Length": b"12",
                b"accept-encoding": b"gzip",
                b"traceparent": b"00-abc-def-01",
                b"authorization": b"Bearer secret",
                b"cookie": b"secret",
            }
            response = await ask(address, INFER, body, *sent.items())
            assert response.body == body
            names = {name for name, _ in response.headers}
            assert names == {b"content-type", b"content-length", b"x-content-type-options", b"cache-control"}
            (request,) = triton.requests
            assert request.target == INFER.decode()
            assert request.headers == {
                "host": str(triton.address),
                "content-length": str(len(body)),
                "inference-header-content-length": "12",
                "accept-encoding": "gzip",
                "traceparent": "00-abc-def-01",
            }
            wrong = await ask(address, INFER, b"{}", (b"inference-header-content-length", b"-1"))
            assert wrong.status == 400
            assert await metric(address, "gateway_requests_total", model="m", code="200") == 1
            assert await metric(address, "gateway_request_duration_seconds_count", model="m") == 2

    uvloop.run(main())


@pytest.mark.parametrize(
    "target",
    [
        b"/v2/models/../infer",
        b"/v2/models/./infer",
        b"/v2/models/..%2f..%2frepository/infer",
        b"/v2/models/a%2fb/infer",
        b"/v2/models/a%0d%0ab/infer",
        b"/v2/models/a/versions/x/infer",
        b"/v2/models/a/versions/1/infer/",
        b"/v2/models//infer",
        b"/v2/models/" + b"a" * 300 + b"/infer",
        b"/v2/repository/index",
        b"/v2/repository/models/a/load",
        b"/v2/systemsharedmemory/status",
        b"/v2/cudasharedmemory/status",
        b"/v2/logging",
        b"/v2/trace/setting",
        b"/v2/models/a/trace/setting",
        b"/v2/models/a/generate",
        b"/v2/models/stats/infer",
        b"/v2/models/%2e%2e",
        b"/v2/models/%2e%2e/ready",
        b"/metrics/x",
    ],
)
def test_nothing_else_reaches_triton(target: bytes) -> None:
    async def main() -> None:
        async with scripted_server(echo) as triton, gateway(Settings(upstream=(triton.url,), port=0)) as address:
            for body in (None, b"{}"):
                response = await ask(address, target, body)
                assert response.status in (403, 404, 405)
                error(response)
            assert not triton.requests

    uvloop.run(main())


def test_a_body_over_the_bound_is_refused_without_reading_it_all() -> None:
    async def main() -> None:
        settings = Settings(port=0, max_body_bytes=100_000)
        async with scripted_server(echo) as triton, gateway(with_upstream(settings, triton)) as address:
            assert (await ask(address, INFER, bytes(100_000))).status == 200
            for target in (INFER, b"/predict/m"):
                response = await ask(address, target, bytes(150_000), (b"content-type", b"image/png"))
                assert response.status == 413
                assert "100000" in error(response)["why"]
            assert len(triton.requests) == 1
            # One that says that it is huge, and one of unknown length: answered before they are sent.
            for framing in (b"content-length: 999999999999", b"transfer-encoding: chunked"):
                reader, writer = await asyncio.open_connection(address.host, address.port)
                writer.write(b"POST %b HTTP/1.1\r\nhost: a\r\n%b\r\n\r\n" % (INFER, framing))
                if b"chunked" in framing:
                    writer.write(b"1e8480\r\n" + bytes(150_000))
                head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
                assert head.startswith(b"HTTP/1.1 413")
                writer.close()

    uvloop.run(main())


def with_upstream(settings: Settings, triton: Scripted) -> Settings:
    return Settings(upstream=(triton.url,), port=0, max_body_bytes=settings.max_body_bytes)


def test_who_left_has_a_connection_to_triton_until_that_is_through_and_no_longer() -> None:
    async def respond(request: Received, writer: asyncio.StreamWriter) -> None:
        if request.body == b"slow":
            await through.wait()
        writer.write(answer())

    through = asyncio.Event()

    async def main() -> None:
        async with (
            scripted_server(respond) as triton,
            gateway(Settings(upstream=(triton.url,), port=0, max_connections=1)) as address,
        ):
            leaver = asyncio.ensure_future(ask(address, INFER, b"slow"))
            await asyncio.wait_for(triton.met.wait(), 5)
            leaver.cancel()
            other = asyncio.ensure_future(ask(address, INFER, b"{}"))
            await asyncio.sleep(0.2)
            assert not other.done()
            through.set()
            assert (await other).status == 200
            assert await metric(address, "gateway_requests_total", code="499") == 1
            await asyncio.gather(leaver, return_exceptions=True)

    uvloop.run(main())


def test_names_that_clients_make_up_are_no_labels() -> None:
    async def missing(_: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(answer(b'{"error":"Request for unknown model: \'m\' is not found"}', "404 Not Found"))

    async def main() -> None:
        async with scripted_server(missing) as triton, gateway(Settings(upstream=(triton.url,), port=0)) as address:
            for number in range(20):
                assert (await ask(address, b"/v2/models/m%d/infer" % number, b"{}")).status == 404
                assert (await ask(address, b"/v2/models/m%d" % number)).status == 404
            assert await metric(address, "gateway_requests_total", model="unknown", code="404") == 40
            page = (await ask(address, b"/metrics")).body
            assert b"m19" not in page

    uvloop.run(main())


def test_settings_that_can_not_work() -> None:
    for wrong in ({"upstream": ("https://a",)}, {"port": 70000}, {"timeout_s": 0}, {"max_connections": 0}):
        with pytest.raises(ServerError):
            Settings(**wrong)


def test_clients_that_are_in_a_hurry_or_leave_cost_the_others_no_places() -> None:
    async def slowly(request: Received, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.08)
        writer.write(answer(b"{}"))

    async def main() -> None:
        async with scripted_server(slowly) as one, scripted_server(slowly) as other:
            settings = Settings(upstream=(one.url, other.url), port=0)
            async with gateway(settings) as address:

                async def places() -> float:
                    return await metric(address, "gateway_model_limit", model="m")

                async def load() -> None:
                    for _ in range(8):
                        answers = await asyncio.gather(*(ask(address, INFER, b"{}") for _ in range(8)))
                        assert {each.status for each in answers} == {200}

                await load()
                before = await places()
                for _ in range(20):
                    hurried = (ask(address, INFER, b"{}", (b"x-request-timeout-ms", b"1")) for _ in range(8))
                    assert 200 not in {each.status for each in await asyncio.gather(*hurried)}
                    pool = Pool(address, timeout_s=0.01)
                    gone = [pool.request(b"POST", INFER, (), b"{}") for _ in range(8)]
                    await asyncio.gather(*gone, return_exceptions=True)
                await load()
                assert await places() >= before
                assert await metric(address, "gateway_upstream_ejected") == 0
                assert await metric(address, "gateway_model_in_flight") == 0

    uvloop.run(main())


def test_however_many_ask_whether_it_is_ready_the_server_is_asked_on_its_own_clock() -> None:
    """And those who hang up take nobody's request with them."""
    waits = asyncio.Event()

    async def respond(request: Received, writer: asyncio.StreamWriter) -> None:
        if request.method == "POST":
            await waits.wait()
        writer.write(answer(b"{}"))

    async def main() -> None:
        async with scripted_server(respond) as one, scripted_server(respond) as other:
            settings = Settings(upstream=(one.url, other.url), port=0)
            async with gateway(settings) as address:
                under_way = [asyncio.create_task(ask(address, INFER, b"{}")) for _ in range(8)]
                await asyncio.gather(one.met.wait(), other.met.wait())
                begun, before = asyncio.get_running_loop().time(), one.probes
                for target in (b"/readyz", b"/v2/health/ready", b"/v2/health/live"):
                    for _ in range(5):
                        held = [await connected(address, target) for _ in range(100)]
                        for writer in held:
                            writer.transport.abort()
                        assert (await ask(address, target)).status == 200
                seconds = asyncio.get_running_loop().time() - begun
                assert one.probes - before <= seconds + 2
                waits.set()
                assert {each.status for each in await asyncio.gather(*under_way)} == {200}

    uvloop.run(main())


async def connected(address: Address, target: bytes) -> asyncio.StreamWriter:
    """A client that asks and does not wait for the answer."""
    _, writer = await asyncio.open_connection(address.host, address.port)
    writer.write(b"GET %b HTTP/1.1\r\nhost: x\r\n\r\n" % target)
    return writer


def test_readiness_is_what_the_last_probe_said() -> None:
    state = "200 OK"

    async def respond(request: Received, writer: asyncio.StreamWriter) -> None:
        if state == "silent":
            await asyncio.sleep(30)
        writer.write(answer(b"", state))

    async def main() -> None:
        nonlocal state
        async with scripted_server(respond) as triton:
            settings = Settings(upstream=(triton.url,), port=0, health_interval_s=0.05)
            async with gateway(settings) as address:
                for said, ready, live in (
                    ("200 OK", (200, 200), 200),
                    ("400 Bad Request", (503, 400), 200),
                    ("silent", (503, 503), 503),
                    ("200 OK", (200, 200), 200),
                ):
                    state = said
                    async with asyncio.timeout(30):
                        for target, status in zip((b"/readyz", b"/v2/health/ready"), ready, strict=True):
                            while (await ask(address, target)).status != status:
                                pass
                        assert (await ask(address, b"/v2/health/live")).status == live

    uvloop.run(main())


def test_what_is_known_of_many_models_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: Counter[str] = Counter()

    async def respond(request: Received, writer: asyncio.StreamWriter) -> None:
        asked[request.target] += 1
        name = request.target.split("/")[3]
        tensors = [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}]
        config = request.target.endswith("/config")
        told = {"max_batch_size": 8} if config else {"name": name, "inputs": tensors, "outputs": tensors}
        writer.write(answer(orjson.dumps(told)))

    async def main() -> None:
        monkeypatch.setattr(module, "CACHE_S", 600.0)
        async with scripted_server(respond) as triton:
            upstream = module.Upstream(Settings(upstream=(triton.url,), port=0), Telemetry())
            names = [f"m{number}" for number in range(300)]
            for _ in range(2):
                for name in names:
                    assert (await upstream.metadata(name)).name == name
            assert len(asked) == 600, "a model and its configuration"
            assert set(asked.values()) == {1}
            for version in ("1", "01", "0001"):  # the same one, however it is written
                await upstream.metadata("m0", version)
            assert len(asked) == 602
            before = upstream._known.size
            monkeypatch.setattr(upstream._known, "_most", before)
            for number in range(300, 350):  # no more than may be: those that were not asked for longest are forgotten
                await upstream.metadata(f"m{number}")
                assert upstream._known.size <= before
            await upstream.metadata("m299")
            assert len(asked) == 702
            await upstream.close()

    uvloop.run(main())
