"""How long a ResNet takes to learn Fashion-MNIST to 90%, and what each ingredient of the training gives.

    python benchmarks/train_speed.py [--seeds 3] [--rounds 5] [--target 0.9]
        [--high-target 0.92] [--high-seeds 1]

From scratch, by labels alone, judged on all 10,000 test images. A plain loop (float32, Adam at a constant rate of 1e-3,
batches of 64 from a DataLoader without workers) against the defaults of `compress finetune`, then the defaults with one
ingredient switched off, or another in its place.

Two things are measured apart, as the second is noisy here and the first is not: how many steps it takes to the target
(whole trainings), and what a step takes (medians of short trainings that take turns, each after a warm-up); their
product is the time. With a constant rate, the target is reached when a look every eighth of an epoch finds it; a
schedule is planned for its epochs, so it gets the fewest quarters of an epoch (from 4 epochs on, the fewest epochs)
that end at the target. What changes only the speed (memory layout, how samples are fetched, the compiler) takes the
steps of the defaults. The defaults and the constant rate are trained on to the high target, too: where a schedule is
to pay, as a constant rate soon finds what is easy; that takes long, so fewer seeds. The plain loop, the defaults and
the constant rate get all seeds, the other rows the first.
Where torch finds a GPU, all rows train there, and float16 is a row. What is through is kept in build/train-benchmark
until all is, so that the same command goes on after an interruption. The last line of
stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch.utils.data import TensorDataset
from train_common import FOLDER, Clock, Reached, accuracy, fresh, open_data, plain_loop, test_data

from compress.data.dataset import Dataset
from compress.data.sources import Fetched, Fetcher
from compress.options.training import TrainingOptions
from compress.runtime.machine import environment
from compress.runtime.measure import cores
from compress.training.finetune import Finetune
from compress.training.loop import LOOK_EVERY

PLANS = (*(quarters / 4 for quarters in range(1, 17)), 5.0, 6.0, 8.0)
MOST = 12  # epochs of a constant rate
PLAIN, DEFAULTS, CONSTANT = "plain loop", "defaults", "constant rate"
MAIN = (PLAIN, DEFAULTS, CONSTANT)  # get all seeds
SCHEDULES = (DEFAULTS, CONSTANT)  # go on to the high target
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
    Way(CONSTANT, {"schedule": "constant"}),
    Way("one cycle", {"schedule": "one-cycle"}),
    Way("batches of 16", {"batch_size": 16, "learning_rate": 1e-3}),
    Way("batches of 256", {"batch_size": 256, "learning_rate": 4e-3}),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--target", type=float, default=0.9)
    parser.add_argument("--high-target", type=float, default=0.92)
    parser.add_argument("--high-seeds", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(cores())
    LOOK_EVERY["cuda"] = 1  # as each step is timed and counted
    low, high = arguments.target, arguments.high_target
    bench = Bench(low, high, arguments.high_seeds)
    times: dict[str, list[float]] = {way.name: [] for way in WAYS}
    for turn in range(arguments.rounds):
        for way in WAYS:
            times[way.name].append(bench.kept(f"{way} round {turn}", lambda way=way: bench.step_seconds(way)))  # type: ignore[misc]
            print(f"round {turn + 1}, {way.name}: {1e3 * times[way.name][-1]:.1f} ms", file=sys.stderr, flush=True)
    found: dict[float, dict[str, list[Run]]] = {low: {}, high: {}}
    wanted = [(seed, way, low) for seed in range(arguments.seeds) for way in WAYS if seed == 0 or way.name in MAIN]
    wanted += [(seed, way, high) for seed in range(arguments.high_seeds) for way in WAYS if way.name in SCHEDULES]
    for seed, way, target in wanted:
        if way.steps_of is None:
            run = bench.to_target(way, seed, target)
            found[target].setdefault(way.name, []).append(run)
            print(f"seed {seed}, {way.name}, {target:.1%}: {run}", file=sys.stderr, flush=True)
    figures = {way.name: summed(way, times[way.name], found[low].get(way.steps_of or way.name, [])) for way in WAYS}
    at_high = {way.name: summed(way, times[way.name], found[high][way.name]) for way in WAYS if way.name in found[high]}
    show(figures, low)
    show(at_high, high)
    told = {"benchmark": "train_speed", **vars(arguments), "environment": environment(cores())}
    print(json.dumps(told | {"rows": figures, "rows_at_the_high_target": at_high}))
    bench.kept.path.unlink(missing_ok=True)


Run = dict[str, Any]


class Kept:
    """What is through, one JSON line each."""

    def __init__(self, path: Path) -> None:
        self.path = path
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        self._found: dict[str, Any] = dict(json.loads(line) for line in lines)

    def __call__(self, key: str, run: Callable[[], Any]) -> Any:
        """What a run gave, or gives now."""
        if key not in self._found:
            self._found[key] = run()
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps([key, self._found[key]]) + "\n")
        return self._found[key]


class Bench:
    """The data, and the kinds of runs."""

    def __init__(self, low: float, high: float, high_seeds: int) -> None:
        self.low, self.high, self.high_seeds = low, high, high_seeds
        self.data, self.signature = open_data()
        self.images, self.labels = test_data()
        self.kept = Kept(FOLDER / "train_speed.jsonl")
        self.first: dict[tuple[str, float], int] = {}  # the plan that was enough for the last seed

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

    def to_target(self, way: Way, seed: int, target: float) -> Run:
        """Epochs and steps to the target; None where it was not reached."""
        constant = way.name == PLAIN or way.options.get("schedule") == "constant"
        return self._looked_at(way, seed, target) if constant else self._planned(way, seed, target)

    def _looked_at(self, way: Way, seed: int, target: float) -> Run:
        per_epoch = -(-len(self.data) // 64)
        until = self.high if way.name in SCHEDULES and seed < self.high_seeds else self.low
        looks = self.kept(f"{way} {seed} to {until}", lambda: self._looks(way, seed, until, per_epoch))
        steps, value = next(((steps, value) for steps, _, value in looks if value >= target), (None, None))
        if steps is None:
            return {"epochs": None, "steps": None, "accuracy": max(value for _, _, value in looks)}
        return {"epochs": steps / per_epoch, "steps": steps, "accuracy": value}

    def _looks(self, way: Way, seed: int, target: float, per_epoch: int) -> list[tuple[int, float, float]]:
        module = fresh(seed)
        clock = Clock(lambda: accuracy(module, self.images, self.labels), per_epoch // 8, target)
        with contextlib.suppress(Reached):
            if way.name == PLAIN:
                self._plain(self.data, seed, lambda _module: clock.step(), MOST * per_epoch, module)
            else:
                stage = Finetune(self.data, None, TrainingOptions(epochs=MOST, **way.options), seed)
                stage.fit(module, self.signature, lambda _d, _t, _n: clock.step())
        return clock.found

    def _planned(self, way: Way, seed: int, target: float) -> Run:
        tried: dict[float, tuple[int, float]] = {}

        def enough(number: int) -> bool:
            plan = PLANS[number]
            tried[plan] = self.kept(f"{way} {seed} {plan}", lambda: self._trained(way, seed, plan))
            return tried[plan][1] >= target

        number = begin = self.first.get((way.name, target), 3)
        while number < len(PLANS) and not enough(number):
            number += 1
        while number == begin and number and enough(number - 1):
            number = begin = number - 1
        told = {str(plan): value for plan, (_, value) in sorted(tried.items())}
        if number == len(PLANS):
            return {"epochs": None, "steps": None, "accuracy": max(told.values()), "tried": told}
        self.first[way.name, target] = number
        steps, value = tried[PLANS[number]]
        return {"epochs": PLANS[number], "steps": steps, "accuracy": value, "tried": told}

    def _trained(self, way: Way, seed: int, plan: float) -> tuple[int, float]:
        """Steps and accuracy of a training of so many epochs: whole ones, of a part of the data where they are none."""
        epochs = math.ceil(plan)
        some = np.random.default_rng(seed).permutation(len(self.data))[: round(plan / epochs * len(self.data))]
        part = self.data if epochs == plan else self.data.part(some)
        module = fresh(seed)
        stage = Finetune(part, None, TrainingOptions(epochs=epochs, **way.options), seed)
        trained = stage.fit(module, self.signature, lambda _d, _t, _n: None)
        return trained.steps, accuracy(module, self.images, self.labels)

    def _plain(self, data: Dataset, seed: int, told: Any, steps: int, module: torch.nn.Module | None = None) -> None:
        """The plain loop, for so many steps, or whole epochs beyond them."""
        module = module or fresh(seed)
        per_epoch = -(-len(data) // 64)
        whole = math.ceil(steps / per_epoch) * per_epoch
        for _ in itertools.islice(plain_loop(data, module, seed, 64), whole):
            told(module)


def _one_by_one(data: Dataset) -> Dataset:
    """The same images through `__getitem__`, in the training's own process."""
    arrays, labels = data.take(slice(0, len(data)))
    whole = TensorDataset(torch.from_numpy(np.array(arrays["image"])), torch.from_numpy(np.array(labels)))
    fetcher = Fetcher(whole, ["image"], "one by one")
    views = {name: Fetched(shape, dtype, name, fetcher.rows) for name, (shape, dtype) in fetcher.specs.items()}
    return Dataset("one by one", {"image": views["image"]}, views["label"], "one by one", fetcher=fetcher)


def summed(way: Way, times: list[float], runs: list[Run]) -> dict[str, Any]:
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
            f"{figures[base]['seconds'] / row['seconds']:.2f}×" if "seconds" in figures.get(base, {}) else ""
            for base in (PLAIN, DEFAULTS)
        ]
        told = f"{row['epochs']:.2f}", f"{row['steps']:.0f}", f"{row['step_ms']:.1f}", f"{row['seconds']:.1f}"
        table.add_row(name, *told, *ratios)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
