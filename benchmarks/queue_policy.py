"""What a bound on Triton's queue costs: one network served under several queue policies, load-tested in turns.

    python benchmarks/queue_policy.py [--rounds 8] [--seconds 1]

A 64→256→10 network in one Triton, a model for each policy, 16 clients in a closed loop. With a bound, Triton's batcher
hands out no request before an instance is idle, and can sleep through a wake-up: then nothing happens for 500 ms
unless another request arrives. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from gateway_overhead import save_network
from rich.console import Console
from rich.table import Table

from compress.runtime.machine import environment
from serve.load.options import LoadOptions
from serve.load.run import run_load
from serve.pack.write import pack
from serve.triton.launch import Ports, TritonServer

POLICIES: dict[str, str] = {
    "none": "",
    "allow_timeout_override": "allow_timeout_override: true",
    "max_queue_size": "max_queue_size: 256",
    "default_timeout": "default_timeout_microseconds: 1000000",
    "both": "max_queue_size: 256 default_timeout_microseconds: 1000000",
}
INSTANCES = (1, 2)
CLIENTS = 16
STALL_MS = 400


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=1.0, help="measured time of each run")
    arguments = parser.parse_args()
    cases = [(policy, instances) for instances in INSTANCES for policy in POLICIES]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        artifact = save_network(folder / "artifact")
        repository = folder / "repository"
        for policy, instances in cases:
            model = f"{policy}_{instances}"
            pack(artifact, repository=repository, name=model)
            path = repository / model / "config.pbtxt"
            text = path.read_text().replace("count: 2", f"count: {instances}")
            block = (
                f"dynamic_batching {{ default_queue_policy {{ {POLICIES[policy]} }} }}" if POLICIES[policy] else None
            )
            if block:
                assert "dynamic_batching {\n}" in text  # noqa: S101  what pack writes by default
                text = text.replace("dynamic_batching {\n}", block)
            path.write_text(text)
        with TritonServer(repository, ports=Ports(0, 0, 0)) as triton:
            rows = measure(cases, f"http://{triton.http_address}", arguments.rounds, arguments.seconds)
    show(rows)
    print(json.dumps({"benchmark": "queue_policy", "environment": environment(1), "rows": rows}))


def measure(cases: list[tuple[str, int]], url: str, rounds: int, seconds: float) -> list[dict[str, Any]]:
    runs: dict[tuple[str, int], list[tuple[float, float]]] = {case: [] for case in cases}
    for turn in range(rounds):
        for policy, instances in cases:
            options = LoadOptions(
                model=f"{policy}_{instances}", url=url, concurrency=CLIENTS, duration=seconds, warmup=0.2
            )
            result = run_load(options)
            runs[policy, instances].append((result.throughput, result.max_ms or 0.0))
        print(f"round {turn + 1} of {rounds}", file=sys.stderr)
    return [
        {
            "policy": policy,
            "instances": instances,
            "throughput_median": statistics.median(throughput for throughput, _ in found),
            "throughput_worst": min(throughput for throughput, _ in found),
            "runs_with_a_stall": sum(longest > STALL_MS for _, longest in found),
            "runs": len(found),
        }
        for (policy, instances), found in runs.items()
    ]


def show(rows: list[dict[str, Any]]) -> None:
    table = Table(title=f"closed loop, {CLIENTS} clients, directly at Triton", title_justify="left")
    for column in ("default_queue_policy", "instances", "median", "worst run", "runs with a stall"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row["policy"], str(row["instances"]), f"{row['throughput_median']:,.0f}/s",
            f"{row['throughput_worst']:,.0f}/s", f"{row['runs_with_a_stall']} of {row['runs']}",
        )  # fmt: skip
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
