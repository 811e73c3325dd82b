"""A load test's result for people: tables in the terminal, a live view; and CSV and HdrHistogram's log for programs."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from serve.load.figures.compare import Comparison
from serve.load.figures.intervals import interval
from serve.load.figures.result import PERCENTS, Latency, LoadResult
from serve.load.report.report import NOT_ALL, LoadReport

__all__ = ["csv_text", "hlog_text", "print_comparisons", "print_report"]

NAMES = tuple(f"p{percent:g}" for percent in PERCENTS)


def print_report(report: LoadReport, console: Console | None = None) -> None:
    """Print the tables, and the verdict."""
    console = console or Console()
    console.print(report.title, highlight=False, soft_wrap=True)
    if len(report.runs) == 1:
        _print_run(report, report.runs[0], console)
    elif report.runs:
        console.print(_sweep(report))
    for number, run in enumerate(report.runs):
        for why in run.invalid:
            which = f"run {number + 1} ({run.offered})" if len(report.runs) > 1 else "this run"
            console.print(f"[red]invalid[/]: {which}: {escape(why)}", highlight=False, soft_wrap=True)
        if run.interrupted:
            console.print("Stopped before its time: these are the figures up to then.")
    if report.ended:
        console.print(f"[red]invalid[/]: {NOT_ALL}: {escape(report.ended)}", highlight=False, soft_wrap=True)
    if report.verdict:
        console.print(report.verdict, highlight=False, soft_wrap=True)


def print_comparisons(comparisons: Sequence[Comparison], allowed: float, console: Console | None = None) -> None:
    """Print a table for each load."""
    console = console or Console()
    colours = {"worse": "red", "no worse": "green", "undecided": "yellow"}
    for comparison in comparisons:
        table = Table(title=comparison.offered, title_justify="left")
        for column in ("", "before", "after", "after/before", "95% interval", f"worse than by {allowed:.3g}".rstrip()):
            table.add_column(column, justify="left" if column == "" else "right")
        for change in comparison.changes:
            share = change.name == "errors"
            shown = [f"{value:.3%}" if share else _number(value) for value in (change.before, change.after)]
            between = "" if change.low is None or change.high is None else f"{change.low:.3f} to {change.high:.3f}"
            unit = "" if share else "/s" if change.name == "throughput" else " ms"
            table.add_row(
                change.name, shown[0] + unit, shown[1] + unit, "" if share else f"{change.ratio:.3f}", between,
                f"[{colours[change.word]}]{change.word}[/]",
            )  # fmt: skip
        console.print(table)
        for note in comparison.notes:
            console.print(note, highlight=False, soft_wrap=True)


def csv_text(report: LoadReport) -> str:
    """A line for each second of each run."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    fields = ("second", "due", "successes", "rows", "errors", "p50_ms", "p99_ms", "max_ms", "late_ms")
    writer.writerow(("run", "load", *fields))
    for number, run in enumerate(report.runs):
        for second in run.series:
            values = (getattr(second, name) for name in fields)
            writer.writerow((number, run.offered, *("" if value is None else value for value in values)))
    return file.getvalue()


def hlog_text(report: LoadReport) -> str:
    """HdrHistogram's own log, an interval histogram of each second, tagged by run where there are several."""
    begin = report.runs[0].started if report.runs else 0.0
    lines = [
        "#[Latency of answers, in nanoseconds, by the second in which the request was due]",
        "#[Histogram log format version 1.3]",
        f"#[StartTime: {begin:.3f} (seconds since epoch)]",
        '"StartTimestamp","Interval_Length","Interval_Max","Interval_Compressed_Histogram"',
    ]
    for number, run in enumerate(report.runs):
        tag = f"Tag=run{number}," if len(report.runs) > 1 else ""
        for second in run.series:
            if second.latency:
                at = run.started + second.second
                longest = 1e6 * (second.max_ms or 0.0)
                lines.append(f"{tag}{at:.3f},1.000,{longest / 1e6:.3f},{second.latency}")
    return "\n".join(lines) + "\n"


def _print_run(report: LoadReport, run: LoadResult, console: Console) -> None:
    console.print(
        f"{run.offered}, {run.seconds:.1f} s" + (f", {run.arrivals}" if run.arrivals else ""), highlight=False
    )
    table = Table(show_header=False)
    table.add_column(style="dim")
    table.add_column(justify="right")
    for name, value in _facts(report, run):
        table.add_row(name, value)
    console.print(table)
    console.print(_percentiles(run))
    if run.breakdown is not None:
        console.print(_breakdown(run))


def _facts(report: LoadReport, run: LoadResult) -> Iterable[tuple[str, str]]:
    yield "throughput", f"{run.throughput:,.1f} answers/s"
    if run.inferences and abs(run.inferences / max(run.throughput, 1e-9) - 1) > 0.01:
        yield "inferences", f"{run.inferences:,.1f}/s"
    yield "answers", f"{run.count:,} in {run.seconds:.1f} s"
    yield "errors", f"{run.error_count:,}" + (f" ({run.error_share:.2%})" if run.error_count else "")
    for kind, count in run.errors.items():
        yield f"  {escape(kind)}", f"{count:,}"
    if run.accuracy is not None:
        yield "accuracy", f"{run.accuracy:.2%} of {run.labelled:,}"
    if run.latency.mean_ms is not None and run.latency.max_ms is not None:
        yield "latency mean, max", f"{run.latency.mean_ms:.2f}, {run.latency.max_ms:.2f} ms"
    if between := interval(run, 99):
        yield "p99, 95% interval", f"{between[0]:.2f} to {between[1]:.2f} ms"
    if run.rate is not None:
        late, most = run.lateness.at("p99"), run.lateness.max_ms
        if late is not None:
            yield "sent late, p99", f"{late:.3f} ms"
        else:
            few = "too few samples for p99"
            yield "sent late, at most", few if most is None else f"{most:.3f} ms ({few})"
        if run.waiting_ms > 0.01:
            yield "waited for a connection", f"{run.waiting_ms:.2f} ms on average"
    if run.clock_error_ms is not None:
        yield "workers' clocks apart, at most", f"{run.clock_error_ms:.3f} ms"
    yield "bytes in, out, of answers", f"{run.bytes_in:,}, {run.bytes_out:,}"
    yield "this client's CPU", f"{run.client_cpu_share:.0%} of a core, {run.client_memory_bytes / 1e6:.0f} MB"
    if run.server is not None:
        yield "the server's CPU", f"{run.server.cpu_share:.0%} of a core, {run.server.memory_bytes / 1e6:,.0f} MB"
    elif run.server_untold:
        yield "the server's CPU", f"not measured: {run.server_untold}"
    if (cost := report.cost_of_a_million(run)) is not None:
        yield "a million inferences cost", f"{cost:,.4g}"


def _percentiles(run: LoadResult) -> Table:
    """Both ways of counting, side by side."""
    table = Table()
    table.add_column("latency, ms")
    for name in NAMES:
        table.add_column(name, justify="right")
    rows: list[tuple[str, Latency | None]]
    if run.rate is not None:
        rows = [("from when it was due", run.latency), ("from when it was sent", run.service)]
    else:
        rows = [("as measured", run.latency), ("estimate without the clients' waiting", run.estimated)]
    for label, latency in rows:
        if latency is not None:
            table.add_row(label, *(_number(latency.at(name)) for name in NAMES))
    return table


def _breakdown(run: LoadResult) -> Table:
    table = Table(title="where the mean request's time went, ms", title_justify="left")
    for column in ("", "requests", "total", "queue", "input", "compute", "output", "batch"):
        table.add_column(column, justify="left" if column == "" else "right")
    if run.latency.mean_ms is not None and run.service.mean_ms is not None:
        table.add_row("client, from when it was due", f"{run.count:,}", _number(run.latency.mean_ms))
        table.add_row("client, from when it was sent", f"{run.count:,}", _number(run.service.mean_ms))
    assert run.breakdown is not None  # noqa: S101
    if run.breakdown.gateway_ms is not None:
        table.add_row("gateway", "", _number(run.breakdown.gateway_ms))
    for model in run.breakdown.models:
        batch = model.batch_size
        table.add_row(
            model.model, f"{model.requests:,}",
            *map(_number, (model.total_ms, model.queue_ms, model.input_ms, model.infer_ms, model.output_ms)),
            "" if batch is None else f"{batch:.2f}",
        )  # fmt: skip
    return table


def _sweep(report: LoadReport) -> Table:
    table = Table()
    for column in ("load", "answers/s", "p50 ms", "p90 ms", "p99 ms", "p99.9 ms", "errors", "late p99 ms", "batch"):
        table.add_column(column, justify="left" if column == "load" else "right")
    if report.objective:
        table.add_column(report.objective)
    if report.hourly_cost is not None:
        table.add_column("a million cost", justify="right")
    for number, run in enumerate(report.runs):
        batch = run.breakdown.models[-1].batch_size if run.breakdown is not None else None
        cells = [
            run.offered,
            f"{run.throughput:,.1f}",
            *(_number(run.latency.at(name)) for name in ("p50", "p90", "p99", "p99.9")),
        ]
        cells.append(f"{run.error_share:.2%}" if run.error_count else "0")
        cells.append(_number(run.lateness.at("p99")) if run.rate is not None else "")
        cells.append("" if batch is None else f"{batch:.2f}")
        if report.objective:
            broken = report.broken[number]
            cells.append(f"[red]{'; '.join(broken)}[/]" if broken else "[green]kept[/]")
        if report.hourly_cost is not None:
            cost = report.cost_of_a_million(run)
            cells.append("" if cost is None else f"{cost:,.4g}")
        table.add_row(*cells)
    return table


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
