"""Whether showing the samples more often of which the model is unsure helps a recovery.

    python benchmarks/train_samplers.py [--seeds 3] [--epochs 3] [--samples 12000]

The ResNet of examples/fashion_mnist, pruned by 69% of its multiply-accumulates, is trained on the original's answers to
a part of the training images, with each `--sampler`. Accuracy is over all 10,000 test images; the interval is that of
the paired difference to uniform, over the seeds and images. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from train_common import open_data, original_and_pruned, test_data

from compress.evaluate.intervals import SHARE, difference_interval
from compress.options.training import TrainingOptions
from compress.runtime.machine import environment
from compress.runtime.measure import cores
from compress.training.finetune import Finetune

SAMPLERS = ("uniform", "uncertainty", "margin", "entropy")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--samples", type=int, default=12_000)
    arguments = parser.parse_args()
    original, pruned, _ = original_and_pruned(0.71)
    data, _ = open_data()
    right: dict[str, list[np.ndarray[Any, Any]]] = {name: [] for name in SAMPLERS}
    for seed in range(arguments.seeds):
        part = data.part(np.random.default_rng(seed).permutation(len(data))[: arguments.samples])
        for name in SAMPLERS:
            module = copy.deepcopy(pruned.module)
            asked: dict[str, Any] = {"epochs": arguments.epochs, "batch_size": 128, "sampler": name}
            Finetune(part, original, TrainingOptions(**asked), seed).fit(
                module, pruned.signature, lambda _d, _t, _n: None
            )
            right[name].append(answers(module))
            print(f"seed {seed}, {name}: {right[name][-1].mean():.4f}", file=sys.stderr, flush=True)
    figures = {}
    for name in SAMPLERS:
        both = (np.concatenate(right[name]), np.concatenate(right["uniform"]))
        gained = difference_interval(*both, bounds=SHARE).times(100)
        figures[name] = {
            "accuracy": statistics.mean(float(scores.mean()) for scores in right[name]),
            "gain_points": gained.value, "gain_low": gained.low, "gain_high": gained.high,
            "by_seed": [float(scores.mean()) for scores in right[name]],
        }  # fmt: skip
    table = Table(title="A recovery by --sampler, Fashion-MNIST", title_justify="left")
    for column in ("sampler", "accuracy", "points over uniform (95%)"):
        table.add_column(column, justify="left" if column == "sampler" else "right")
    for name, row in figures.items():
        spread = f"{row['gain_points']:+.2f} ({row['gain_low']:+.2f} to {row['gain_high']:+.2f})"
        table.add_row(name, f"{row['accuracy']:.2%}", "" if name == "uniform" else spread)
    Console(width=100).print(table)
    told = {"benchmark": "train_samplers", "environment": environment(cores()), **vars(arguments)}
    print(json.dumps(told | {"samplers": figures}))


@torch.inference_mode()
def answers(module: torch.nn.Module) -> np.ndarray[Any, Any]:
    """1 for each test image that is right, else 0."""
    images, labels = test_data()
    judged = copy.deepcopy(module).eval()
    parts = [judged(images[at : at + 500]).argmax(1) == labels[at : at + 500] for at in range(0, len(labels), 500)]
    return torch.cat(parts).double().numpy()


if __name__ == "__main__":
    main()
