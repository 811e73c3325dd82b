"""Peak memory of calibrating INT8 ranges against the number of samples, beside ONNX Runtime's own calibrators.

    python benchmarks/calibration_memory.py [--samples 16,64,256]

A small CNN on 64x64 images (random weights: memory does not depend on them), each run in a process of its own. Every
figure is what calibration adds to the process's peak. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import logging
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import torch
from onnxruntime.quantization import CalibrationDataReader
from onnxruntime.quantization.calibrate import CalibrationMethod, create_calibrator
from rich.console import Console
from rich.table import Table
from torch import nn

import compress
from compress import ExportOptions
from compress.data.dataset import Dataset
from compress.quantize.calibrate import calibrate
from compress.runtime.machine import environment

OURS, THEIRS = "compress", "ONNX Runtime"
CASES = [(tool, method) for method in ("minmax", "entropy", "percentile") for tool in (OURS, THEIRS)] + [(OURS, "mse")]
METHODS = {
    "minmax": CalibrationMethod.MinMax,
    "entropy": CalibrationMethod.Entropy,
    "percentile": CalibrationMethod.Percentile,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", default="16,64,256")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)  # TOOL METHOD COUNT FOLDER: the child's work
    arguments = parser.parse_args()
    if arguments.one:
        tool, method, count, folder = arguments.one
        print(json.dumps(child(tool, method, int(count), Path(folder))))
        return
    counts = [int(count) for count in arguments.samples.split(",")]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        prepare(Path(name), max(counts))
        for tool, method in CASES:
            for count in counts:
                words = [sys.executable, __file__, "--one", tool, method, str(count), name]
                done = subprocess.run(words, capture_output=True, text=True, check=False)
                peak = json.loads(done.stdout.splitlines()[-1])["added_mb"] if done.returncode == 0 else None
                rows.append({"tool": tool, "method": method, "samples": count, "added_mb": peak})
    table = Table(title="memory that calibration adds, MB", title_justify="left")
    for column in ("method", "tool", *(f"{count} samples" for count in counts)):
        table.add_column(column, justify="right", no_wrap=True)
    for tool, method in CASES:
        found = [row["added_mb"] for row in rows if (row["tool"], row["method"]) == (tool, method)]
        table.add_row(method, tool, *("failed" if peak is None else f"{peak:,.0f}" for peak in found))
    Console(width=120).print(table)
    print(json.dumps({"benchmark": "calibration_memory", "environment": environment(1), "rows": rows}))


def prepare(folder: Path, count: int) -> None:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, padding=1), nn.ReLU()]
    for _ in range(4):
        layers += [nn.Conv2d(32, 32, 3, padding=1), nn.ReLU()]
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    compress.save(net, folder / "model.pt", inputs="x:float32[batch,3,64,64]")
    compress.export(folder / "model.pt", ExportOptions(output=folder / "artifact"))
    np.save(folder / "x.npy", np.random.default_rng(0).standard_normal((count, 3, 64, 64), np.float32))


def child(tool: str, method: Any, count: int, folder: Path) -> dict[str, float]:
    artifact = compress.Artifact.load(folder / "artifact")
    data = Dataset.open(str(folder / "x.npy"), artifact.signature)
    inputs, _ = data.take(slice(0, count))
    data = Dataset("", inputs, None, "")
    ort.InferenceSession(str(artifact.model_path)).run(None, data.take(slice(0, 1))[0])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if tool == OURS:
        calibrate(artifact.model_path, data, method, lambda _done, _total, _note: None)
    else:
        logging.getLogger().setLevel(logging.ERROR)
        calibrator = create_calibrator(
            artifact.model_path, augmented_model_path=str(folder / "augmented.onnx"), calibrate_method=METHODS[method]
        )
        calibrator.collect_data(Reader(data))
        calibrator.compute_data()
    return {"added_mb": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024}


class Reader(CalibrationDataReader):  # type: ignore[misc]
    """One sample at a time, as the library's own examples read them."""

    def __init__(self, data: Dataset) -> None:
        self._batches: Iterator[Any] = data.batches(1)

    def get_next(self) -> Any:
        batch = next(self._batches, None)
        return None if batch is None else batch[0]


if __name__ == "__main__":
    main()
