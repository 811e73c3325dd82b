"""What the gateway costs: the same load on Triton directly and through the gateway, turn by turn in one run.

    python benchmarks/gateway_overhead.py [--rounds 5] [--seconds 2]

The gateway asks for a key, keeps its rate, and counts. Three networks: a tiny one (64→256→10), one that takes an image
tensor of 588 KB and does little with it, and convolutions that take all of both cores. Binary tensors, closed loop;
Triton, gateway and client share this machine's cores. Medians over the rounds. Then the CPU time of each process for a
request, and of the gateway's own parts. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx
import psutil
from onnx import TensorProto, helper, numpy_helper

from compress.artifact import Artifact, Signature, TensorSpec, sha256_of
from serve.gateway.access.admission import Admission, Bounds
from serve.gateway.access.identity import KeyRing
from serve.gateway.access.keys import add_key
from serve.gateway.observe.telemetry import INFER_ROUTE, Telemetry
from serve.http.message import Address, encode_head
from serve.load.figures.result import LoadResult
from serve.load.options import LoadOptions
from serve.load.run import run_load
from serve.pack.write import pack
from serve.triton.launch import Ports, TritonServer

GATEWAY = """
import sys
from pathlib import Path
from serve.gateway.server import run_gateway
from serve.gateway.settings import Settings
settings = Settings(upstream=(sys.argv[1],), port=0, keys=Path(sys.argv[2]))
run_gateway(settings, on_ready=lambda url: print(url, flush=True))
"""
WARMUP_S = 0.3
CASES = (("mlp", 1), ("mlp", 32), ("mlp", 128), ("image", 1), ("convolutions", 8))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="measured time of each of a round's eight runs")
    arguments = parser.parse_args()
    from gateway_overload import save_network as save_convolutions

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        secret, _ = add_key(folder / "keys.json", "load", rate=1e6, burst=10**6)
        for model, save in (("mlp", save_network), ("image", save_image), ("convolutions", save_convolutions)):
            pack(save(folder / model), repository=folder / "repository", name=model)
        with (
            TritonServer(folder / "repository", ports=Ports(0, 0, 0)) as triton,
            running_gateway(f"http://{triton.http_address}", folder / "keys.json") as (gateway, process),
        ):
            ways = {"direct": f"http://{triton.http_address}", "gateway": gateway}
            figures = measure(ways, secret, arguments.rounds, arguments.seconds)
            figures["cpu_us"] = cpu(ways["gateway"], secret, process, psutil.Process(triton.pid), arguments.seconds)
        figures["parts_us"] = parts(folder / "keys.json", secret)
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


def save_image(folder: Path) -> Path:
    """The mean of each channel of x:float32[batch,3,224,224]; its folder."""
    graph = helper.make_graph(
        [helper.make_node("ReduceMean", ["x", "axes"], ["means"], keepdims=0)],
        "image",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3, 224, 224])],
        [helper.make_tensor_value_info("means", TensorProto.FLOAT, ["batch", 3])],
        [numpy_helper.from_array(np.array([2, 3], np.int64), "axes")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    folder.mkdir()
    path = folder / "model.onnx"
    onnx.save(model, path)
    inputs, outputs = (TensorSpec.parse("x:float32[batch,3,224,224]"),), (TensorSpec.parse("means:float32[batch,3]"),)
    Artifact(folder, path.name, "onnx", sha256_of(path), Signature(inputs, outputs)).save()
    return folder


@contextmanager
def running_gateway(upstream: str, keys: Path) -> Iterator[tuple[str, psutil.Process]]:
    """URL and process of a gateway."""
    command = [sys.executable, "-c", GATEWAY, upstream, str(keys)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            if process.stdout is None or not (url := process.stdout.readline().strip()):
                raise SystemExit("the gateway did not start")
            yield url, psutil.Process(process.pid)
        finally:
            process.terminate()


def measure(ways: dict[str, str], key: str, rounds: int, seconds: float) -> dict[str, object]:
    """Medians over the rounds; ratios are the gateway's figure over the direct one of the same round."""
    names = [f"{model}_c{clients}" for model, clients in CASES]
    p50_ms: dict[str, dict[str, list[float]]] = {name: {way: [] for way in ways} for name in names}
    rates: dict[str, dict[str, list[float]]] = {name: {way: [] for way in ways} for name in names}
    for number in range(rounds):
        order = list(ways) if number % 2 == 0 else list(reversed(ways))
        for (model, clients), name in zip(CASES, names, strict=True):
            for way in order:
                result = one(ways[way], model, clients, seconds, key)
                p50_ms[name][way].append(result.p50_ms or float("nan"))
                rates[name][way].append(result.throughput)
            shown = [f"{way} {p50_ms[name][way][-1]:.3f} ms {rates[name][way][-1]:,.0f}/s" for way in ways]
            print(f"round {number + 1}, {model}, {clients} at a time: p50 and rate {', '.join(shown)}", flush=True)
    figures: dict[str, object] = {"cores": os.cpu_count() or 0, "rounds": rounds}
    for name in names:
        added = [g - d for g, d in zip(p50_ms[name]["gateway"], p50_ms[name]["direct"], strict=True)]
        figures[name] = {
            "direct_p50_ms": round(statistics.median(p50_ms[name]["direct"]), 4),
            "gateway_p50_ms": round(statistics.median(p50_ms[name]["gateway"]), 4),
            "added_p50_ms": round(statistics.median(added), 4),
            "p50_ratio": round(ratio(p50_ms[name]), 3),
            "direct_per_s": round(statistics.median(rates[name]["direct"]), 1),
            "gateway_per_s": round(statistics.median(rates[name]["gateway"]), 1),
            "throughput_ratio": round(ratio(rates[name]), 3),
        }
    return figures


def one(url: str, model: str, clients: int, seconds: float, key: str) -> LoadResult:
    result = run_load(LoadOptions(model, url, concurrency=clients, duration=seconds, warmup=WARMUP_S, key=key))
    if result.errors:
        raise SystemExit(f"errors make the figures worthless: {dict(result.errors)}")
    return result


def ratio(figures: dict[str, list[float]], way: str = "gateway") -> float:
    return statistics.median(g / d for g, d in zip(figures[way], figures["direct"], strict=True))


def cpu(url: str, key: str, gateway: psutil.Process, triton: psutil.Process, seconds: float) -> dict[str, float]:
    """CPU microseconds of each process for a request of the tiny network, 32 at a time."""
    client = psutil.Process()
    groups = {"triton": [triton, *triton.children(recursive=True)], "gateway": [gateway], "client": [client]}
    before = {name: spent(group) for name, group in groups.items()}
    begun = time.perf_counter()
    result = run_load(LoadOptions("mlp", url, concurrency=32, duration=seconds, warmup=0.0, key=key))
    answers = result.throughput * (time.perf_counter() - begun)
    figures = {}
    for name, group in groups.items():
        user, system = (after - was for after, was in zip(spent(group), before[name], strict=True))
        figures[f"{name}_user"], figures[f"{name}_system"] = 1e6 * user / answers, 1e6 * system / answers
    rounded = {name: round(value, 1) for name, value in figures.items()}
    print("CPU microseconds a request: " + ", ".join(f"{name} {value}" for name, value in rounded.items()))
    return rounded


def spent(processes: list[psutil.Process]) -> tuple[float, float]:
    times = [process.cpu_times() for process in processes]
    return sum(each.user for each in times), sum(each.system for each in times)


def parts(keys: Path, key: str) -> dict[str, float]:
    """Microseconds of the gateway's own parts; the rest of its time is uvicorn's, asyncio's and the kernel's."""
    ring = KeyRing(keys)
    headers = {b"authorization": f"Bearer {key}".encode()}
    identity = ring.identify(headers)
    places = Admission("mlp", Bounds(), time.monotonic)
    telemetry = Telemetry()
    address = Address("127.0.0.1", 8000)
    sent = [(b"content-type", b"application/octet-stream"), (b"inference-header-content-length", b"120")]

    def rate() -> None:
        identity.take()
        identity.limits()

    def place() -> None:
        places.try_enter()
        places.leave(0.001)

    def count() -> None:
        observed = telemetry.begin(INFER_ROUTE, "mlp", "127.0.0.1")
        observed.key = "load"
        telemetry.observe(observed, 200)

    found: dict[str, Callable[[], object]] = {
        "key": lambda: ring.identify(headers),
        "rate": rate,
        "place": place,
        "head": lambda: encode_head(b"POST", b"/v2/models/mlp/infer", address, sent, 300),
        "count": count,
    }
    figures = {}
    for name, part in found.items():
        figures[name] = round(min(timeit.repeat(part, number=20_000, repeat=5)) / 20_000 * 1e6, 2)
    print("microseconds of the gateway's parts: " + ", ".join(f"{name} {value}" for name, value in figures.items()))
    return figures


if __name__ == "__main__":
    main()
