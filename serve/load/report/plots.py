"""The plots of a load test."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from serve.load.figures.result import MIN_BEYOND, LoadResult
from serve.load.report.plot_style import (
    BLUE,
    CYCLE,
    GREEN,
    GREY,
    INK,
    NINES,
    ORANGE,
    RED,
    figure_of,
    legend_of,
    nines,
    own_settings,
    plain_log,
    spectrum,
    svg_of,
)
from serve.load.report.report import LoadReport
from serve.load.slo import Objective

__all__ = [
    "batches_plot", "breakdown_plot", "difference_plot", "percentiles_plot", "search_plot", "sweep_plot", "time_plot",
]  # fmt: skip


@own_settings()
def percentiles_plot(runs: Sequence[LoadResult], names: Sequence[str], objective: Objective | None) -> str:
    """Latency over percentiles, on an axis of nines: from when requests were due; dotted, from when they were sent."""
    figure, axes = figure_of(4.0)
    highest = 90.0
    for number, (run, name) in enumerate(zip(runs, names, strict=True)):
        colour = CYCLE[number % len(CYCLE)]
        open_loop = run.rate is not None
        other = run.service if open_loop else run.estimated
        label = "from when it was due" if open_loop else "as measured"
        other_label = "from when it was sent (hides the wait)" if open_loop else "estimate without the clients' waiting"
        if len(runs) > 1:
            label = name
        if other is not None and other.count:
            xs, ys = spectrum(other.samples())
            axes.plot(xs, ys, color=colour, lw=1.2, ls=(0, (2, 2)), label=other_label if len(runs) == 1 else None)
        if run.latency.count:
            xs, ys = spectrum(run.latency.samples())
            axes.plot(xs, ys, color=colour, lw=2, label=label)
            highest = max(highest, 100 * (1 - MIN_BEYOND / max(run.latency.count, MIN_BEYOND + 1)))
    for term in objective.terms if objective is not None else ():
        if term.percent is not None:
            axes.plot([nines(term.percent)], [term.bound], "v", color=RED, ms=8, zorder=5, label=str(term))
    ticks = [percent for percent in NINES if percent <= highest + 1e-9]
    axes.set_xticks([nines(percent) for percent in ticks], [f"{percent:g}%" for percent in ticks])
    axes.set(xlim=(0, max(nines(highest), 1)), xlabel="percentile", ylabel="latency, ms", yscale="log")
    plain_log(axes.yaxis)
    axes.grid(visible=True, which="major", alpha=0.25)
    legend_of(axes, fontsize=9)
    return svg_of(figure)


@own_settings()
def time_plot(run: LoadResult) -> str:
    """Requests due, answers and errors, and latency, second by second."""
    figure, (upper, lower) = figure_of(4.6, rows=2)
    whole = max(round(run.seconds), 1)
    series = [second for second in run.series if second.second < whole]
    seconds = [second.second + 0.5 for second in series]
    upper.step(seconds, [second.due for second in series], where="mid", color=GREY, lw=1.2, label="due")
    upper.step(seconds, [second.successes for second in series], where="mid", color=BLUE, lw=1.8, label="answers")
    if run.errors:
        upper.step(seconds, [second.errors for second in series], where="mid", color=RED, lw=1.5, label="errors")
    upper.set(ylabel="in each second", ylim=(0, None))
    for attribute, label, colour in (("p50_ms", "p50", BLUE), ("p99_ms", "p99", ORANGE), ("max_ms", "max", GREY)):
        known = [(second.second + 0.5, getattr(second, attribute)) for second in series
                 if getattr(second, attribute) is not None]  # fmt: skip
        if known:
            style = {"lw": 1, "ls": ":"} if label == "max" else {"lw": 1.8}
            lower.plot([x for x, _ in known], [y for _, y in known], color=colour, label=label,
                       marker="." if len(known) < 40 else None, **style)  # fmt: skip
    lower.set(xlabel="second in which the request was due", ylabel="latency, ms", yscale="log")
    plain_log(lower.yaxis)
    for axes in (upper, lower):
        axes.set_xlim(0, whole)
        axes.grid(visible=True, axis="y", alpha=0.25)
        legend_of(axes, fontsize=9, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return svg_of(figure)


@own_settings()
def sweep_plot(groups: Sequence[tuple[str, Sequence[LoadResult]]], objective: Objective | None) -> str:
    """Latency over throughput, point after point of each sweep, the knee ringed; and throughput over the load."""
    figure, (left, right) = figure_of(3.8, columns=2)
    bound = objective.latency_ms if objective is not None else None
    for number, (name, runs) in enumerate(groups):
        colour = CYCLE[number % len(CYCLE)]
        for which, style, label in (("p50", ":", f"{name} p50".strip()), ("p99", "-", f"{name} p99".strip())):
            known = [(run.throughput, value) for run in runs if (value := run.latency.at(which)) is not None]
            if known:
                left.plot(
                    [x for x, _ in known], [y for _, y in known], ls=style, marker="o", ms=4, color=colour, label=label
                )
        best = knee(runs)
        if best is not None and len(runs) > 2:
            run = runs[best]
            value = run.latency.at("p99") or run.latency.at("p50")
            if value is not None:
                left.plot([run.throughput], [value], "o", ms=13, mfc="none", mec=colour, mew=1.6,
                          label=f"{name} knee: {run.offered}".strip())  # fmt: skip
        xs = [_load(run) for run in runs]
        right.plot(
            xs, [run.throughput for run in runs], marker="o", ms=4, color=colour, label=f"{name} answers/s".strip()
        )
        if any(run.error_count for run in runs):
            right.plot(xs, [run.error_count / run.seconds for run in runs], marker="x", ms=5, ls="--", color=RED,
                       label=f"{name} errors/s".strip())  # fmt: skip
        if runs and runs[0].rate is not None:
            right.plot(xs, xs, color=GREY, lw=1, ls=":", label="offered" if number == 0 else None)
    if bound is not None:
        left.axhline(bound, color=RED, lw=1, ls="--", label=str(objective))
    left.set(xlabel="answers/s", ylabel="latency, ms", yscale="log")
    plain_log(left.yaxis)
    open_loop = bool(groups) and bool(groups[0][1]) and groups[0][1][0].rate is not None
    right.set(xlabel="requests/s offered" if open_loop else "clients", ylabel="a second", ylim=(0, None))
    if not open_loop:
        right.set_xscale("log", base=2)
        right.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    for axes in (left, right):
        axes.grid(visible=True, alpha=0.25)
        legend_of(axes, fontsize=8)
    return svg_of(figure)


@own_settings()
def breakdown_plot(runs: Sequence[LoadResult], names: Sequence[str]) -> str:
    """Where the mean request's time went, stacked; empty where nothing is known."""
    rows = [(name, parts) for run, name in zip(runs, names, strict=True) if (parts := parts_of(run))]
    if not rows:
        return ""
    figure, axes = figure_of(0.45 * len(rows) + 1.3)
    labels = list(dict.fromkeys(label for _, parts in rows for label, _ in parts))
    for row, (_, parts) in enumerate(rows):
        left = 0.0
        for label, value in parts:
            axes.barh(row, value, left=left, height=0.6, color=CYCLE[labels.index(label) % len(CYCLE)],
                      label=label if row == 0 else None)  # fmt: skip
            left += value
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.invert_yaxis()
    axes.set_xlabel("ms of the mean request")
    legend_of(axes, fontsize=8, ncols=4, loc="lower left", bbox_to_anchor=(0, 1))
    return svg_of(figure)


@own_settings()
def batches_plot(runs: Sequence[LoadResult], names: Sequence[str]) -> str:
    """Executions by batch size of the model that batches most; empty where nothing is known."""
    rows: list[tuple[str, str, dict[int, int]]] = []
    for run, name in zip(runs, names, strict=True):
        models = run.breakdown.models if run.breakdown is not None else ()
        most = max((model for model in models if model.batches), key=lambda model: model.batch_size or 0, default=None)
        if most is not None:
            rows.append((name, most.model, dict(most.batches)))
    if not rows:
        return ""
    figure, axes = figure_of(2.8)
    sizes = sorted({size for _, _, batches in rows for size in batches})
    width = 0.8 / len(rows)
    for number, (name, model, batches) in enumerate(rows):
        total = sum(batches.values())
        rowsum = sum(size * count for size, count in batches.items())
        axes.bar([at + number * width for at in range(len(sizes))],
                 [100 * batches.get(size, 0) * size / rowsum for size in sizes], width=width, align="edge",
                 color=CYCLE[number % len(CYCLE)],
                 label=f"{name}: {model}, {rowsum / total:.2f} on average".lstrip(": "))  # fmt: skip
    shown = sizes if len(sizes) <= 24 else sizes[:: len(sizes) // 16]
    axes.set_xticks([sizes.index(size) + 0.4 for size in shown], [str(size) for size in shown])
    axes.set(xlabel="batch size", ylabel="% of the inferences")
    legend_of(axes, fontsize=8)
    return svg_of(figure)


@own_settings()
def search_plot(report: LoadReport) -> str:
    """Each rate that was tried, in order, and whether it kept the objective."""
    if report.found is None:
        return ""
    figure, axes = figure_of(2.8)
    trials = [trial for trial in report.found.trials if trial.stage != "peak"]
    for kept, marker, colour, label in ((True, "o", GREEN, "kept"), (False, "X", RED, "not kept")):
        mine = [(number + 1, trial) for number, trial in enumerate(trials) if trial.kept == kept]
        if mine:
            axes.plot([x for x, _ in mine], [trial.rate for _, trial in mine], marker, color=colour, ms=7, label=label)
    confirming = [number + 1 for number, trial in enumerate(trials) if trial.stage == "confirm"]
    if confirming:
        axes.axvspan(confirming[0] - 0.5, confirming[-1] + 0.5, color=GREY, alpha=0.15, lw=0, label="confirmation")
    if report.found.rate is not None:
        axes.axhline(report.found.rate, color=GREEN, lw=1, ls="--")
    most = max((trial.rate for trial in trials), default=1.0)
    axes.set(xlabel="trial", ylabel="requests/s", ylim=(0, 1.12 * most))
    axes.xaxis.get_major_locator().set_params(integer=True)
    legend_of(axes, fontsize=9, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return svg_of(figure)


@own_settings()
def difference_plot(before: Sequence[LoadResult], after: Sequence[LoadResult]) -> str:
    """After over before at each percentile, with the 95% band over seconds or rounds."""
    from serve.load.figures.intervals import LEAST_BLOCKS, blocks_of, blocks_of_rounds

    if len(before) == 1:
        old, new = blocks_of(before[0]), blocks_of(after[0])
    else:
        old, new = blocks_of_rounds(before), blocks_of_rounds(after)
    count = min(sum(run.count for run in runs) for runs in (before, after))
    highest = 1 - MIN_BEYOND / max(count, MIN_BEYOND * 2)
    percents = [100 * (1 - 10 ** -(nine / 12)) for nine in range(1, 61) if 1 - 10 ** -(nine / 12) <= highest]
    if not percents or min(len(old), len(new)) < LEAST_BLOCKS:
        return ""
    generator = np.random.default_rng(0)
    drawn = old.draw(generator, 400)
    again = drawn if len(before) > 1 else new.draw(generator, 400)
    figure, axes = figure_of(3.0)
    ratios = np.array([new.percentiles(again, percent) / old.percentiles(drawn, percent) for percent in percents])
    xs = [nines(percent) for percent in percents]
    low, high = np.percentile(ratios, [2.5, 97.5], axis=1)
    axes.fill_between(xs, low, high, color=BLUE, alpha=0.25, lw=0, label="95%")
    axes.plot(xs, np.median(ratios, axis=1), color=BLUE, lw=2, label="after over before")
    axes.axhline(1.0, color=INK, lw=1, ls="--")
    ticks = [percent for percent in NINES if percent <= percents[-1] + 1e-9]
    axes.set_xticks([nines(percent) for percent in ticks], [f"{percent:g}%" for percent in ticks])
    axes.set(xlabel="percentile", ylabel="latency, ratio")
    axes.grid(visible=True, alpha=0.25)
    legend_of(axes, fontsize=9)
    return svg_of(figure)


def knee(runs: Sequence[LoadResult]) -> int | None:
    """The load of greatest power, throughput over latency (Kleinrock 1979), by its place; None without latencies."""
    power = [(run.throughput / value, place) for place, run in enumerate(runs) if (value := run.latency.at("mean"))]
    return max(power)[1] if power else None


def parts_of(run: LoadResult) -> list[tuple[str, float]]:
    """The mean latency of a run in parts, in milliseconds; empty where Triton's account is missing."""
    told, mean_ms, service_ms = run.breakdown, run.latency.mean_ms, run.service.mean_ms
    if told is None or not told.models or mean_ms is None or service_ms is None:
        return []
    first = told.models[0]
    inner = told.models[1:] or (first,)
    weights = [model.requests / max(first.requests, 1) for model in inner]

    def total(name: str) -> float:
        return sum(weight * float(getattr(model, name)) for weight, model in zip(weights, inner, strict=True))

    queue, feed, compute, output = (total(name) for name in ("queue_ms", "input_ms", "infer_ms", "output_ms"))
    triton = first.total_ms
    if (known := queue + feed + compute + output) > triton > 0:  # Triton rounds, and counts the steps' batches for each
        queue, feed, compute, output = (part * triton / known for part in (queue, feed, compute, output))
    gateway = max(told.gateway_ms - triton, 0.0) if told.gateway_ms is not None else None
    rest = max(service_ms - (told.gateway_ms if told.gateway_ms is not None else triton), 0.0)
    parts = [
        ("sent late, waiting for a connection", max(mean_ms - service_ms, 0.0)),
        ("network and client" if gateway is not None else "network, server's front, client", rest),
        ("gateway", gateway or 0.0),
        ("queue", queue),
        ("input", feed),
        ("compute", compute),
        ("output", output),
        ("rest of Triton", max(triton - queue - feed - compute - output, 0.0)),
    ]
    return [(label, value) for label, value in parts if value > 0]


def _load(run: LoadResult) -> float:
    return run.rate if run.rate is not None else float(run.concurrency)
