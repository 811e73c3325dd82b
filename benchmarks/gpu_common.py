"""What the GPU benchmarks share: the machine's own peaks, the ways to run a network, and the table."""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import torch
from rich.console import Console
from rich.table import Table

import compress
from compress.evaluate.metrics import cosine_similarity
from compress.jobs.measure import Prepares, time_in_turns
from compress.model import Arrays, OnnxModel, TorchModel
from compress.runtime.backends.onnxrt_device import OnnxDeviceBackend, ProviderOptions
from compress.runtime.backends.pytorch_device import TorchDeviceBackend
from compress.runtime.device import accelerator, described, elapsed_ms, new_stream
from compress.runtime.machine import environment
from compress.runtime.measure import onnx_macs, torch_macs

__all__ = ["Way", "arguments", "finish", "measure_network", "onnx_ways", "peaks", "run", "torch_ways"]


@dataclass(frozen=True)
class Way:
    """A way to run a network.

    Attributes:
        name: in the table.
        open: makes it ready.
        precision: of its products: "fp32" (TF32 on a GPU), "fp16" or "int8".
        macs: multiply-accumulates of a sample.
        weight_bytes: read at each call.
    """

    name: str
    open: Callable[[], Prepares]
    precision: str
    macs: int
    weight_bytes: int


def arguments(doc: str) -> argparse.ArgumentParser:
    """--device, --batches, --rounds, --folder and --result."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu only tries the script out")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--folder", type=Path, default=Path("build/gpu"), help="keeps the exported models")
    parser.add_argument("--export-only", action="store_true", help="export, on a machine without a GPU; measure later")
    parser.add_argument("--result", type=Path, help="a JSON file for the figures")
    return parser


class HalfTorch(TorchDeviceBackend):
    """torch as who knows it serves it: weights in float16, images channels-last; compiled, with CUDA graphs.

    Args:
        model: a copy of it goes to the device.
        device: a CUDA device; on the CPU there are no graphs, and bfloat16 is in float16's place.
        compiled: by torch.compile in its mode "reduce-overhead".
    """

    def __init__(self, model: TorchModel, device: torch.device, *, compiled: bool) -> None:
        super().__init__(model, device)
        self._kind = torch.float16 if device.type == "cuda" else torch.bfloat16
        module: Any = self._module.to(self._kind)
        if any(isinstance(layer, torch.nn.Conv2d) for layer in module.modules()):
            module = module.to(memory_format=torch.channels_last)
        mode = "reduce-overhead" if device.type == "cuda" else "default"
        self._module = torch.compile(module, dynamic=False, mode=mode) if compiled else module

    @property
    def runtime(self) -> str:
        return "torch, weights in FP16"

    def _there(self, inputs: Arrays) -> dict[str, torch.Tensor]:
        found = {}
        for name, tensor in super()._there(inputs).items():
            kept = tensor.to(self._kind) if tensor.is_floating_point() else tensor
            found[name] = kept.contiguous(memory_format=torch.channels_last) if kept.ndim == 4 else kept
        return found


def torch_ways(name: str, model: TorchModel, macs: int, device: torch.device, precisions: Sequence[str]) -> list[Way]:
    """Eager in each precision, compiled in float32, and with weights in float16, eager and compiled."""
    size = sum(parameter.numel() for parameter in model.module.parameters())
    ways = [
        Way(f"{name}torch eager {kind.upper()}", lambda kind=kind: TorchDeviceBackend(model, device, precision=kind),  # type: ignore[misc]
            kind, macs, size * (4 if kind == "fp32" else 2))
        for kind in precisions
    ]  # fmt: skip
    compiled = Way(f"{name}torch.compile FP32", lambda: TorchDeviceBackend(model, device, compiled=True), "fp32", macs,
                   4 * size)  # fmt: skip
    half = [
        Way(f"{name}{told}", lambda fast=fast: HalfTorch(model, device, compiled=fast), "fp16", macs, 2 * size)  # type: ignore[misc]
        for told, fast in (("torch FP16 weights", False), ("torch.compile FP16 weights, CUDA graph", True))
    ]
    return [*ways, compiled, *half]


def onnx_ways(name: str, folder: Path, precision: str, device: torch.device, *, graphs: bool = True) -> list[Way]:
    """ONNX Runtime on an artifact, the same with CUDA graphs, and with these and images channels-last."""
    artifact = compress.Artifact.load(folder)
    model = OnnxModel(artifact.model_path, artifact.signature)
    macs, size = onnx_macs(model.path, model.signature), model.path.stat().st_size
    provider: Any = device.type if device.type == "cuda" else "cpu"
    found = [Way(name, lambda: OnnxDeviceBackend(model, ProviderOptions(provider)), precision, macs, size)]
    if graphs and device.type == "cuda":
        for told, laid_out in (("CUDA graph", False), ("channels-last, CUDA graph", True)):
            options = ProviderOptions("cuda", cuda_graphs=True, channels_last=laid_out)
            opened = functools.partial(OnnxDeviceBackend, model, options)
            found.append(Way(f"{name}, {told}", opened, precision, macs, size))
    return found


def peaks(device: torch.device) -> dict[str, float]:
    """Operations a second (a multiply-accumulate is two) in square products, and bytes a second in a copy: the best.

    What a network reaches is told as a share of these, measured on the same GPU in the same run.
    """
    side, elements = (8192, 2**28) if device.type == "cuda" else (1024, 2**24)
    stream = new_stream(device)
    found: dict[str, float] = {}
    kinds = {"fp32": torch.float32, "fp16": torch.float16 if device.type == "cuda" else torch.bfloat16}
    for name, kind in kinds.items():
        a, b = (torch.randn(side, side, device=device).to(kind) for _ in range(2))
        found[name] = 2 * side**3 / (_best(lambda a=a, b=b: torch.mm(a, b), stream) / 1000)  # type: ignore[misc]
    a8, b8 = (torch.randint(-127, 127, (side, side), device=device, dtype=torch.int8) for _ in range(2))
    found["int8"] = 2 * side**3 / (_best(lambda: torch._int_mm(a8, b8), stream) / 1000)
    source = torch.empty(elements, device=device)
    target = torch.empty_like(source)
    found["bytes"] = 8 * elements / (_best(lambda: target.copy_(source), stream) / 1000)
    return found


def _told(err: Exception) -> str:
    return str(err) if isinstance(err, compress.errors.ToolkitError) else f"{type(err).__name__}: {err}"[:600]


def _best(work: Callable[[], Any], stream: Any) -> float:
    def there() -> None:
        if stream is None:
            work()
        else:
            with torch.cuda.stream(stream):
                work()

    elapsed_ms(there, stream, 3)
    return min(elapsed_ms(there, stream, 10))


def run(
    ways: Sequence[Way], inputs_of: Callable[[int], Arrays], batches: Sequence[int], rounds: int, device: torch.device
) -> list[dict[str, Any]]:
    """Time all ways in turns at each batch size; the first is what the others are compared with.

    A way that does not run is a row that says why, never a figure of something else.
    """
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    roofs = peaks(device)
    backends: dict[str, Prepares] = {}
    rows: list[dict[str, Any]] = []
    console = Console(stderr=True)
    for way in ways:
        try:
            backends[way.name] = way.open()
            backends[way.name].infer(inputs_of(batches[0]))
        except Exception as err:  # whatever fails here, the other ways are measured
            backends.pop(way.name, None)
            rows.append({"way": way.name, "failed": _told(err)})
    for batch in batches:
        inputs = inputs_of(batch)
        for name in list(backends):
            try:
                backends[name].prepared(inputs)()
            except Exception as err:  # as above
                del backends[name]
                rows.append({"way": name, "batch": batch, "failed": _told(err)})
        expected = backends[ways[0].name].infer(inputs)
        started = time.perf_counter()
        times = time_in_turns(backends, inputs, rounds)
        console.print(f"batch {batch}: {time.perf_counter() - started:.0f} s", highlight=False)
        first = times[ways[0].name].p50_ms
        for way in ways:
            if way.name not in backends:
                continue
            backend, took = backends[way.name], times[way.name]
            p50, p99 = took.p50_ms, took.p99_ms
            roof = 1000 * max(2 * way.macs * batch / roofs[way.precision], way.weight_bytes / roofs["bytes"])
            got = list(backend.infer(inputs).values())
            cosine = min(float(np.min(cosine_similarity(a, b))) for a, b in zip(expected.values(), got, strict=True))
            cpu = getattr(backend, "cpu_nodes", {})
            rows.append(
                {"way": way.name, "runtime": backend.runtime, "batch": batch, "p50_ms": p50, "p99_ms": p99,
                 "samples_per_s": 1000 * batch / p50, "over_first": first / p50, "share_of_roof": roof / p50,
                 "cosine_to_first": cosine, "nodes_on_cpu": dict(cpu)}
            )  # fmt: skip
    return rows


def finish(rows: Sequence[Mapping[str, Any]], device: torch.device, result: Path | None) -> None:
    """Print the table and one JSON line; keep it where asked."""
    table = Table(title=f"On {described(device).get('gpu', 'the CPU')}", title_justify="left")
    for column in ("batch", "way", "p50", "p99", "samples/s", "over the first", "share of its roof", "cosine"):
        table.add_column(column, justify="left" if column == "way" else "right", no_wrap=True)
    for row in rows:
        if "failed" in row:
            table.add_row("", row["way"], "did not run", "", "", "", "", "")
            continue
        table.add_row(
            str(row["batch"]), row["way"], f"{row['p50_ms']:.3f} ms", f"{row['p99_ms']:.3f} ms",
            f"{row['samples_per_s']:,.0f}", f"{row['over_first']:.2f}×", f"{row['share_of_roof']:.0%}",
            f"{row['cosine_to_first']:.5f}",
        )  # fmt: skip
    Console(width=150).print(table)
    for row in rows:
        if "failed" in row:
            print(f"{row['way']} did not run: {row['failed']}")
    found = {
        "environment": {**environment(1), **described(device), "providers": ort.get_available_providers(),
                        "driver": _driver(), "cudnn": _cudnn()},
        "rows": list(rows),
    }  # fmt: skip
    if result is not None:
        result.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(found))


def _cudnn() -> int | None:
    version: Callable[[], int | None] = torch.backends.cudnn.version
    return version()


def _driver() -> str:
    path = Path("/proc/driver/nvidia/version")
    return path.read_text(encoding="utf-8").splitlines()[0] if path.exists() else ""


def measure_network(
    folder: Path, kinds: Mapping[str, tuple[str, Any]], inputs_of: Callable[[int], Arrays], asked: argparse.Namespace
) -> None:
    """Time model.pt of a folder with torch, and its exports, numbered as the kinds are, with ONNX Runtime."""
    device = accelerator() if asked.device == "cuda" else torch.device("cpu")
    model = compress.load(folder / "model.pt")
    assert isinstance(model, TorchModel)  # noqa: S101
    ways = torch_ways("", model, torch_macs(model.module, model.signature), device, ("fp32", "fp16"))
    for number, (name, (precision, _)) in enumerate(kinds.items()):
        ways += onnx_ways(name, folder / str(number), precision, device)
    finish(run(ways, inputs_of, asked.batches, asked.rounds, device), device, asked.result)
