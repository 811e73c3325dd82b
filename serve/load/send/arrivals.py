"""When requests are due: drawn before the run, from a seed, so that no server can slow them down.

Arrivals of unit rate are stretched by the rate over time: the i-th of a rate r(t) is due where the integral of r
reaches the i-th of unit rate (time rescaling; Daley and Vere-Jones, An Introduction to the Theory of Point Processes,
7.4). So a Poisson process stays one under ramps and steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from compress.errors import ServerError
from compress.vetting.texts import read_text
from serve.config.named import LARGEST_DATA
from serve.load.figures.histogram import Ints

__all__ = ["Arrivals", "Leg", "parse_arrivals", "parse_rate", "read_trace"]

Floats = np.ndarray[Any, np.dtype[np.float64]]
Kind = Literal["poisson", "constant", "burst", "trace"]
CHUNK = 65_536
RATE_MEND = "give a rate a second, as in 500; a ramp, as in 100..500; or steps, as in 100:10,100..500:20,500:10"


@dataclass(frozen=True)
class Leg:
    """A stretch of time in which the rate goes from one value to another.

    Attributes:
        first, last: requests a second at its beginning and end.
        seconds: how long it lasts.
    """

    first: float
    last: float
    seconds: float

    @property
    def requests(self) -> float:
        return (self.first + self.last) / 2 * self.seconds


@dataclass(frozen=True)
class Arrivals:
    """A schedule.

    Attributes:
        kind: "poisson"; "constant" (evenly spaced); "burst" (`burst` at once, the bursts Poisson); "trace".
        legs: the rate over time; empty for a trace.
        seed: the same seed draws the same times.
        burst: requests at a time, for that kind.
        times_s: a trace's times, ascending, in seconds from the beginning.
    """

    kind: Kind
    legs: tuple[Leg, ...] = ()
    seed: int = 0
    burst: int = 1
    times_s: tuple[float, ...] = ()

    @property
    def seconds(self) -> float:
        """How long it lasts."""
        return self.times_s[-1] if self.kind == "trace" else sum(leg.seconds for leg in self.legs)

    @property
    def expected(self) -> float:
        """Requests in all; their mean, where they are drawn."""
        return len(self.times_s) if self.kind == "trace" else sum(leg.requests for leg in self.legs)

    @property
    def rate(self) -> float:
        """Requests a second, on average."""
        return self.expected / max(self.seconds, 1e-9)

    def chunks(self, part: int = 0, parts: int = 1) -> Iterator[tuple[Ints, Ints]]:
        """Due times in nanoseconds from the beginning, and the number of each request, a chunk at a time.

        Args:
            part, parts: every `parts`-th request from the `part`-th on: what one of several processes sends. Together
                they send what one alone would.
        """
        for first, times in self._times():
            numbers = np.arange(first, first + len(times), dtype=np.int64)
            mine = numbers % parts == part
            yield (times[mine] * 1e9).astype(np.int64), numbers[mine]

    def total(self) -> int:
        """How many are due."""
        return sum(len(times) for _, times in self._times())

    def before(self, at_ns: int) -> int:
        """How many are due before that time, in nanoseconds from the beginning."""
        count = 0
        for times, _ in self.chunks():
            found = int(np.searchsorted(times, at_ns))
            count += found
            if found < len(times):
                break
        return count

    def _times(self) -> Iterator[tuple[int, Floats]]:
        if self.kind == "trace":
            times = np.asarray(self.times_s, np.float64)
            for at in range(0, len(times), CHUNK):
                yield at, times[at : at + CHUNK]
            return
        total = sum(leg.requests for leg in self.legs)
        count = 0
        for units in self._units():
            inside = units < total
            if not inside.all():
                yield count, self._stretched(units[inside])
                return
            yield count, self._stretched(units)
            count += len(units)

    def _units(self) -> Iterator[Floats]:
        """Arrivals of unit rate."""
        generator = np.random.default_rng(self.seed)
        last = 0.0
        number = 0
        while True:
            if self.kind == "constant":
                yield np.arange(number, number + CHUNK, dtype=np.float64)
                number += CHUNK
                continue
            size = self.burst if self.kind == "burst" else 1
            units = last + np.cumsum(generator.exponential(size, CHUNK))
            last = float(units[-1])
            yield np.repeat(units, size) if size > 1 else units

    def _stretched(self, units: Floats) -> Floats:
        """The times at which the integral of the rate reaches `units`."""
        begins = np.concatenate(([0.0], np.cumsum([leg.requests for leg in self.legs])))
        starts = np.concatenate(([0.0], np.cumsum([leg.seconds for leg in self.legs])))
        at = np.clip(np.searchsorted(begins, units, side="right") - 1, 0, len(self.legs) - 1)
        first = np.array([leg.first for leg in self.legs])[at]
        seconds = np.array([leg.seconds for leg in self.legs])[at]
        slope = (np.array([leg.last for leg in self.legs])[at] - first) / seconds
        need = units - begins[at]
        # need = first t + slope t² / 2, in the form that keeps its digits where the slope is small or 0
        root = np.sqrt(np.maximum(first**2 + 2 * slope * need, 0.0))
        times: Floats = starts[at] + np.minimum(2 * need / np.maximum(first + root, 1e-300), seconds)
        return times


def parse_rate(text: str, seconds: float) -> tuple[Leg, ...]:
    """Read a rate over time.

    Args:
        text: "500", a ramp "100..500", or steps "100:10,100..500:20", each with its seconds.
        seconds: shared by the steps that name none.

    Raises:
        ServerError: it is none.
    """
    try:
        steps = [_step(part) for part in text.split(",")]
    except ValueError as err:
        raise ServerError(f"can't read the rate {text!r}", why=str(err), mend=RATE_MEND) from err
    left = [step for step in steps if step[2] is None]
    each = seconds / max(len(left), 1)
    legs = tuple(Leg(first, last, each if own is None else own) for first, last, own in steps)
    if sum(leg.requests for leg in legs) < 1:
        raise ServerError(f"can't send at the rate {text!r}", why="not one request is due in that time", mend=RATE_MEND)
    return legs


def _step(text: str) -> tuple[float, float, float | None]:
    rate, colon, seconds = text.partition(":")
    first, dots, last = rate.partition("..")
    numbers = [float(first), float(last if dots else first)]
    length = float(seconds) if colon else None
    if not all(math.isfinite(number) and number >= 0 for number in numbers):
        raise ValueError("a rate must be 0 or more")
    if length is not None and not (math.isfinite(length) and length > 0):
        raise ValueError("a step must last longer than 0 s")
    return numbers[0], numbers[1], length


def parse_arrivals(text: str) -> tuple[Kind, int, Path | None]:
    """Read what `--arrivals` says: the kind, a burst's size, a trace's file.

    Raises:
        ServerError: it is no kind.
    """
    kind, _, rest = text.partition(":")
    if kind in ("poisson", "constant") and not rest:
        return ("poisson" if kind == "poisson" else "constant"), 1, None
    if kind == "burst":
        size = rest or "10"
        if size.isdecimal() and 0 < int(size) <= CHUNK:
            return "burst", int(size), None
    if kind == "trace" and rest:
        return "trace", 1, Path(rest)
    raise ServerError(
        f"can't send arrivals {text!r}",
        why="there is no such kind",
        mend="give poisson, constant, burst:10 (ten at once) or trace:FILE (a time in seconds on each line)",
    )


def read_trace(path: Path, *, rate: float | None = None) -> tuple[float, ...]:
    """Times in seconds, from the first on; the first column of each line, a heading left out.

    Args:
        rate: stretches them to this mean rate.

    Raises:
        ServerError: the file can't be read, or its lines don't start with numbers.
    """
    mend = "give a text file with a time in seconds at the beginning of each line"
    try:
        lines = [
            line.replace(";", ",").split(",")[0].strip()
            for line in read_text(path, LARGEST_DATA, named=True).splitlines()
        ]
    except (OSError, ValueError) as err:
        raise ServerError(f"can't read the trace {path}", why=str(err), mend=mend) from err
    lines = [line for line in lines if line and not line.startswith("#")]
    if lines and not _is_number(lines[0]):
        del lines[0]
    if odd := next((line for line in lines if not _is_number(line)), None):
        raise ServerError(f"can't read the trace {path}", why=f"{odd[:40]!r} is no time", mend=mend)
    times = np.sort(np.array([float(line) for line in lines]))
    if len(times) < 2 or times[-1] <= times[0]:
        raise ServerError(f"can't follow the trace {path}", why="it has no two different times", mend=mend)
    times = times - times[0]
    if rate is not None:
        times = times * (len(times) / rate / times[-1])
    return tuple(times.tolist())


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False
