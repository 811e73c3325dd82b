"""What a training has to tell: losses, rates, validation, speed, memory; as figures, as a note, for TensorBoard."""

from __future__ import annotations

import math
import time
from collections import deque
from pathlib import Path
from typing import Any

import torch

from compress.errors import MissingExtraError
from compress.runtime.measure import cores
from compress.vetting.memory import peak_memory

__all__ = ["Journal"]

POINTS = 300  # of the curve of losses
RECENT = 3.0  # seconds that the speed in the note is over
SUMS = ("loss", "steps", "epoch_loss", "epoch_steps", "epoch_samples", "epoch_seconds")


class Journal:
    """Collects; a part of it goes into the kept state, and comes out of it.

    Args:
        steps: of the whole training.
        device: that trains.
        tensorboard: folder for TensorBoard's logs, or None.
    """

    def __init__(self, steps: int, device: torch.device, tensorboard: Path | None = None) -> None:
        self.epochs: list[dict[str, Any]] = []
        self.curve: list[list[float]] = []
        self.seconds = 0.0
        self._bucket = max(1, steps // POINTS)
        self._sums = dict.fromkeys(SUMS, 0.0)
        self._pending: list[torch.Tensor] = []  # losses that nobody has waited for yet
        self.loss = math.nan
        self._device = device
        self._begun = self._mark = time.perf_counter()
        self._cpu = time.process_time()
        self._recent: deque[tuple[float, int]] = deque()
        self._recently = 0  # samples of those
        self._writer = None if tensorboard is None else _writer(tensorboard)

    def step(self, step: int, loss: torch.Tensor, samples: int, rate: float, *, read: bool) -> None:
        """A step is through.

        Args:
            step: counted from 1.
            loss: [], on the device.
            samples: in it.
            rate: of it.
            read: whether the losses so far are to be waited for.
        """
        now = time.perf_counter()
        sums = self._sums
        sums["epoch_seconds"] += now - self._mark
        self.seconds += now - self._mark
        self._mark = now
        self._pending.append(loss)
        sums["epoch_samples"] += samples
        self._recent.append((now, samples))
        self._recently += samples
        while len(self._recent) > 2 and now - self._recent[0][0] > RECENT:
            self._recently -= self._recent.popleft()[1]
        if read:
            self._read(step, rate)

    def _read(self, step: int, rate: float) -> None:
        losses = [float(loss) for loss in self._pending]
        self._pending = []
        if not losses:
            return
        self.loss = losses[-1]
        sums = self._sums
        for name in ("", "epoch_"):
            sums[f"{name}loss"] += sum(losses)
            sums[f"{name}steps"] += len(losses)
        if sums["steps"] >= self._bucket:
            mean = sums["loss"] / sums["steps"]
            self.curve.append([step, mean, rate])
            self._write(step, {"train/loss": mean, "train/rate": rate, "train/samples_per_second": self.speed})
            sums["loss"] = sums["steps"] = 0.0

    def epoch(self, step: int, rate: float, validation: float | None, metric: str | None) -> None:
        """An epoch is through."""
        self._read(step, rate)
        sums = self._sums
        row: dict[str, Any] = {
            "epoch": len(self.epochs) + 1,
            "loss": sums["epoch_loss"] / max(1, sums["epoch_steps"]),
            "seconds": sums["epoch_seconds"],
            "samples_per_second": sums["epoch_samples"] / max(1e-9, sums["epoch_seconds"]),
        }
        if validation is not None:
            row["validation"] = validation
            self._write(step, {f"validation/{metric}": validation})
        self.epochs.append(row)
        for name in SUMS:
            if name.startswith("epoch_"):
                sums[name] = 0.0

    def resumes(self) -> None:
        """The clock goes on: what was between (a validation, a state written) is no step."""
        now = time.perf_counter()
        self.seconds += now - self._mark
        self._mark = now

    @property
    def speed(self) -> float:
        """Samples a second of late."""
        if len(self._recent) < 2:
            return 0.0
        (first, samples), (last, _) = self._recent[0], self._recent[-1]
        return (self._recently - samples) / max(1e-9, last - first)

    def state(self) -> dict[str, Any]:
        """For the kept state; the losses so far must have been read."""
        return {
            "epochs": [dict(row) for row in self.epochs],
            "curve": [list(point) for point in self.curve],
            "seconds": self.seconds,
            "sums": dict(self._sums),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """From a kept state."""
        self.epochs, self.curve = [dict(row) for row in state["epochs"]], [list(point) for point in state["curve"]]
        self.seconds = state["seconds"]
        self._sums = dict(state["sums"])
        self._pending = []
        self._mark = time.perf_counter()

    def figures(self) -> dict[str, Any]:
        """Of the whole training; utilization and memory of this process since it went on last."""
        wall = time.perf_counter() - self._begun
        found: dict[str, Any] = {
            "history": self.epochs,
            "curve": self.curve,
            "training_seconds": self.seconds,
            "cpu_utilization": (time.process_time() - self._cpu) / max(1e-9, wall * cores()),
            "peak_memory_bytes": peak_memory(),
        }
        if self.epochs:
            spent = sum(row["seconds"] for row in self.epochs)
            shown = sum(row["seconds"] * row["samples_per_second"] for row in self.epochs)
            found["samples_per_second"] = shown / max(1e-9, spent)
        if self._device.type == "cuda":
            found["peak_device_bytes"] = torch.cuda.max_memory_allocated(self._device)
        return found

    def close(self) -> None:
        """Write out what TensorBoard has not been given yet."""
        if self._writer is not None:
            self._writer.close()

    def _write(self, step: int, values: dict[str, float]) -> None:
        if self._writer is not None:
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)


def _writer(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as err:
        raise MissingExtraError("can't write TensorBoard's logs", module="tensorboard", extra="tensorboard") from err
    return SummaryWriter(folder)
