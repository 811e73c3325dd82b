"""What the gateway costs: the same load on Triton directly and through the gateway, turn by turn in one run.

    python benchmarks/gateway_overhead.py [--rounds 5] [--seconds 2]

A 64→256→10 network, binary tensors, closed loop; Triton, gateway and client share this machine's cores. Medians
over the rounds; the last line of stdout is one JSON object.
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

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from compress.artifact import Artifact, Signature, TensorSpec, sha256_of
from serve.load.options import LoadOptions
from serve.load.result import LoadResult
from serve.load.run import run_load
from serve.repository import pack
from serve.triton.launch import Ports, TritonServer

GATEWAY = """
import sys
from serve.gateway.server import run_gateway
from serve.gateway.settings import Settings
run_gateway(Settings(upstream=(sys.argv[1],), port=0), on_ready=lambda url: print(url, flush=True))
"""
WARMUP_S = 0.3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="measured time of each of a round's four runs")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pack(save_network(folder / "artifact"), repository=folder / "repository", name="mlp")
        with (
            TritonServer(folder / "repository", ports=Ports(0, 0, 0)) as triton,
            running_gateway(f"http://{triton.http_address}") as gateway,
        ):
            figures = measure(f"http://{triton.http_address}", gateway, arguments.rounds, arguments.seconds)
    print(json.dumps(figures))


def save_network(folder: Path) -> Path:
    """Write a 64→256→10 network as an artifact; its folder."""
    generator = np.random.default_rng(0)
    weights = {
        "first": generator.normal(size=(64, 256)).astype(np.float32),
        "second": generator.normal(size=(256, 10)).astype(np.float32),
    }
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "first"], ["hidden"]),
            helper.make_node("Relu", ["hidden"], ["active"]),
            helper.make_node("MatMul", ["active", "second"], ["logits"]),
        ],
        "mlp",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 64])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 10])],
        [numpy_helper.from_array(weight, name) for name, weight in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    folder.mkdir()
    path = folder / "model.onnx"
    onnx.save(model, path)
    signature = Signature((TensorSpec.parse("x:float32[batch,64]"),), (TensorSpec.parse("logits:float32[batch,10]"),))
    Artifact(folder, path.name, "onnx", sha256_of(path), signature).save()
    return folder


@contextmanager
def running_gateway(upstream: str) -> Iterator[str]:
    """The URL of a gateway in a process of its own."""
    command = [sys.executable, "-c", GATEWAY, upstream]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            if process.stdout is None or not (url := process.stdout.readline().strip()):
                raise SystemExit("the gateway did not start")
            yield url
        finally:
            process.terminate()


def measure(direct: str, gateway: str, rounds: int, seconds: float) -> dict[str, float | int]:
    """Medians over the rounds; ratios are the gateway's figure over the direct one of the same round."""
    ways = {"direct": direct, "gateway": gateway}
    p50_ms: dict[str, list[float]] = {way: [] for way in ways}
    rates: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(rounds):
        order = list(ways) if number % 2 == 0 else list(reversed(ways))
        for way in order:
            p50_ms[way].append(one(ways[way], 1, seconds).p50_ms or float("nan"))
        for way in order:
            rates[way].append(one(ways[way], 32, seconds).throughput)
        print(
            f"round {number + 1}: p50 at 1 {p50_ms['direct'][-1]:.3f} and {p50_ms['gateway'][-1]:.3f} ms, "
            f"throughput at 32 {rates['direct'][-1]:,.0f} and {rates['gateway'][-1]:,.0f}/s (direct and gateway)"
        )
    return {
        "cores": os.cpu_count() or 0,
        "rounds": rounds,
        "direct_c1_p50_ms": round(statistics.median(p50_ms["direct"]), 4),
        "gateway_c1_p50_ms": round(statistics.median(p50_ms["gateway"]), 4),
        "c1_p50_ratio": round(ratio(p50_ms), 3),
        "direct_c32_per_s": round(statistics.median(rates["direct"]), 1),
        "gateway_c32_per_s": round(statistics.median(rates["gateway"]), 1),
        "c32_throughput_ratio": round(ratio(rates), 3),
    }


def one(url: str, concurrency: int, seconds: float) -> LoadResult:
    result = run_load(LoadOptions("mlp", url, concurrency=concurrency, duration=seconds, warmup=WARMUP_S))
    if result.errors:
        raise SystemExit(f"errors make the figures worthless: {dict(result.errors)}")
    return result


def ratio(figures: dict[str, list[float]]) -> float:
    return statistics.median(g / d for g, d in zip(figures["gateway"], figures["direct"], strict=True))


if __name__ == "__main__":
    main()
