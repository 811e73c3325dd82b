"""What each refinement of post-training quantization is worth: accuracy, not latency.

    python benchmarks/quantization_methods.py build/fashion/mobilenet.pt [MODEL.pt …] [--samples 10000] [--spoil 1.5]

Each model file has calibration.npz and eval.npz beside it. Every row is a static INT8 model judged against the torch
original on the same samples: its task metric with the drop's 95% interval, its agreement or cosine with the original,
its squared output error, and the seconds that calibration and quantization took. The last line of stdout is one JSON
object.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any, cast

import numpy as np
from rich.console import Console
from rich.table import Table

import compress
from compress.data.dataset import Dataset
from compress.evaluate.judge import Judge, spread
from compress.evaluate.metric_choice import find_metric
from compress.evaluate.metrics import METRICS
from compress.model import Model, OnnxModel
from compress.onnx_export.fold import FoldOnnx
from compress.onnx_export.from_torch import OnnxFromTorch
from compress.quantize.graph import Graph
from compress.quantize.histogram import METHODS
from compress.quantize.quantize_onnx import QuantizeOnnx
from compress.quantize.scale_links import divide_producer, find_links, multiply_consumers
from compress.quantize.smooth_onnx import SmoothOnnx
from compress.runtime.backends import open_model
from compress.runtime.machine import environment
from compress.runtime.measure import cores
from compress.stage import Stage


def chains(data: Dataset) -> dict[str, list[Stage]]:
    """What is tried: the stages after the export, by name."""

    found: dict[str, list[Stage]] = {"FP32": []}
    found |= {f"INT8, {method}": [QuantizeOnnx("static", data, method)] for method in METHODS}
    for method in ("minmax", "mse"):
        for alpha in (0.25, 0.5, 0.75):
            found[f"smooth {alpha:g}, {method}"] = [SmoothOnnx(data, alpha), QuantizeOnnx("static", data, method)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--samples", type=int, default=10_000, help="of the evaluation data, spread over it")
    parser.add_argument("--spoil", type=float, default=1.5, help="once more with channels scaled by exp(normal · this)")
    parser.add_argument("--only", default="", help="rows whose name holds this")
    arguments = parser.parse_args()
    figures = {}
    for path in arguments.models:
        for sigma in sorted({0.0, arguments.spoil}):
            title = f"{path}, channels scaled badly" if sigma else str(path)
            figures[title] = rows = measure(path, arguments.samples, sigma, arguments.only)
            show(title, rows)
    print(
        json.dumps({"benchmark": "quantization_methods", "environment": environment(cores()), "models": figures}),
    )


def measure(path: Path, samples: int, spoil: float, only: str) -> dict[str, dict[str, Any]]:
    """A row for each chain of stages."""
    original = compress.load(path)
    calibration = Dataset.open(str(path.with_name("calibration.npz")), original.signature)
    data = spread(Dataset.open(str(path.with_name("eval.npz")), original.signature), samples)
    task = find_metric(None, data, original.signature)
    likeness = METRICS["agreement" if task.name in ("top1", "agreement") else "cosine"]
    backend = open_model(original, threads=cores())
    judge, like = Judge(backend, data, task), Judge(backend, data, likeness)
    rows: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        start = run([OnnxFromTorch(), FoldOnnx()], original, folder / "float")
        if spoil:
            start = spoilt(start, folder / "spoilt.onnx", spoil)
        for number, (title, stages) in enumerate(chains(calibration).items()):
            if only not in title and title != "FP32":
                continue
            begun = time.perf_counter()
            model = open_model(run(stages, start, folder / str(number)), threads=cores())
            seconds = time.perf_counter() - begun
            drop = judge.drop(model)
            rows[title] = {
                task.name: drop.after,
                "drop_points": drop.points,
                "drop_low": drop.low,
                "drop_high": drop.high,
                likeness.name: like.drop(model).after,
                "squared_error": judge.squared_error(model),
                "seconds": seconds,
            }
            print(f"{title:42}", *(f"{v:.5f}" for v in rows[title].values() if v is not None), flush=True)
    return rows


def run(stages: list[Stage], model: Model, folder: Path) -> OnnxModel:
    """The stages one after the other, each in a folder of its own."""
    for number, stage in enumerate(stages):
        place = folder / str(number)
        place.mkdir(parents=True)
        model = stage.run(model, place, lambda *_: None).model
    return cast(OnnxModel, model)


def spoilt(model: OnnxModel, path: Path, sigma: float) -> OnnxModel:
    """The same function with badly scaled channels, wherever a scale cancels out between layers."""
    graph, rng = Graph(model.path), np.random.default_rng(0)
    for link in find_links(graph):
        if not link.clips:
            scale = np.exp(rng.normal(0, sigma, link.channels)).astype(np.float32)
            divide_producer(graph, link, scale)
            multiply_consumers(graph, link, scale)
    graph.save(path)
    return OnnxModel(path, model.signature)


def show(title: str, rows: dict[str, dict[str, Any]]) -> None:
    names = list(next(iter(rows.values())))
    table = Table(title=title, title_justify="left")
    table.add_column("method")
    for name in names:
        table.add_column(name, justify="right")
    for method, row in rows.items():
        table.add_row(method, *("–" if row[name] is None else f"{row[name]:.4f}" for name in names))
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
