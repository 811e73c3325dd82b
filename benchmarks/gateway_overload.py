"""What a server does when three times as much is asked of it as it can do: with the gateway's admission, and without.

    python benchmarks/gateway_overload.py [--seconds 6] [--rounds 2]

A convolutional network of some ten milliseconds, Poisson arrivals in an open loop (the same for each way, from a seed),
latency from the moment at which a request was due. Goodput: answers within a second of that, a second. The peak is
Triton's own throughput in a closed loop. Triton, gateway and clients share this machine's cores, so the network is a
heavy one: of a light one, the clients of three times its peak would take the time. The last line of stdout is one JSON
object; a plot goes to build/gateway_overload.svg.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import matplotlib as mpl
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from compress.artifact import Artifact, Signature, TensorSpec, sha256_of
from serve.load.figures.result import LoadResult
from serve.load.options import LoadOptions
from serve.load.run import run_load
from serve.pack.write import pack
from serve.triton.launch import Ports, TritonServer

LOADS = (0.5, 0.9, 1.5, 3.0)
USEFUL_S = 1.0
GIVEN_UP_S = 20.0
CHANNELS, SIDE, LAYERS = 64, 32, 16
SETTINGS = {
    "unbounded": [
        "--max-in-flight",
        "100000",
        "--max-connections",
        "4000",
        "--latency-target-s",
        "1000",
        "--max-wait-s",
        "1000",
        "--max-waiting",
        "100000",
    ],
    "gateway": [],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=6.0, help="of arrivals in each run")
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pack(save_network(folder / "artifact"), repository=folder / "repository", name="convolutions")
        with TritonServer(folder / "repository", ports=Ports(0, 0, 0)) as triton:
            direct = f"http://{triton.http_address}"
            with gateway(direct, "unbounded") as unbounded, gateway(direct, "gateway") as bounded:
                ways = {"Triton alone": direct, "gateway, no admission": unbounded, "gateway": bounded}
                figures = measure(ways, arguments.rounds, arguments.seconds)
    draw(figures, Path("build/gateway_overload.svg"))
    print(json.dumps(figures))


def save_network(folder: Path) -> Path:
    """x:float32[batch,16], spread over 64 channels of 32² and convolved again and again; its folder."""
    generator = np.random.default_rng(0)
    weights = {"spread": generator.normal(size=(16, CHANNELS * SIDE * SIDE)).astype(np.float32) / 4}
    nodes = [
        helper.make_node("MatMul", ["x", "spread"], ["flat"]),
        helper.make_node("Reshape", ["flat", "shape"], ["c0"]),
    ]
    for layer in range(LAYERS):
        weights[f"w{layer}"] = generator.normal(size=(CHANNELS, CHANNELS, 3, 3)).astype(np.float32) / 24
        nodes.append(helper.make_node("Conv", [f"c{layer}", f"w{layer}"], [f"r{layer}"], pads=[1, 1, 1, 1]))
        nodes.append(helper.make_node("Relu", [f"r{layer}"], [f"c{layer + 1}"]))
    nodes.append(helper.make_node("ReduceMean", [f"c{LAYERS}", "axes"], ["logits"], keepdims=0))
    constants = {
        **weights,
        "shape": np.array([-1, CHANNELS, SIDE, SIDE], np.int64),
        "axes": np.array([2, 3], np.int64),
    }
    graph = helper.make_graph(
        nodes,
        "convolutions",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 16])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", CHANNELS])],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    folder.mkdir()
    path = folder / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    outputs = (TensorSpec.parse(f"logits:float32[batch,{CHANNELS}]"),)
    signature = Signature((TensorSpec.parse("x:float32[batch,16]"),), outputs)
    Artifact(folder, path.name, "onnx", sha256_of(path), signature).save()
    return folder


@contextmanager
def gateway(upstream: str, settings: str) -> Iterator[str]:
    """The URL of a gateway in a process of its own."""
    command = [str(Path(sys.executable).with_name("serve")), "gateway", "--upstream", upstream, "--port", "0"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        [*command, *SETTINGS[settings]], stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            line = process.stdout.readline() if process.stdout else ""
            if not line.startswith("gateway"):
                raise SystemExit("the gateway did not start")
            yield line.split()[1]
        finally:
            process.terminate()


def measure(ways: dict[str, str], rounds: int, seconds: float) -> dict[str, object]:
    """Medians over the rounds, by way and load."""
    options = LoadOptions("convolutions", ways["Triton alone"], concurrency=16, duration=4.0, warmup=1.0)
    peak = statistics.median(run_load(options).throughput for _ in range(3))
    print(f"peak {peak:.0f} answers a second")
    runs: dict[str, dict[str, list[dict[str, float]]]] = {way: {str(load): [] for load in LOADS} for way in ways}
    for number in range(rounds):
        for load in LOADS:
            for way, url in ways.items():
                run = offer(url, load * peak, seconds, seed=number)
                runs[way][str(load)].append(run)
                print(
                    f"round {number + 1}, {load:g}x, {way}: goodput {run['goodput']:.0f}/s "
                    f"({run['goodput'] / peak:.2f} of the peak), p50 {run['p50_ms']:.0f}, p99 {run['p99_ms']:.0f} ms, "
                    f"refused {run['refused']:.2f}, generator late by {run['late_ms']:.1f} ms (p99)",
                    flush=True,
                )
    medians = {
        way: {
            load: {key: statistics.median(run[key] for run in found) for key in found[0]} for load, found in by.items()
        }
        for way, by in runs.items()
    }
    return {"cores": os.cpu_count() or 0, "rounds": rounds, "peak_per_s": round(peak, 1), "ways": medians}


def offer(url: str, rate: float, seconds: float, seed: int) -> dict[str, float]:
    """Requests at Poisson times; what became of them."""
    result = run_load(
        LoadOptions(
            "convolutions",
            url,
            rate=f"{rate:.6g}",
            duration=seconds,
            warmup=0,
            seed=seed,
            connections=4000,
            timeout=GIVEN_UP_S,
        )
    )
    refused = result.errors.get("status 503", 0)
    lost = sum(count for kind, count in result.errors.items() if not kind.startswith("status"))
    if refused + lost < result.error_count:
        raise SystemExit(f"the figures are worthless: {dict(result.errors)}")
    sent = max(result.count + result.error_count, 1)
    return {"offered": sent / seconds, "lost": lost / sent} | became(result, seconds)


def became(result: LoadResult, seconds: float) -> dict[str, float]:
    """Of an open loop of so many seconds: useful answers a second, latencies and lateness in ms, what was refused."""
    refused = result.errors.get("status 503", 0)
    sent = max(result.count + result.error_count, 1)
    useful = result.count - result.latency.samples().above(int(USEFUL_S * 1e9))
    return {
        "goodput": useful / seconds,
        "p50_ms": result.p50_ms or result.mean_ms or float("nan"),
        "p99_ms": result.p99_ms or result.max_ms or float("nan"),
        "refused": refused / sent,
        "late_ms": result.lateness.at("p99") or result.lateness.max_ms or 0.0,
    }


def draw(figures: dict[str, object], path: Path) -> None:
    """Goodput and latency over the load offered."""
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    peak, ways = float(str(figures["peak_per_s"])), figures["ways"]
    if not isinstance(ways, dict):
        raise TypeError
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for (way, by_load), marker in zip(ways.items(), "os^", strict=True):
        loads = [float(load) for load in by_load]
        left.plot(loads, [run["goodput"] / peak for run in by_load.values()], marker=marker, label=way)
        right.plot(loads, [run["p99_ms"] for run in by_load.values()], marker=marker, label=way)
    left.set(xlabel="load offered, of the peak", ylabel="goodput, of the peak", ylim=(0, 1.15))
    right.set(xlabel="load offered, of the peak", ylabel="p99 of what was answered, ms", yscale="log")
    right.axhline(1000 * USEFUL_S, color="grey", linestyle=":")
    left.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    figure.savefig(path.with_suffix(".png"), dpi=110)


if __name__ == "__main__":
    main()
