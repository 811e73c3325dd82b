"""Requests a second over time, from a CSV file."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from compress.errors import ServerError
from compress.vetting.texts import read_text
from serve.config.named import LARGEST_DATA

__all__ = ["Traffic", "read_traffic"]

Floats = np.ndarray[Any, np.dtype[np.float64]]
MEND = "give two columns, the time (seconds, or ISO 8601) and requests a second; or one column, a time for each request"


@dataclass(frozen=True, eq=False)
class Traffic:
    """A rate over time, straight between its points.

    Attributes:
        times_s: ascending, from 0.
        rates: requests a second at these.
    """

    times_s: Floats
    rates: Floats

    @property
    def seconds(self) -> float:
        return float(self.times_s[-1])

    @property
    def requests(self) -> float:
        """In all."""
        return float(self._reached[-1])

    @cached_property
    def _reached(self) -> Floats:
        """Requests until each point."""
        return _integral(self.times_s, self.rates)

    def steps(self, step_s: float) -> Floats:
        """Mean rate in each step of so many seconds; what is left at the end is a step, too."""
        edges = np.arange(0.0, self.seconds + step_s, step_s)
        edges = np.append(edges[edges < self.seconds], self.seconds)
        every = np.union1d(self.times_s, edges)
        reached = _integral(every, np.interp(every, self.times_s, self.rates))
        found: Floats = np.diff(np.interp(edges, every, reached)) / np.diff(edges)
        return found

    def arrivals(self, seed: int = 0) -> Floats:
        """Poisson arrivals at this rate, in seconds from the beginning."""
        generator = np.random.default_rng((seed, 2))
        whole = self._reached
        units = np.sort(generator.uniform(0, whole[-1], generator.poisson(whole[-1])))
        at = np.clip(np.searchsorted(whole, units, side="right") - 1, 0, len(whole) - 2)
        # Within a leg from r0 to r1 over w seconds, u requests are reached where r0 t + (r1 - r0) t^2 / 2w = u.
        first, last, width = self.rates[at], self.rates[at + 1], np.diff(self.times_s)[at]
        slope, inside = (last - first) / width, units - whole[at]
        root = np.sqrt(np.maximum(first**2 + 2 * slope * inside, 0.0))
        offset = np.where(first + root > 0, 2 * inside / np.maximum(first + root, 1e-300), 0.0)
        found: Floats = self.times_s[at] + np.minimum(offset, width)
        return found


def _integral(times_s: Floats, rates: Floats) -> Floats:
    """Of a rate that is straight between its points, until each of them."""
    return np.concatenate([[0.0], np.cumsum((rates[1:] + rates[:-1]) / 2 * np.diff(times_s))])


def read_traffic(path: Path, *, scale: float = 1.0) -> Traffic:
    """Read a CSV file; a first row of names is passed over.

    Args:
        path: two columns, time and requests a second; or one, a time for each request.
        scale: what each rate is multiplied by.

    Raises:
        ServerError: it is something else.
    """
    try:
        text = read_text(path, LARGEST_DATA, named=True).removeprefix("\ufeff")
        lines = io.StringIO(text, newline="")
        rows = [[cell.strip() for cell in row] for row in csv.reader(lines) if row and any(map(str.strip, row))]
    except (OSError, ValueError, csv.Error) as err:
        raise ServerError(f"can't read {path}", why=str(err), mend=MEND) from err
    if rows and _number(rows[0][0]) is None:
        rows = rows[1:]
    columns = {len(row) for row in rows}
    if len(rows) < 2 or columns not in ({1}, {2}):
        why = "it has fewer than two rows" if len(rows) < 2 else "its rows are not all of one or two columns"
        raise ServerError(f"can't read the traffic in {path}", why=why, mend=MEND)
    values = [[_number(cell) for cell in row] for row in rows]
    for number, row in enumerate(values, 1):
        if any(value is None or not np.isfinite(value) for value in row) or (len(row) == 2 and (row[1] or 0) < 0):
            raise ServerError(f"can't read the traffic in {path}", why=f"row {number} is {rows[number - 1]}", mend=MEND)
    table = np.array(values, np.float64)
    times = table[:, 0] - table[0, 0]
    if (np.diff(times) < 0).any() or times[-1] <= 0 or (columns == {2} and (np.diff(times) == 0).any()):
        raise ServerError(f"can't read the traffic in {path}", why="its times do not go up", mend=MEND)
    if columns == {2}:
        return Traffic(times, table[:, 1] * scale)
    return _binned(times, scale)


def _binned(times: Floats, scale: float) -> Traffic:
    """Rates from the requests themselves: about a hundred of them, or a second, to a bin."""
    count = max(min(len(times) // 100, int(times[-1])), 1)
    edges = np.linspace(0, times[-1], count + 1)
    counts, _ = np.histogram(times, edges)
    rates = counts / np.diff(edges) * scale
    # A step at each edge, as steep as floats allow, so that no request is lost between the bins.
    inner = np.repeat(edges[1:-1], 2)
    inner[::2] = np.nextafter(inner[::2], 0)
    return Traffic(np.concatenate([[0.0], inner, [edges[-1]]]), np.repeat(rates, 2))


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        try:
            return datetime.fromisoformat(text).timestamp()
        except ValueError:
            return None
