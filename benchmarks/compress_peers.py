"""INT8 of one trained network by compress and by its peers: same model, same calibration data, timed in one run.

    python -m venv build/peers
    build/peers/bin/pip install torch==2.13.0 'numpy<2.3' 'onnx<1.22' nncf onnxruntime torchao
    python benchmarks/compress_peers.py --peers build/peers/bin/python [--rounds 5]

The ResNet of examples/fashion_mnist, 512 calibration images, all 10,000 test images. Peers that need releases of their
own run in an environment of their own and write an ONNX file; all files are then timed here, interleaved, at batch 1
with one thread. What does not run is listed with its error. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from onnxruntime.quantization import QuantFormat, QuantType, quantize_static
from rich.console import Console
from rich.table import Table

import compress
from compress import ExportOptions
from compress.data.dataset import Dataset
from compress.evaluate.judge import Judge
from compress.evaluate.metric_choice import find_metric
from compress.model import Arrays, OnnxModel
from compress.quantize.precision import precisions
from compress.runtime.backends import Backend, OnnxBackend, TorchBackend
from compress.runtime.machine import environment
from compress.runtime.measure import latency

ROOT = Path(__file__).parents[1]
FLOAT, OURS = "FP32 ONNX", "compress --int8 static"

NNCF = """
import sys
import numpy as np, onnx, nncf
source, data, target = sys.argv[1:]
images = np.load(data)["image"]
name = onnx.load(source).graph.input[0].name
calibration = nncf.Dataset([{name: image[None]} for image in images])
onnx.save(nncf.quantize(onnx.load(source), calibration, subset_size=len(images)), target)
"""
TORCHAO = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
from networks import ResNet
from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_
model = ResNet().eval()
quantize_(model, Int8DynamicActivationInt8WeightConfig())
layers = [m for m in model.modules() if isinstance(m, (torch.nn.Conv2d, torch.nn.Linear))]
done = sum("Int8" in type(m.weight).__name__ or "AffineQuantized" in type(m.weight).__name__ for m in layers)
sys.exit(f"{done} of {len(layers)} layers became INT8: it leaves convolutions alone")
"""


class Reader:
    """The calibration data, one sample at a time."""

    def __init__(self, data: Dataset) -> None:
        self._batches = data.batches(1)

    def get_next(self) -> Arrays | None:
        batch = next(self._batches, None)
        return None if batch is None else batch[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, help="a Python with nncf and torchao")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    logging.getLogger().setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as name:
        figures, failed = compared(Path(name), arguments.peers, arguments.rounds)
    table = Table(title="INT8 of a ResNet on Fashion-MNIST, batch 1, one thread", title_justify="left")
    for column in ("tool", "accuracy", "drop in points (95%)", "INT8 layers", "size", "p50", "over FP32 ONNX", "took"):
        table.add_column(column, justify="left" if column == "tool" else "right", no_wrap=True)
    for tool, row in figures.items():
        drop = f"{row['drop_points']:+.2f} ({row['drop_low']:+.2f} to {row['drop_high']:+.2f})"
        table.add_row(
            tool, f"{row['accuracy']:.2%}", drop,
            str(row["int8_layers"]), f"{row['size_bytes'] / 1e3:.0f} kB", f"{row['latency_p50_ms']:.3f} ms",
            f"{row['faster_than_fp32_onnx']:.2f}×", f"{row['seconds']:.1f} s",
        )  # fmt: skip
    Console(width=150).print(table)
    for tool, why in failed.items():
        print(f"{tool} did not run: {why}")
    head = {"benchmark": "compress_peers", "rounds": arguments.rounds, "environment": environment(1)}
    print(json.dumps(head | {"models": figures, "did_not_run": failed}))


def compared(folder: Path, peers: Path | None, rounds: int) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    example = ROOT / "examples/fashion_mnist"
    subprocess.run([sys.executable, example / "train_fashion.py", folder, "--data-only"], check=True)
    original = compress.load(folder / "resnet.pt")
    calibration = Dataset.open(str(folder / "calibration.npz"), original.signature)
    data = Dataset.open(str(folder / "eval.npz"), original.signature)
    seconds: dict[str, float] = {}
    paths: dict[str, Path] = {}
    failed: dict[str, str] = {}

    def ours(tool: str, **options: Any) -> Path:
        asked = ExportOptions(output=folder / tool.replace(" ", "_"), **options)
        artifact, report = compress.export(folder / "resnet.pt", asked)
        seconds[tool] = sum(row.seconds for row in report.stages)
        return artifact.model_path

    paths[FLOAT] = ours(FLOAT)
    paths[OURS] = ours(OURS, int8="static", calibration="calibration.npz")

    def attempt(tool: str, work: Callable[[Path], None]) -> None:
        path = folder / f"{len(paths) + len(failed)}.onnx"
        start = time.perf_counter()
        try:
            work(path)
        except subprocess.CalledProcessError as err:
            failed[tool] = (err.stderr.strip().splitlines() or [f"it ended with {err.returncode}"])[-1][:300]
        else:
            seconds[tool], paths[tool] = time.perf_counter() - start, path

    def apart(program: str, *words: str) -> None:
        command = [str(peers), "-W", "ignore", "-c", program, *words]
        subprocess.run(command, check=True, capture_output=True, text=True)

    def quantizer(path: Path, **how: Any) -> None:
        quantize_static(paths[FLOAT], path, Reader(calibration), **how)

    channels = {"per_channel": True, "activation_type": QuantType.QUInt8, "weight_type": QuantType.QInt8}
    attempt("onnxruntime quantize_static, defaults", quantizer)
    attempt(
        "onnxruntime quantize_static, per channel",
        lambda path: quantizer(path, quant_format=QuantFormat.QDQ, **channels),
    )
    if peers is not None:
        source, samples = str(paths[FLOAT]), str(folder / "calibration.npz")
        attempt("NNCF", lambda path: apart(NNCF, source, samples, str(path)))
        attempt("torchao", lambda _path: apart(TORCHAO, str(example)))
    models: dict[str, Backend] = {
        tool: OnnxBackend(OnnxModel(path, original.signature), 1) for tool, path in paths.items()
    }
    judge = Judge(TorchBackend(original, 2), data, find_metric("top1", data, original.signature))
    one = data.take(slice(0, 1))[0]
    runs = [latency(models, one) for _ in range(rounds)]
    p50 = {tool: statistics.median(run[tool].p50_ms for run in runs) for tool in models}
    figures = {}
    for tool, path in paths.items():
        drop = judge.drop(OnnxBackend(OnnxModel(path, original.signature), 2))
        figures[tool] = {
            "accuracy": drop.after,
            "drop_points": drop.points,
            "drop_low": drop.low,
            "drop_high": drop.high,
            "int8_layers": precisions(path).int8,
            "size_bytes": path.stat().st_size,
            "latency_p50_ms": p50[tool],
            "faster_than_fp32_onnx": p50[FLOAT] / p50[tool],
            "seconds": seconds[tool],
        }
    return figures, failed


if __name__ == "__main__":
    main()
