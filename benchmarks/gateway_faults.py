"""What clients see while something goes wrong, and whether the others are unharmed.

    python benchmarks/gateway_faults.py [--seconds 4] [--soak 0] [--only WORDS]

Two Tritons with a tiny network behind one gateway in a process of its own. Sixteen bystanders ask in closed loops,
first in peace, then while the fault happens; their outcomes and p99 of both are shown, the longest answer, and the
gateway's memory. `--soak 600` then goes on for so many seconds, and prints the memory each minute. The last line of
stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import uvloop
from gateway_heavy_requests import heavy_requests
from gateway_isolation import isolation
from gateway_overhead import save_network
from gateway_slow_models import slow_models

from serve.http.client import Address, ExchangeError, Pool
from serve.pack.write import pack
from serve.triton.launch import Ports, TritonServer

INFER = b"/v2/models/mlp/infer"
HEADER = json.dumps(
    {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 64], "parameters": {"binary_data_size": 256}}]}
).encode()
BODY = HEADER + bytes(256)
HEADERS = [(b"inference-header-content-length", b"%d" % len(HEADER))]
BYSTANDERS = 16
MIB = 1 << 20
Fault = Callable[[Address], Coroutine[None, None, str]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each half: in peace, and under the fault")
    parser.add_argument("--soak", type=float, default=0.0, help="seconds of load afterwards")
    parser.add_argument("--only", default="", help="faults whose label holds these words")
    arguments = parser.parse_args()
    figures: dict[str, object] = {"cores": os.cpu_count() or 0}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pack(save_network(folder / "artifact"), repository=folder / "repository", name="mlp")
        label = "one of two fails each request at once"
        if arguments.only in label:
            figures[label] = with_servers(folder, lambda _: nothing, arguments.seconds, first=failing(folder))
            show(label, figures[label])
        for label, fault in CLIENTS.items():
            if arguments.only not in label:
                continue
            figures[label] = with_servers(folder, lambda _: fault, arguments.seconds)  # noqa: B023  called at once
            show(label, figures[label])
        for label, number in (("one of two Tritons is killed", signal.SIGKILL), ("one stops", signal.SIGTERM),
                              ("one freezes", signal.SIGSTOP)):  # fmt: skip
            if arguments.only not in label:
                continue
            figures[label] = with_servers(folder, lambda triton: strike(triton, number), 2 * arguments.seconds)  # noqa: B023
            show(label, figures[label])
        label = "one key: slow requests to five models"
        if arguments.only in label:
            figures[label] = slow_models(folder, arguments.seconds)
            show(label, figures[label])
        label = "one key: heavy requests to a model of others"
        if arguments.only in label:
            figures[label] = heavy_requests(folder, arguments.seconds)
            show(label, figures[label])
        figures |= isolation(64, 64, 256)  # by `serve up`, with clients and a Triton of its own
        if arguments.soak:
            figures["soak"] = with_servers(folder, lambda _: nothing, arguments.soak / 2, each_minute=True)
            show("soak", figures["soak"])
    print(json.dumps(figures))


def show(label: str, figures: object) -> None:
    print(f"{label}: {figures}", flush=True)


def failing(folder: Path) -> Path:
    """A repository whose model of the same name raises at each request."""
    repository = folder / "failing"
    model = repository / "mlp"
    shutil.copytree(folder / "repository" / "mlp", model)
    config = model / "config.pbtxt"
    text = re.sub(r"(?s)model_warmup \{.*?\n\}\n", "", config.read_text())  # it would fail, too
    config.write_text(text.replace('"onnxruntime"', '"python"'))
    for path in (model / "1").iterdir():
        path.unlink()
    (model / "1" / "model.py").write_text(
        "class TritonPythonModel:\n    def execute(self, requests):\n        raise MemoryError('all is in use')\n"
    )
    return repository


def with_servers(
    folder: Path,
    fault_for: Callable[[TritonServer], Fault],
    seconds: float,
    *,
    each_minute: bool = False,
    first: Path | None = None,
) -> dict[str, object]:
    """The figures of one fault, with servers of its own; `first` is the repository of the first of them."""
    ports = Ports(0, 0, 0)
    with (
        TritonServer(first or folder / "repository", ports=ports) as one,
        TritonServer(folder / "repository", ports=ports) as two,
    ):
        command = [str(Path(sys.executable).with_name("serve")), "gateway", "--port", "0", "--head-timeout-s", "2"]
        command += ["--body-timeout-s", "2", "--max-body-bytes", str(MIB), "--max-address-share", "1"]
        for server in (one, two):
            command += ["--upstream", f"http://{server.http_address}"]
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
            try:
                line = process.stdout.readline() if process.stdout else ""
                if not line.startswith("gateway"):
                    raise SystemExit("the gateway did not start")
                address = Address.parse(line.split()[1])
                gateway = psutil.Process(process.pid)
                return uvloop.run(measure(address, fault_for(one), gateway, seconds, each_minute=each_minute))
            finally:
                process.terminate()
                with contextlib.suppress(ProcessLookupError):
                    if one.pid is not None:
                        os.kill(one.pid, signal.SIGCONT)


async def measure(
    address: Address, fault: Fault, gateway: psutil.Process, seconds: float, *, each_minute: bool
) -> dict[str, object]:
    await bystand(address, 1.0)
    before = gateway.memory_info().rss
    _, peace = await bystand(address, seconds)
    happening = asyncio.create_task(fault(address))
    memory = asyncio.create_task(watch(gateway, 60.0 if each_minute else 0.2))
    outcomes, latencies = await bystand(address, seconds)
    told = await happening
    memory.cancel()
    found = await memory
    figures: dict[str, object] = {
        "bystanders": dict(outcomes),
        "p99_ms": [round(float(np.percentile(each, 99)) * 1000, 1) for each in (peace, latencies)],
        "longest_ms": round(max(latencies) * 1000),
        "per_s": [round(len(each) / seconds) for each in (peace, latencies)],
        "memory_mib": [round(before / MIB), round(max(found) / MIB), round(gateway.memory_info().rss / MIB)],
    }
    if told:
        figures["offenders"] = told
    if each_minute:
        figures["memory_each_minute_mib"] = [round(each / MIB, 1) for each in found]
    return figures


async def watch(gateway: psutil.Process, every_s: float) -> list[int]:
    found = [gateway.memory_info().rss]
    with contextlib.suppress(asyncio.CancelledError):
        while True:
            await asyncio.sleep(every_s)
            found.append(gateway.memory_info().rss)
    return found


async def bystand(address: Address, seconds: float) -> tuple[Counter[str], list[float]]:
    """Well-behaved clients; what became of their requests, and the latencies of those answered."""
    outcomes: Counter[str] = Counter()
    latencies: list[float] = []
    end = time.perf_counter() + seconds

    async def client() -> None:
        pool = Pool(address, timeout_s=30)
        while (begun := time.perf_counter()) < end:
            try:
                outcomes[str((await pool.request(b"POST", INFER, HEADERS, BODY)).status)] += 1
                latencies.append(time.perf_counter() - begun)
            except ExchangeError as err:
                outcomes[err.kind] += 1
        await pool.close()

    await asyncio.gather(*(client() for _ in range(BYSTANDERS)))
    return outcomes, latencies


def strike(triton: TritonServer, number: int) -> Fault:
    async def fault(_: Address) -> str:
        await asyncio.sleep(0.5)
        if triton.pid is not None:
            os.kill(triton.pid, number)
        return ""

    return fault


async def nothing(_: Address) -> str:
    return ""


async def open_raw(address: Address, first: bytes) -> AsyncIterator[bytes]:
    """Send, then what comes back until the connection ends."""
    reader, writer = await asyncio.open_connection(address.host, address.port)
    try:
        writer.write(first)
        while part := await reader.read(65536):
            yield part
    except ConnectionError:
        return
    finally:
        writer.close()


async def answers(address: Address, texts: list[bytes], patience_s: float = 10) -> str:
    """The status lines that raw requests get, counted."""
    counted: Counter[str] = Counter()

    async def one(text: bytes) -> None:
        came = b""
        with contextlib.suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(patience_s):
                async for part in open_raw(address, text):
                    came += part
                    if b"\r\n" in came:
                        break
        counted[came.split(b"\r\n")[0][9:12].decode() or "closed"] += 1

    await asyncio.gather(*(one(text) for text in texts))
    return str(dict(counted))


def head(*lines: bytes) -> bytes:
    return b"\r\n".join((b"POST /v2/models/mlp/infer HTTP/1.1", b"host: a", *lines, b"", b""))


async def idle(address: Address) -> str:
    """Ten thousand connections that were used once and do nothing since."""
    opened = []
    for _ in range(100):
        opened += await asyncio.gather(*(asyncio.open_connection(address.host, address.port) for _ in range(100)))
        for _, writer in opened[-100:]:
            writer.write(b"GET /healthz HTTP/1.1\r\nhost: a\r\n\r\n")
        for reader, _ in opened[-100:]:
            await reader.readuntil(b"}")
    count = len(opened)
    await asyncio.sleep(1.0)
    for _, writer in opened:
        writer.close()
    return f"{count} connections"


async def drip(address: Address) -> str:
    """A byte of a head each tenth of a second, two hundred times over."""

    async def one() -> str:
        reader, writer = await asyncio.open_connection(address.host, address.port)
        try:
            for byte in head(b"content-length: 9"):
                writer.write(bytes([byte]))
                if reader.at_eof() or writer.is_closing():
                    break
                await asyncio.sleep(0.1)
            return (await reader.read(100))[9:12].decode()
        except ConnectionError:
            return "closed"
        finally:
            writer.close()

    return str(dict(Counter(await asyncio.gather(*(one() for _ in range(200))))))


async def leave(address: Address) -> str:
    """Two thousand clients that hang up before their answer."""
    for _ in range(100):
        pairs = await asyncio.gather(*(asyncio.open_connection(address.host, address.port) for _ in range(20)))
        for _, writer in pairs:
            length = b"inference-header-content-length: %d" % len(HEADER)
            writer.write(head(b"content-length: %d" % len(BODY), length) + BODY)
        for _, writer in pairs:
            writer.close()
        await asyncio.sleep(0.01)
    return "2000 hung up"


async def huge(address: Address) -> str:
    """Bodies of 10 GB: said, and sent in chunks without a length."""
    said = [head(b"content-length: 10000000000") + bytes(100_000)] * 50
    chunk = b"100000\r\n" + bytes(MIB) + b"\r\n"
    return await answers(address, [*said, *[head(b"transfer-encoding: chunked") + chunk * 3] * 20])


async def rubbish(address: Address) -> str:
    """Requests that are none, or contradict themselves."""
    kinds = [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"rubbish\r\n\r\n",
        head(b"content-length: 5", b"content-length: 6") + b"12345",
        head(b"content-length: 5", b"transfer-encoding: chunked") + b"0\r\n\r\n",
        head(b"content-length: 2", b"inference-header-content-length: 900") + b"{}",
        head(b"content-length: 2", b"inference-header-content-length: x") + b"{}",
        head(b"content-length: 9") + b"{broken}}",
    ]
    return await answers(address, kinds * 50)


async def misfits(address: Address) -> str:
    """What does not fit the model: shapes of terabytes, or that overflow; nested lists; sizes and lengths that lie."""

    def infer(header: bytes, data: bytes = b"") -> bytes:
        body = header + data
        lengths = b"content-length: %d" % len(body), b"inference-header-content-length: %d" % len(header)
        return head(*lengths) + body

    def shaped(shape: list[int], datatype: str = "FP32", **parameters: int) -> bytes:
        tensor = {"name": "x", "datatype": datatype, "shape": shape, "parameters": {"binary_data_size": 256}}
        return json.dumps({"inputs": [tensor], "parameters": parameters}).encode()

    kinds = [
        infer(shaped([1099511627776, 64]), bytes(256)),
        infer(shaped([4294967296, 4294967296]), bytes(256)),
        infer(shaped([1] * 40_000), bytes(256)),
        infer(shaped([1, 64], "BYTES"), b"\xff\xff\xff\xff" + bytes(252)),
        infer(shaped([1, 64]), bytes(252)),
        infer(b'{"inputs": ' + b"[" * 50_000 + b"]" * 50_000 + b"}"),
    ]
    return await answers(address, kinds * 50)


async def breaks(address: Address) -> str:
    """Two hundred clients that send nothing but line breaks."""
    return await answers(address, [b"\r\n", b"\n", b"\r\n\r\n", b"\n" * 1000] * 50, 60)


async def hurry(address: Address) -> str:
    """Five thousand requests with a deadline of a millisecond."""
    counted: Counter[str] = Counter()

    async def one() -> None:
        pool = Pool(address, timeout_s=10)
        for _ in range(250):
            with contextlib.suppress(ExchangeError):
                answer = await pool.request(b"POST", INFER, [*HEADERS, (b"x-request-timeout-ms", b"1")], BODY)
                counted[str(answer.status)] += 1
        await pool.close()

    await asyncio.gather(*(one() for _ in range(20)))
    return str(dict(counted))


async def readiness(address: Address) -> str:
    """Fifteen hundred clients that ask whether it is ready and hang up, and one that waits for the answer."""
    counted: Counter[str] = Counter()
    pool = Pool(address, timeout_s=10)
    for _ in range(15):
        pairs = await asyncio.gather(*(asyncio.open_connection(address.host, address.port) for _ in range(100)))
        for _, writer in pairs:
            writer.write(b"GET /readyz HTTP/1.1\r\nhost: a\r\n\r\n")
            writer.close()
        counted[str((await pool.request(b"GET", b"/readyz")).status)] += 1
    await pool.close()
    return str(dict(counted))


async def connect(address: Address, how: str) -> str:
    """Another process opens up to six thousand connections a second for four seconds, and does with each as it says."""
    command = (sys.executable, "-c", CONNECTS, address.host, str(address.port), how)
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    told, _ = await process.communicate()
    return told.decode().strip()


CONNECTS = """
import socket, struct, sys, time
host, port, how = sys.argv[1], int(sys.argv[2]), sys.argv[3]
begun, made, held = time.monotonic(), 0, []
while (now := time.monotonic()) < begun + 4:
    if made > 6000 * (now - begun):
        time.sleep(0.001)
        continue
    made += 1
    client = socket.socket()
    client.settimeout(0.05)
    try:
        client.connect((host, port))
    except OSError:
        continue
    if how == "reset":
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
        continue
    held.append(client)
    if len(held) > 400:
        held.pop(0).close()
print(f"{made} connections")
"""


CLIENTS: dict[str, Fault] = {
    "6,000 connections a second, reset at once": partial(connect, how="reset"),
    "6,000 connections a second, 400 of them open": partial(connect, how="hold"),
    "5,000 requests with a deadline of 1 ms": hurry,
    "1,500 clients ask for readiness and hang up": readiness,
    "10,000 idle connections": idle,
    "200 clients drip their heads": drip,
    "2,000 clients hang up": leave,
    "bodies of 10 GB": huge,
    "rubbish": rubbish,
    "what does not fit the model": misfits,
    "200 clients send line breaks only": breaks,
}


if __name__ == "__main__":
    main()
