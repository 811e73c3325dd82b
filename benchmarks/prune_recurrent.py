"""Accuracy of a small LSTM classifier, pruned: as it is, repaired, and after a recovery.

    python benchmarks/prune_recurrent.py [--seeds 5] [--fractions 0.3 0.5] [--kind lstm|gru]

scikit-learn's handwritten digits, row by row as eight steps of eight numbers, read both ways by two recurrent layers
and a linear one; each seed trains a network of its own, and draws the calibration data. Accuracy is over the 500 images
that neither training nor calibration has seen. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
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
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

from compress.data.dataset import Dataset
from compress.model import TorchModel, infer_signature
from compress.options.training import TrainingOptions
from compress.prune.prune_channels import PruneChannels
from compress.prune.repair_channels import RepairChannels
from compress.runtime.machine import environment
from compress.runtime.measure import torch_macs
from compress.signature import TensorSpec
from compress.training.finetune import Finetune

EPOCHS, RECOVERY, BATCH = 24, 6, 64
KINDS: dict[str, Any] = {"lstm": nn.LSTM, "gru": nn.GRU}


class Rows(nn.Module):
    """[batch, 8, 8] -> logits [batch, 10]."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.rnn = KINDS[kind](8, 64, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(x)[0].mean(1))  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--fractions", type=float, nargs="+", default=[0.3, 0.5])
    parser.add_argument("--kind", choices=KINDS, default="lstm")
    arguments = parser.parse_args()
    found: dict[tuple[str, float], dict[str, list[float]]] = {}
    for seed in range(arguments.seeds):
        for way, fraction, figures in rows_of(arguments.kind, arguments.fractions, seed):
            row = found.setdefault((way, fraction), {})
            for name, figure in figures.items():
                row.setdefault(name, []).append(figure)
            print(seed, way, fraction, figures, file=sys.stderr, flush=True)
    told_of = [{"way": way, "fraction": fraction} | row for (way, fraction), row in found.items()]
    show(told_of)
    told = {"benchmark": "prune_recurrent", "kind": arguments.kind, "environment": environment(torch.get_num_threads())}
    print(json.dumps(told | {"figures": told_of}))


def rows_of(kind: str, fractions: list[float], seed: int) -> list[tuple[str, float, dict[str, float]]]:
    """By way and fraction: accuracy, the share of multiply-accumulates removed, hidden units left and CPU seconds."""
    digits = load_digits()
    order = np.random.default_rng(seed).permutation(len(digits.images))
    rows, labels = (digits.images[order] / 16).astype(np.float32), digits.target[order].astype(np.int64)
    train = Dataset("train", {"x": rows[628:]}, labels[628:], f"train {seed}")
    calibration = Dataset("calibration", {"x": rows[500:628]}, None, f"calibration {seed}")
    module = trained(kind, torch.from_numpy(rows[628:]), torch.from_numpy(labels[628:]), seed)
    model = TorchModel(module, infer_signature(module, (TensorSpec.parse("x:float32[batch,8,8]"),)))
    whole = torch_macs(module, model.signature)
    found: list[tuple[str, float, dict[str, float]]] = []

    def add(way: str, fraction: float, given: TorchModel, start: float) -> None:
        with torch.no_grad():
            right = (given.module(torch.from_numpy(rows[:500])).argmax(1).numpy() == labels[:500]).mean()
        rnn: Any = given.module.get_submodule("rnn")
        removed = 1 - torch_macs(given.module, model.signature) / whole
        took = time.process_time() - start
        found.append(
            (way, fraction, {"accuracy": float(right), "macs_removed": removed, "hidden": rnn.hidden_size, "s": took})
        )

    add("unpruned", 0.0, model, time.process_time())
    for fraction in fractions:
        for importance in ("magnitude", "taylor", "obs"):
            with tempfile.TemporaryDirectory() as folder:
                work, start = Path(folder), time.process_time()
                prune = PruneChannels(fraction, importance, data=train, calibration=calibration)
                pruned = cast(TorchModel, prune.run(model, work, quiet).model)
                add(importance, fraction, pruned, start)
                start = time.process_time()
                repaired = cast(TorchModel, RepairChannels(calibration).run(pruned, work, quiet).model)
                add(f"{importance}, repaired", fraction, repaired, start)
                start = time.process_time()
                recovery = Finetune(train, model, TrainingOptions(epochs=RECOVERY))
                recovered = cast(TorchModel, recovery.run(repaired, work, quiet).model)
                add(f"{importance}, repaired, recovered", fraction, recovered, start)
    return found


def trained(kind: str, rows: torch.Tensor, labels: torch.Tensor, seed: int) -> nn.Module:
    """A network that has learnt the digits."""
    torch.manual_seed(seed)
    net, steps = Rows(kind), EPOCHS * -(-len(rows) // BATCH)
    optimizer = torch.optim.AdamW(net.parameters(), weight_decay=0.02)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=steps)
    for _ in range(EPOCHS):
        for index in torch.split(torch.randperm(len(rows)), BATCH):
            optimizer.zero_grad()
            F.cross_entropy(net(rows[index]), labels[index]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
    return net.eval()


def show(figures: list[dict[str, Any]]) -> None:
    """As a table."""
    table = Table("way", "fraction", "MACs removed", "hidden units", "accuracy", "least", "CPU s")
    for row in figures:
        table.add_row(
            row["way"],
            f"{row['fraction']:.0%}",
            f"{statistics.mean(row['macs_removed']):.1%}",
            f"{statistics.mean(row['hidden']):.1f}",
            f"{statistics.mean(row['accuracy']):.2%}",
            f"{min(row['accuracy']):.2%}",
            f"{statistics.mean(row['s']):.1f}",
        )
    Console(stderr=True).print(table)


def quiet(_done: int, _total: int, _note: str) -> None:
    pass


if __name__ == "__main__":
    main()
