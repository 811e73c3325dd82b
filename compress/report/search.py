"""A search told: terminal table, search.json and a self-contained search.html with the Pareto front drawn."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from compress.artifact import RUNTIME_NAMES
from compress.console.durations import bytes_text
from compress.console.wording import counted
from compress.evaluate.gains import signed, within
from compress.evaluate.intervals import percent
from compress.evaluate.search_result import SearchResult, Trial
from compress.report.pages import page
from compress.report.plot_labels import label_points
from compress.report.plot_settings import own_settings
from compress.report.plots import axes_of, log_axis, svg_of
from compress.storage.files import write_files

__all__ = ["search_table", "write_search"]

COLUMNS = ("candidate", "{metric}", "drop", "interval", "size", "p50", "samples/s", "on", "")
MARKERS = {"float": "o", "BF16": "P", "INT8 static": "s", "INT8 dynamic": "^", "INT8 weights": "D"}
COLOURS = ("#3b8bc4", "#2ca25f", "#e08214", "#8c6bb1", "#c51b7d", "#8c510a", "#01665e")


def search_table(result: SearchResult) -> Table:
    """Every candidate; those on the Pareto front, or not to be told from it, are starred."""
    table = Table(
        title=f"{counted(len(result.trials), 'candidates')} by {result.goal}, {result.metric} of the original "
        f"{result.original:.4f} on the {counted(result.samples, 'samples')} that choose; "
        f"at most {counted(result.max_drop, 'points')} may go"
        + ("" if result.confidence is None else f", with {percent(result.confidence)} confidence"),
        title_justify="left",
    )
    for column in _columns(result):
        table.add_column(
            escape(column), justify="left" if column in ("candidate", "on", "") else "right", no_wrap=column != ""
        )
    for row in _rows(result):
        table.add_row(*map(escape, row), style="bold green" if row[-1].startswith("best") else None)
    return table


def write_search(result: SearchResult, folder: Path) -> None:
    """Write search.json and search.html into a folder, made if missing."""
    html = page("search.html", result=result, rows=_rows(result), columns=_columns(result), plot=pareto_plot(result))
    text = json.dumps(result.to_dict(), indent=2) + "\n"
    write_files({folder / "search.json": text, folder / "search.html": html})


def _columns(result: SearchResult) -> tuple[str, ...]:
    return tuple(name.format(metric=result.metric) for name in COLUMNS)


def _rows(result: SearchResult) -> list[tuple[str, ...]]:
    front, tied, best = result.front, result.tied, result.best

    def shown(value: float | None, text: str) -> str:
        return "–" if value is None else text.format(value)

    rows: list[tuple[str, ...]] = []
    for trial in result.trials:
        starred = ("★" if trial in front else "") + (" tied" if trial in tied else "")
        word = trial.why if trial.status != "measured" else "best" if trial is best else starred.strip()
        interval = within(trial.drop_low, trial.drop_high, result.metric) or "–"
        rows.append(
            (
                trial.candidate.name,
                shown(trial.value, "{:.4g}" if result.metric == "mse" else "{:.4f}"),
                "–" if trial.drop is None else signed(trial.drop, result.metric),
                interval,
                "–" if trial.size_bytes is None else bytes_text(trial.size_bytes),
                shown(trial.latency_p50_ms, "{:.3f} ms"),
                shown(trial.throughput, "{:,.0f}"),
                "–" if trial.runtime is None else RUNTIME_NAMES[trial.runtime],
                word,
            )
        )
    return rows


def _cost(trial: Trial, result: SearchResult) -> float:
    if result.goal == "size":
        return (trial.size_bytes or 0) / 1e6
    return (trial.latency_p50_ms if result.goal == "latency" else trial.throughput) or 0.0


@own_settings()
def pareto_plot(result: SearchResult) -> str:
    """Drop against cost as inline SVG; empty when nothing was measured."""
    if not result.measured:
        return ""
    figure, axes = axes_of(4.6)
    ratios = sorted({trial.candidate.prune for trial in result.measured})
    for trial in result.measured:
        axes.scatter(
            _cost(trial, result), trial.drop or 0.0, s=60, alpha=0.85,
            marker=MARKERS[trial.candidate.kind],
            color=COLOURS[ratios.index(trial.candidate.prune) % len(COLOURS)],
        )  # fmt: skip
    front = result.line
    axes.plot([_cost(t, result) for t in front], [t.drop or 0.0 for t in front], color="#888888", lw=1.2, zorder=0)
    axes.axhline(result.max_drop, color="#c0392b", lw=1, ls="--")
    left = axes.get_xlim()[1]
    axes.annotate("largest drop", (left, result.max_drop), (-4, 4), textcoords="offset points", ha="right", fontsize=8)
    if (best := result.best) is not None:
        at = (_cost(best, result), best.drop or 0.0)
        axes.scatter(*at, s=230, facecolors="none", edgecolors="#c0392b", linewidths=1.6)
    handles = [
        axes.scatter(
            [], [], color=COLOURS[index % len(COLOURS)], marker="o", label=f"−{ratio:.0%}" if ratio else "whole"
        )
        for index, ratio in enumerate(ratios)
    ] + [
        axes.scatter([], [], color="#999999", marker=marker, label=kind)
        for kind, marker in MARKERS.items()
        if any(trial.candidate.kind == kind for trial in result.measured)
    ]
    axes.legend(handles=handles, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=5, frameon=False, fontsize=9)
    log_axis(axes)
    axes.invert_yaxis()
    units = {"latency": "milliseconds", "size": "MB", "throughput": "samples a second"}
    called = "" if result.goal == "size" else f" at batch {result.batch(result.goal)}"
    axes.set_xlabel(f"{units[result.goal]}{called}, logarithmic")
    axes.set_ylabel("drop in points (less is higher)")
    if best is not None:
        others = [(_cost(trial, result), trial.drop or 0.0) for trial in result.measured if trial is not best]
        line = [(_cost(trial, result), trial.drop or 0.0) for trial in front]
        label_points(
            axes, [(_cost(best, result), best.drop or 0.0)], [best.candidate.name],
            size=9, radii=[8], others=others, lines=[*pairwise(line)],
        )  # fmt: skip
    return svg_of(figure)
