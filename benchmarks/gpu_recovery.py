"""How long a pruned network takes to come back on a GPU, and what each ingredient of the training gives there.

    python benchmarks/gpu_recovery.py [--prune 0.72] [--epochs 5] [--rounds 3] [--target 0.93] [--result FILE]

The ResNet of examples/fashion_mnist loses 73% of its multiply-accumulates, and is trained on the original's answers and
the labels by what `compress finetune` runs, batches of 128: its defaults, then these with one thing changed. Beside
them a plain loop (float32, Adam at a constant rate of 1e-3, labels alone, batches of 128 from a DataLoader), which is
looked at every eighth of an epoch, the looks not counted, and ends at the target. Seconds are of whole trainings, the
original's answers and what is kept for going on included, each after a warm-up; all ways take turns, medians over the
rounds, each with another seed. Accuracy is over all 10,000 test images. What one step's time goes into is from a
training apart. The last line of stdout is one JSON object. Runs on a CPU, too, where there is no GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from train_common import FOLDER, Clock, Reached, accuracy, loaded, open_data, original_and_pruned, plain_loop, test_data

from compress.formats.checkpoint import write
from compress.model import TorchModel
from compress.options.training import TrainingOptions
from compress.runtime.device import described
from compress.runtime.machine import environment
from compress.runtime.measure import cores, torch_macs
from compress.training.finetune import Finetune

PLAIN, DEFAULTS, SIZE = "plain loop", "defaults", 128
MOST = 24  # epochs of the plain loop
WAYS: dict[str, dict[str, Any]] = {
    DEFAULTS: {},
    "in float32": {"train_precision": "32"},
    **({"in float16, loss scaled": {"train_precision": "16-mixed"}} if torch.cuda.is_available() else {}),
    "not channels-last": {"channels_last": False},
    "torch.compile": {"compile": "on"},
    "samples fetched by the training itself": {"loader_workers": 0},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prune", type=float, default=0.72)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--target", type=float, default=0.93)
    parser.add_argument("--result", type=Path, help="a JSON file for the figures")
    asked = parser.parse_args()
    original, pruned, _ = original_and_pruned(asked.prune)
    write(pruned, FOLDER / "pruned.pt")
    bench = Bench(asked.epochs, asked.target)
    runs: dict[str, list[dict[str, Any]]] = {PLAIN: [], **{name: [] for name in WAYS}}
    bench.warm_up()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    told: dict[str, Any] = {
        "benchmark": "gpu_recovery",
        "environment": {**environment(cores()), **described(device)},
        "epochs": asked.epochs,
        "target": asked.target,
        "macs_removed": 1 - _macs(pruned) / _macs(original),
        "accuracy": {"original": bench.judged(original), "pruned": bench.judged(pruned)},
        "runs": runs,
        "profile": bench.profile(),
    }
    for seed in range(asked.rounds):
        for name, found in runs.items():
            found.append(bench.plain(seed) if name == PLAIN else bench.recovered(WAYS[name], seed))
            print(f"round {seed + 1}, {name}: {found[-1]}", file=sys.stderr, flush=True)
            if asked.result is not None:  # an interruption loses one training
                asked.result.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
    show(runs, told["accuracy"])
    print(json.dumps(told))


def _macs(model: TorchModel) -> int:
    return torch_macs(model.module, model.signature)


class Bench:
    """The data, and the kinds of trainings."""

    def __init__(self, epochs: int, target: float) -> None:
        self.epochs, self.target = epochs, target
        self.data, _ = open_data()
        self.teacher = loaded(FOLDER / "resnet.pt")
        self.images, self.labels = test_data()

    def judged(self, model: TorchModel) -> float:
        return accuracy(model.module, self.images, self.labels)

    def warm_up(self) -> None:
        """What the first training of a process pays for once: CUDA's start, its libraries' choice of kernels."""
        few = self.data.part(np.arange(8 * SIZE))
        for options in WAYS.values():
            self._stage(few, options, 0, epochs=2)

    def recovered(self, options: dict[str, Any], seed: int) -> dict[str, Any]:
        """A whole recovery."""
        begun = time.perf_counter()
        given = self._stage(self.data, options, seed, epochs=self.epochs)
        seconds = time.perf_counter() - begun
        details = given.details
        return {
            "seconds": seconds,
            "accuracy": self.judged(given.model),
            "steps": details["steps"],
            "precision": details["precision"],
            "answers_seconds": details.get("answers_seconds"),
            "training_seconds": details.get("seconds"),
            "peak_device_bytes": details.get("peak_device_bytes"),
        }

    def profile(self) -> Any:
        """Where the time of some steps goes."""
        few = self.data.part(np.arange(64 * SIZE))
        return self._stage(few, {"profile": True}, 0, epochs=2).details.get("profile")

    def _stage(self, data: Any, options: dict[str, Any], seed: int, *, epochs: int) -> Any:
        stage = Finetune(data, self.teacher, TrainingOptions(epochs=epochs, batch_size=SIZE, **options), seed)
        with tempfile.TemporaryDirectory() as work:
            return stage.run(loaded(FOLDER / "pruned.pt"), Path(work), lambda _d, _t, _n: None)

    def plain(self, seed: int) -> dict[str, Any]:
        """The plain loop, until the target."""
        module = loaded(FOLDER / "pruned.pt").module
        per_epoch = -(-len(self.data) // SIZE)
        steps = plain_loop(self.data, module, seed, SIZE)
        clock = Clock(lambda: accuracy(module, self.images, self.labels), per_epoch // 8, self.target)
        with contextlib.suppress(Reached):
            for _ in itertools.islice(steps, MOST * per_epoch):
                clock.step()
        best = max(value for _, _, value in clock.found)
        return {
            "seconds": clock.seconds, "accuracy": best, "steps": clock.steps, "precision": "32",
            "reached": best >= self.target,
        }  # fmt: skip


def show(runs: dict[str, list[dict[str, Any]]], accuracies: dict[str, float]) -> None:
    """Medians over the rounds."""
    title = f"ResNet on Fashion-MNIST: {accuracies['original']:.2%}, pruned {accuracies['pruned']:.2%}"
    table = Table(title=title, title_justify="left")
    for column in ("training", "steps", "seconds", "ms a step", "accuracy, least and most", "plain loop takes"):
        table.add_column(column, justify="left" if column == "training" else "right", no_wrap=True)
    plain = statistics.median(run["seconds"] for run in runs[PLAIN])
    for name, found in runs.items():
        seconds, steps = (statistics.median(run[key] for run in found) for key in ("seconds", "steps"))
        values = [run["accuracy"] for run in found]
        table.add_row(
            name, f"{steps:.0f}", f"{seconds:.1f}", f"{1e3 * seconds / steps:.2f}",
            f"{min(values):.2%} {max(values):.2%}", f"{plain / seconds:.2f}×",
        )  # fmt: skip
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
