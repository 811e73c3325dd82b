"""What is trained, and how it went."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from compress.artifact import Signature
from compress.data.dataset import Dataset
from compress.evaluate.metrics import Metric
from compress.evaluate.output_kind import OutputForm
from compress.options.training import TrainingOptions

__all__ = ["Among", "Task", "Trained"]


@dataclass(frozen=True)
class Among:
    """A training is one of several of the same model on the same data.

    Attributes:
        folder: keeps what all of them can use: the original's answers, samples that were made.
        judged: is told after each epoch, with the scores of all epochs so far; what it raises ends the training.
    """

    folder: Path
    judged: Callable[[Sequence[float], Metric], None]


@dataclass(frozen=True)
class Task:
    """What is trained, and on what.

    Attributes:
        module: is trained in place.
        teacher: gives the answers to learn; None where the labels alone do.
        signature: of both.
        data: to train on.
        validation: to judge epochs by, or None.
        options: the rest.
        seed: of everything random.
        folder: keeps the state and the profile's trace; None keeps nothing.
        exact: all in float32.
        forms: what each output is, by their order.
        labelled: the place of the output that labels teach.
        trial: only some steps, to tell how long all would take.
        among: of one of several trainings, what they share.
        judged: the hash of what the result is judged by afterwards.
    """

    module: nn.Module
    teacher: nn.Module | None
    signature: Signature
    data: Dataset
    validation: Dataset | None
    options: TrainingOptions
    seed: int = 0
    folder: Path | None = None
    exact: bool = False
    forms: tuple[OutputForm, ...] = ()
    labelled: int = 0
    trial: bool = False
    among: Among | None = None
    judged: str = ""


@dataclass(frozen=True)
class Trained:
    """How a training went.

    Attributes:
        first: mean loss of the first epoch.
        last: of the last one.
        steps: that were taken.
        figures: JSON values.
        warnings: what to know.
    """

    first: float
    last: float
    steps: int
    figures: dict[str, Any]
    warnings: tuple[str, ...]
