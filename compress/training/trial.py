"""A training tried: a few of its steps, for real, tell how long all of it would take."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from compress.data.dataset import Dataset

__all__ = ["SECONDS", "Enough", "Pace", "judged_in_time"]

SECONDS = 2.0  # that each kind of work is watched for
COLD, FEWEST = 3, 3  # looks at the loss: that don't count, and that do, at least

Progress = Callable[[int, int, str], None]


class Enough(BaseException):
    """What was seen will do; nothing that expects a failure is to catch it."""


class Pace:
    """Is told of steps as a run's progress is, and ends them once they have shown how fast they go.

    Args:
        step: that the training begins at.
        fabric: of several processes, the first says for all when it is enough.
        progress: is told, too.
    """

    def __init__(self, step: int, fabric: Any, progress: Progress) -> None:
        self._fabric, self._progress = fabric, progress
        self._marks = [(step, time.perf_counter())]

    def __call__(self, done: int, total: int, note: str) -> None:
        self._marks.append((done, time.perf_counter()))
        self._progress(done, total, note)
        if self.seen and self._fabric.broadcast(self._marks[-1][1] - self._marks[COLD][1] > SECONDS):
            raise Enough

    @property
    def seen(self) -> bool:
        """Whether there were enough steps to tell."""
        return len(self._marks) > COLD + FEWEST

    def seconds(self, steps: int) -> float:
        """That so many steps take, the first, slower ones among them."""
        begun, last = self._marks[0], self._marks[-1]
        warm = self._marks[min(COLD, len(self._marks) - 1)]
        if last[0] == warm[0]:  # all that there are have been done
            warm = begun
        pace = (last[1] - warm[1]) / max(1, last[0] - warm[0])
        return (warm[1] - begun[1]) + pace * max(0, steps - (warm[0] - begun[0]))


def judged_in_time(data: Dataset, step_seconds: float, size: int) -> Dataset:
    """As many of the samples as a judge may take some seconds for; a training step takes longer than its answers.

    Args:
        data: to judge by.
        step_seconds: of a training step.
        size: samples in one.
    """
    few = max(size, int(SECONDS * size / max(1e-9, step_seconds)))
    return data if few >= len(data) else data.part(np.arange(few))
