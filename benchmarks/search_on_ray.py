"""A search on a Ray cluster of this machine: nodes of one core beside one, one that dies, what goes to and fro.

Two cores bear no more than twice the work of one: that is what two nodes and three are held against, and the same
search in three processes without Ray, which tells what three at a time lose on two cores by themselves. While others
use them, neither efficiency nor seconds say anything; candidates that are made twice, and bytes, do. The last line is
JSON.
Usage: search_on_ray.py [ROUNDS [EPOCHS]]
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ |= {"COMPRESS_CACHE_GB": "0", "COMPRESS_MEASURE_SECONDS": "0", "RAY_USAGE_STATS_ENABLED": "0"}

import numpy as np
import torch
from torch import nn

import compress
from compress import OptimizeOptions
from compress.cluster.connect import connected
from compress.cluster.nodes import Needs, facts
from compress.cluster.shared import Shared
from compress.cluster.tasks import answers
from compress.errors import printable
from compress.evaluate.candidates import Candidate, candidates
from compress.evaluate.search_result import SearchResult
from compress.jobs import on_ray
from compress.jobs.branch import Setting
from compress.jobs.export import Silent
from compress.jobs.on_ray import Task
from compress.stage import Progress
from tests.ray_cluster import Running, ray_cluster

KINDS = ("one", "two", "three", "processes")
PRUNE = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
EPOCHS = int(sys.argv[2]) if len(sys.argv) > 2 else 30
CORES = 2  # of this machine, that the nodes share
GOAL = 0.85  # of what these can
QUIET = 0.5  # load of others up to which a figure of time says something
NOTHING = 100  # tasks that do nothing


class Phases(Silent):
    """Remembers when each part of a run began."""

    def __init__(self) -> None:
        self.begun: dict[str, float] = {}

    def started(self, stage: str) -> Progress:
        self.begun.setdefault(stage, time.perf_counter())
        return super().started(stage)


def task(folder: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((5000, 32)).astype(np.float32)
    y = (np.tanh(x) @ rng.standard_normal((32, 8))).argmax(1)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 8))
    optimizer = torch.optim.Adam(module.parameters(), 3e-3)
    for _ in range(60):
        loss = nn.functional.cross_entropy(module(torch.from_numpy(x[:4000])), torch.from_numpy(y[:4000]))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    compress.save(module, folder / "model.pt", inputs="x:float32[batch,32]", outputs=["logits"])
    np.savez(folder / "train.npz", x=x[:4000], label=y[:4000])
    np.savez(folder / "eval.npz", x=x[4000:], label=y[4000:])


def asked(output: Path, address: str) -> OptimizeOptions:
    return OptimizeOptions(
        output=output, eval="eval.npz", finetune="train.npz", epochs=EPOCHS, prune=PRUNE, int8=("none", "dynamic"),
        goal="size", max_drop=100.0, train_threads=1, compile="off", ray=address or None, workers=1 if address else 3,
        runtime="onnxruntime",
    )  # fmt: skip


def search(folder: Path, output: Path, address: str) -> tuple[SearchResult, float]:
    """The result, and how long the candidates took, from the first task to the last."""
    phases = Phases()
    found = compress.optimize(folder / "model.pt", asked(output, address), watcher=phases)
    return found, phases.begun["compare"] - phases.begun["candidates"]


def told(found: SearchResult) -> list[Any]:
    """What hangs on no clock."""
    return [[(t.candidate, t.status, t.drop, t.size_bytes) for t in found.trials], [t.candidate for t in found.line]]


def _branch(task: Task, shared: Shared, setting: Setting, group: Sequence[Candidate]) -> Any:
    """On a node: the work itself, and before it a file that says which ratio is begun, and when."""
    from compress.jobs.on_ray import _branch as work

    begun = shared.root.parent / "begun"
    begun.mkdir(exist_ok=True)
    (begun / f"{time.time()}").write_text(str(group[0].prune))
    return work(task, shared, setting, group)


@dataclass
class Killed:
    """What was there when a node died.

    Attributes:
        at: when, in seconds since 1970; 0 where none had a task any more.
        kept: stages by their folders.
    """

    at: float = 0.0
    kept: frozenset[Path] = frozenset()


@contextmanager
def killing(cluster: Running, work: Path) -> Iterator[Killed]:
    """Within it, a node dies that has a task, as soon as the first stages are kept."""
    found, through = Killed(), threading.Event()

    def kill() -> None:
        while not found.at and not through.wait(0.05):
            kept = frozenset(path.parent for path in work.glob("ray/stages/[a-z]*/stage.json"))
            if kept and cluster.kill_busy() > 0:
                found.at, found.kept = time.time(), kept

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield found
    finally:
        through.set()
        thread.join()


def again(work: Path, killed: Killed, found: SearchResult) -> dict[str, float]:
    """What a death has others do again: tasks, candidates that were not kept yet, and seconds of work, at most."""
    begun: dict[str, list[float]] = {}
    for path in sorted(work.glob("begun/*"), key=lambda path: float(path.name)):
        begun.setdefault(path.read_text(), []).append(float(path.name))
    twice = {prune: times for prune, times in begun.items() if len(times) > 1}
    # A task makes its candidates one after the other: of those that were not kept, the first was begun.
    lost = {
        str(trial.candidate.prune) for trial in found.trials
        if str(trial.candidate.prune) in twice and (trial.path is None or trial.path.parent not in killed.kept)
    }  # fmt: skip
    return {
        "tasks": sum(len(times) - 1 for times in twice.values()),
        "candidates": len(lost),
        "seconds": sum(max(0.0, killed.at - times[0]) for times in twice.values()),
    }


def overhead(address: str) -> float:
    """Seconds that a task takes of the driver and the cluster, where it does nothing."""
    with connected(address) as ray:
        list(answers(ray, printable, [("",)] * 3, Needs(), lambda: range(3)))  # processes have begun
        begun = time.perf_counter()
        list(answers(ray, printable, [("",)] * NOTHING, Needs(), lambda: range(NOTHING)))
        return (time.perf_counter() - begun) / NOTHING


def sizes(folder: Path, output: Path, found: SearchResult) -> dict[str, float]:
    """Bytes for each candidate: what goes with a task, what comes back, what is kept in the shared folder."""
    options = asked(output, "127.0.0.1:6379")
    shared = Shared.at(output.with_name(f"{output.name}.work"))
    setting = Setting(folder / "model.pt", options, "0" * 300, Path(), shared.stages)
    group = [each for each in candidates(options) if each.prune == PRUNE[0]]
    there = len(pickle.dumps((Task(Needs(), {}, facts(), (), shared), shared, setting, group)))
    back = len(pickle.dumps([t for t in found.trials if t.candidate.prune == PRUNE[0]]))
    kept = sum(path.stat().st_size for path in (shared.root / "stages").rglob("*") if path.is_file())
    count = len(found.trials)
    return {"task": there / len(group), "answer": back / len(group), "shared folder": kept / count}


def main(rounds: int) -> None:
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        task(folder)
        seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
        results = []
        with ray_cluster(1) as one, ray_cluster(2) as two, ray_cluster(3) as three:
            for turn in range(rounds):
                for kind, cluster in zip(KINDS, (one, two, three, None), strict=True):
                    found, took = search(folder, folder / f"{kind}{turn}", cluster.address if cluster else "")
                    seconds[kind].append(took)
                    results.append(told(found))
                    print(f"{kind:9} {took:6.1f} s, load {os.getloadavg()[0]:.1f}", flush=True)
            each = overhead(three.address)
            work = folder / "killed.work"
            on_ray._branch = _branch
            with killing(three, work) as died:
                killed, took = search(folder, folder / "killed", three.address)
        results.append(told(killed))
        twice = again(work, died, killed)
        same = all(result == results[0] for result in results)
        goes = sizes(folder, folder / "one0", found)
        count = len(found.trials)
    ratios = {
        kind: median(a / b for a, b in zip(seconds["one"], took_by, strict=True))
        for kind, took_by in seconds.items()
        if kind != "one"
    }
    cost = took - median(seconds["three"])
    others = max(load, os.getloadavg()[0] - 3)
    noise = "" if others <= QUIET else f" (not quiet: others' load was {others:.1f}, so this proves nothing)"
    efficiency = {kind: ratio / CORES for kind, ratio in ratios.items()}
    for kind, of in efficiency.items():
        who = "three processes without Ray" if kind == "processes" else f"{kind} nodes of one core"
        goal = "" if kind == "processes" else f"; {GOAL} is {'reached' if of >= GOAL else 'missed'}"
        print(
            f"{who}: {ratios[kind]:.2f} times as fast as one node, {of:.2f} of the {CORES} times that {CORES} cores "
            f"can{goal}{noise}"
        )
    if died.at:
        print(
            f"one of the three killed in its task: {took:.1f} s, {cost:+.1f} s{noise}; tasks begun again "
            f"{twice['tasks']}, candidates made twice {twice['candidates']} of {count}, {twice['seconds']:.1f} s "
            f"of a core's work lost at most; the same result: {same}"
        )
    else:
        print("no node was killed: none had a task any more when the first stages were kept; give more EPOCHS")
    print("bytes for each candidate: " + ", ".join(f"{name} {size:,.0f}" for name, size in goes.items()))
    alone = median(seconds["one"]) / count
    slots = 100
    paper = 1000 * alone / slots + 1000 / count * len(PRUNE) * each
    print(
        f"on paper, 1,000 such candidates on {slots} nodes of one core: {1000 * alone:,.0f} s of work, {paper:,.0f} s "
        f"where all is even, {1000 * sum(goes.values()) / 1e6:,.1f} MB; {each * 1000:.1f} ms of overhead for a task"
    )
    told_as = {
        "load_before": load, "load_after": os.getloadavg()[0], "quiet": not noise, "seconds": seconds,
        "efficiency": efficiency, "killed": died.at > 0, "killed_seconds": took, "kill_costs_seconds": cost,
        "made_twice": twice, "same": same, "bytes_per_candidate": goes, "task_overhead_s": each,
        "paper_1000_on_100_s": paper,
    }  # fmt: skip
    print(json.dumps(told_as))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
