"""The batch size found by trying: the largest that fits, as long as a larger one still gains throughput."""

from __future__ import annotations

import copy
import dataclasses
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from compress.training.batches.loader import example
from compress.training.machine.profile import Profile
from compress.training.machine.setup import alone
from compress.training.stepper import Stepper
from compress.training.task import Task

__all__ = ["BASE", "Tried", "find_batch_size", "scaled_rate", "try_batch_sizes"]

SMALLEST = 32
COLD, TIMED = 1, 3
GAIN = 1.08  # that twice the size must bring
STEPS = 300  # that a training must still have: fewer updates learn less, however fast they are
BASE = 64  # the size that a learning rate is meant for


@dataclass(frozen=True)
class Tried:
    """Sizes and the samples a second that they gave; a size that did not fit has none."""

    size: int
    throughput: dict[int, float | None]


def find_batch_size(step: Callable[[int], None], samples: int, epochs: int) -> Tried:
    """Double the size while it pays.

    Args:
        step: trains one step of so many samples, on a copy of the model; waits until it is through.
        samples: in an epoch.
        epochs: of the training.
    """
    most = max(SMALLEST, min(samples, samples * epochs // STEPS))
    tried: dict[int, float | None] = {}
    best, size = SMALLEST, SMALLEST
    while size <= most:
        try:
            tried[size] = _throughput(step, size)
        except torch.cuda.OutOfMemoryError:
            torch.cuda.empty_cache()
            tried[size] = None
            break
        if size > SMALLEST and (tried[size] or 0) < GAIN * (tried[best] or 0):
            break
        best = size
        size *= 2
    return Tried(best, tried)


def scaled_rate(rate: float, size: int) -> float:
    """By the square root of the batch, as is right for Adam (Malladi et al., On the SDEs and Scaling Rules for Adaptive
    Gradient Algorithms, NeurIPS 2022, section 4)."""
    return rate * math.sqrt(size / BASE)


def try_batch_sizes(task: Task, fabric: Any) -> Tried:
    """Find the size for a task, on a copy of its model; of several processes, each tries its part, the first decides.

    Args:
        task: what is to be trained; is left as it is.
        fabric: launched.
    """
    options = dataclasses.replace(task.options, compile="off")
    copied = dataclasses.replace(task, module=copy.deepcopy(task.module), options=options, folder=None)
    stepper = Stepper(copied, fabric, Profile(None, fabric.device), 0.0, example(task.data, 2), alone=True)

    def step(size: int) -> None:
        stepper.gradients(example(task.data, size), size)
        stepper.update(0.0, None, 1, 0)
        if fabric.device.type == "cuda":
            torch.cuda.synchronize()

    processes = fabric.world_size
    with alone():  # each may stop at another size
        mine = find_batch_size(step, len(task.data) // processes, task.options.epochs)
    if stepper.features is not None:
        stepper.features.close()
    tried = Tried(processes * mine.size, {processes * size: speed for size, speed in mine.throughput.items()})
    decided: Tried = fabric.broadcast(tried) if processes > 1 else tried
    return decided


def _throughput(step: Callable[[int], None], size: int) -> float:
    seconds = []
    for _ in range(COLD + TIMED):
        start = time.perf_counter()
        step(size)
        seconds.append(time.perf_counter() - start)
    return size / statistics.median(seconds[COLD:])
