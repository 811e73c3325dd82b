"""How much of the original's training time its pruned network needs to come back.

    python benchmarks/train_recovery.py [--prune 0.72] [--epochs 5]

A ResNet for Fashion-MNIST (examples/fashion_mnist, trained for 24 epochs) loses 73% of its multiply-accumulates (what
rounding to whole channels makes of the 72% asked for), and is trained by `compress finetune` on the original's answers.
What the original's training takes on this machine is measured in the same run: an epoch of it before, and one after the
recovery, times 24. Accuracy is over all 10,000 test images.
The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from typing import Any

from rich.console import Console
from rich.table import Table
from train_common import FOLDER, ROOT, accuracy, loaded, original_and_pruned, test_data

from compress.formats.checkpoint import write
from compress.jobs.recovery import finetune
from compress.options import FinetuneOptions
from compress.report.progress import Terminal
from compress.runtime.machine import environment
from compress.runtime.measure import cores, torch_macs

EPOCHS = 24  # of the original's training


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prune", type=float, default=0.72)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=128)
    arguments = parser.parse_args()
    original, pruned, pruning_seconds = original_and_pruned(arguments.prune)
    write(pruned, FOLDER / "pruned.pt")
    epochs = [epoch_of_the_original()]
    options = FinetuneOptions(
        output=FOLDER / "recovered", data=str(FOLDER / "train"), teacher=FOLDER / "resnet.pt",
        epochs=arguments.epochs, batch_size=arguments.batch_size,
    )  # fmt: skip
    begun = time.perf_counter()
    with Terminal(Console(stderr=True)) as terminal:
        found = finetune(FOLDER / "pruned.pt", options, watcher=terminal)
    seconds = time.perf_counter() - begun
    if found is None:
        raise SystemExit("start it alone")
    epochs.append(epoch_of_the_original())
    models = {"original": original, "pruned": pruned, "recovered": loaded(FOLDER / "recovered/model.pt")}
    judged = {name: accuracy(model.module, *test_data()) for name, model in models.items()}
    whole = EPOCHS * statistics.mean(epochs)
    macs = {
        name: torch_macs(model.module, model.signature) for name, model in (("before", original), ("after", pruned))
    }
    figures: dict[str, Any] = {
        "macs_removed": 1 - macs["after"] / macs["before"],
        "accuracy": judged,
        "drop_points": 100 * (judged["original"] - judged["recovered"]),
        "recovery_seconds": seconds,
        "pruning_seconds": pruning_seconds,
        "answers_seconds": found.details.get("answers_seconds"),
        "original_epoch_seconds": epochs,
        "original_training_seconds": whole,
        "share_of_the_training": (seconds + pruning_seconds) / whole,
        "precision": found.details["precision"],
        "epochs": arguments.epochs,
        "batch_size": arguments.batch_size,
    }
    table = Table(title="ResNet on Fashion-MNIST", title_justify="left")
    for column in ("network", "MACs", "accuracy", "seconds", "share of the original's"):
        table.add_column(column, justify="left" if column == "network" else "right")
    table.add_row("original", f"{macs['before'] / 1e6:.1f} M", f"{judged['original']:.2%}", f"{whole:.0f}", "100%")
    table.add_row("pruned", f"{macs['after'] / 1e6:.1f} M", f"{judged['pruned']:.2%}", f"{pruning_seconds:.0f}", "")
    table.add_row("recovered", f"{macs['after'] / 1e6:.1f} M", f"{judged['recovered']:.2%}", f"{seconds:.0f}",
                  f"{figures['share_of_the_training']:.0%} with the pruning")  # fmt: skip
    Console(width=100).print(table)
    print(json.dumps({"benchmark": "train_recovery", "environment": environment(cores())} | figures))


def epoch_of_the_original() -> float:
    """Seconds that its own script says for one epoch, as it trains today."""
    script = ROOT / "examples/fashion_mnist/train_fashion.py"
    command = [sys.executable, str(script), str(FOLDER / "again"), "--epochs", "1"]
    told = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    print(told.strip(), file=sys.stderr)
    return float(next(line for line in told.splitlines() if line.startswith("epoch 1/1")).split()[-2])


if __name__ == "__main__":
    main()
