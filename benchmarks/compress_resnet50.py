"""What pruning and INT8 gain in speed on a ResNet-50 at 224², against torch and FP32 ONNX.

    python benchmarks/compress_resnet50.py [--prune 0.74] [--rounds 3]

Untrained weights: speed and size only, no accuracy is claimed. Batches 1 and 8, one thread, all models interleaved in
one run; medians over the rounds. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional as F

import compress
from compress import ExportOptions
from compress.model import OnnxModel, TorchModel, sample_inputs
from compress.report.progress import Terminal
from compress.runtime.backends import Backend, OnnxBackend, TorchBackend
from compress.runtime.machine import environment
from compress.runtime.measure import latency

EAGER, COMPILED, FLOAT = "torch eager", "torch.compile", "ONNX Runtime FP32"


class Bottleneck(nn.Module):
    """1 by 1, 3 by 3 with the stride, 1 by 1 (He et al., 2016, figure 5; the stride as in version 1.5)."""

    def __init__(self, ins: int, width: int, stride: int) -> None:
        super().__init__()
        outs = 4 * width
        self.a, self.b, self.c = (
            nn.Conv2d(ins, width, 1, bias=False),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.Conv2d(width, outs, 1, bias=False),
        )
        self.na, self.nb, self.nc = nn.BatchNorm2d(width), nn.BatchNorm2d(width), nn.BatchNorm2d(outs)
        self.short = (
            nn.Identity()
            if ins == outs
            else nn.Sequential(nn.Conv2d(ins, outs, 1, stride, bias=False), nn.BatchNorm2d(outs))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.nb(self.b(F.relu(self.na(self.a(x))))))
        return F.relu(self.nc(self.c(y)) + self.short(x))


def resnet50() -> nn.Module:
    """25.6 M weights, 4.1 G multiply-accumulates; its running statistics are those of a few random images."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
    ]
    ins = 64
    for width, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for index in range(count):
            layers.append(Bottleneck(ins, width, stride if index == 0 else 1))
            ins = 4 * width
    module = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))
    with torch.no_grad():
        for _ in range(4):
            module(torch.randn(4, 3, 224, 224))
    return module.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prune", type=float, default=0.74)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        compress.save(resnet50(), folder / "model.pt", inputs="image:float32[batch,3,224,224]", outputs=["logits"])
        np.savez(folder / "c.npz", image=np.random.default_rng(0).standard_normal((16, 3, 224, 224)).astype(np.float32))
        original = compress.load(folder / "model.pt")
        static = {"int8": "static", "calibration": "c.npz"}
        pruned = f"pruned {arguments.prune:.0%}"
        kinds: dict[str, dict[str, Any]] = {
            FLOAT: {},
            "INT8": static,
            pruned: {"prune": arguments.prune},
            f"{pruned} + INT8": static | {"prune": arguments.prune},
        }
        compiled = cast(nn.Module, torch.compile(original.module))
        models: dict[str, Backend] = {
            EAGER: TorchBackend(original, 1),
            COMPILED: TorchBackend(TorchModel(compiled, original.signature), 1),
        }
        sizes, seconds = {}, {}
        for number, (kind, options) in enumerate(kinds.items()):
            asked = ExportOptions(output=folder / str(number), work=folder / "work", **options)
            with Terminal(Console(stderr=True)) as terminal:
                artifact, report = compress.export(folder / "model.pt", asked, watcher=terminal)
            models[kind] = OnnxBackend(OnnxModel(artifact.model_path, original.signature), 1)
            sizes[kind] = artifact.model_path.stat().st_size
            seconds[kind] = sum(row.seconds for row in report.stages)
        figures = measured(models, original, sizes, seconds, arguments.rounds)
    show(figures)
    head = {"benchmark": "compress_resnet50", "weights": "untrained", "prune": arguments.prune}
    print(json.dumps(head | {"rounds": arguments.rounds, "environment": environment(1), "models": figures}))


def measured(
    models: dict[str, Backend], original: TorchModel, sizes: dict[str, int], seconds: dict[str, float], rounds: int
) -> dict[str, dict[str, Any]]:
    figures: dict[str, dict[str, Any]] = {
        name: {"size_bytes": sizes.get(name), "seconds": seconds.get(name)} for name in models
    }
    for batch in (1, 8):
        inputs = sample_inputs(original.signature, batch)
        runs = [latency(models, inputs, rounds=4, block_seconds=0.5) for _ in range(rounds)]
        p50 = {name: statistics.median(run[name].p50_ms for run in runs) for name in models}
        for name in models:
            figures[name][f"batch_{batch}"] = {
                "p50_ms": p50[name],
                "faster_than_torch_eager": p50[EAGER] / p50[name],
                "faster_than_fp32_onnx": p50[FLOAT] / p50[name],
            }
    return figures


def show(figures: dict[str, dict[str, Any]]) -> None:
    table = Table(title="ResNet-50 at 224², untrained: speed and size only; one thread", title_justify="left")
    for column in (
        "model",
        "size",
        "batch 1",
        "over eager",
        "over FP32 ONNX",
        "batch 8",
        "over eager",
        "over FP32 ONNX",
    ):
        table.add_column(column, justify="left" if column == "model" else "right", no_wrap=True)
    for name, row in figures.items():
        cells = [name, "" if row["size_bytes"] is None else f"{row['size_bytes'] / 1e6:.1f} MB"]
        for batch in ("batch_1", "batch_8"):
            found = row[batch]
            cells += [f"{found['p50_ms']:.2f} ms", f"{found['faster_than_torch_eager']:.1f}×"]
            cells.append(f"{found['faster_than_fp32_onnx']:.2f}×")
        table.add_row(*cells)
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
