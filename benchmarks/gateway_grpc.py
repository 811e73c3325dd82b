"""What the gateway costs over gRPC, beside HTTP: the same request directly and through it, turn by turn in one run.

    python benchmarks/gateway_grpc.py [--rounds 5] [--seconds 1]

One gateway with both protocols, a key, its rate, and validation; a tiny network (64→256→10), one row of raw FP32, 1 and
32 requests in flight. Triton, gateway and client share this machine's cores. The clients are this project's own for
HTTP and grpc.aio for gRPC: a ratio compares one protocol with itself, CPU time is each process's own. Medians over
the rounds. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
from gateway_overhead import save_network, spent
from tritonclient.grpc import service_pb2 as messages

from serve.gateway.access.keys import add_key
from serve.load.options import LoadOptions
from serve.load.run import run_load
from serve.pack.write import pack
from serve.triton.launch import Ports, TritonServer

GATEWAY = """
import sys
from pathlib import Path
from serve.gateway.server import run_gateway
from serve.gateway.settings import Settings
settings = Settings(
    upstream=(sys.argv[1],), grpc_upstream=(sys.argv[2],), keys=Path(sys.argv[3]), port=0, grpc_port=int(sys.argv[4])
)
run_gateway(settings, on_ready=lambda url: print(url, flush=True))
"""
CALL = "/inference.GRPCInferenceService/ModelInfer"
IN_FLIGHT = (1, 32)


@dataclass
class Measured:
    """One run: answers a second, the median latency, and CPU time for an answer by process."""

    rate: float
    p50_ms: float
    cpu_us: dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="measured time of each of a round's eight runs")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        secret, _ = add_key(folder / "keys.json", "load", rate=1e6, burst=10**6)
        pack(save_network(folder / "mlp"), repository=folder / "repository", name="mlp")
        with (
            TritonServer(folder / "repository", ports=Ports(0, 0, 0)) as triton,
            gateway(triton, folder / "keys.json") as (url, address, process),
        ):
            ways = {
                "direct gRPC": triton.grpc_address,
                "gateway gRPC": address,
                "direct HTTP": f"http://{triton.http_address}",
                "gateway HTTP": url,
            }
            server = psutil.Process(triton.pid)
            processes = {"triton": [server, *server.children(recursive=True)], "gateway": [process]}
            runs: dict[tuple[str, int], list[Measured]] = defaultdict(list)
            for number in range(arguments.rounds):
                for in_flight in IN_FLIGHT:
                    for way in list(ways) if number % 2 == 0 else reversed(ways):
                        run = measure(ways[way], in_flight, arguments.seconds, secret, processes)
                        runs[way, in_flight].append(run)
    print(json.dumps(told(runs)))


@contextmanager
def gateway(triton: TritonServer, keys: Path) -> Iterator[tuple[str, str, psutil.Process]]:
    """URL, gRPC address and process of a gateway."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    command = [
        sys.executable, "-c", GATEWAY, f"http://{triton.http_address}", triton.grpc_address, str(keys), str(port),
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            if process.stdout is None or not (url := process.stdout.readline().strip()):
                raise SystemExit("the gateway did not start")
            yield url, f"127.0.0.1:{port}", psutil.Process(process.pid)
        finally:
            process.terminate()


def measure(
    address: str, in_flight: int, seconds: float, key: str, processes: dict[str, list[psutil.Process]]
) -> Measured:
    """One closed loop, all of whose answers are counted, and the CPU time that they took."""
    before = {name: sum(spent(group)) for name, group in processes.items()}
    if address.startswith("http"):
        load = LoadOptions("mlp", address, concurrency=in_flight, duration=seconds, warmup=0.0, key=key)
        result = run_load(load)
        if result.errors:
            raise SystemExit(f"errors make the figures worthless: {dict(result.errors)}")
        answers = result.latency.count
        rate, p50_ms = result.throughput, result.p50_ms or float("nan")
    else:
        latencies, took = asyncio.run(load_grpc(address, in_flight, seconds, key))
        answers, rate = len(latencies), len(latencies) / took
        p50_ms = 1000 * statistics.median(latencies)
    spent_s = {name: sum(spent(group)) - before[name] for name, group in processes.items()}
    return Measured(rate, p50_ms, {name: 1e6 * value / answers for name, value in spent_s.items()})


async def load_grpc(address: str, in_flight: int, seconds: float, key: str) -> tuple[list[float], float]:
    """A closed loop; latencies in seconds, and how long it took."""
    request = messages.ModelInferRequest(
        model_name="mlp", inputs=[{"name": "x", "datatype": "FP32", "shape": (1, 64)}],
        raw_input_contents=[np.zeros(64, np.float32).tobytes()],
    )  # fmt: skip
    body, metadata = request.SerializeToString(), (("x-api-key", key),)
    latencies: list[float] = []
    async with grpc.aio.insecure_channel(address) as channel:
        call: Any = channel.unary_unary(CALL)
        await call(body, metadata=metadata)
        begun = time.perf_counter()

        async def ask() -> None:
            while (started := time.perf_counter()) < begun + seconds:
                await call(body, metadata=metadata)
                latencies.append(time.perf_counter() - started)

        await asyncio.gather(*(ask() for _ in range(in_flight)))
        return latencies, time.perf_counter() - begun


def told(runs: dict[tuple[str, int], list[Measured]]) -> dict[str, object]:
    """Print a table; its figures."""
    figures: dict[str, object] = {}
    print(f"{'':24}{'answers/s':>11}{'p50 ms':>9}{'ratio':>8}{'gateway CPU us':>16}{'Triton CPU us':>15}")
    for (way, in_flight), measured in sorted(runs.items(), key=lambda item: (item[0][1], item[0][0][-4:])):
        direct = runs[f"direct {way[-4:]}", in_flight]
        shares = [each.rate / other.rate for each, other in zip(measured, direct, strict=True)]
        row = {
            "rate": statistics.median(each.rate for each in measured),
            "p50_ms": statistics.median(each.p50_ms for each in measured),
            "ratio": statistics.median(shares),
            "gateway_us": statistics.median(each.cpu_us["gateway"] for each in measured),
            "triton_us": statistics.median(each.cpu_us["triton"] for each in measured),
        }
        print(
            f"{way + f', {in_flight} in flight':24}{row['rate']:11,.0f}{row['p50_ms']:9.2f}{row['ratio']:8.2f}"
            f"{row['gateway_us']:16.0f}{row['triton_us']:15.0f}"
        )
        figures[f"{way}, {in_flight}"] = {name: round(value, 3) for name, value in row.items()}
    return figures


if __name__ == "__main__":
    main()
