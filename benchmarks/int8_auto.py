"""What `--int8 auto` chooses, beside float and INT8 for the whole model: single calls in turns, batch 1, one thread.

    python benchmarks/int8_auto.py [MODEL.pt …]

Each model file has calibration.npz beside it; without one, INT8 is dynamic. Two networks with random weights come
first: their speed is that of trained ones. The three files of a network are measured once more after the choice, by
themselves; intervals are at 95%, over rounds. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import compress
from compress.data.dataset import Dataset
from compress.model import sample_inputs
from compress.onnx_export.fold import FoldOnnx
from compress.onnx_export.from_torch import OnnxFromTorch
from compress.quantize.quantize_faster import QuantizeFaster
from compress.quantize.quantize_onnx import QuantizeOnnx
from compress.runtime.backends import open_model
from compress.runtime.latency import latency, ratio
from compress.runtime.machine import environment, int8_saturates

THREADS = 1
SAMPLES = 64


class Gated(nn.Module):
    """An inverted residual with a gate for each channel and SiLU, as in EfficientNet (Tan and Le, 2019)."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.expand = nn.Sequential(nn.Conv2d(width, hidden, 1, bias=False), nn.BatchNorm2d(hidden), nn.SiLU())
        self.depthwise = nn.Sequential(
            nn.Conv2d(hidden, hidden, 5, padding=2, groups=hidden, bias=False), nn.BatchNorm2d(hidden), nn.SiLU()
        )
        self.gate = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(hidden, width, 1), nn.SiLU(), nn.Conv2d(width, hidden, 1), nn.Sigmoid()
        )
        self.project = nn.Sequential(nn.Conv2d(hidden, width, 1, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.depthwise(self.expand(x))
        projected: torch.Tensor = self.project(hidden * self.gate(hidden))
        return x + projected


def efficient(width: int = 24, blocks: int = 6) -> nn.Module:
    body = [Gated(width, 4 * width) for _ in range(blocks)]
    return nn.Sequential(
        nn.Conv2d(3, width, 3, stride=2, padding=1), nn.BatchNorm2d(width), nn.SiLU(), *body,
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10),
    )  # fmt: skip


def perceptron() -> nn.Module:
    """Too small for INT8 to pay."""
    return nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 4))


MADE = {"efficient": (efficient, "x:float32[batch,3,96,96]"), "perceptron": (perceptron, "x:float32[batch,16]")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", type=Path)
    arguments = parser.parse_args()
    console = Console(stderr=True)
    table = Table(title="times as fast as in float")
    for column in ("network", "float", "all in INT8", "--int8 auto", "nodes in float", "what it says"):
        table.add_column(column, justify="left" if column in ("network", "what it says") else "right")
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        paths = [_made(name, Path(folder)) for name in MADE]
        for path in (*paths, *arguments.models):
            with console.status(path.stem):
                figures[path.stem] = found = measured(path)
            table.add_row(
                path.stem, f"{found['float_ms']:.3f} ms", _times(found["all"]), _times(found["auto"]),
                f"{found['left']} of {found['nodes']}", found["did"],
            )  # fmt: skip
    Console(width=160).print(table)
    print(json.dumps({"environment": environment(THREADS), "networks": figures}))


def _made(name: str, folder: Path) -> Path:
    torch.manual_seed(0)
    make, inputs = MADE[name]
    path = folder / name / f"{name}.pt"
    path.parent.mkdir()
    compress.save(make().eval(), path, inputs=inputs)
    shape = [int(size) for size in inputs.partition("[")[2].rstrip("]").split(",")[1:]]
    x = np.random.default_rng(0).normal(size=(SAMPLES, *shape)).astype(np.float32)
    np.savez(path.parent / "calibration.npz", x=x)
    return path


def measured(path: Path) -> dict[str, Any]:
    model = compress.load(path)
    data = path.parent / "calibration.npz"
    calibration = Dataset.open(str(data), model.signature) if data.exists() else None
    mode = "dynamic" if calibration is None else "static"
    quantize = QuantizeOnnx(mode, calibration, reduce_range=int8_saturates())  # type: ignore[arg-type]
    with tempfile.TemporaryDirectory() as name:
        folders = [Path(name) / each for each in ("export", "fold", "all", "auto")]
        for each in folders:
            each.mkdir()
        given: Any = OnnxFromTorch(calibration).run(model, folders[0], _quiet).model
        floats: Any = FoldOnnx().run(given, folders[1], _quiet).model
        whole = quantize.run(floats, folders[2], _quiet).model
        auto = QuantizeFaster(quantize, THREADS).run(floats, folders[3], _quiet)
        rows: dict[str, Any] = {"float": floats, "all": whole, "auto": auto.model}
        opened = {row: open_model(each, threads=THREADS) for row, each in rows.items()}
        found = latency(opened, sample_inputs(model.signature, 1), references=["float"])
    gains = {}
    for row in ("all", "auto"):
        gain = ratio(found["float"].rounds_ms, found[row].rounds_ms)
        gains[row] = None if gain is None else (gain.value, gain.low, gain.high)
    left = auto.details["left_in_float"]
    return {
        "float_ms": found["float"].p50_ms, **gains, "mode": mode, "left": len(left), "left_in_float": left,
        "nodes": auto.details["units"], "mixtures": auto.details["mixtures"], "did": auto.did.partition(";")[0],
    }  # fmt: skip


def _times(gain: tuple[float, float | None, float | None] | None) -> str:
    if gain is None or gain[1] is None:
        return "?"
    return f"{gain[0]:.2f} ({gain[1]:.2f} to {gain[2]:.2f})"


def _quiet(_done: int, _total: int, _note: str) -> None:
    pass


if __name__ == "__main__":
    main()
