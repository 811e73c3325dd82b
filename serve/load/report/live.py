"""A run while it is under way: a bar with the time left and the last second's figures; plain lines elsewhere."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from serve.load.run import Progress

__all__ = ["show_progress"]

PLAIN_LINE_S = 5.0
HISTORY = 60
BARS = " ▁▂▃▄▅▆▇█"


@contextmanager
def show_progress(console: Console | None = None) -> Iterator[Callable[[Progress], None]]:
    """What to tell of each `Progress`; gone when it ends."""
    console = console or Console(stderr=True)
    if not console.is_terminal:
        yield _plain_lines(console)
        return
    rates: deque[float] = deque(maxlen=HISTORY)
    with Live(console=console, transient=True, auto_refresh=False) as live:
        last: tuple[float, float | None] = (-1.0, None)

        def show(standing: Progress) -> None:
            nonlocal last
            second = float(int(standing.elapsed_s))
            if standing.elapsed_s < last[0]:
                rates.clear()
            if standing.per_s is not None and second != last[1]:
                rates.append(standing.per_s)
            last = (standing.elapsed_s, second)
            live.update(_view(standing, list(rates)), refresh=True)

        yield show


def _view(standing: Progress, rates: list[float]) -> Group:
    elapsed_s = min(standing.elapsed_s, standing.total_s)
    left_s = standing.total_s - elapsed_s
    line = Table.grid(padding=(0, 1))
    line.add_row(
        standing.offered, ProgressBar(standing.total_s, elapsed_s, width=30),
        f"{left_s:.0f} s left" if left_s > 0 else "waiting for the last answers",
    )  # fmt: skip
    if not standing.successes and not standing.errors:
        return Group(line, Text("warming up"))
    grid = Table.grid(padding=(0, 2))
    late = "" if not standing.late_ms else f"sent late by up to {standing.late_ms:.2f} ms"
    errors = f"[red]{standing.errors:,} errors[/]" if standing.errors else "no errors"
    waiting = f", {standing.waiting:,} wait" if standing.waiting else ""
    grid.add_row(
        "last second", _number(standing.per_s, "answers/s"), _number(standing.p50_ms, "ms p50"),
        _number(standing.p99_ms, "ms p99"), late,
    )  # fmt: skip
    grid.add_row("so far", f"{standing.successes:,} answers", errors, f"{standing.in_flight:,} in flight{waiting}")
    most = max(rates, default=0.0) or 1.0
    spark = "".join(BARS[round(rate / most * (len(BARS) - 1))] for rate in rates)
    return Group(line, grid, Text(spark))


def _number(value: float | None, unit: str) -> str:
    return "" if value is None else f"{value:,.3g} {unit}" if value < 100 else f"{value:,.0f} {unit}"


def _plain_lines(console: Console) -> Callable[[Progress], None]:
    due_s = PLAIN_LINE_S
    last_s = 0.0

    def show(standing: Progress) -> None:
        nonlocal due_s, last_s
        if standing.elapsed_s < last_s:
            due_s = PLAIN_LINE_S
        last_s = standing.elapsed_s
        if standing.elapsed_s < due_s:
            return
        due_s = standing.elapsed_s + PLAIN_LINE_S
        left_s = max(standing.total_s - standing.elapsed_s, 0)
        console.print(f"{standing.successes} answers, {standing.errors} errors, {left_s:.0f} s left")

    return show
