"""The gateway's start and end."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import signal
import socket
import subprocess
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import uvloop

from compress.errors import ServerError
from serve.gateway.server import check_port, serve_gateway
from serve.gateway.settings import Settings
from serve.http.client import Address, ExchangeError, Pool
from tests.serve_http import Received, answer, gateway, scripted_server

pytestmark = pytest.mark.clock

INFER = b"/v2/models/m/infer"


def test_a_port_in_use_is_told_in_three_parts() -> None:
    async def main(port: int) -> None:
        await serve_gateway(Settings(port=port), stop=asyncio.Event())

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ServerError, match="another program listens there") as caught:
            uvloop.run(main(port))
        assert str(port) in caught.value.what
        with pytest.raises(ServerError, match="another program"):
            check_port("127.0.0.1", port)
    check_port("127.0.0.1", port)


def test_it_ends_in_order() -> None:
    """Readiness turns false, what is in flight is answered, then the port closes."""
    release = asyncio.Event()

    async def slow(request: Received, writer: asyncio.StreamWriter) -> None:
        if request.method == "POST":
            await release.wait()
        writer.write(answer())

    async def main() -> None:
        stop = asyncio.Event()
        ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        async with scripted_server(slow) as triton:
            settings = Settings(upstream=(triton.url,), port=0, validate=False, drain_delay_s=0.5)
            running = asyncio.ensure_future(serve_gateway(settings, stop=stop, on_ready=ready.set_result))
            pool = Pool(Address.parse(await ready))
            assert (await pool.request(b"GET", b"/readyz")).status == 200
            in_flight = asyncio.ensure_future(pool.request(b"POST", INFER, (), b"{}"))
            await asyncio.sleep(0.05)
            stop.set()
            await asyncio.sleep(0.05)
            assert (await pool.request(b"GET", b"/readyz")).status == 503
            assert (await pool.request(b"GET", b"/v2/health/ready")).status == 503
            assert (await pool.request(b"GET", b"/healthz")).status == 200
            await asyncio.sleep(0.8)  # past the delay: the port is closed, the request is still being answered
            with pytest.raises(ExchangeError) as caught:
                await Pool(pool.address).request(b"GET", b"/healthz")
            assert caught.value.kind == "refused"
            assert not in_flight.done()
            release.set()
            assert (await in_flight).status == 200
            await asyncio.wait_for(running, 10)
            await pool.close()

    uvloop.run(main())


@pytest.mark.parametrize("path", [INFER, b"/predict/m", b"/v2/models/m"])
def test_what_its_end_cuts_is_told_so(path: bytes, tmp_path: Path) -> None:
    """With 503 and when to come again, on the long way, too."""
    log = tmp_path / "log"

    async def main() -> None:
        stop, asked = asyncio.Event(), asyncio.Event()
        ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        async def never(request: Received, _: asyncio.StreamWriter) -> None:
            if "/models/m" in request.target:
                asked.set()
            await asyncio.sleep(60)

        async with scripted_server(never) as triton:
            settings = Settings(upstream=(triton.url,), port=0, validate=False, drain_timeout_s=1, access_log=log)
            running = asyncio.ensure_future(serve_gateway(settings, stop=stop, on_ready=ready.set_result))
            address = Address.parse(await ready)
            reader, writer = await asyncio.open_connection(address.host, address.port)
            method = b"GET" if path == b"/v2/models/m" else b"POST"
            head = b"%b %b HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
            writer.write(head % (method, path) + b"2\r\n{}\r\n0\r\n\r\n")
            await asked.wait()
            await asyncio.sleep(0.2)
            stop.set()
            came = await asyncio.wait_for(reader.read(), 30)
            assert came.startswith(b"HTTP/1.1 503 ")
            assert b"retry-after: 1" in came.lower()
            assert b"the gateway ends" in came
            writer.close()
            await asyncio.wait_for(running, 30)

    uvloop.run(main())
    if path == INFER:
        assert [json.loads(line)["status"] for line in log.read_text().splitlines()] == [503]


def test_force_ends_it_at_once() -> None:
    async def never(_: Received, __: asyncio.StreamWriter) -> None:
        await asyncio.sleep(60)

    async def main() -> None:
        stop, force = asyncio.Event(), asyncio.Event()
        ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        async with scripted_server(never) as triton:
            running = asyncio.ensure_future(
                serve_gateway(
                    Settings(upstream=(triton.url,), port=0, validate=False),
                    stop=stop,
                    on_ready=ready.set_result,
                    force=force,
                )
            )
            pool = Pool(Address.parse(await ready))
            stuck = asyncio.ensure_future(pool.request(b"POST", INFER, (), b"{}"))
            await asyncio.sleep(0.1)
            stop.set()
            await asyncio.sleep(0.3)
            assert not running.done()
            force.set()
            await asyncio.wait_for(running, 5)
            stuck.cancel()
            await asyncio.gather(stuck, return_exceptions=True)

    uvloop.run(main())


@pytest.mark.parametrize(("pipelined", "upstreams"), [(1, 1), (8, 1), (2, 2)])
def test_what_is_cut_is_told_in_one_line(pipelined: int, upstreams: int, caplog: pytest.LogCaptureFixture) -> None:
    """Requests that do not end in time: on the short way, in a task of their own, and those that wait their turn.

    With several model servers there is no short way.
    """
    asked: list[Received] = []

    async def never(request: Received, _: asyncio.StreamWriter) -> None:
        if request.method == "POST":
            asked.append(request)
            await asyncio.sleep(600)

    async def main() -> None:
        async with AsyncExitStack() as stack:
            tritons = [await stack.enter_async_context(scripted_server(never)) for _ in range(upstreams)]
            urls = tuple(triton.url for triton in tritons)
            async with gateway(Settings(upstream=urls, port=0, max_clients=100, drain_timeout_s=1)) as address:
                writers = []
                for _ in range(4):
                    _reader, writer = await asyncio.open_connection(address.host, address.port)
                    head = b"POST /v2/models/m/infer HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\n{}"
                    writer.write(head * pipelined)
                    writers.append(writer)
                for _ in range(600):
                    if len(asked) == 4:
                        break
                    await asyncio.sleep(0.1)
                assert len(asked) == 4
            for writer in writers:
                writer.close()

    uvloop.run(main())
    # The scripted server's own connections, which the gateway has none of, end in lines of asyncio's.
    records = [record for record in caplog.records if "StreamReaderProtocol" not in record.getMessage()]
    told = [record.getMessage() for record in records if record.levelno >= logging.WARNING]
    waits, cut, ended = told
    assert waits.startswith("the gateway waits for requests in flight (")
    assert cut.startswith(f"the gateway ends after drain_timeout_s = 1; requests cut: {4 * pipelined} (")
    assert ended.startswith("the gateway has ended, after ")
    assert not [record for record in records if record.exc_info]


def test_the_docs_need_no_other_host() -> None:
    async def main() -> None:
        async with gateway(Settings(port=0)) as address:
            pool = Pool(address)
            page = (await pool.request(b"GET", b"/docs")).body.decode()
            assert not re.findall(r"(?:https?:)?//[a-z]", page)
            links = re.findall(r'(?:src|href)="([^"]+)"', page)
            assert len(links) == 5
            assert "/openapi.json" in links
            for link in links:
                response = await pool.request(b"GET", link.encode())
                assert response.status == 200
                assert response.body
            assert b"/predict/{model}" in (await pool.request(b"GET", b"/openapi.json")).body
            await pool.close()

    uvloop.run(main())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stand_alone_it_ends_on_a_signal(number: signal.Signals, tmp_path: Path) -> None:
    script = tmp_path / "gateway.py"
    script.write_text(
        "from serve.gateway.server import run_gateway\n"
        "from serve.gateway.settings import Settings\n"
        "run_gateway(Settings(port=0), on_ready=lambda url: print(url, flush=True))\n"
        "print('ended')\n"
    )
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("http://127.0.0.1:")
        process.send_signal(number)
        assert process.stdout.readline() == "ended\n"
        assert process.wait(20) == 0


def test_it_imports_no_heavy_package() -> None:
    code = (
        "import sys, serve.gateway.server, serve.load.run, serve.http.ask\n"
        "print(sorted({'torch', 'onnx', 'onnxruntime'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
