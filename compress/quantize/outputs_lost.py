"""How much of what a network tells samples apart by is lost in 8 bits: by the data that the ranges come from.

It needs no evaluation data, and no rule that knows why.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from compress.console.wording import counted
from compress.data.dataset import Dataset
from compress.errors import StageError, ToolkitError
from compress.evaluate.judge import spread
from compress.evaluate.scoring import ForEach
from compress.model import Arrays, OnnxModel
from compress.model.apart import without_fills
from compress.quantize.chances import chances_of
from compress.runtime.backends import Backend, open_model
from compress.runtime.measure import cores

__all__ = ["OutputsLost", "outputs_lost"]

SAMPLES = 32  # tell what is lost by halves
MORE = 256  # are asked where these tell of a loss, or of a column nothing: one label of forty may be in none of them
# Rounding alone takes some hundredths. Of a constant that lies in the middle, all is lost: beyond half, the outputs are
# nearer to that than to the float model's.
MOST = 0.5
# Of columns along the last axis, the worst is told where they are few: of thousands, some lose much by chance.
COLUMNS = 64
FEW = 3  # answers that change by chance, where they are classes or flags
VARIES = 1e-10  # of an output's mean square: below, float32 alone makes it vary
# Chances, from 0 to 1 or to 100, mean the same in each column. One whose variance is this far below the largest is of a
# label that no sample has: 8 bits for all labels need not hold the traces that it varies by. An output that is a single
# chance, as the graph tells, is held against one that is right of half of the samples.
TRACES = 1e-3
LARGEST = 0.25

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class OutputsLost:
    """The output that loses most.

    Attributes:
        output: its name.
        share: of floats, mean squared error beside the variance over samples, infinite where values are no numbers; of
            classes, flags and other whole numbers, how many change beside how many one answer for all samples misses,
            one at least.
        samples: that it was found on.
        column: the one along the last axis that loses most; None where there is none, or too many.
        column_share: of that column.
        changed: of whole numbers, the share that changes; None for floats.
        missed: the share of them that one answer for all samples misses.
        few: whether so few of them change that it may be chance.
    """

    output: str
    share: float
    samples: int
    column: int | None = None
    column_share: float | None = None
    changed: float | None = None
    missed: float | None = None
    few: bool = False

    @property
    def worst(self) -> float:
        """The share of the whole, or of its worst column."""
        return self.share if self.column_share is None else max(self.share, self.column_share)

    @property
    def warning(self) -> str | None:
        """What is to be said, where it is too much."""
        if self.worst <= MOST or self.few:
            return None
        where = f"the output {self.output!a} on {counted(self.samples, 'samples')} of the calibration data"
        if self.changed is not None:
            told = f"INT8 changes {self.changed:.1%} of the answers of {where}, and one answer for all samples misses "
            told += f"{self.missed:.1%}"
        elif not np.isfinite(self.worst):
            told = f"INT8 makes values that are no numbers of {where}"
        else:
            part = (
                ""
                if self.share > MOST or self.column is None
                else f"column {self.column} (from 0, on the last axis) of "
            )
            told = (
                f"INT8 loses {self.share if not part else self.worst:.0%} of {part}{where}: that is its squared error "
            )
            told += "beside what the float model's answers vary by, and one answer for all samples loses 100%"
        return f"{told}. `compress explain` tells which nodes lose it; --keep-float keeps them in float"

    def to_dict(self) -> dict[str, Any]:
        """As JSON values; a share that is no number is None."""
        return {
            "output": self.output,
            "share": _finite(self.share),
            "samples": self.samples,
            **({} if self.column is None else {"column": self.column, "column_share": _finite(self.column_share)}),
            **({} if self.changed is None else {"changed": self.changed, "missed": self.missed}),
        }


def _finite(share: float | None) -> float | None:
    return share if share is not None and np.isfinite(share) else None


def outputs_lost(before: OnnxModel, after: OnnxModel, data: Dataset) -> OutputsLost | None:
    """Hold a quantized file against the float file on some samples.

    Args:
        before: the float file.
        after: the quantized one.
        data: the calibration data.

    Returns:
        None where no output varies over samples, or the float file does not run here.

    Raises:
        StageError: the quantized file does not run on what the float file takes.
    """
    found: dict[str, _Floats | _Wholes] | None = {}
    chances = chances_of(before.path)
    for count in (SAMPLES, MORE):
        some = spread(data, count)
        found = _held(before, after, some, chances)
        if found is None:
            return None
        told = [lost for name, tally in found.items() if (lost := tally.lost(name, len(some))) is not None]
        sure = not any(lost.warning for lost in told) and all(tally.told for tally in found.values())
        if sure or len(some) == len(data):
            break
    return max(told, key=lambda lost: (not lost.few, lost.worst), default=None)


def _held(
    before: OnnxModel, after: OnnxModel, some: Dataset, chances: Mapping[str, float]
) -> dict[str, _Floats | _Wholes] | None:
    """By output, what both files make of samples; None where the float file does not run."""
    found: dict[str, _Floats | _Wholes] = {}
    try:
        first = open_model(before, threads=cores())
        each = ForEach(first, some)
    except ToolkitError:  # who runs it next says so
        return None
    second: Backend | None = None
    for inputs, _ in some.batches(each.batch):
        try:
            wanted = first.infer(inputs)
        except ToolkitError:
            return None
        try:
            second = second or open_model(after, threads=cores())
            given = second.infer(inputs)
        except ToolkitError as err:
            raise _no_run(err) from err
        for name, (want, got) in _by_sample(wanted, given, each, len(next(iter(inputs.values())))).items():
            if name not in found:
                found[name] = _Floats(want[:1], chances.get(name)) if want.dtype.kind == "f" else _Wholes()
            found[name].add(want, got)
    return found


def _no_run(err: ToolkitError) -> StageError:
    return StageError(
        "the INT8 file does not run on the calibration data",
        why=f"the float model takes these samples; with what 8 bits round, ONNX Runtime says: {err.why or err}",
        mend="keep in float what reckons places in tables or sizes (--keep-float, by names of the exported graph), or "
        "round no activation: --int8 weights",
    )


def _by_sample(wanted: Arrays, given: Arrays, each: ForEach, rows: int) -> dict[str, tuple[Array, Array]]:
    """Outputs [samples, …] of both files, where they have samples and are of one shape."""
    axes = each.axes(wanted, rows)
    found: dict[str, tuple[Array, Array]] = {}
    for name, want in wanted.items():
        axis, got = axes[name], given[name]
        if axis is not None and want.dtype.kind in "fiub" and want.shape == got.shape and want.shape[axis] == rows:
            found[name] = np.moveaxis(want, axis, 0), np.moveaxis(got, axis, 0)
    return found


class _Wholes:
    """Answers of one output that are no floats: classes, flags, counts."""

    told = True  # of all that there is

    def __init__(self) -> None:
        self._wanted: list[Array] = []
        self._changed = 0

    def add(self, want: Array, got: Array) -> None:
        """Some samples more."""
        self._wanted.append(want)
        self._changed += int((want != got).sum())

    def lost(self, name: str, samples: int) -> OutputsLost | None:
        """None where nothing varies, nor changes, or samples differ in shape."""
        if len({want.shape[1:] for want in self._wanted}) != 1:
            return None
        wanted = np.concatenate(self._wanted)
        most = np.zeros(wanted.shape[1:], np.int64)  # samples that one answer for all of them is right for, by place
        for one in wanted:
            most = np.maximum(most, (wanted == one).sum(0))
        missed = wanted.size - int(most.sum())
        if len(wanted) < 2 or not wanted.size or not (missed or self._changed):
            return None
        share, few = self._changed / max(missed, 1), self._changed < FEW
        changed, missed_share = self._changed / wanted.size, missed / wanted.size
        return OutputsLost(name, share, samples, changed=changed, missed=missed_share, few=few)


class _Floats:
    """Sums over the samples of one output, by column of its last axis where these are few.

    Args:
        first: sample.
        chance: what a chance of 1 is, where they are chances; None where the graph does not tell.
    """

    def __init__(self, first: Array, chance: float | None) -> None:
        self._chance = chance
        self._lone = first.ndim < 2 or first.shape[-1] == 1
        self._first = np.where(np.isfinite(first), first, 0).astype(np.float64)  # sums of what is far from 0 cancel
        self._sum = np.zeros_like(self._first)
        last = first.shape[-1] if first.ndim > 1 else 1
        self._columns = last if 0 < last <= COLUMNS else 1
        self._squares, self._error, self._size = (np.zeros(self._columns) for _ in range(3))
        self._low, self._high = np.inf, -np.inf
        self._count = self._values = 0
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
        self._squares += self._by_column(np.square(apart))
        self._size += self._by_column(np.square(wide))
        with np.errstate(over="ignore", invalid="ignore"):
            self._error += self._by_column(np.square(other - wide))
        self._low, self._high = wide.min(initial=self._low), wide.max(initial=self._high)
        self._count += len(want)
        self._values += want.size // self._columns

    @property
    def told(self) -> bool:
        """Whether of each of its columns something can be said."""
        sums = self._sums()
        return bool((sums[:, 0] >= self._least(sums)).all()) and all(part is not None for part in self._parts())

    def lost(self, name: str, samples: int) -> OutputsLost | None:
        """None where it does not vary."""
        if not self._whole or self._count < 2:
            return None
        sums = self._sums()
        share = _share(sums.sum(0), self._least(sums) if self._lone else 0.0)
        if share is None or self._columns < 2:
            return None if share is None else OutputsLost(name, share, samples)
        parts = {at: part for at, part in enumerate(self._parts()) if part is not None}
        worst = max(parts, key=lambda at: parts[at], default=None)
        return OutputsLost(name, share, samples, worst, None if worst is None else parts[worst])

    def _parts(self) -> list[float | None]:
        """By column its share; None where it does not vary."""
        sums = self._sums()
        return [_share(each, self._least(sums)) for each in sums]

    def _least(self, sums: Array) -> float:
        """What a column of chances is held against at least, however little it varies; 0 where they are no chances.

        Columns beside each other are chances also where all lie in 0 to 1. A lone output that does may be any number.
        """
        if self._lone:
            return TRACES * LARGEST * self._values * (self._chance or 0.0) ** 2
        chances = self._chance is not None or (self._low >= 0 and self._high <= 1)
        return TRACES * float(sums[:, 0].max()) if chances else 0.0

    def _sums(self) -> Array:
        """By column, what it varies by, the sum of its squares, and its squared error [columns, 3]."""
        varies = self._squares - self._by_column(np.square(self._sum)) / max(self._count, 1)
        return np.stack([varies, self._size, self._error], axis=1)

    def _by_column(self, values: Array) -> Array:
        total: Array = values.reshape(-1, self._columns).sum(0)
        return total


def _share(sums: Array, least: float) -> float | None:
    """Error by variance, or by the least that it is held against; None where it does not vary."""
    varies, size, error = map(float, sums)
    if varies <= VARIES * size:
        return None
    return error / max(varies, least) if np.isfinite(error) else float("inf")
