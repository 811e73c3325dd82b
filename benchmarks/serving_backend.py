"""What of bare ONNX Runtime's throughput is left behind a Triton whose onnxruntime backend is written in Python.

    python benchmarks/serving_backend.py [--rounds 5] [--seconds 4]

Three INT8 networks, with 38, 49 and 588 KB a request, two instances of one thread each, on all cores of the machine.
In turns: bare processes, one for each core, that do nothing but run the network, at batch 1 and at batch 4; then
Triton, with its load generator (perf_analyzer, C++) on the same cores, 8 requests in flight; medians over the rounds.
The generator and the server's own work take time from the same cores, which is the point: that is what a user gets of a
machine. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from perf_analyzer import install
from rich.console import Console
from rich.table import Table
from serving_networks import SIDES, network

from compress.runtime.machine import environment
from serve.pack.write import PackOptions, pack
from serve.triton.launch import Ports, TritonServer

BARE = """
import sys, time
import numpy as np, onnxruntime as ort
options = ort.SessionOptions()
options.intra_op_num_threads = 1
session = ort.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
side, batch = int(sys.argv[2]), int(sys.argv[4])
image = np.random.default_rng(0).standard_normal((batch, 3, side, side)).astype(np.float32)
for _ in range(5):
    session.run(None, {"image": image})
print("ready", flush=True)
sys.stdin.readline()
count, end = 0, time.perf_counter() + float(sys.argv[3])
while time.perf_counter() < end:
    session.run(None, {"image": image})
    count += len(image)
print(count, flush=True)
"""
IN_FLIGHT = 8
BATCHES = (1, 4)
PROTOCOLS = ("http", "grpc")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="measured time of each run")
    arguments = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    runs: dict[str, dict[str, list[float]]] = {name: {} for name in SIDES}
    with tempfile.TemporaryDirectory() as name:
        repository = Path(name) / "models"
        for each in SIDES:
            pack(network(each), repository=repository, name=each, options=PackOptions(instances=cores))
        for number in range(arguments.rounds):
            for each, side in SIDES.items():
                model = network(each) / "model.onnx"
                found = {f"bare {size}": bare(model, side, arguments.seconds, cores, size) for size in BATCHES}
                with TritonServer(repository, ports=Ports(0, 0, 0)) as triton:
                    for protocol in PROTOCOLS:
                        found[protocol] = served(triton, each, protocol, arguments.seconds, Path(name))
                for kind, value in found.items():
                    runs[each].setdefault(kind, []).append(value)
                print(f"round {number + 1}: {each}: {found}", file=sys.stderr)
    figures = {each: {kind: figure(kinds, kind) for kind in kinds} for each, kinds in runs.items()}
    table = Table(
        title=f"{cores} cores, {IN_FLIGHT} in flight; medians of {arguments.rounds} rounds", title_justify="left"
    )
    for column in (
        "network",
        *(f"bare, batch {size}" for size in BATCHES),
        *(f"Triton, {protocol}" for protocol in PROTOCOLS),
    ):
        table.add_column(column, justify="right")
    for each, kinds in figures.items():
        alone = [f"{kinds[f'bare {size}']['per_s']:,.0f}/s" for size in BATCHES]
        shares = [
            f"{kinds[p]['per_s']:,.0f}/s, {kinds[p]['of_bare']:.0%} of batch 1, {kinds[p]['of_best']:.0%} of the best"
            for p in PROTOCOLS
        ]
        table.add_row(each, *alone, *shares)
    Console(soft_wrap=True).print(table)
    head = {"benchmark": "serving_backend", "rounds": arguments.rounds, "in_flight": IN_FLIGHT}
    print(json.dumps(head | {"environment": environment(1), "networks": figures}))


def figure(kinds: dict[str, list[float]], kind: str) -> dict[str, float]:
    """The median rate, and the median share of bare ONNX Runtime at batch 1, and at its better batch."""
    bases = list(zip(*(kinds[f"bare {size}"] for size in BATCHES), strict=True))
    pairs = list(zip(kinds[kind], bases, strict=True))
    return {
        "per_s": statistics.median(kinds[kind]),
        "of_bare": statistics.median(value / base[0] for value, base in pairs),
        "of_best": statistics.median(value / max(base) for value, base in pairs),
    }


def bare(model: Path, side: int, seconds: float, cores: int, batch: int) -> float:
    """Items a second of one process for each core."""
    command = [sys.executable, "-c", BARE, str(model), str(side), str(seconds), str(batch)]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(cores)
    ]
    for process in processes:
        assert process.stdout is not None  # noqa: S101
        process.stdout.readline()
    for process in processes:
        assert process.stdin is not None  # noqa: S101
        process.stdin.write("\n")
        process.stdin.flush()
    return sum(int(process.communicate()[0]) for process in processes) / seconds


def served(triton: TritonServer, model: str, protocol: str, seconds: float, folder: Path) -> float:
    """Items a second through Triton."""
    binary, environ = install()
    out = folder / "perf.csv"
    address = triton.http_address if protocol == "http" else triton.grpc_address
    window = str(round(seconds * 1000))
    command = [
        str(binary),
        "-m",
        model,
        "-u",
        address,
        "-i",
        protocol,
        "-p",
        window,
        "-f",
        str(out),
        "-r",
        "3",
        "-s",
        "50",
    ]
    command += ["--concurrency-range", str(IN_FLIGHT), "--max-threads", "2"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    if done.returncode and not out.exists():
        sys.exit(done.stdout + done.stderr)
    with out.open(newline="") as file:
        (row,) = csv.DictReader(file)
    out.unlink()
    return float(row["Inferences/Second"])


if __name__ == "__main__":
    main()
