"""Accuracy, speed and size of a ResNet on Fashion-MNIST: INT8 alone, and pruned by 30 to 90% of the MACs + INT8.

    python benchmarks/compress_fashion_mnist.py [--epochs 6] [--rounds 5] [--fractions 0.5 0.7] [--work FOLDER]

The network is examples/fashion_mnist's, trained beforehand; its recovery is compress's own. Accuracy is over all 10,000
test images. Every round times each model once more, interleaved; medians over the rounds. Draws
docs/figures/accuracy-against-macs.svg. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

import compress
from compress import ExportOptions
from compress.artifact import StageReport
from compress.model import OnnxModel, sample_inputs
from compress.report.progress import Terminal
from compress.runtime.backends import Backend, OnnxBackend, TorchBackend
from compress.runtime.machine import environment
from compress.runtime.measure import latency

ROOT = Path(__file__).parents[1]
EAGER, FLOAT, INT8 = "torch eager", "ONNX Runtime FP32", "INT8"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--fractions", type=float, nargs="+", default=[0.3, 0.5, 0.7, 0.8, 0.9])
    parser.add_argument("--work", type=Path, default=ROOT / "build/fashion-benchmark")
    arguments = parser.parse_args()
    folder: Path = arguments.work
    train = ROOT / "examples/fashion_mnist/train_fashion.py"
    subprocess.run([sys.executable, train, folder, "--data-only"], check=True, stdout=sys.stderr)
    runs: dict[str, dict[str, Any]] = {FLOAT: {}, INT8: {}}
    runs |= {
        f"−{fraction:.0%} MACs + INT8": {"prune": fraction, "finetune": "train", "epochs": arguments.epochs}
        for fraction in arguments.fractions
    }
    rows: dict[str, tuple[StageReport, ...]] = {}
    paths: dict[str, Path] = {}
    for number, (name, options) in enumerate(runs.items()):
        int8: dict[str, Any] = {} if name == FLOAT else {"int8": "static", "calibration": "calibration.npz"}
        asked = ExportOptions(output=folder / f"export-{number}", eval="eval.npz", batch_size=128, **int8, **options)
        with Terminal(Console(stderr=True)) as terminal:
            artifact, report = compress.export(folder / "resnet.pt", asked, watcher=terminal)
        rows[name], paths[name] = report.stages, artifact.model_path
    figures = measured(folder, rows, paths, arguments.rounds)
    show(figures)
    draw(figures, ROOT / "docs/figures/accuracy-against-macs.svg")
    benchmark = {"benchmark": "compress_fashion_mnist", "epochs": arguments.epochs, "rounds": arguments.rounds}
    print(json.dumps(benchmark | {"environment": environment(1), "models": figures}))


def measured(
    folder: Path, rows: dict[str, tuple[StageReport, ...]], paths: dict[str, Path], rounds: int
) -> dict[str, dict[str, Any]]:
    original = compress.load(folder / "resnet.pt")
    models: dict[str, Backend] = {EAGER: TorchBackend(original, 1)}
    models |= {name: OnnxBackend(OnnxModel(path, original.signature), 1) for name, path in paths.items()}
    inputs = sample_inputs(original.signature, 1)
    runs = [latency(models, inputs) for _ in range(rounds)]
    p50 = {name: statistics.median(run[name].p50_ms for run in runs) for name in models}
    whole = rows[FLOAT][0].measured
    figures: dict[str, dict[str, Any]] = {
        EAGER: {"accuracy": whole.accuracy, "macs": whole.macs, "latency_p50_ms": p50[EAGER]}
    }
    for name, stages in rows.items():
        last = stages[-1].measured
        before = next((row.measured for row in stages if row.stage == "fold_onnx"), last)
        figures[name] = {
            "accuracy": last.accuracy,
            "accuracy_low": last.value_low,
            "accuracy_high": last.value_high,
            "drop_points": last.drop,
            "drop_low": last.drop_low,
            "drop_high": last.drop_high,
            "accuracy_before_int8": before.accuracy,
            "macs": last.macs,
            "size_bytes": last.size_bytes,
            "smaller_than_fp32_onnx": paths[FLOAT].stat().st_size / paths[name].stat().st_size,
            "latency_p50_ms": p50[name],
            "faster_than_torch_eager": p50[EAGER] / p50[name],
            "faster_than_fp32_onnx": p50[FLOAT] / p50[name],
            "seconds": sum(row.seconds for row in stages),
        }
    return figures


def show(figures: dict[str, dict[str, Any]]) -> None:
    table = Table(title="ResNet on Fashion-MNIST, 10,000 test images, batch 1, one thread", title_justify="left")
    for column in ("model", "accuracy", "drop in points (95%)", "size", "p50", "over eager", "over FP32 ONNX"):
        table.add_column(column, justify="left" if column == "model" else "right", no_wrap=True)
    for name, row in figures.items():
        if name == EAGER:
            table.add_row(name, f"{row['accuracy']:.2%}", "", "", f"{row['latency_p50_ms']:.3f} ms", "1.0×", "")
            continue
        table.add_row(
            name, f"{row['accuracy']:.2%}",
            f"{row['drop_points']:+.2f} ({row['drop_low']:+.2f} to {row['drop_high']:+.2f})",
            f"{row['size_bytes'] / 1e6:.3f} MB ({row['smaller_than_fp32_onnx']:.1f}×)",
            f"{row['latency_p50_ms']:.3f} ms",
            f"{row['faster_than_torch_eager']:.1f}×", f"{row['faster_than_fp32_onnx']:.2f}×",
        )  # fmt: skip
    Console(width=140).print(table)


def draw(figures: dict[str, dict[str, Any]], path: Path) -> None:
    """The curve of accuracy against MACs, with 95% intervals."""
    rows = sorted((row for name, row in figures.items() if name not in (EAGER, FLOAT)), key=lambda row: -row["macs"])
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    macs = [row["macs"] / 1e6 for row in rows]
    accuracy = [100 * row["accuracy"] for row in rows]
    ends = ([100 * (row["accuracy"] - row["accuracy_low"]) for row in rows],
            [100 * (row["accuracy_high"] - row["accuracy"]) for row in rows])  # fmt: skip
    axes.axhline(100 * figures[FLOAT]["accuracy"], color="#999999", ls="--", lw=1, label="FP32, unpruned")
    before = [100 * row["accuracy_before_int8"] for row in rows]
    axes.plot(macs, before, color="#3b8bc4", marker="o", ms=4, lw=1, label="pruned and recovered")
    axes.errorbar(macs, accuracy, yerr=ends, color="#2ca25f", marker="s", ms=4, lw=1, capsize=2, label="and INT8")
    for x, y, row in zip(macs, accuracy, rows, strict=True):
        axes.annotate(f"{row['faster_than_torch_eager']:.0f}× eager", (x, y), (6, -12), textcoords="offset points",
                      fontsize=8)  # fmt: skip
    axes.set_xlabel("million multiply-accumulates")
    axes.set_ylabel("accuracy on 10,000 test images, %")
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
