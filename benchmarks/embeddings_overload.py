"""Embeddings when more is asked than can be computed: this stack's /v1/embeddings beside the peers of embeddings.py.

    python benchmarks/embeddings_overload.py all-MiniLM-L6-v2 build/minilm-artifact [OTHER_ARTIFACT …]
      [--rounds 2] [--seconds 8] [--lengths mixed] [--loads 0.8 1.5 3] [--max-wait-s 0.5] [--only SERVER …]

Poisson arrivals in an open loop, one text a request, at so many times what each server answers by itself in a closed
loop of 16 clients just before; latency from the moment at which a request was due. Goodput: answers within a second of
that, a second, of that peak. Ours is `serve pack` and `serve up` as they are, with the gateway's own bounds. The peers
are those of embeddings.py, set up as it says; none of them turns anything away by itself. Servers take turns, round by
round; medians. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from embeddings import BENTOML, running, servers_of, write_bodies
from gateway_overload import GIVEN_UP_S, became
from rich.console import Console
from rich.table import Table
from serving_peers import Target

from compress.runtime.machine import environment
from serve.load.options import LoadOptions
from serve.load.run import run_load
from serve.pack.write import pack

CLIENTS = 16  # of the closed loop


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of Hugging Face")
    parser.add_argument("artifacts", type=Path, nargs="+", help="that `compress export` made of it")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=8.0, help="of arrivals in each run")
    parser.add_argument("--lengths", choices=("short", "mixed"), default="mixed")
    parser.add_argument("--loads", type=float, nargs="*", default=[0.8, 1.5, 3.0], help="of the peak")
    parser.add_argument("--max-wait-s", type=float, help="of this stack's gateway, in place of its own")
    parser.add_argument("--only", nargs="*", help="these servers, by how their names begin")
    arguments = parser.parse_args()
    ours, servers = servers_of(arguments.artifacts, arguments.only)
    runs: dict[str, dict[str, list[dict[str, float]]]] = {}
    peaks: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        for server, artifact in ours.items():
            pack(artifact, repository=scratch / server / "models", name="minilm")
        write_bodies(scratch, arguments.lengths, 1)
        for number in range(arguments.rounds):
            for server in servers if number % 2 == 0 else reversed(servers):
                with running(server, arguments.folder, scratch, patience=arguments.max_wait_s) as (url, _):
                    kind = "sentences" if server == BENTOML else "input"
                    target = Target(url, scratch / kind / arguments.lengths)
                    peak = closed_loop(target)
                    peaks.setdefault(server, []).append(peak)
                    for load in arguments.loads:
                        found = offer(target, load * peak, peak, arguments.seconds, seed=number)
                        runs.setdefault(server, {}).setdefault(f"{load:g}", []).append(found)
                        print(f"{number + 1} {server} {load:g} of {peak:.0f}/s: {found}", file=sys.stderr, flush=True)
    figures = {
        server: {
            "peak_per_s": statistics.median(peaks[server]),
            "loads": {
                load: {key: statistics.median(run[key] for run in found) for key in found[0]}
                for load, found in by.items()
            },
        }
        for server, by in runs.items()
    }
    show(figures, arguments.lengths)
    head = {"benchmark": "embeddings_overload"} | {
        key: getattr(arguments, key) for key in ("rounds", "seconds", "max_wait_s")
    }
    print(json.dumps(head | {"lengths": arguments.lengths, "environment": environment(1), "servers": figures}))


def closed_loop(target: Target) -> float:
    """Answers a second of `CLIENTS` clients, each of which waits for its answer and comes again when refused."""
    options = LoadOptions(
        url=target.url, body=target.body, header=target.header, concurrency=CLIENTS, duration=6.0, warmup=2.0
    )
    return run_load(options).throughput


def offer(target: Target, rate: float, peak: float, seconds: float, seed: int) -> dict[str, float]:
    """Requests at Poisson times; what became of them. Times in ms, shares of 1."""
    result = run_load(
        LoadOptions(
            url=target.url,
            body=target.body,
            header=target.header,
            rate=f"{rate:.6g}",
            duration=seconds,
            warmup=0,
            seed=seed,
            connections=4000,
            timeout=GIVEN_UP_S,
        )
    )
    found = became(result, seconds)
    failed = result.error_count / max(result.count + result.error_count, 1) - found["refused"]
    return found | {"goodput": found["goodput"] / peak, "failed": failed}


def show(figures: dict[str, dict[str, Any]], lengths: str) -> None:
    table = Table("server", "peak, answers/s", title=f"{lengths} texts, one a request", title_justify="left")
    for load in next(iter(figures.values()))["loads"]:
        table.add_column(f"{load} of the peak: goodput of it, p50, p99 ms, refused, failed", justify="right")
    for server, found in figures.items():
        cells = [
            "  ".join(
                (
                    f"{run['goodput']:.2f}",
                    *(f"{run[key]:,.0f}" for key in ("p50_ms", "p99_ms")),
                    *(f"{run[key]:.0%}" for key in ("refused", "failed")),
                )
            )
            for run in found["loads"].values()
        ]
        table.add_row(server, f"{found['peak_per_s']:,.0f}", *cells)
    Console(soft_wrap=True, width=200).print(table)


if __name__ == "__main__":
    main()
