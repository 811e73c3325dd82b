"""A load test on one page that needs nothing else: verdict, plots, tables."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

from serve.load.figures.compare import Comparison
from serve.load.figures.intervals import interval
from serve.load.figures.result import PERCENTS, LoadResult
from serve.load.report.page_style import STYLE
from serve.load.report.plot_style import check as check_plots
from serve.load.report.plots import (
    batches_plot,
    breakdown_plot,
    difference_plot,
    percentiles_plot,
    search_plot,
    sweep_plot,
    time_plot,
)
from serve.load.report.report import NOT_ALL, LoadReport
from serve.load.slo import parse_objective

__all__ = ["check_plots", "page"]

MOST_LINES, MOST_BARS, MOST_OPEN = 8, 4, 2


def page(report: LoadReport, *, names: Sequence[str] = (), comparisons: Sequence[Comparison] = ()) -> str:
    """The page, as HTML.

    Args:
        report: what was measured; of several laid over each other, each run's `model` is the name of its own.
        names: of the reports that it was laid together from; empty for one.
        comparisons: of two of them.
    """
    objective = parse_objective(report.objective) if report.objective else None
    runs = report.runs
    groups = _groups(runs, names)
    labels = [_label(run, runs, names) for run in runs]
    figures: list[tuple[str, str]] = []
    if comparisons and len(groups) == 2:
        figures.append(("After over before, at each percentile", difference_plot(groups[0][1], groups[1][1])))
    if runs:
        caption = "Latency over percentiles"
        caption += "; dotted: from when it was sent, or estimated" if len(runs) > 1 else ""
        shown = _few(runs, labels, MOST_LINES)
        figures.append((caption, percentiles_plot(shown[0], shown[1], objective)))
    if len(runs) > 1 and not comparisons and report.found is None:
        figures.append(("Latency against throughput, and throughput against load", sweep_plot(groups, objective)))
    figures.append(("Rates that were tried", search_plot(report)))
    figures.append(("Where the mean request's time went", breakdown_plot(runs, labels)))
    figures.append(("Batch sizes reached, by the inferences in them", batches_plot(*_few(runs, labels, MOST_BARS))))
    over_time = [
        (f"Second by second: {label}", time_plot(run)) for run, label in zip(runs, labels, strict=True) if run.series
    ]
    closed = over_time[:-MOST_OPEN]
    figures += over_time[-MOST_OPEN:]
    title = html.escape(report.title)
    invalid = "".join(
        f'<li class="bad">{html.escape(f"{label}: {why}")}</li>'
        for run, label in zip(runs, labels, strict=True)
        for why in run.invalid
    )
    if report.ended:
        invalid += f'<li class="bad">{html.escape(f"{NOT_ALL}: {report.ended}")}</li>'
    kind = "" if not report.objective else "good" if report.kept else "bad"
    said = html.escape(report.verdict)
    verdict = f'<p class="verdict"><span class="{kind}">{said}</span></p>' if said else ""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Load test: {title}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head><body>'
        f'<h1>{title}</h1><p class="soft">{html.escape(_subtitle(report))}</p>{verdict}'
        + (f"<h2>Invalid</h2><ul>{invalid}</ul>" if invalid else "")
        + (_tiles(report, runs[0]) if len(runs) == 1 else "")
        + "".join(_compared(comparison) for comparison in comparisons)
        + _figures(figures)
        + (
            f"<details><summary>The other runs, second by second</summary>{_figures(closed)}</details>"
            if closed
            else ""
        )
        + "<h2>Runs</h2>"
        + _runs_table(report, labels)
        + _times_table(runs, labels)
        + _errors_table(runs, labels)
        + _machine(report)
        + "</body></html>\n"
    )


def _subtitle(report: LoadReport) -> str:
    runs = report.runs
    words = [report.scenario] if report.scenario else []
    words.append(f"{len(runs)} runs" if len(runs) > 1 else runs[0].offered if runs else "nothing measured")
    if runs:
        words.append(f"{sum(run.seconds for run in runs):.0f} s measured")
        words.append(datetime.fromtimestamp(runs[0].started, UTC).strftime("%Y-%m-%d %H:%M UTC"))
        words.append(f"{runs[0].request_bytes:,} bytes a request")
        words.append(f"seed {runs[0].seed}")
    return ", ".join(words)


def _tiles(report: LoadReport, run: LoadResult) -> str:
    between = interval(run, 99)
    tiles = [
        ("answers/s", f"{run.throughput:,.1f}"),
        ("p50", _ms(run.latency.at("p50"))),
        ("p99" + (f", {between[0]:.3g} to {between[1]:.3g}" if between else ""), _ms(run.latency.at("p99"))),
        ("errors", f"{run.error_share:.2%}" if run.error_count else "0"),
    ]
    if run.rate is not None:
        tiles.append(("sent late, p99", _ms(run.lateness.at("p99"))))
    if run.clock_error_ms is not None:
        tiles.append(("workers' clocks apart, at most", _ms(run.clock_error_ms)))
    if run.accuracy is not None:
        tiles.append((f"accuracy of {run.labelled:,}", f"{run.accuracy:.2%}"))
    tiles.append(("client's CPU", f"{run.client_cpu_share:.0%} of a core"))
    if run.server is not None:
        tiles.append(("server's CPU", f"{run.server.cpu_share:.0%} of a core"))
    if (cost := report.cost_of_a_million(run)) is not None:
        tiles.append(("a million inferences cost", f"{cost:,.4g}"))
    return (
        '<div class="tiles">'
        + "".join(
            f'<div><b>{html.escape(value)}</b><span class="soft">{html.escape(name)}</span></div>'
            for name, value in tiles
        )
        + "</div>"
    )


def _runs_table(report: LoadReport, labels: Sequence[str]) -> str:
    names = [f"p{percent:g}" for percent in PERCENTS]
    columns = ["load", "answers/s", *(f"{name}, ms" for name in names), "max, ms", "errors", "late p99, ms"]
    rows: list[list[str]] = []
    for number, (run, label) in enumerate(zip(report.runs, labels, strict=True)):
        errors = f"{run.error_share:.2%}" if run.error_count else "0"
        rows.append([label, f"{run.throughput:,.1f}", *(_number(run.latency.at(name)) for name in names),
                     _number(run.latency.max_ms), errors,
                     _number(run.lateness.at("p99")) if run.rate is not None else "–"])  # fmt: skip
        other, words = (run.service, "from when it was sent") if run.rate is not None else (run.estimated, "estimated")
        if other is not None:
            rows.append([f"  {words}", "", *(_number(other.at(name)) for name in names), _number(other.max_ms), "", ""])
        if report.objective and number < len(report.broken) and report.broken[number]:
            rows.append([f"  not kept: {'; '.join(report.broken[number])}", *[""] * (len(columns) - 1)])
    note = "A dash: fewer than ten answers would lie beyond that percentile."
    return _table(columns, rows) + f'<p class="soft">{note}</p>'


def _times_table(runs: Sequence[LoadResult], labels: Sequence[str]) -> str:
    columns = ["Triton's account", "requests", "total, ms", "queue", "input", "compute", "output", "batch"]
    rows: list[list[str]] = []
    for run, label in zip(runs, labels, strict=True):
        for model in run.breakdown.models if run.breakdown is not None else ():
            batch = model.batch_size
            times = (model.total_ms, model.queue_ms, model.input_ms, model.infer_ms, model.output_ms)
            rows.append([f"{label}: {model.model}" if len(runs) > 1 else model.model, f"{model.requests:,}",
                         *map(_number, times), "–" if batch is None else f"{batch:.2f}"])  # fmt: skip
    return _table(columns, rows) if rows else ""


def _errors_table(runs: Sequence[LoadResult], labels: Sequence[str]) -> str:
    rows = [
        [label, kind, f"{count:,}"]
        for run, label in zip(runs, labels, strict=True)
        for kind, count in run.errors.items()
    ]
    return _table(["errors", "kind", "count"], rows) if rows else ""


def _compared(comparison: Comparison) -> str:
    rows: list[list[str]] = []
    for change in comparison.changes:
        share = change.name == "errors"
        values = [f"{value:.3%}" if share else _number(value) for value in (change.before, change.after)]
        between = "" if change.low is None or change.high is None else f"{change.low:.3f} to {change.high:.3f}"
        rows.append([change.name, *values, "" if share else f"{change.ratio:.3f}", between, change.word])
    notes = "".join(f"<li>{html.escape(note)}</li>" for note in comparison.notes)
    table = _table([comparison.offered, "before", "after", "after/before", "95% interval", ""], rows)
    return table + (f'<ul class="soft">{notes}</ul>' if notes else "")


def _machine(report: LoadReport) -> str:
    machine = dict(report.machine)
    versions = machine.pop("versions", {})
    words = [f"{name} {value}" for name, value in machine.items()]
    words += [f"{name} {value}" for name, value in versions.items()] if isinstance(versions, dict) else []
    use = "".join(
        f"; the server took {run.server.cpu_share:.0%} of a core and {run.server.memory_bytes / 1e6:,.0f} MB"
        for run in report.runs[-1:]
        if run.server is not None
    )
    use += "".join(f"; server's CPU not measured: {run.server_untold}" for run in report.runs[-1:] if run.server_untold)
    client = "".join(f"; this client {run.client_cpu_share:.0%} of a core" for run in report.runs[-1:])
    return f'<p class="soft">{html.escape(", ".join(words) + client + use)}.</p>' if words else ""


def _groups(runs: Sequence[LoadResult], names: Sequence[str]) -> list[tuple[str, list[LoadResult]]]:
    if len(names) < 2:
        return [("", list(runs))]
    return [(name, [run for run in runs if run.model == name]) for name in names]


def _label(run: LoadResult, runs: Sequence[LoadResult], names: Sequence[str]) -> str:
    alike = [each for each in runs if each.offered == run.offered and each.model == run.model]
    label = f"{run.model}, {run.offered}" if len(names) > 1 else run.offered
    return label if len(alike) == 1 else f"{label} ({next(n for n, each in enumerate(alike) if each is run) + 1})"


def _few(runs: Sequence[LoadResult], labels: Sequence[str], most: int) -> tuple[list[LoadResult], list[str]]:
    """At most as many as can be told apart, the first and the last among them."""
    if len(runs) <= most:
        return list(runs), list(labels)
    places = sorted({round(step * (len(runs) - 1) / (most - 1)) for step in range(most)})
    return [runs[place] for place in places], [labels[place] for place in places]


def _figures(figures: Iterable[tuple[str, str]]) -> str:
    return "".join(
        f"<figure><figcaption>{html.escape(caption)}</figcaption>{svg}</figure>" for caption, svg in figures if svg
    )


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
    body = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g} ms"


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
