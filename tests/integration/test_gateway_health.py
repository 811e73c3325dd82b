"""Several real Tritons, one of which fails: who is asked, over HTTP and gRPC, and how it comes back."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
import uvloop
from tritonclient.grpc import service_pb2 as messages

from serve.gateway.access.keys import add_key
from serve.gateway.settings import Settings
from serve.http.client import Address, Pool
from serve.triton.launch import TritonServer
from tests.integration.test_gateway_grpc import free_port
from tests.integration.test_triton import FREE
from tests.serve_http import gateway
from tests.unit.serve.gateway.test_upstream import metric

CONFIG = """\
name: "m"
backend: "python"
max_batch_size: 8
input [ { name: "x" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 1 ] } ]
instance_group [ { kind: KIND_CPU count: 2 } ]
"""
MODEL = """\
import os
import time
import triton_python_backend_utils as utils

class TritonPythonModel:
    def execute(self, requests):
        if os.path.exists({flag!r}):
            raise ValueError("out of memory")
        time.sleep(0.005)
        x = [utils.get_input_tensor_by_name(each, "x").as_numpy() for each in requests]
        if min(each.min() for each in x) < 0:
            raise ValueError("a negative number")
        return [utils.InferenceResponse([utils.Tensor("y", each)]) for each in x]
"""


def body_of(x: float) -> bytes:
    return json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [x]}]}).encode()


BODY = body_of(1)
CLIENTS = 16


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[TritonServer]]]:
    """Three Tritons with one model, which fails while the file `failsN` is there; their folder, and the Tritons."""
    folder = tmp_path_factory.mktemp("fleet")
    with ExitStack() as stack:
        servers = []
        for number in range(3):
            version = folder / str(number) / "m" / "1"
            version.mkdir(parents=True)
            (version.parent / "config.pbtxt").write_text(CONFIG)
            (version / "model.py").write_text(MODEL.format(flag=str(folder / f"fails{number}")))
            servers.append(stack.enter_context(TritonServer(folder / str(number), ports=FREE)))
        yield folder, servers


async def http_load(address: Address, requests: int) -> Counter[str]:
    seen: Counter[str] = Counter()

    async def client() -> None:
        pool = Pool(address, timeout_s=30)
        for _ in range(requests // CLIENTS):
            seen[str((await pool.request(b"POST", b"/v2/models/m/infer", (), BODY)).status)] += 1
        await pool.close()

    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return seen


async def grpc_load(target: str, requests: int) -> Counter[str]:
    seen: Counter[str] = Counter()
    message = messages.ModelInferRequest(model_name="m")
    message.inputs.add(name="x", datatype="FP32", shape=[1, 1]).contents.fp32_contents.append(1.0)
    body = message.SerializeToString()
    async with grpc.aio.insecure_channel(target) as channel:
        ask = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")

        async def client() -> None:
            for _ in range(requests // CLIENTS):
                try:
                    await ask(body, timeout=30)
                    seen["200"] += 1
                except grpc.aio.AioRpcError as err:
                    seen[err.code().name] += 1

        await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return seen


@pytest.mark.parametrize("tritons", [2, 3])
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_triton_that_fails_at_once_gets_next_to_nothing_and_comes_back_when_it_is_well(
    fleet: tuple[Path, list[TritonServer]], tritons: int, protocol: str
) -> None:
    flag, servers = fleet[0] / "fails0", fleet[1][:tritons]
    port = free_port()
    settings: dict[str, Any] = {
        "upstream": tuple(f"http://{server.http_address}" for server in servers),
        "grpc_upstream": tuple(server.grpc_address for server in servers),
    }

    async def main() -> None:
        async with gateway(Settings(**settings, port=0, grpc_port=port), validate=True) as address:

            async def load(requests: int) -> Counter[str]:
                if protocol == "http":
                    return await http_load(address, requests)
                return await grpc_load(f"127.0.0.1:{port}", requests)

            flag.touch()
            seen = await load(800)
            failed = 800 - seen["200"]
            assert failed < 4 * CLIENTS, seen
            assert await metric(address, "gateway_upstream_ejected", model="m") == 1
            flag.unlink()
            deadline = asyncio.get_running_loop().time() + 60
            while await metric(address, "gateway_upstream_ejected", model="m"):
                assert asyncio.get_running_loop().time() < deadline, "it did not come back"
                await load(CLIENTS)
            assert set(await load(400)) == {"200"}

    try:
        uvloop.run(main())
    finally:
        flag.unlink(missing_ok=True)


def message_of(x: float) -> bytes:
    message = messages.ModelInferRequest(model_name="m")
    message.inputs.add(name="x", datatype="FP32", shape=[1, 1]).contents.fp32_contents.append(x)
    body: bytes = message.SerializeToString()
    return body


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_whoever_makes_a_model_fail_takes_its_servers_from_nobody_else(
    fleet: tuple[Path, list[TritonServer]], tmp_path: Path, protocol: str
) -> None:
    """Of two Tritons one is left alone, and the other breaks: nobody else may be left with nothing but its 500s."""
    folder, servers = fleet[0], fleet[1][:2]
    port = free_port()
    addresses = [Address.parse(f"http://{server.http_address}") for server in servers]
    keys = tmp_path / "keys.json"
    good, hostile, admin = (add_key(keys, name, admin=name == "admin")[0] for name in ("good", "hostile", "admin"))
    settings: dict[str, Any] = {
        "upstream": tuple(f"http://{server.http_address}" for server in servers),
        "grpc_upstream": tuple(server.grpc_address for server in servers),
        "keys": keys,
    }

    async def main() -> None:
        async with gateway(Settings(**settings, port=0, grpc_port=port), validate=True) as address:
            pool = Pool(address, timeout_s=30)
            channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
            ask = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
            over = asyncio.Event()

            async def answered(key: str, x: float) -> bool:
                if protocol == "http":
                    asked = pool.request(b"POST", b"/v2/models/m/infer", [(b"x-api-key", key.encode())], body_of(x))
                    return (await asked).status == 200
                try:
                    await ask(message_of(x), metadata=(("x-api-key", key),), timeout=30)
                except grpc.aio.AioRpcError:
                    return False
                return True

            async def failing() -> None:
                while not over.is_set():
                    assert not await answered(hostile, -1)
                    await asyncio.sleep(0.005)  # or it would keep the machine busy

            attack = [asyncio.create_task(failing()) for _ in range(4)]
            await asyncio.sleep(2.0)
            out = [await metric(address, "gateway_upstream_ejected", admin, upstream=str(at)) for at in addresses]
            assert sum(out) == 1, out
            (folder / f"fails{out.index(0.0)}").touch()
            seen: Counter[bool] = Counter()
            for _ in range(60):
                seen[await answered(good, 1)] += 1
                await asyncio.sleep(0.1)
            over.set()
            await asyncio.gather(*attack)
            await pool.close()
            await channel.close()
            assert seen[False] <= 5, seen  # of the broken one, before it is known to be, and trials of it

    try:
        uvloop.run(main())
    finally:
        for flag in folder.glob("fails?"):
            flag.unlink()


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_of_two_tritons_one_falls_silent_and_whoever_comes_then_is_answered_by_the_other(
    fleet: tuple[Path, list[TritonServer]], tmp_path: Path, protocol: str
) -> None:
    """One key keeps both busy. What the silent one has waits until it is known to be so; nothing else does."""
    servers, port, keys = fleet[1][:2], free_port(), tmp_path / "keys.json"
    busy, *others = (add_key(keys, name)[0] for name in ("busy", "one", "two", "three"))
    settings: dict[str, Any] = {
        "upstream": tuple(f"http://{server.http_address}" for server in servers),
        "grpc_upstream": tuple(server.grpc_address for server in servers),
        "keys": keys,
    }
    seen: list[tuple[float, float, str]] = []  # of the others: since when, for how long, and the answer

    async def main() -> None:
        async with gateway(Settings(**settings, port=0, grpc_port=port), validate=True) as address:
            pools = [Pool(address, timeout_s=30, max_connections=500) for _ in range(2)]
            channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
            ask = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
            over = asyncio.Event()

            async def answered(key: str) -> str:
                if protocol == "http":
                    pool = pools[key == busy]
                    answer = await pool.request(
                        b"POST", b"/v2/models/m/infer", [(b"x-api-key", key.encode())], body_of(1)
                    )
                    return str(answer.status) if answer.status == 200 else f"{answer.status} {answer.body[:200]!r}"
                try:
                    await ask(message_of(1), metadata=(("x-api-key", key),), timeout=30)
                except grpc.aio.AioRpcError as err:
                    return f"{err.code().name} {err.details()}"
                return "200"

            async def keeps_busy() -> None:
                while not over.is_set():
                    if await answered(busy) != "200":
                        await asyncio.sleep(0.05)

            async def one(key: str) -> None:
                begun = time.monotonic()
                status = await answered(key)
                seen.append((begun - stopped, time.monotonic() - begun, status))

            stopped = math.inf
            load = [asyncio.create_task(keeps_busy()) for _ in range(32)]
            asking = []
            for number in range(100):
                if number == 20:
                    os.kill(servers[0].pid or 0, signal.SIGSTOP)
                    stopped = time.monotonic()
                asking += [asyncio.create_task(one(key)) for key in others]
                await asyncio.sleep(0.1)
            await asyncio.gather(*asking)
            over.set()
            await asyncio.gather(*load)
            for pool in pools:
                await pool.close()
            await channel.close()

    try:
        uvloop.run(main())
    finally:
        os.kill(servers[0].pid or 0, signal.SIGCONT)
    assert not [each for each in seen if each[2] != "200"]
    assert max(took for begun, took, _ in seen if begun > 2.0) < 1.5
