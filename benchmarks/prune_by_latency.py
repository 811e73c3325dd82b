"""Pruning to a share of the latency by tables, beside pruning by MACs: at the same latency, and at the same MACs.

    python benchmarks/prune_by_latency.py [--networks residual mobile wide] [--runtimes onnxruntime openvino]
        [--precisions fp32 int8] [--fractions 0.5 0.7] [--seeds 1]

Small networks, trained here on the 8 x 8 digits of scikit-learn drawn at 32 x 32 (some minutes); 512 of the training
images calibrate, and the others' 597 are the test. Both ways choose channels by obs and are repaired, none is trained
again. `latency` goes to the fraction of the latency; `macs, same time` is the choice by MACs whose finished file is as
fast, by bisection with measurements; `macs, same MACs` has the MACs of `latency`. All files of a setting take turns in
the end. `error` is the squared difference of the logits to the original's, as a share of their spread: of so easy
a task it tells more than the accuracy does. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional as F

from compress.artifact import Runtime
from compress.data.dataset import Dataset
from compress.errors import StageError
from compress.model import OnnxModel, TorchModel, infer_signature, sample_inputs
from compress.onnx_export.fold import FoldOnnx
from compress.onnx_export.from_torch import OnnxFromTorch
from compress.prune.finished import finished
from compress.prune.latency.by_latency import ByLatency
from compress.prune.latency.tables import Clocked
from compress.prune.prune_channels import PruneChannels
from compress.prune.repair_channels import RepairChannels
from compress.quantize.quantize_onnx import QuantizeOnnx
from compress.runtime.backends import open_model
from compress.runtime.latency import FEWEST, latency, ratio
from compress.runtime.machine import environment, int8_saturates
from compress.signature import TensorSpec
from compress.stage import Stage

SIZE, CALIBRATION, TEST = 32, 512, 597
STEPS = 5  # of the bisection for the same time


def conv(i: int, o: int, kernel: int = 3, stride: int = 1, groups: int = 1) -> nn.Sequential:
    layer = nn.Conv2d(i, o, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(o), nn.ReLU())


class Block(nn.Module):
    """Two convolutions around a sum."""

    def __init__(self, width: int, inner: int, kernel: int = 3) -> None:
        super().__init__()
        self.a, self.b = conv(width, inner, kernel), conv(inner, width, kernel)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.b(self.a(x))  # type: ignore[no-any-return]


class Inverted(nn.Module):
    """As in MobileNetV2."""

    def __init__(self, width: int) -> None:
        super().__init__()
        wide = 4 * width
        self.all = nn.Sequential(conv(width, wide, 1), conv(wide, wide, 3, groups=wide), conv(wide, width, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.all(x)  # type: ignore[no-any-return]


def network(name: str) -> nn.Module:
    """`residual` has most of its work at one size, `wide` few large pixels and many channels, `mobile` is depthwise."""
    kinds: dict[str, list[nn.Module]] = {
        "residual": [
            conv(1, 32, stride=2), Block(32, 32), Block(32, 32), conv(32, 64, stride=2), Block(64, 64),
            conv(64, 128, stride=2), Block(128, 128),
        ],
        "mobile": [
            conv(1, 16, stride=2), Inverted(16), conv(16, 32, 1), Inverted(32), conv(32, 32, 3, 2, 32), conv(32, 64, 1),
            Inverted(64), conv(64, 64, 3, 2, 64), conv(64, 96, 1), Inverted(96),
        ],
        "wide": [
            conv(1, 24), conv(24, 24), conv(24, 96, stride=4), Block(96, 96), conv(96, 256, stride=4),
            Block(256, 512, 1), Block(256, 512, 1),
        ],
    }  # fmt: skip
    last = {"residual": 128, "mobile": 96, "wide": 256}[name]
    return nn.Sequential(*kinds[name], nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(last, 10))


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    from sklearn.datasets import load_digits

    held = load_digits()
    images = torch.from_numpy(held.images).float()[:, None] / 16
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(images)))
    images = F.interpolate(images, (SIZE, SIZE), mode="bilinear")
    return images[order], torch.from_numpy(held.target)[order]


def trained(name: str, seed: int, images: torch.Tensor, labels: torch.Tensor, epochs: int) -> TorchModel:
    torch.manual_seed(seed)
    module = network(name).train()
    optimizer = torch.optim.AdamW(module.parameters(), 2e-3)
    total = epochs * (len(images) // 64)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total)
    for _ in range(epochs):
        for batch in torch.randperm(len(images))[: len(images) // 64 * 64].view(-1, 64):
            shift = torch.randint(-3, 4, (2,)).tolist()
            given = torch.roll(images[batch], shift, (2, 3))
            loss = F.cross_entropy(module(given), labels[batch], label_smoothing=0.05)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
    module.eval()
    spec = TensorSpec.parse(f"image:float32[batch,1,{SIZE},{SIZE}]")
    return TorchModel(module, infer_signature(module, (spec,), ("logits",)))


class Setting:
    """A network on a runtime in a precision."""

    def __init__(self, model: TorchModel, data: Dataset, runtime: Runtime, precision: str, folder: Path) -> None:
        self.model, self.data, self.runtime, self.folder = model, data, runtime, folder
        quantize = QuantizeOnnx("static", data, reduce_range=int8_saturates()) if precision == "int8" else None
        more: tuple[Stage, ...] = () if quantize is None else (quantize,)
        tail: tuple[Stage, ...] = (OnnxFromTorch(data), FoldOnnx(unfuse=True), *more)
        self.by = ByLatency(Clocked(runtime, 1, quantize), tail)
        self.count = 0
        self.inputs = sample_inputs(model.signature, 1)

    def finished(self, model: TorchModel) -> OnnxModel:
        self.count += 1
        folder = self.folder / str(self.count)
        folder.mkdir(parents=True)
        return dataclasses.replace(finished(model, self.by.tail, folder), runtime=self.runtime)

    def turns(self, models: dict[str, OnnxModel], **options: Any) -> Any:
        return latency({name: open_model(each, threads=1) for name, each in models.items()}, self.inputs, **options)

    def faster(self, reference: OnnxModel, other: OnnxModel) -> float:
        """How many times as fast the other is."""
        turns = self.turns({"reference": reference, "other": other}, rounds=FEWEST)
        found = ratio(turns["reference"].rounds_ms, turns["other"].rounds_ms)
        assert found is not None  # noqa: S101
        return found.value

    def repaired(self, model: TorchModel) -> TorchModel:
        return cast(TorchModel, RepairChannels(self.data).run(model, self.folder, quiet).model)


def rows_of(setting: Setting, fraction: float, images: np.ndarray, labels: np.ndarray) -> dict[str, Any]:
    """Accuracy without training, MACs and milliseconds of each way."""
    begun = time.perf_counter()
    prune = PruneChannels(fraction, "obs", calibration=setting.data, latency=setting.by)
    given = prune.run(setting.model, setting.folder, quiet)
    seconds = time.perf_counter() - begun
    chosen = cast(TorchModel, given.model)
    plain = dataclasses.replace(prune, latency=None)
    prepared = plain.prepare(setting.model, quiet, setting.folder)
    files = {"unpruned": setting.finished(setting.model), "latency": setting.finished(setting.repaired(chosen))}
    macs = {"unpruned": 0.0, "latency": given.details["macs_removed"]}

    def cut(share: float) -> tuple[TorchModel, float] | None:
        try:
            found = dataclasses.replace(plain, fraction=share).cut(prepared, quiet, prove=False)
        except StageError:
            return None
        return cast(TorchModel, found.model), found.details["macs_removed"]

    low, high = 0.02, 0.97
    nearest: tuple[float, TorchModel, float] | None = None
    for _ in range(STEPS):
        middle = (low + high) / 2
        tried = cut(middle)
        if tried is None:
            high = middle
            continue
        speed = setting.faster(files["latency"], setting.finished(tried[0]))
        if nearest is None or abs(speed - 1) < nearest[0]:
            nearest = (abs(speed - 1), *tried)
        low, high = (middle, high) if speed < 1 else (low, middle)
    alike = {"macs, same time": None if nearest is None else nearest[1:], "macs, same MACs": cut(macs["latency"])}
    for name, other in alike.items():
        if other is not None:
            files[name], macs[name] = setting.finished(setting.repaired(other[0])), other[1]
    turns = setting.turns(files, references=("unpruned", "latency"))
    rows = {}
    answers = {
        name: next(iter(open_model(file, threads=1).infer({"image": images}).values())) for name, file in files.items()
    }
    first = answers["unpruned"]
    spread = float(np.square(first - first.mean(0)).sum())
    for name in files:
        over = ratio(turns["unpruned"].rounds_ms, turns[name].rounds_ms)
        rows[name] = {
            "accuracy": float((answers[name].argmax(1) == labels).mean()),
            "error": float(np.square(answers[name] - first).sum()) / spread,
            "macs_removed": macs[name], "p50_ms": turns[name].p50_ms,
            "times_as_fast": None if over is None else [over.value, over.low, over.high],
        }  # fmt: skip
    told = given.details["by_latency"]
    kept = {name: told.get(name) for name in ("off", "tried", "over_macs", "over_macs_low", "over_macs_high", "shapes")}
    return {"fraction": fraction, "seconds": seconds, "rows": rows, "table": {**kept, "seconds": told["table_seconds"]}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=["residual", "mobile", "wide"])
    parser.add_argument("--runtimes", nargs="+", default=["onnxruntime", "openvino"])
    parser.add_argument("--precisions", nargs="+", default=["fp32", "int8"])
    parser.add_argument("--fractions", type=float, nargs="+", default=[0.5, 0.7])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=12)
    arguments = parser.parse_args()
    os.environ.setdefault("COMPRESS_MEASURE_SECONDS", "5")
    images, labels = digits()
    figures: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as held:
        for name in arguments.networks:
            for seed in range(arguments.seeds):
                model = trained(name, seed, images[:-TEST], labels[:-TEST], arguments.epochs)
                data = Dataset("", {"image": images[:CALIBRATION].numpy()}, None, f"digits {SIZE}")
                for runtime in arguments.runtimes:
                    for precision in arguments.precisions:
                        folder = Path(held) / f"{name}-{seed}-{runtime}-{precision}"
                        folder.mkdir()
                        setting = Setting(model, data, runtime, precision, folder)
                        for fraction in arguments.fractions:
                            own = {"network": name, "seed": seed, "runtime": runtime, "precision": precision}
                            try:
                                found = rows_of(setting, fraction, images[-TEST:].numpy(), labels[-TEST:].numpy())
                            except StageError as err:  # so much can't go
                                print(f"{own}: {err.what}, {err.why}", file=sys.stderr)
                                continue
                            figures.append(own | found)
                            print(json.dumps(figures[-1]), file=sys.stderr, flush=True)
    show(figures)
    print(json.dumps({"benchmark": "prune_by_latency", "environment": environment(1), "figures": figures}))


def show(figures: list[dict[str, Any]]) -> None:
    """Means over the seeds."""
    table = Table(title=f"{TEST} test images, no training after pruning", title_justify="left")
    for column in ("network", "on", "asked", "way", "MACs", "p50", "times as fast", "accuracy", "error"):
        table.add_column(column, justify="left" if column in ("network", "on", "way") else "right", no_wrap=True)
    settings = {(f["network"], f["runtime"], f["precision"], f["fraction"]): None for f in figures}
    for key in settings:
        alike = [f for f in figures if (f["network"], f["runtime"], f["precision"], f["fraction"]) == key]
        for way in alike[0]["rows"]:
            rows = [each["rows"][way] for each in alike if way in each["rows"]]
            mean = {
                name: statistics.mean(row[name] for row in rows)
                for name in ("accuracy", "error", "macs_removed", "p50_ms")
            }
            speeds = [row["times_as_fast"][0] for row in rows if row["times_as_fast"]]
            table.add_row(
                key[0], f"{key[1]} {key[2]}", f"-{key[3]:.0%}", way, f"-{mean['macs_removed']:.0%}",
                f"{mean['p50_ms']:.3f} ms", f"{statistics.mean(speeds):.2f}" if speeds else "–",
                f"{mean['accuracy']:.1%}", f"{mean['error']:.4f}",
            )  # fmt: skip
    Console(width=120).print(table)


def quiet(_done: int, _total: int, _note: str) -> None:
    """Shows nothing."""


if __name__ == "__main__":
    main()
