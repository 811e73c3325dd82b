"""A load test's result for people (a table, a progress bar) and for programs (a JSON file)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from compress.errors import ServerError
from serve.load.generator import Progress as Standing
from serve.load.result import LoadResult

__all__ = ["print_result", "show_progress", "write_json"]

PLAIN_LINE_S = 5.0


def print_result(result: LoadResult, console: Console | None = None) -> None:
    """Print the table."""
    console = console or Console()
    console.print(f"{result.model} at {result.url}, {result.concurrency} at a time", highlight=False, soft_wrap=True)
    table = Table()
    table.add_column("measured")
    table.add_column("value", justify="right")
    table.add_row("throughput", f"{result.throughput:,.1f} answers/s")
    for name, value in (("p50", result.p50_ms), ("p90", result.p90_ms), ("p99", result.p99_ms)):
        table.add_row(f"latency {name}", "too few samples" if value is None else f"{value:.2f} ms")
    if result.mean_ms is not None and result.max_ms is not None:
        table.add_row("latency mean, max", f"{result.mean_ms:.2f}, {result.max_ms:.2f} ms")
    table.add_row("answers", f"{result.count:,} in {result.seconds:.1f} s")
    table.add_row("errors", f"{result.error_count:,}")
    for kind, count in result.errors.items():
        table.add_row(f"  {kind}", f"{count:,}")
    table.add_row("bytes in, out", f"{result.bytes_in:,}, {result.bytes_out:,}")
    table.add_row("this client's CPU", f"{result.client_cpu_share:.0%} of a core")
    console.print(table)
    if result.interrupted:
        console.print("Stopped before its time: these are the figures up to then.")
    if result.client_cpu_share > 0.9:
        console.print("This client was busy all the time: the server may be able to do more.")


def write_json(result: LoadResult, path: Path) -> None:
    """Write the result beside, then rename.

    Raises:
        ServerError: the file can't be written.
    """
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_text(json.dumps(result.to_dict(), indent=2) + "\n", encoding="utf-8")
        part.replace(path)
    except OSError as err:
        raise ServerError(
            f"can't write {path}", why=err.strerror or str(err), mend="name a file in a folder that you can write to"
        ) from err


@contextmanager
def show_progress(console: Console | None = None) -> Iterator[Callable[[Standing], None]]:
    """A bar with the time left on a terminal, a line every few seconds elsewhere; gone when it ends."""
    console = console or Console(stderr=True)
    if not console.is_terminal:
        yield _plain_lines(console)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as bar:
        task = bar.add_task("warming up")

        def show(standing: Standing) -> None:
            counts = f"{standing.successes:,} answers" if standing.successes or standing.errors else "warming up"
            errors = f", {standing.errors:,} errors" if standing.errors else ""
            elapsed_s = min(standing.elapsed_s, standing.total_s)
            bar.update(task, description=counts + errors, completed=elapsed_s, total=standing.total_s)
            bar.refresh()

        yield show


def _plain_lines(console: Console) -> Callable[[Standing], None]:
    due_s = PLAIN_LINE_S

    def show(standing: Standing) -> None:
        nonlocal due_s
        if standing.elapsed_s < due_s:
            return
        due_s = standing.elapsed_s + PLAIN_LINE_S
        left_s = max(standing.total_s - standing.elapsed_s, 0)
        console.print(f"{standing.successes} answers, {standing.errors} errors, {left_s:.0f} s left")

    return show
