"""A search over a training's settings: Optuna's TPE with trials ended early, beside random search, beside no search.

    python benchmarks/tune_training.py [--seeds 5] [--trials 12] [--epochs 4] [--prune 0.95] [--folder F]

The network of examples/digits, pruned by most of its multiply-accumulates, is recovered from its original's answers;
a fifth of the 1,169 training images is held out and chooses, the 500 evaluation images, which no search has seen, judge
the results. For each seed the ways to search take turns, in another order each time, with the same number of trials.
Seconds hang on what else the machine does; epochs that were trained do not. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import compress
from compress.data.dataset import Dataset
from compress.model import TorchModel
from compress.options.training import TrainingOptions
from compress.prune.prune_channels import PruneChannels
from compress.runtime.machine import environment
from compress.training.finetune import Finetune
from compress.training.tune.sampling import BAYESIAN, RANDOM, Method
from compress.training.tune.search import Search

ROOT = Path(__file__).parents[1]
WAYS = {
    "random": RANDOM,
    "random, ended early": dataclasses.replace(RANDOM, pruner=BAYESIAN.pruner),
    "TPE, ended early (--tune-training)": BAYESIAN,
}
QUARTERS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--trials", type=int, default=12)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--prune", type=float, default=0.95)
    parser.add_argument("--folder", type=Path, help="keeps the original, which is trained if it is not there")
    asked = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name:
        folder = asked.folder or Path(name)
        if not (folder / "model.pt").exists():
            script = ROOT / "examples/digits/train.py"
            subprocess.run([sys.executable, script, folder], check=True, stdout=sys.stderr)
        runs = searches(folder, asked)
    rows = [summary(name, runs) for name in WAYS]
    show(rows, runs)
    found = {
        "benchmark": "tune_training",
        "asked": {name: value for name, value in vars(asked).items() if name != "folder"},
        "load_before_and_after": [load, os.getloadavg()[0]],
        "rows": rows,
        "runs": runs,
        "environment": environment(1),
    }
    print(json.dumps(found))


def searches(folder: Path, asked: argparse.Namespace) -> list[dict[str, Any]]:
    """Of each seed, by way, what its trials gave."""
    original = compress.load(folder / "model.pt")
    pruned = cast(TorchModel, PruneChannels(asked.prune).run(original, folder, quiet).model)
    data = Dataset.open(str(folder / "train.npz"), original.signature)
    with np.load(folder / "eval.npz") as held:
        images, labels = torch.from_numpy(held["image"]), held["label"]
    options = TrainingOptions(epochs=asked.epochs, hold_out=0.2, tune_training=asked.trials, train_threads=1)
    runs = []
    for seed in range(asked.seeds):
        stage = Finetune(data, original, options, seed)
        run: dict[str, Any] = {}
        names = list(WAYS)
        for name in names[seed % len(names) :] + names[: seed % len(names)]:
            with tempfile.TemporaryDirectory() as work:
                run[name] = searched(stage, pruned, Path(work), WAYS[name], images, labels)
            print(f"seed {seed}, {name}: {run[name]['best']:.4f} in {run[name]['seconds']:.0f} s", file=sys.stderr)
        alone = dataclasses.replace(stage, training=dataclasses.replace(options, tune_training=None))
        plain = cast(TorchModel, alone.run(pruned, folder, quiet).model)
        run["accuracy_as_asked"] = accuracy(plain.module, images, labels)
        runs.append(run)
    return runs


def searched(
    stage: Finetune, model: TorchModel, work: Path, method: Method, images: torch.Tensor, labels: Any
) -> dict[str, Any]:
    """One search, and what its network gets right of images that it has not seen."""
    begun = time.perf_counter()
    search = Search(stage, model, work, quiet, method)
    found = search.run()
    seconds = time.perf_counter() - begun
    trials: list[dict[str, Any]] = []
    spent = took = 0.0
    for trial in search.trials:
        share = 1.0 if trial.pruned_at is None else trial.pruned_at / QUARTERS
        spent += share * float(trial.settings["epochs"])
        took += trial.seconds
        trials.append(
            {"epochs_so_far": spent, "seconds_so_far": took, "value": trial.value, "settings": trial.settings}
        )
    return {
        "best": max(each["value"] for each in trials if each["value"] is not None),
        "asked": trials[0]["value"],
        "seconds": seconds,
        "epochs": spent,
        "winner_epochs": float(found.options.epochs),
        "accuracy": accuracy(found.module, images, labels),
        "trials": trials,
    }


@torch.no_grad()
def accuracy(module: torch.nn.Module, images: torch.Tensor, labels: Any) -> float:
    """Share of the images [n, 1, 8, 8] that a network gets right."""
    return float((module(images).argmax(1).numpy() == labels).mean())


def summary(name: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the seeds; ratios are to random search of the same seed."""
    mine = [run[name] for run in runs]
    reached = [first_at(run[name], run["random"]["best"]) for run in runs]
    usual = [first_at(run["random"], run["random"]["best"]) for run in runs]
    pairs = [(a, b) for a, b in zip(reached, usual, strict=True) if a is not None and b is not None]
    asked = runs[0]["random"]["trials"][0]["settings"]["epochs"]
    return {
        "way": name,
        "held_out": statistics.median(run["best"] for run in mine),
        "held_out_as_asked": statistics.median(run["asked"] for run in mine),
        "accuracy": [run["accuracy"] for run in mine],
        "seconds_to_random": statistics.median(
            a["seconds"] / r["random"]["seconds"] for a, r in zip(mine, runs, strict=True)
        ),
        "epochs_to_random": statistics.median(
            a["epochs"] / r["random"]["epochs"] for a, r in zip(mine, runs, strict=True)
        ),
        "reached_randoms_best": len(pairs),
        "epochs_to_randoms_best": statistics.median(a[0] / b[0] for a, b in pairs) if pairs else None,
        "seconds_to_randoms_best": statistics.median(a[1] / b[1] for a, b in pairs) if pairs else None,
        "winner_epochs_of_asked": statistics.median(run["winner_epochs"] / asked for run in mine),
    }


def first_at(run: dict[str, Any], target: float) -> tuple[float, float] | None:
    """Epochs and seconds until a trial was as good as a score; None if none was."""
    for each in run["trials"]:
        if each["value"] is not None and each["value"] >= target:
            return each["epochs_so_far"], each["seconds_so_far"]
    return None


def show(rows: list[dict[str, Any]], runs: list[dict[str, Any]]) -> None:
    table = Table(title=f"{len(runs)} seeds, medians; time of the whole search against random's", title_justify="left")
    for column in ("way", "held out", "accuracy, mean", "epochs", "seconds", "reached random's best", "in epochs"):
        table.add_column(column, justify="left" if column == "way" else "right")
    for row in rows:
        table.add_row(
            row["way"], f"{row['held_out']:.2%}", f"{statistics.mean(row['accuracy']):.2%}",
            f"{row['epochs_to_random']:.2f}×", f"{row['seconds_to_random']:.2f}×",
            f"{row['reached_randoms_best']} of {len(runs)}",
            "–" if row["epochs_to_randoms_best"] is None else f"{row['epochs_to_randoms_best']:.2f}×",
        )  # fmt: skip
    first = runs[0]["random"]
    asked = statistics.mean(run["accuracy_as_asked"] for run in runs)
    held = statistics.median(run["random"]["asked"] for run in runs)
    table.add_row(
        "no search: as asked for",
        f"{held:.2%}",
        f"{asked:.2%}",
        f"{first['trials'][0]['settings']['epochs'] / first['epochs']:.2f}×",
    )
    Console(width=140).print(table)


def quiet(_done: int, _total: int, _note: str) -> None:
    """Shows nothing."""


if __name__ == "__main__":
    main()
