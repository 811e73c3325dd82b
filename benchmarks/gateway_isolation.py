"""What others see when a model's process dies, when one client kills it on purpose, and when clients send too much.

    python benchmarks/gateway_isolation.py [--clients 64] [--body-mib 64] [--bound-mib 256]

A real `serve up` with a tiny network, which well-behaved clients ask in closed loops, and a Python model that dies of
some requests. Its rows are part of gateway_faults.py. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import os
import re
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import uvloop
from gateway_overhead import save_network

from serve.http.client import Address, ExchangeError, Pool
from serve.pack.write import pack

MIB = 1 << 20
BYSTANDERS = 4
CONFIG = """\
name: "fragile"
backend: "python"
max_batch_size: 4
input [ { name: "file" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "bytes" data_type: TYPE_INT64 dims: [ 1 ] } ]
instance_group [ { count: 1 kind: KIND_CPU } ]
"""
MODEL = """\
import os
import signal

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(pb_utils.get_input_tensor_by_name(request, "file").as_numpy()) for request in requests]

    def answer(self, files):
        if files[0, 0].startswith(b"die"):
            os.kill(os.getpid(), signal.SIGSEGV)
        size = np.array([[len(file)] for file in files[:, 0]], dtype=np.int64)
        return pb_utils.InferenceResponse([pb_utils.Tensor("bytes", size)])
"""
GOOD = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 64], "data": [0.5] * 64}]}).encode()


def main() -> None:
    if sys.argv[1:2] == ["--flood"]:
        flooding(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=64, help="that send large bodies together")
    parser.add_argument("--body-mib", type=int, default=64, help="of each")
    parser.add_argument("--bound-mib", type=int, default=256, help="memory_bytes of the gateway")
    arguments = parser.parse_args()
    print(json.dumps(isolation(arguments.clients, arguments.body_mib, arguments.bound_mib)))


def isolation(clients: int, body_mib: int, bound_mib: int) -> dict[str, object]:
    """The rows, by what happens."""

    async def rows() -> dict[str, object]:
        figures: dict[str, object] = {}
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            pack(save_network(folder / "artifact"), repository=folder / "repository", name="mlp")
            version = folder / "repository" / "fragile" / "1"
            version.mkdir(parents=True)
            (version.parent / "config.pbtxt").write_text(CONFIG)
            (version / "model.py").write_text(MODEL)
            async with serving(folder, bound_mib * MIB, body_mib * MIB) as (process, address):
                label = f"{clients} clients send {body_mib} MiB, {bound_mib} MiB are allowed"
                for what, happen in (
                    ("a model's process is killed", lambda: killed(process, address)),
                    ("one client's request kills it, 20 times", lambda: poisoned(address, lambda _: b"die")),
                    ("one client's requests kill it, each another", lambda: poisoned(address, varied)),
                    (label, lambda: flooded(process, address, clients, body_mib * MIB - 4096)),
                ):
                    figures[what] = await beside(address, happen)
                    print(f"{what}: {figures[what]}", flush=True)
        return figures

    return uvloop.run(rows())


@asynccontextmanager
async def serving(folder: Path, bound: int, body: int) -> AsyncIterator[tuple[psutil.Process, Address]]:
    settings, log = folder / "gateway.toml", folder / "up.log"
    settings.write_text(f"memory_bytes = {bound}\nmax_body_bytes = {body}\n")
    ports = [
        word for kind in ("", "triton-http-", "triton-grpc-", "triton-metrics-") for word in (f"--{kind}port", "0")
    ]
    command = [sys.executable, "-m", "serve", "up", str(folder / "repository"), *ports, "--gateway", str(settings)]
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=os.environ | {"PYTHONUNBUFFERED": "1"})  # noqa: ASYNC220
    try:
        while (match := re.search(r"^gateway +(http://\S+)", log.read_text(), re.MULTILINE)) is None:
            if process.poll() is not None:
                raise SystemExit(log.read_text())
            await asyncio.sleep(0.1)
        yield psutil.Process(process.pid), Address.parse(match[1])
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


async def beside(address: Address, happen: Callable[[], Awaitable[dict[str, object]]]) -> dict[str, object]:
    """What happens, and what became of the requests of others meanwhile."""
    outcomes: Counter[str] = Counter()
    stop = asyncio.Event()
    longest = 0.0

    async def client() -> None:
        nonlocal longest
        pool = Pool(address, timeout_s=60)
        while not stop.is_set():
            begun = time.perf_counter()
            try:
                outcomes[str((await pool.request(b"POST", b"/v2/models/mlp/infer", (), GOOD)).status)] += 1
            except ExchangeError as err:
                outcomes[err.kind] += 1
            longest = max(longest, time.perf_counter() - begun)
        await pool.close()

    clients = [asyncio.ensure_future(client()) for _ in range(BYSTANDERS)]
    told = await happen()
    stop.set()
    await asyncio.gather(*clients)
    return told | {"bystanders": dict(outcomes), "bystanders_longest_ms": round(1000 * longest)}


def text(content: bytes) -> tuple[list[tuple[bytes, bytes]], bytes]:
    """A request of one raw text."""
    size = 4 + len(content)
    item = {"name": "file", "datatype": "BYTES", "shape": [1, 1], "parameters": {"binary_data_size": size}}
    head = json.dumps({"inputs": [item]}).encode()
    return [(b"inference-header-content-length", b"%d" % len(head))], head + struct.pack("<I", len(content)) + content


async def asked(address: Address, content: bytes) -> str:
    pool = Pool(address, timeout_s=120)
    try:
        headers, body = text(content)
        return str((await pool.request(b"POST", b"/v2/models/fragile/infer", headers, body)).status)
    except ExchangeError as err:
        return err.kind
    finally:
        await pool.close()


async def killed(process: psutil.Process, address: Address) -> dict[str, object]:
    """How long it is before it answers again, and what it answers meanwhile."""
    stubs = [each for each in process.children(recursive=True) if any("/fragile/" in word for word in each.cmdline())]
    seen: Counter[str] = Counter()
    slowest = 0.0
    stubs[0].kill()
    begun = time.perf_counter()
    while (status := await asked(address, b"abc")) != "200":
        slowest = max(slowest, time.perf_counter() - begun) if not seen else slowest
        seen[status] += 1
        await asyncio.sleep(0.01)
    return {
        "answers_until_healed": dict(seen),
        "first_refusal_ms": round(1000 * slowest),
        "healed_s": round(time.perf_counter() - begun, 2),
    }


def varied(number: int) -> bytes:
    return b"die %d" % number


async def poisoned(address: Address, content: Callable[[int], bytes]) -> dict[str, object]:
    """What a client gets that asks for the model's death again and again, each time that it answers others."""
    seen: list[str] = []
    begun = time.perf_counter()
    for number in range(20):
        seen.append(await asked(address, content(number)))
        while (status := await asked(address, b"abc")) != "200":
            if status != "503":
                raise SystemExit(f"the others are answered {status}")
            await asyncio.sleep(0.05)
        if time.perf_counter() - begun > 30:
            break
    return {"answers_to_the_client": dict(Counter(seen)), "deaths_in_30_s": seen.count("503")}


async def flooded(process: psutil.Process, address: Address, clients: int, size: int) -> dict[str, object]:
    """The outcomes, and the most memory of the gateway and its process for long JSON."""
    peak = 0

    async def watch() -> None:
        nonlocal peak
        while True:
            used = 0
            for each in (process, *process.children()):
                with contextlib.suppress(psutil.NoSuchProcess):
                    used += 0 if "tritonserver" in each.name() else each.memory_info().rss
            peak = max(peak, used)
            await asyncio.sleep(0.05)

    watching = asyncio.ensure_future(watch())
    outcomes = json.loads(await asyncio.to_thread(flood, address, clients, size))
    watching.cancel()
    return {"outcomes": outcomes, "peak_mib": round(peak / MIB)}


def flood(address: Address, clients: int, size: int) -> bytes:
    """In a process of its own: to send so much would hold up the others' clients here."""
    command = [sys.executable, __file__, "--flood", f"{address.host}:{address.port}", str(clients), str(size)]
    return subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout


def flooding(address: str, clients: int, size: int) -> None:
    headers, body = text(bytes(size))
    fields = {"Inference-Header-Content-Length": headers[0][1].decode()}
    outcomes: Counter[str] = Counter()

    def one() -> None:
        connection = http.client.HTTPConnection(address, timeout=120)
        with contextlib.closing(connection):
            try:
                connection.request("POST", "/v2/models/fragile/infer", body, fields)
                outcomes[str(connection.getresponse().status)] += 1
            except (ConnectionError, TimeoutError):
                outcomes["cut off"] += 1

    threads = [threading.Thread(target=one) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main()
