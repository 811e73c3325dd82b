"""Tritons that the gateway did not start: who ends them is found, and nobody else pays for it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import socket
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import uvloop
from tritonclient.grpc import service_pb2 as messages
from tritonclient.grpc import service_pb2_grpc

from compress.errors import ServerError
from serve.gateway.access.keys import add_key
from serve.gateway.settings import Settings
from serve.http.client import Address, ExchangeError, Pool
from serve.triton.launch import TritonOptions, TritonServer
from tests.gateway_models import FILES_MODEL, write_files_model
from tests.integration.test_triton import FREE
from tests.serve_http import gateway

pytestmark = pytest.mark.integration
INFER = b"/v2/models/files/infer"
LIMIT_S = 240.0
GOOD = ["good0", "good1", "good2"]
ENOUGH = 100
# Parent of its process is Triton itself.
MODEL = FILES_MODEL.replace(
    "        if files[0, 0].startswith(b\"fail\"):",
    "        if files[0, 0].startswith(b\"die\"):\n            os.kill(os.getppid(), signal.SIGKILL)\n"
    "        if files[0, 0].startswith(b\"fail\"):",
).replace("import time\n", "import os\nimport signal\nimport time\n").replace(
    "time.sleep(2)", "time.sleep(0.1)"
)  # fmt: skip


def asked(content: str) -> bytes:
    return json.dumps({"inputs": [{"name": "file", "datatype": "BYTES", "shape": [1, 1], "data": [content]}]}).encode()


class Restarted:
    """A Triton that is started again whenever it ends, as a kubelet does.

    Attributes:
        ends: number of times that it ended.
    """

    def __init__(self, repository: Path) -> None:
        # Told to end with the gateway before it, it takes all the time that it may; no request here takes a second.
        self.server = TritonServer(repository, ports=FREE, options=TritonOptions(stop_timeout_s=3.0)).start()
        self.ends = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look_after)
        self._thread.start()

    def _look_after(self) -> None:
        while not self._stop.wait(0.05):
            if not self.server.running:
                self.ends += 1
                self._stop.wait(0.5)
                with contextlib.suppress(ServerError):  # it met its death while it started: once more
                    self.server.restart()

    def kill(self, how: signal.Signals) -> None:
        assert self.server.pid is not None
        os.kill(self.server.pid, how)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self.server.stop()


@contextmanager
def restarted(tmp_path: Path, count: int) -> Iterator[list[Restarted]]:
    write_files_model(tmp_path / "models", MODEL)
    with contextlib.ExitStack() as stack:
        servers = []
        for _ in range(count):
            servers.append(Restarted(tmp_path / "models"))
            stack.callback(servers[-1].close)
        yield servers


class Clients:
    """Keys that ask again and again.

    Attributes:
        keys: by their names.
        told: how often each got which status, or which reason.
    """

    def __init__(self, address: Address, keys: dict[str, str]) -> None:
        self.told: dict[str, Counter[str]] = {name: Counter() for name in keys}
        self._address = address
        self.keys = keys

    async def ask(self, name: str, content: str) -> tuple[int, str]:
        """Status, and the reason of a refusal."""
        pool = Pool(self._address, timeout_s=60)
        try:
            answer = await pool.request(b"POST", INFER, [(b"x-api-key", self.keys[name].encode())], asked(content))
        finally:
            await pool.close()
        why = "" if answer.status == 200 else str(json.loads(answer.body).get("why", ""))
        self.told[name][f"{answer.status} {why}".strip()] += 1
        return answer.status, why

    @asynccontextmanager
    async def asking(self, *names: str, content: Callable[[int], str]) -> AsyncIterator[None]:
        """These ask, one request after the other, beside what else happens."""

        async def go_on(name: str) -> None:
            for number in itertools.count():
                with contextlib.suppress(ExchangeError):
                    await self.ask(name, content(number))

        tasks = [asyncio.create_task(go_on(name)) for name in names]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def answered(self, name: str, count: int) -> None:
        """Wait until a key has so many answers more."""
        before = self.told[name]["200"]
        while self.told[name]["200"] < before + count:  # noqa: ASYNC110  # nobody tells
            await asyncio.sleep(0.02)

    async def all_answered(self, count: int) -> None:
        """Wait until each of the good keys has so many answers more."""
        await asyncio.gather(*(self.answered(name, count) for name in GOOD))

    async def deaths(self) -> int:
        """Of servers, as the gateway tells them."""
        pool = Pool(self._address, timeout_s=60)
        try:
            headers = [(b"x-api-key", self.keys["admin"].encode())]
            page = (await pool.request(b"GET", b"/metrics", headers)).body.decode()
        finally:
            await pool.close()
        found = [line for line in page.splitlines() if line.startswith('gateway_model_deaths_total{model=""}')]
        return int(float(found[0].split()[-1])) if found else 0


def against(
    tmp_path: Path, servers: list[Restarted], check: Callable[[Clients], Awaitable[None]], **given: object
) -> None:
    keys = tmp_path / "keys.json"
    names = {name: add_key(keys, name)[0] for name in (*GOOD, "bad")}
    names["admin"] = add_key(keys, "admin", admin=True)[0]
    upstream = tuple(f"http://{each.server.http_address}" for each in servers)
    settings = Settings(upstream=upstream, port=0, keys=keys, **given)  # type: ignore[arg-type]

    async def main() -> None:
        async with asyncio.timeout(LIMIT_S), gateway(settings) as address:
            await check(Clients(address, names))

    uvloop.run(main())


def refusals(told: Counter[str]) -> list[str]:
    """What is said to those that are held to have ended servers."""
    return [each for each in told if "several times" in each or each.startswith("422")]


def over_grpc(content: str) -> messages.ModelInferRequest:
    tensor = messages.ModelInferRequest.InferInputTensor(name="file", datatype="BYTES", shape=[1, 1])
    said = content.encode()
    raw = len(said).to_bytes(4, "little") + said
    return messages.ModelInferRequest(model_name="files", inputs=[tensor], raw_input_contents=[raw])


@pytest.mark.parametrize("streams", [False, True], ids=["unary", "streams"])
def test_over_grpc_they_are_found_as_well(tmp_path: Path, streams: bool) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]

    async def ask(clients: Clients, stub: Any, content: str) -> str:
        """What is said to the hostile key."""
        metadata = (("x-api-key", clients.keys["bad"]),)
        try:
            if streams:
                call = stub.ModelStreamInfer(iter([over_grpc(content)]), metadata=metadata, timeout=60)
                answers = [answer async for answer in call]
                return answers[0].error_message if answers else ""
            await stub.ModelInfer(over_grpc(content), metadata=metadata, timeout=60)
        except grpc.aio.AioRpcError as err:
            return f"{err.code().name} {err.details()}"
        return ""

    async def check(clients: Clients) -> None:
        async with (
            grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
            clients.asking(*GOOD, content=lambda number: "sleep" if number % 2 else "the same each time"),
        ):
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            await clients.answered("good0", 5)
            said: list[str] = []
            while not said or not ("several times" in said[-1] or "twice" in said[-1]):
                said.append(await ask(clients, stub, "die"))
                await asyncio.sleep(0.05)
            assert sum(each.ends for each in servers) <= 14, said
            await clients.all_answered(20)
        for name in GOOD:
            assert not refusals(clients.told[name]), clients.told

    with restarted(tmp_path, 2) as servers:
        upstream = tuple(each.server.grpc_address for each in servers)
        against(tmp_path, servers, check, grpc_port=port, grpc_upstream=upstream)


@pytest.mark.parametrize("count", [2, 1])
@pytest.mark.parametrize("same", [True, False], ids=["same", "never-same"])
def test_a_key_that_ends_them_is_refused_and_the_others_are_answered(tmp_path: Path, count: int, same: bool) -> None:
    async def check(clients: Clients) -> None:
        for name in GOOD:
            assert (await clients.ask(name, "abcd"))[0] == 200
        async with clients.asking(*GOOD, content=lambda number: "sleep" if number % 2 else "the same each time"):
            refused = False
            for number in itertools.count():
                status, why = await clients.ask("bad", "die" if same else f"die {number}")
                refused = status == 422 if same else "several times" in why
                if refused:
                    break
                await asyncio.sleep(0.05)
            assert refused
            ends = sum(each.ends for each in servers)
            assert ends <= 14, clients.told
            await clients.all_answered(5)  # the last that it ended is back
            told = {name: Counter(clients.told[name]) for name in GOOD}
            await clients.all_answered(ENOUGH)
            later = {name: clients.told[name] - told[name] for name in GOOD}
        assert 1 <= await clients.deaths() <= sum(each.ends for each in servers)  # one more may have been on its way
        for name in GOOD:
            assert not refusals(clients.told[name]), clients.told
            failed = sum(later[name].values()) - later[name]["200"]
            assert failed <= later[name]["200"] // 5, later

    with restarted(tmp_path, count) as servers:
        against(tmp_path, servers, check)


def test_servers_that_end_in_order_or_by_an_operators_hand_have_nobody_refused(tmp_path: Path) -> None:
    async def check(clients: Clients) -> None:
        async with clients.asking(*GOOD, content=lambda number: "sleep" if number % 2 else "the same each time"):
            await clients.answered("good0", 5)
            for how in (signal.SIGTERM, signal.SIGKILL):
                for each in servers:
                    before = each.ends
                    each.kill(how)
                    while each.ends == before or not each.server.running:  # noqa: ASYNC110  # nobody tells
                        await asyncio.sleep(0.02)
                    await clients.answered("good0", 20)
                if how == signal.SIGTERM:
                    assert await clients.deaths() == 0, "they ended in order"
            assert await clients.deaths() <= 2
            await clients.all_answered(20)
        for name in GOOD:
            assert not refusals(clients.told[name]), clients.told

    with restarted(tmp_path, 2) as servers:
        against(tmp_path, servers, check)
