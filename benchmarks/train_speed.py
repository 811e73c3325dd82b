"""How long a ResNet takes to learn Fashion-MNIST to 90%, and what each ingredient of the training gives.

    python benchmarks/train_speed.py [--seeds 3] [--rounds 5] [--target 0.9]

From scratch, by labels alone, judged on all 10,000 test images. A plain loop (float32, Adam at a constant rate of 1e-3,
batches of 64 from a DataLoader without workers) against the defaults of `compress finetune`, then the defaults with one
ingredient switched off, or another in its place.

Two things are measured apart, as the second is noisy here and the first is not: how many steps it takes to the target
(whole trainings), and what a step takes (medians of short trainings that take turns, each after a warm-up); their
product is the time. With a constant rate, the target is reached when a look every eighth of an epoch finds it; a
schedule is planned for its epochs, so it gets the fewest of 1/4, 1/2, 3/4, 1, 1.5, 2, 3 that end at the target. What
changes only the speed (memory layout, how samples are fetched, the compiler) takes the steps of the defaults.
Where torch finds a GPU, all rows train there, and float16 is a row. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from train_common import Clock, Reached, accuracy, fresh, open_data, test_data

from compress.data_sources import Fetched, Fetcher
from compress.dataset import Dataset
from compress.machine import environment
from compress.measure import cores
from compress.stages.finetune import Finetune
from compress.training_options import TrainingOptions

PLANS = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0)
MOST = 4.0  # epochs of a constant rate
PLAIN, DEFAULTS = "plain loop", "defaults"
SHORT = 24  # steps of a timed training, of which the first are warm-up
WARM_UP = 6


@dataclass(frozen=True)
class Way:
    """A row of the table.

    Attributes:
        name: of it.
        options: other than the defaults.
        steps_of: the row whose steps to the target it shares; itself by default.
        one_by_one: samples come through `__getitem__`.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    steps_of: str | None = None
    one_by_one: bool = False


WAYS = (
    Way(PLAIN),
    Way(DEFAULTS),
    Way("in float32", {"train_precision": "32"}, DEFAULTS),
    Way("not channels-last", {"channels_last": False}, DEFAULTS),
    Way("samples one by one", {}, DEFAULTS, one_by_one=True),
    Way("torch.compile", {"compile": "on"}, DEFAULTS),
    *([Way("in float16", {"train_precision": "16-mixed"}, DEFAULTS)] if torch.cuda.is_available() else []),
    Way("constant rate", {"schedule": "constant"}),
    Way("one cycle", {"schedule": "one-cycle"}),
    Way("batches of 16", {"batch_size": 16, "learning_rate": 1e-3}),
    Way("batches of 256", {"batch_size": 256, "learning_rate": 4e-3}),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--target", type=float, default=0.9)
    arguments = parser.parse_args()
    torch.set_num_threads(cores())
    bench = Bench(arguments.target)
    times: dict[str, list[float]] = {way.name: [] for way in WAYS}
    for turn in range(arguments.rounds):
        for way in WAYS:
            times[way.name].append(bench.step_seconds(way))
            print(f"round {turn + 1}, {way.name}: {1e3 * times[way.name][-1]:.1f} ms", file=sys.stderr, flush=True)
    found: dict[str, list[dict[str, Any]]] = {way.name: [] for way in WAYS if way.steps_of is None}
    for seed in range(arguments.seeds):
        for way in WAYS:
            if way.steps_of is None:
                found[way.name].append(bench.to_target(way, seed))
                print(f"seed {seed}, {way.name}: {found[way.name][-1]}", file=sys.stderr, flush=True)
    figures = {way.name: summed(way, times[way.name], found[way.steps_of or way.name]) for way in WAYS}
    show(figures, arguments.target)
    told = {
        "benchmark": "train_speed",
        "rounds": arguments.rounds,
        "seeds": arguments.seeds,
        "target": arguments.target,
    }
    print(json.dumps(told | {"environment": environment(cores()), "rows": figures}))


class Bench:
    """The data, and the kinds of runs."""

    def __init__(self, target: float) -> None:
        self.target = target
        self.data, self.signature = open_data()
        self.images, self.labels = test_data()
        self.first: dict[str, int] = {}  # the plan to begin with, by row

    def step_seconds(self, way: Way) -> float:
        """The median over a short training, its first steps left out."""
        marks = [time.perf_counter()]
        size = 64 if way.name == PLAIN else int(TrainingOptions(**way.options).batch_size)
        part = self.data.part(np.arange(SHORT * size))
        if way.name == PLAIN:
            self._plain(part, 0, lambda _module: marks.append(time.perf_counter()), SHORT)
        else:
            given = _one_by_one(part) if way.one_by_one else part
            stage = Finetune(given, None, TrainingOptions(epochs=1, **way.options))
            stage.fit(fresh(0), self.signature, lambda _d, _t, _n: marks.append(time.perf_counter()))
        steps = np.diff(marks[WARM_UP:])
        return float(np.median(steps))

    def to_target(self, way: Way, seed: int) -> dict[str, Any]:
        """Epochs and steps to the target; None where it was not reached."""
        constant = way.name == PLAIN or way.options.get("schedule") == "constant"
        return self._looked_at(way, seed) if constant else self._planned(way, seed)

    def _looked_at(self, way: Way, seed: int) -> dict[str, Any]:
        per_epoch = -(-len(self.data) // 64)
        module = fresh(seed)
        clock = Clock(lambda: accuracy(module, self.images, self.labels), per_epoch // 8, self.target)
        try:
            if way.name == PLAIN:
                self._plain(self.data, seed, lambda _module: clock.step(), int(MOST * per_epoch), module)
            else:
                stage = Finetune(self.data, None, TrainingOptions(epochs=int(MOST), **way.options), seed)
                stage.fit(module, self.signature, lambda _d, _t, _n: clock.step())
        except Reached:
            return {"epochs": clock.steps / per_epoch, "steps": clock.steps, "accuracy": clock.found[-1][2]}
        return {"epochs": None, "steps": None, "accuracy": max(value for _, _, value in clock.found)}

    def _planned(self, way: Way, seed: int) -> dict[str, Any]:
        tried: dict[str, float] = {}
        for number in range(max(0, self.first.get(way.name, 2) - 1), len(PLANS)):
            plan = PLANS[number]
            share = plan if plan < 1 else next(part for part in (1.0, 0.75) if (plan / part).is_integer())
            count = round(share * len(self.data))
            some = np.random.default_rng(seed).permutation(len(self.data))[:count]
            part = self.data if share == 1 else self.data.part(some)
            module = fresh(seed)
            stage = Finetune(part, None, TrainingOptions(epochs=round(max(1, plan / share)), **way.options), seed)
            trained = stage.fit(module, self.signature, lambda _d, _t, _n: None)
            tried[str(plan)] = accuracy(module, self.images, self.labels)
            if tried[str(plan)] >= self.target:
                self.first[way.name] = number
                return {"epochs": plan, "steps": trained.steps, "accuracy": tried[str(plan)], "tried": tried}
        return {"epochs": None, "steps": None, "accuracy": max(tried.values()), "tried": tried}

    def _plain(self, data: Dataset, seed: int, told: Any, steps: int, module: torch.nn.Module | None = None) -> None:
        """As most tutorials write it."""
        torch.manual_seed(seed)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        module = (module or fresh(seed)).to(device)
        arrays, labels = data.take(slice(0, len(data)))
        whole = TensorDataset(torch.from_numpy(np.array(arrays["image"])), torch.from_numpy(np.array(labels)))
        loader = DataLoader(whole, batch_size=64, shuffle=True)
        optimizer = torch.optim.Adam(module.parameters(), lr=1e-3)
        done = 0
        while done < steps:
            for shown, wanted in loader:
                module.train()
                loss = F.cross_entropy(module(shown.to(device)), wanted.to(device))
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                told(module)
                done += 1


def _one_by_one(data: Dataset) -> Dataset:
    """The same images through `__getitem__`, in the training's own process."""
    arrays, labels = data.take(slice(0, len(data)))
    whole = TensorDataset(torch.from_numpy(np.array(arrays["image"])), torch.from_numpy(np.array(labels)))
    fetcher = Fetcher(whole, ["image"], "one by one")
    views = {name: Fetched(shape, dtype, name, fetcher.rows) for name, (shape, dtype) in fetcher.specs.items()}
    return Dataset("one by one", {"image": views["image"]}, views["label"], "one by one", fetcher=fetcher)


def summed(way: Way, times: list[float], runs: list[dict[str, Any]]) -> dict[str, Any]:
    reached = [run for run in runs if run["epochs"] is not None]
    step = statistics.median(times)
    found: dict[str, Any] = {"options": way.options, "step_ms": 1e3 * step, "steps_of": way.steps_of or way.name,
                             "step_ms_of_rounds": [1e3 * seconds for seconds in times], "runs": runs}  # fmt: skip
    if reached:
        found["epochs"] = statistics.median(run["epochs"] for run in reached)
        found["steps"] = statistics.median(run["steps"] for run in reached)
        found["seconds"] = found["steps"] * step
        found["reached"] = len(reached)
    return found


def show(figures: dict[str, dict[str, Any]], target: float) -> None:
    table = Table(
        title=f"ResNet on Fashion-MNIST, from scratch to {target:.0%} of the test images", title_justify="left"
    )
    columns = ("training", "epochs", "steps", "ms a step", "seconds", "plain loop takes", "defaults take")
    for column in columns:
        table.add_column(column, justify="left" if column == "training" else "right", no_wrap=True)
    for name, row in figures.items():
        if "seconds" not in row:
            table.add_row(name, "", "", f"{row['step_ms']:.1f}", "not reached", "", "")
            continue
        ratios = [
            f"{figures[base]['seconds'] / row['seconds']:.2f}×" if "seconds" in figures[base] else ""
            for base in (PLAIN, DEFAULTS)
        ]
        told = f"{row['epochs']:.2f}", f"{row['steps']:.0f}", f"{row['step_ms']:.1f}", f"{row['seconds']:.1f}"
        table.add_row(name, *told, *ratios)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
