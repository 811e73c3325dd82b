"""What `compress export --dry-run` says that a run will take, beside what it takes.

    python benchmarks/dry_run.py [--only residual transformer perceptron]

Three networks with untrained weights and random data, each with a job of its own; by each, the estimate is made first,
in the same process. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import compress
from compress.jobs.export import Silent
from compress.jobs.plan import estimates
from compress.runtime.machine import environment

CLASSES = 10


class Residual(nn.Module):
    """Two convolutions around which the input goes, too."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.body(x))


def residual() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), Residual(32), nn.MaxPool2d(2), Residual(32), nn.MaxPool2d(2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, CLASSES),
    )  # fmt: skip


class Layer(nn.Module):
    """Attention and a perceptron, each with what came in added."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            layer(x).view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, width)
        x = self.first(x + self.out(mixed))
        found: torch.Tensor = self.second(x + self.down(nn.functional.gelu(self.up(x))))
        return found


class Transformer(nn.Module):
    """Judges the mean of what its layers make of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Layer(128, 4) for _ in range(3)))
        self.head = nn.Linear(128, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.layers(x).mean(1))
        return found


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, CLASSES))


Job = tuple[Callable[[], nn.Module], tuple[int, ...], int, dict[str, Any]]
JOBS: dict[str, Job] = {
    "residual": (residual, (3, 32, 32), 4000, {"prune": 0.5, "epochs": 4, "int8": "qat", "hold_out": 0.1}),
    "transformer": (Transformer, (32, 128), 3000, {"prune": 0.3, "epochs": 3, "int8": "dynamic", "batches": (1, 8)}),
    "perceptron": (perceptron, (64,), 20_000, {"prune": 0.5, "epochs": 8, "int8": "auto"}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=sorted(JOBS), default=list(JOBS))
    arguments = parser.parse_args()
    found = {}
    for name in arguments.only:
        with Console(stderr=True).status(name), tempfile.TemporaryDirectory() as folder:
            found[name] = timed(JOBS[name], Path(folder))
        Console(width=140).print(table(name, found[name]))
    print(json.dumps({"benchmark": "dry_run", "environment": environment(1), "networks": found}))


def timed(job: Job, folder: Path) -> dict[str, Any]:
    make, shape, samples, asked = job
    torch.manual_seed(0)
    axes = ",".join(map(str, ("batch", *shape)))
    compress.save(make().eval(), folder / "model.pt", inputs=f"x:float32[{axes}]", outputs=["logits"])
    for name, count in (("train", samples), ("eval", samples // 4), ("calibration", 128)):
        rng = np.random.default_rng(count)
        x, label = rng.normal(size=(count, *shape)).astype(np.float32), rng.integers(0, CLASSES, count)
        arrays = {"x": x} if name == "calibration" else {"x": x, "label": label}
        np.savez(folder / f"{name}.npz", **arrays)
    static: dict[str, Any] = {"calibration": str(folder / "calibration.npz")} if asked["int8"] != "dynamic" else {}
    options = compress.ExportOptions(
        output=folder / "out", finetune=str(folder / "train.npz"), eval=str(folder / "eval.npz"), **static, **asked
    )
    begun = time.perf_counter()
    rows, _ = estimates(folder / "model.pt", options, Silent())
    tried = time.perf_counter() - begun
    begun = time.perf_counter()
    _, report = compress.export(folder / "model.pt", options)
    real = time.perf_counter() - begun
    took = [row.seconds for row in report.stages[2:]]
    names = ["load, check", "the original's export", *(row.stage for row in report.stages[2:]), "compare, measure"]
    measured = report.measuring["seconds"]
    stages = {
        name: {"estimate": row.seconds, "real": seconds}
        for name, row, seconds in zip(names, rows, [None, None, *took, measured], strict=True)
    }
    whole = sum(row.seconds or 0.0 for row in rows)
    return {"estimate": whole, "real": real, "ratio": whole / real, "trying": tried, "stages": stages}


def table(name: str, found: Mapping[str, Any]) -> Table:
    told = Table(title=f"{name}: seconds; {found['trying']:.0f} s to find out", title_justify="left")
    for column in ("stage", "estimate", "real", "ratio"):
        told.add_column(column, justify="left" if column == "stage" else "right")
    for stage, each in found["stages"].items():
        real = each["real"]
        ratio = "" if not real or each["estimate"] is None else f"{each['estimate'] / real:.2f}"
        told.add_row(stage, f"{each['estimate']:.1f}", "" if real is None else f"{real:.1f}", ratio)
    told.add_row("all", f"{found['estimate']:.1f}", f"{found['real']:.1f}", f"{found['ratio']:.2f}", style="bold")
    return told


if __name__ == "__main__":
    main()
