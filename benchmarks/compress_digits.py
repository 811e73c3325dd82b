"""What `compress export` gains on the digits network, beside what one gets without it, all timed in one run.

    python benchmarks/compress_digits.py [--rounds 5]

The network of examples/digits is trained here. Its peers: torch eager and torch.compile on the original, ONNX Runtime
on the original's ONNX file, and ONNX Runtime's own quantize_static with its defaults and the same calibration data.
Every round times each model once more, interleaved; medians over the rounds. The last line of stdout is one JSON
object.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import onnx
import torch
from onnxruntime.quantization import CalibrationDataReader, quantize_static
from rich.console import Console
from rich.table import Table

import compress
from compress import ExportOptions
from compress.data.dataset import Dataset
from compress.evaluate.compare import compare
from compress.model import Arrays, OnnxModel, TorchModel
from compress.runtime.backends import Backend, OnnxBackend, TorchBackend
from compress.runtime.machine import environment
from compress.runtime.measure import latency

ROOT = Path(__file__).parents[1]
EAGER, COMPILED, ORT = "torch eager", "torch.compile", "ONNX Runtime FP32"
PEER, INT8, OURS = "ONNX Runtime quantize_static, defaults", "compress, INT8", "compress, pruned 70% + INT8"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        subprocess.run([sys.executable, ROOT / "examples/digits/train.py", folder], check=True, stdout=sys.stderr)
        figures = measure(folder, rounds)
    show(figures)
    print(
        json.dumps({"benchmark": "compress_digits", "rounds": rounds, "environment": environment(1), "models": figures})
    )


def measure(folder: Path, rounds: int) -> dict[str, dict[str, Any]]:
    """Size, accuracy and latency of every model, and its ratios to torch eager and to FP32 ONNX."""
    original = compress.load(folder / "model.pt")
    data = Dataset.open(str(folder / "eval.npz"), original.signature)
    static = {"int8": "static", "calibration": "calibration.npz"}
    exports: dict[str, dict[str, Any]] = {
        ORT: {},
        INT8: static,
        OURS: static | {"prune": 0.7, "finetune": "train.npz"},
    }
    paths: dict[str, Path] = {}
    for number, (name, options) in enumerate(exports.items()):
        output = folder / f"export-{number}"
        artifact, _ = compress.export(folder / "model.pt", ExportOptions(output=output, **options))
        paths[name] = artifact.model_path
    paths[PEER] = folder / "peer.onnx"
    logging.getLogger().setLevel(logging.ERROR)
    quantize_static(paths[ORT], paths[PEER], Reader(Dataset.open(str(folder / "calibration.npz"), original.signature)))
    compiled = cast(torch.nn.Module, torch.compile(original.module))
    models: dict[str, Backend] = {
        EAGER: TorchBackend(original, 1),
        COMPILED: TorchBackend(TorchModel(compiled, original.signature), 1),
    }
    models |= {name: OnnxBackend(OnnxModel(path, original.signature), 1) for name, path in paths.items()}
    compared = compare(EAGER, models, data, batch=50)
    one = data.take(slice(0, 1))[0]
    runs = [latency(models, one) for _ in range(rounds)]
    medians = {name: statistics.median(run[name].p50_ms for run in runs) for name in models}
    float_size = paths[ORT].stat().st_size
    figures: dict[str, dict[str, Any]] = {}
    for name in (EAGER, COMPILED, ORT, PEER, INT8, OURS):
        size = paths[name].stat().st_size if name in paths else None
        figures[name] = {
            "size_bytes": size,
            "smaller_than_fp32_onnx": size and float_size / size,
            "accuracy": compared[name].accuracy,
            "agreement": compared[name].agreement,
            "latency_p50_ms": medians[name],
            "faster_than_torch_eager": medians[EAGER] / medians[name],
            "faster_than_fp32_onnx": medians[ORT] / medians[name],
            "int8_layers": int8_layers(paths[name]) if name in paths else 0,
        }
    return figures


class Reader(CalibrationDataReader):  # type: ignore[misc]
    """The calibration data, one sample at a time, as the library's own examples read it."""

    def __init__(self, data: Dataset) -> None:
        self._batches: Iterator[tuple[Arrays, Any]] = data.batches(1)

    def get_next(self) -> Arrays | None:
        batch = next(self._batches, None)
        return None if batch is None else batch[0]


def int8_layers(path: Path) -> int:
    graph = onnx.load(path).graph
    dequantized = {node.output[0] for node in graph.node if node.op_type == "DequantizeLinear"}
    return sum(node.op_type in ("Conv", "Gemm", "MatMul") and node.input[1] in dequantized for node in graph.node)


def show(figures: dict[str, dict[str, Any]]) -> None:
    table = Table(title="digits network, batch 1, one thread", title_justify="left")
    for column in ("model", "size", "accuracy", "p50", "over eager", "over FP32 ONNX"):
        table.add_column(column, justify="left" if column == "model" else "right", no_wrap=True)
    for name, row in figures.items():
        size = "–" if row["size_bytes"] is None else f"{row['size_bytes'] / 1e6:.2f} MB"
        table.add_row(
            name, size, f"{row['accuracy']:.2%}", f"{row['latency_p50_ms']:.3f} ms",
            f"{row['faster_than_torch_eager']:.1f}×", f"{row['faster_than_fp32_onnx']:.2f}×",
        )  # fmt: skip
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
