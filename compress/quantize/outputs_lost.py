"""How much of what a network tells samples apart by is lost in 8 bits: by the data that the ranges come from.

It needs no evaluation data, and no rule that knows why.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from compress.console.wording import counted
from compress.data.dataset import Dataset
from compress.errors import ToolkitError
from compress.evaluate.judge import spread
from compress.evaluate.scoring import batch_for
from compress.model import OnnxModel
from compress.model.apart import without_fills
from compress.runtime.backends import open_model
from compress.runtime.measure import cores

__all__ = ["OutputsLost", "outputs_lost"]

SAMPLES = 32  # tell what is lost by halves
# Rounding alone takes some hundredths. Of a constant that lies in the middle, all is lost: beyond half, the outputs are
# nearer to that than to the float model's.
MOST = 0.5
VARIES = 1e-10  # of an output's mean square: below, float32 alone makes it vary

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class OutputsLost:
    """The output that loses most.

    Attributes:
        output: its name.
        share: mean squared error beside the variance over samples; infinite where values are no numbers.
        samples: that it was found on.
    """

    output: str
    share: float
    samples: int

    @property
    def warning(self) -> str | None:
        """What is to be said, where it is too much."""
        if self.share <= MOST:
            return None
        where = f"of the output {self.output!a} on {counted(self.samples, 'samples')} of the calibration data"
        told = (
            f"INT8 loses {self.share:.0%} {where}: that is its squared error beside what the float model's answers "
            "vary by, and one answer for all samples loses 100%"
            if np.isfinite(self.share)
            else f"INT8 makes values that are no numbers {where}"
        )
        return f"{told}. `compress explain` tells which nodes lose it; --keep-float keeps them in float"

    def to_dict(self) -> dict[str, Any]:
        """As JSON values; a share that is no number is None."""
        return {
            "output": self.output,
            "share": self.share if np.isfinite(self.share) else None,
            "samples": self.samples,
        }


def outputs_lost(before: OnnxModel, after: OnnxModel, data: Dataset) -> OutputsLost | None:
    """Hold a quantized file against the float file on some samples.

    Args:
        before: the float file.
        after: the quantized one.
        data: the calibration data.

    Returns:
        None where no output of floats varies over samples, or one of the files does not run here.
    """
    some = spread(data, SAMPLES)
    found: dict[str, _Tally] = {}
    try:
        models = [open_model(model, threads=cores()) for model in (before, after)]
        for inputs, _ in some.batches(batch_for(models[0], some)):
            wanted, given = (model.infer(inputs) for model in models)
            rows = len(next(iter(inputs.values())))
            for name, want in wanted.items():
                got = given[name]
                if want.dtype.kind == "f" and want.shape == got.shape and want.shape[:1] == (rows,):
                    found.setdefault(name, _Tally(want[:1])).add(want, got)
    except ToolkitError:  # who runs it next says so
        return None
    shares = {name: share for name, tally in found.items() if (share := tally.share) is not None}
    if not shares:
        return None
    worst = max(shares, key=lambda name: shares[name])
    return OutputsLost(worst, shares[worst], len(some))


class _Tally:
    """Sums over the samples of one output."""

    def __init__(self, first: Array) -> None:
        self._first = np.where(np.isfinite(first), first, 0).astype(np.float64)  # sums of what is far from 0 cancel
        self._sum = np.zeros_like(self._first)
        self._squares = self._error = self._size = 0.0
        self._count = 0
        self._whole = True

    def add(self, want: Array, got: Array) -> None:
        """Some samples more; of another shape, the output is left out."""
        if not self._whole or want.shape[1:] != self._first.shape[1:]:
            self._whole = False
            return
        wide, other = (each.astype(np.float64) for each in without_fills(want, got))
        wide, other = (np.where(np.isfinite(want), each, 0.0) for each in (wide, other))
        apart = wide - self._first
        self._sum += apart.sum(0, keepdims=True)
        self._squares += float(np.square(apart).sum())
        self._size += float(np.square(wide).sum())
        with np.errstate(over="ignore"):
            self._error += float(np.square(other - wide).sum())
        self._count += len(want)

    @property
    def share(self) -> float | None:
        """Error by variance; None where it does not vary."""
        varies = self._squares - float(np.square(self._sum).sum()) / max(self._count, 1)
        if not self._whole or self._count < 2 or varies <= VARIES * self._size:
            return None
        return self._error / varies if np.isfinite(self._error) else float("inf")
