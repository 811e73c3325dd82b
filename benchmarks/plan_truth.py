"""What `serve plan` predicts for one replica beside what a load test then measures there.

    python benchmarks/plan_truth.py [--rounds 3] [--requests 1500] [--case ensemble] [--save FOLDER]

A real Triton serves convolutions of some milliseconds, directly and through the gateway, with one instance; and with
two, which on two cores have to share these with the load; and the digits network with its hooks, an ensemble of three.
Each round first measures what the planner is given (closed loops of 1, 2, 8 and 32 clients, and an open one at 60% of
the peak), predicts Poisson loads of 30, 50, 70 and 85% of the measured peak, then measures these; the prediction is for
the very arrivals that the load test drew, as a percentile of a thousand requests near saturation is mostly luck.
Printed is predicted over measured: the median of the rounds, the least and the most. The last line of stdout is one
JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import numpy as np
from gateway_overload import gateway, save_network

from serve.load.figures.result import LoadResult
from serve.load.options import LoadOptions
from serve.load.report.report import LoadReport
from serve.load.run import run_load
from serve.load.send.arrivals import Arrivals, Leg
from serve.pack.options import PackOptions
from serve.pack.write import pack
from serve.plan.replica import closed_loop, open_loop
from serve.plan.service import Service, batching_of, service_of
from serve.repository.read import read_models
from serve.triton.launch import Ports, TritonServer

CLIENTS = (1, 2, 8, 32)
SHARES = (0.3, 0.5, 0.7, 0.85)
GIVEN = 0.6
CALIBRATION_S = 4.0
WARMUP_S = 1.0
SHORTEST_S = 5.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=1500, help="of each measured load")
    parser.add_argument("--case", default="", help="only those whose title has this in it")
    parser.add_argument("--save", type=Path, help="a folder for what was measured, as `serve load` writes it")
    arguments = parser.parse_args()
    found: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        artifact = save_network(folder / "artifact")
        for case, repository, name in cases(folder, artifact):
            if arguments.case not in case:
                continue
            configs = {model.name: model.config for model in read_models(repository)}
            with TritonServer(repository, ports=Ports(0, 0, 0)) as triton:
                direct = f"http://{triton.http_address}"
                for way in ("Triton", "gateway"):
                    with gateway(direct, "unbounded") if way == "gateway" else nullcontext(direct) as url:
                        title = f"{way}, {case}"
                        found[title] = {}
                        for number in range(arguments.rounds):
                            options = LoadOptions(name, url, seed=number, warmup=WARMUP_S)
                            given, loads = one_round(options, arguments.requests)
                            report = LoadReport(tuple(given), title)
                            if arguments.save:
                                arguments.save.mkdir(exist_ok=True)
                                path = arguments.save / f"{title.replace(', ', '-').replace(' ', '-')}-{number}.json"
                                path.write_text(json.dumps(report.to_dict()))
                            service = service_of(report, batching_of(configs, name))
                            for key, ratio in compare(service, given, loads, arguments.requests).items():
                                found[title].setdefault(key, []).append(ratio)
                        print(title)
                        for key, ratios in found[title].items():
                            print(
                                f"  {key:22} {statistics.median(ratios):.2f}  ({min(ratios):.2f} to {max(ratios):.2f})"
                            )
    for title, each in found.items():
        below = [
            statistics.median(ratios)
            for key, ratios in each.items()
            if key.startswith(("p50", "p99")) and "85%" not in key
        ]
        print(f"{title}, up to 70% of the peak: {min(below):.2f} to {max(below):.2f} of what was measured")
    print(json.dumps({"cores": os.cpu_count(), "rounds": arguments.rounds, "predicted over measured": found}))


def cases(folder: Path, artifact: Path) -> Iterator[tuple[str, Path, str]]:
    """A title, a repository and its model."""
    for instances in (1, 2):
        repository = folder / f"models{instances}"
        pack(artifact, repository=repository, name="convolutions", options=PackOptions(instances=instances))
        yield f"{instances} instance{'s' if instances > 1 else ''}", repository, "convolutions"
    yield "an ensemble with hooks", Path(__file__).parents[1] / "model_repository", "digits"


def one_round(options: LoadOptions, requests: int) -> tuple[list[LoadResult], list[LoadResult]]:
    """What the planner is given, then the loads that it is to predict."""
    given = [run_load(options.with_(concurrency=clients, duration=CALIBRATION_S)) for clients in CLIENTS]
    peak = max(run.throughput for run in given)
    given.append(run_load(options.with_(rate=f"{GIVEN * peak:.4g}", duration=2 * CALIBRATION_S)))
    loads = []
    for share in SHARES:
        rate = float(f"{share * peak:.4g}")
        loads.append(run_load(options.with_(rate=str(rate), duration=max(requests / rate, SHORTEST_S))))
    return given, loads


def compare(service: Service, given: list[LoadResult], loads: list[LoadResult], requests: int) -> dict[str, float]:
    """Predicted over measured."""
    fullest = max(given, key=lambda run: run.concurrency)
    found = {"throughput, 32 clients": closed_loop(service, fullest.concurrency, 10_000)[0] / fullest.throughput}
    for run, share in zip(loads, SHARES, strict=True):
        rate = run.rate or 0.0
        legs = (Leg(rate, rate, WARMUP_S), Leg(rate, rate, max(requests / rate, SHORTEST_S)))
        due_s = np.concatenate([due for due, _ in Arrivals("poisson", legs, run.seed).chunks()]) / 1e9
        latencies_ms = open_loop(service, due_s, warmup_s=WARMUP_S) * 1000
        for percent in (50, 99):
            told = float(np.percentile(latencies_ms, percent)) / (run.latency.samples().value_at(percent) / 1e6)
            found[f"p{percent}, at {share:.0%}"] = told
    return found


if __name__ == "__main__":
    main()
