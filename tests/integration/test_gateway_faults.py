"""Model servers and gateways that die, freeze or stop under load, and what the clients see of it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import uvloop

from serve.gateway.settings import Settings
from serve.http.client import Address, ExchangeError, Pool
from serve.pack.write import pack
from serve.triton.launch import TritonServer
from tests.integration.test_triton import FREE
from tests.serve_http import gateway
from tests.serve_models import tiny_artifact

INFER = b"/v2/models/tiny/infer"
BODY = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]}).encode()
CLIENTS = 16


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[TritonServer, TritonServer]]:
    """Two Tritons with the same model."""
    pack(tiny_artifact(tmp_path / "tiny"), repository=tmp_path / "models", name="tiny")
    with TritonServer(tmp_path / "models", ports=FREE) as one, TritonServer(tmp_path / "models", ports=FREE) as other:
        yield one, other


async def load(address: Address, seconds: float, happen: Callable[[], Awaitable[None]]) -> Counter[str]:
    """Closed-loop clients; `happen` is called after a quarter of the time. The outcomes, by status or error."""
    outcomes: Counter[str] = Counter()
    end = asyncio.get_running_loop().time() + seconds

    async def client() -> None:
        pool = Pool(address, timeout_s=20)
        while asyncio.get_running_loop().time() < end:
            try:
                response = await pool.request(b"POST", INFER, (), BODY)
                outcomes[str(response.status) if response.status in (200, 503) else str(response)] += 1
            except ExchangeError as err:
                outcomes[f"{err.kind}: {err}"] += 1
        await pool.close()

    async def later() -> None:
        await asyncio.sleep(seconds / 4)
        await happen()

    await asyncio.gather(later(), *(client() for _ in range(CLIENTS)))
    return outcomes


def against(servers: tuple[TritonServer, ...], seconds: float, happen: Callable[[], object]) -> Counter[str]:
    async def main() -> Counter[str]:
        settings = Settings(upstream=tuple(f"http://{server.http_address}" for server in servers), port=0)

        async def soon() -> None:
            await asyncio.to_thread(happen)

        async with gateway(settings) as address:
            return await load(address, seconds, soon)

    return uvloop.run(main())


def pid_of(server: TritonServer) -> int:
    assert server.pid is not None
    return server.pid


def test_a_triton_that_is_killed_loses_no_request_and_the_last_one_is_told_at_once(
    two: tuple[TritonServer, TritonServer],
) -> None:
    outcomes = against(two, 3.0, lambda: os.kill(pid_of(two[0]), signal.SIGKILL))
    assert set(outcomes) == {"200"}, outcomes
    outcomes = against(two[1:], 1.5, lambda: os.kill(pid_of(two[1]), signal.SIGKILL))
    assert outcomes["200"] > 0
    assert outcomes["503"] > 0
    others = {outcome for outcome in outcomes if "status=502" not in outcome}
    assert others == {"200", "503"}, outcomes


def test_requests_that_say_the_same_are_not_lost_with_a_triton_that_had_several_of_them(
    two: tuple[TritonServer, TritonServer],
) -> None:
    async def main() -> list[int]:
        settings = Settings(upstream=tuple(f"http://{server.http_address}" for server in two), port=0)
        async with gateway(settings) as address:
            pool = Pool(address, timeout_s=60)
            for _ in range(4):
                await asyncio.gather(*(pool.request(b"POST", INFER, (), BODY) for _ in range(CLIENTS)))
            os.kill(pid_of(two[0]), signal.SIGSTOP)  # so that it has some when it dies
            asking = [asyncio.ensure_future(pool.request(b"POST", INFER, (), BODY)) for _ in range(CLIENTS)]
            while sum(each.done() for each in asking) < CLIENTS // 2:  # noqa: ASYNC110  # nobody tells
                await asyncio.sleep(0.01)
            os.kill(pid_of(two[0]), signal.SIGKILL)
            statuses = [(await each).status for each in asking]
            await pool.close()
            return statuses

    assert uvloop.run(main()) == [200] * CLIENTS


def test_no_request_is_lost_when_one_of_two_tritons_stops(two: tuple[TritonServer, TritonServer]) -> None:
    outcomes = against(two, 4.0, lambda: os.kill(pid_of(two[0]), signal.SIGTERM))
    assert set(outcomes) == {"200"}, outcomes


def test_no_request_is_lost_when_one_of_two_tritons_freezes(two: tuple[TritonServer, TritonServer]) -> None:
    pid = pid_of(two[0])
    try:
        outcomes = against(two, 7.0, lambda: os.kill(pid, signal.SIGSTOP))
    finally:
        os.kill(pid, signal.SIGCONT)
    assert set(outcomes) == {"200"}, outcomes


@contextmanager
def running(port: int, upstream: str, *flags: str) -> Iterator[subprocess.Popen[str]]:
    """A gateway in a process of its own, once it takes requests."""
    command = [str(Path(sys.executable).with_name("serve")), "gateway", "--port", str(port), "--upstream", upstream]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen([*command, *flags], stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("gateway"), "it did not start"
        try:
            yield process
        finally:
            process.kill()


def test_no_request_is_lost_when_a_gateway_takes_over_from_another(tmp_path: Path) -> None:
    pack(tiny_artifact(tmp_path / "tiny"), repository=tmp_path / "models", name="tiny")
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    with TritonServer(tmp_path / "models", ports=FREE) as triton:
        upstream = f"http://{triton.http_address}"
        with running(port, upstream, "--reuse-port") as old, running(port, upstream, "--reuse-port"):

            async def replace() -> None:
                old.send_signal(signal.SIGTERM)
                assert await asyncio.to_thread(old.wait, 10) == 0

            outcomes = uvloop.run(load(Address("127.0.0.1", port), 3.0, replace))
    assert set(outcomes) == {"200"}, outcomes
