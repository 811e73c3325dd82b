"""A run shown in the terminal: a bar with the time left for the stage at work, a line for each that is through."""

from __future__ import annotations

import re
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

from compress.console.durations import left
from compress.console.interrupts import heed
from compress.console.wording import Note, counted
from compress.errors import printable
from compress.pipeline import Outcome
from compress.stage import Progress as StageProgress

__all__ = ["Terminal"]

# What goes on beside the stages, and is through when all of it is done.
MEASURING = ("data", "candidates", "compare", "measure", "memory", "grid", "roofline", "sensitivity")
COUNTED = re.compile(r"[a-z ]+s\b[a-z ]*")  # a note that names what there is so much of; others are sentences
LINE_SECONDS = 15.0  # between two lines where there is no bar


class TimeLeft(ProgressColumn):
    """What the rest takes by the time since the part at work began, up to now: a step that goes on for long counts
    while it does, where rich's own column says 0 s after some that were quick.
    """

    def render(self, task: Task) -> Text:
        """Empty before there is a pace."""
        since, first = task.fields["since"], task.fields["first"]
        told = left(time.perf_counter() - since, task.completed - first, (task.total or 0) - first)
        return Text(f"{told} left" if told else "")


class Terminal:
    """A watcher that draws; without a terminal it prints plain lines.

    Args:
        console: usually of standard error, so that standard output holds the results alone.
        verbose: what others print is shown above the bar.
    """

    def __init__(self, console: Console, *, verbose: bool = False) -> None:
        self._console = console
        self._bar = Progress(
            TextColumn("{task.description:<26}", markup=False),
            BarColumn(30),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            TimeLeft(),
            TextColumn("{task.fields[note]}", markup=False),
            console=console,
            transient=True,
            disable=not console.is_terminal,
            redirect_stdout=verbose,
            redirect_stderr=verbose,
        )

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def started(self, stage: str) -> StageProgress:
        heed()
        for task in self._bar.task_ids:
            self._bar.remove_task(task)
        begun = told = since = time.perf_counter()
        task = self._bar.add_task(stage, total=None, note="", since=since, first=0)
        first, part = 0, -1

        def progress(done: int, total: int, note: str) -> None:
            nonlocal told, since, first, part
            heed()
            now = time.perf_counter()
            if total != part:  # something else begins; what was there from before has taken no time in this run
                since, first, part = now, done, total
            if task in self._bar.task_ids:  # else something that was begun within it has its place
                self._bar.update(task, completed=done, total=total, note=note, since=since, first=first)
            goes_on = first < done or now - since >= LINE_SECONDS
            if not self._console.is_terminal and now - told >= LINE_SECONDS and goes_on and done < total:
                told = now
                rest = left(now - since, done - first, total - first)
                line = f"  … {stage:<26} {done / total:.0%}, {note}{f', {rest} left' if rest else ''}"
                self._console.print(line, markup=False, highlight=False, soft_wrap=True)
            if stage in MEASURING and done == total:
                seconds = time.perf_counter() - begun
                self._line(stage, counted(total, note) if COUNTED.fullmatch(note) else note, seconds)

        return progress

    def ended(self, outcome: Outcome) -> None:
        label = next((str(task.description) for task in self._bar.tasks), outcome.stage.name)
        for warning in outcome.given.warnings:
            kind = "[blue]note[/]" if isinstance(warning, Note) else "[yellow]warning[/]"
            self._console.print(f"  {kind} {escape(printable(warning))}", highlight=False, soft_wrap=True)
        self._line(label, outcome.given.did, outcome.seconds, reused=outcome.reused)

    def _line(self, label: str, did: str, seconds: float, *, reused: bool = False) -> None:
        took = "kept from before" if reused else f"{seconds:.1f} s"
        line = f"  [green]✓[/] {escape(printable(label)):<26} {escape(printable(did))} [dim]({took})[/]"
        self._console.print(line, highlight=False, soft_wrap=True)
