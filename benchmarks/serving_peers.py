"""This stack against LitServe, BentoML, MLServer, Ray Serve and plain FastAPI: one network, one client, the same cores.

    for peer in litserve bentoml mlserver 'ray[serve]' 'fastapi uvicorn[standard]'; do
      name=${peer%%[[ ]*}; python -m venv build/peers/$name
      build/peers/$name/bin/pip install onnxruntime==1.31.1 $peer
    done
    build/peers/mlserver/bin/pip install 'uvloop<0.22'
    python benchmarks/serving_peers.py [--rounds 3] [--seconds 2] [--only triton litserve]

Each server runs two workers with one ONNX Runtime thread each and, where it can, batches of up to 32; the client is
this project's load generator in a closed loop, on the same cores. Requests are in the leanest form that the server
takes by itself: binary tensors for Triton, JSON for the others, with the image as base64 where the server leaves the
decoding to the user's code, and as a list of numbers in the Open Inference Protocol for MLServer. A peer that is not
installed is left out. Servers take turns, round by round; medians. CPU is the server's, user and system, all its
processes. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table
from serving_networks import network

from compress.runtime.machine import environment
from serve.gateway.oip.protocol import build_request, parse_request
from serve.load.options import LoadOptions
from serve.load.run import run_load
from serve.pack.write import PackOptions, pack
from serve.triton.launch import Ports, TritonServer
from serve.triton.wheel import TRITON

HERE = Path(__file__).parent
ENVIRONMENTS = Path("build/peers")
NETWORKS = {"tiny": ("x", (64,)), "compute": ("image", (3, 224, 224))}
SERVERS = ("triton", "triton, no batching", "gateway", "fastapi", "litserve", "bentoml", "mlserver", "ray")
CONCURRENCIES = (1, 8, 32, 128)
START_S = 90


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0, help="measured time of each run")
    parser.add_argument("--only", nargs="*", default=SERVERS)
    parser.add_argument("--networks", nargs="*", default=list(NETWORKS))
    arguments = parser.parse_args()
    servers = [name for name in arguments.only if name in SERVERS[:3] or (ENVIRONMENTS / name).is_dir()]
    runs: dict[tuple[str, str, int], list[dict[str, float | None]]] = {}
    for number in range(arguments.rounds):
        for net in arguments.networks:
            for server in servers if number % 2 == 0 else reversed(servers):
                with running(server, net) as (target, process):
                    for concurrency in CONCURRENCIES:
                        found = one(target, process, concurrency, arguments.seconds)
                        runs.setdefault((net, server, concurrency), []).append(found)
                        print(f"{number + 1} {net} {server} {concurrency}: {found}", file=sys.stderr, flush=True)
    figures: dict[str, Any] = {}
    for (net, server, concurrency), rounds in runs.items():
        middle = {key: median([run[key] for run in rounds]) for key in rounds[0]}
        figures.setdefault(net, {}).setdefault(server, {})[str(concurrency)] = middle
    for net, by_server in figures.items():
        show(net, by_server)
    head = {"benchmark": "serving_peers", "rounds": arguments.rounds, "seconds": arguments.seconds}
    print(json.dumps(head | {"environment": environment(1), "versions": versions(servers), "networks": figures}))


def median(values: list[float | None]) -> float | None:
    """None where a run had too few answers for it."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if len(known) == len(values) else None


def show(net: str, by_server: dict[str, Any]) -> None:
    table = Table(title=net, title_justify="left")
    table.add_column("server")
    for concurrency in CONCURRENCIES:
        table.add_column(f"{concurrency} in flight: answers/s, p50, p99 ms, CPU ms", justify="right")
    table.add_column("memory", justify="right")
    for server, rows in by_server.items():
        cells = [
            f"{row['per_s']:,.0f}  {ms(row['p50_ms'])}  {ms(row['p99_ms'])}  {row['cpu_ms']:.2f}"
            + (f"  {row['errors']:.0f} errors" if row["errors"] else "")
            for row in rows.values()
        ]
        table.add_row(server, *cells, f"{max(row['memory_mb'] for row in rows.values()):,.0f} MB")
    Console(soft_wrap=True, width=220).print(table)


def ms(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def versions(servers: list[str]) -> dict[str, str]:
    """Of the peers, as their environments have them."""
    found = {"nvidia-pytriton": TRITON}
    for server in servers:
        if server in SERVERS[3:]:
            code = f"import importlib.metadata as m; print(m.version({server!r}))"
            python = ENVIRONMENTS / server / "bin" / "python"
            done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
            found[server] = done.stdout.strip()
    return found


@dataclass(frozen=True)
class Target:
    """An address with a path, and what is sent to it."""

    url: str
    body: Path
    header: tuple[str, ...] = ("Content-Type: application/json",)


def one(target: Target, process: psutil.Process, concurrency: int, seconds: float) -> dict[str, float | None]:
    """One run: rate, latency, the server's CPU for an answer, its memory."""
    options = LoadOptions(
        url=target.url, body=target.body, header=target.header, concurrency=concurrency, duration=seconds, warmup=0.5
    )
    before = cpu(process)
    result = run_load(options)
    spent = (cpu(process) - before) / max(result.count + result.warmup_count, 1)
    return {
        "per_s": result.throughput,
        "p50_ms": result.p50_ms,
        "p99_ms": result.p99_ms,
        "cpu_ms": 1000 * spent,
        "memory_mb": memory(process) / 1e6,
        "errors": float(sum(result.errors.values())),
    }


def family(process: psutil.Process) -> list[psutil.Process]:
    return [process, *process.children(recursive=True)]


def cpu(process: psutil.Process) -> float:
    return sum(sum(each.cpu_times()[:2]) for each in family(process))


def memory(process: psutil.Process) -> float:
    """Shared pages counted once, as far as the kernel says."""
    return float(sum(each.memory_full_info().pss for each in family(process)))


@contextmanager
def running(server: str, net: str) -> Iterator[tuple[Target, psutil.Process]]:
    """A started server: what to send, and its first process."""
    name, shape = NETWORKS[net]
    item = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    with tempfile.TemporaryDirectory() as folder:
        if server in SERVERS[:3]:
            with ours(server, net, Path(folder), name, item) as found:
                yield found
            return
        port = free_port()
        command = peer_command(server, port, Path(folder))
        environ = os.environ | {
            "NETWORK": str((network(net) / "model.onnx").absolute()), "SHAPE": json.dumps(shape),
            "PYTHONPATH": str(HERE / "peers"), "OMP_NUM_THREADS": "1", "BENTOML_DO_NOT_TRACK": "True",
            "RAY_USAGE_STATS_ENABLED": "0",
            "PATH": f"{(ENVIRONMENTS / server / 'bin').absolute()}:{os.environ['PATH']}",
        }  # fmt: skip
        log = Path(folder) / "log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                command, env=environ, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )
        try:
            target = peer_target(server, port, item, Path(folder) / "body.json")
            wait(target, process, log)
            yield target, psutil.Process(process.pid)
        finally:
            for each in reversed(family(psutil.Process(process.pid))) if process.poll() is None else ():
                each.send_signal(signal.SIGTERM if each.pid == process.pid else signal.SIGKILL)
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


@contextmanager
def ours(
    server: str, net: str, folder: Path, name: str, item: np.ndarray[Any, Any]
) -> Iterator[tuple[Target, psutil.Process]]:
    options = PackOptions(dynamic_batching=server != "triton, no batching")
    pack(network(net), repository=folder / "models", name=net, options=options)
    if server != "gateway":
        with TritonServer(folder / "models", ports=Ports(0, 0, 0)) as triton:
            yield tensor_target(f"http://{triton.http_address}", net, name, item, folder), psutil.Process(triton.pid)
        return
    words = [sys.executable, "-m", "serve", "up", str(folder / "models"), "--port", "0", "--triton-http-port", "0"]
    words += ["--triton-grpc-port", "0", "--triton-metrics-port", "0"]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"}
    ) as process:
        try:
            assert process.stdout is not None  # noqa: S101
            line = next(line for line in process.stdout if line.startswith("gateway"))
            yield tensor_target(line.split()[1], net, name, item, folder), psutil.Process(process.pid)
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)


def tensor_target(url: str, model: str, name: str, item: np.ndarray[Any, Any], folder: Path) -> Target:
    """A request of the Open Inference Protocol with a binary tensor."""
    tensor = {"name": name, "datatype": "FP32", "shape": [1, *item.shape], "data": item.ravel().tolist()}
    message = build_request(parse_request(json.dumps({"inputs": [tensor]}).encode()))
    body = folder / "body.bin"
    body.write_bytes(message.body)
    return Target(
        f"{url}/v2/models/{model}/infer",
        body,
        tuple(f"{key.decode()}: {value.decode()}" for key, value in message.headers),
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def peer_command(server: str, port: int, folder: Path) -> list[str]:
    binaries = (ENVIRONMENTS / server / "bin").absolute()
    if server == "fastapi":
        return [str(binaries / "uvicorn"), "fastapi_app:app", "--workers", "2", "--port", str(port),
                "--app-dir", str(HERE / "peers"), "--log-level", "warning", "--no-access-log"]  # fmt: skip
    if server == "bentoml":
        return [str(binaries / "bentoml"), "serve", "bentoml_app:Service", "--working-dir", str(HERE / "peers"),
                "--host", "127.0.0.1", "--port", str(port)]  # fmt: skip
    if server == "mlserver":
        settings = {"http_port": port, "grpc_port": free_port(), "metrics_port": free_port(),
                    "host": "127.0.0.1", "parallel_workers": 2, "debug": False}  # fmt: skip
        model = {"name": "net", "implementation": "mlserver_runtime.Runtime", "max_batch_size": 32,
                 "max_batch_time": 0.001}  # fmt: skip
        (folder / "settings.json").write_text(json.dumps(settings))
        (folder / "model-settings.json").write_text(json.dumps(model))
        return [str(binaries / "mlserver"), "start", str(folder)]
    return [str(binaries / "python"), str(HERE / "peers" / f"{server}_app.py"), str(port)]


def peer_target(server: str, port: int, item: np.ndarray[Any, Any], file: Path) -> Target:
    data: Any = item.ravel().tolist() if item.size < 1000 else base64.b64encode(item.tobytes()).decode()
    path, body = "/predict", {"data": [data] if server == "bentoml" else data}
    if server == "mlserver":
        path = "/v2/models/net/infer"
        tensor = {"name": "x", "datatype": "FP32", "shape": [1, *item.shape], "data": item.ravel().tolist()}
        body = {"inputs": [tensor]}
    file.write_text(json.dumps(body))
    return Target(f"http://127.0.0.1:{port}{path}", file)


def wait(target: Target, process: subprocess.Popen[bytes], log: Path) -> None:
    """Until a request is answered."""
    import http.client

    address = urlsplit(target.url)
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        connection = http.client.HTTPConnection(address.netloc, timeout=30)
        try:
            connection.request("POST", address.path, target.body.read_bytes(), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            body = answer.read()
            if answer.status == 200:
                return
            if answer.status == 422:
                break
        except (OSError, http.client.HTTPException):
            body = b""
        finally:
            connection.close()
        time.sleep(0.5)
    sys.exit(f"it does not serve: {body[:500]!r}\n{log.read_text(errors='replace')[-3000:]}")


if __name__ == "__main__":
    main()
