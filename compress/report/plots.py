"""The report's plots, as inline SVG whose ink takes the page's text colour (so that they read in light and dark)."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

from compress.artifact import StageReport
from compress.console.durations import ms_text
from compress.evaluate.intervals import CONFIDENCE, percent
from compress.report.plot_labels import label_points, plain
from compress.report.plot_settings import own_settings

__all__ = ["INK", "INT8", "ONNX", "SHARES", "TORCH", "axes_of", "log_axis", "plots", "svg_of"]

INK = "#0a0b0c"  # stands for the page's text colour
TORCH, ONNX, INT8 = "#8c6bb1", "#3b8bc4", "#2ca25f"


@own_settings()
def plots(
    stages: Sequence[StageReport],
    latencies_ms: Mapping[str, Sequence[float]],
    layer_bytes: tuple[Mapping[str, int], Mapping[str, int]] = ({}, {}),
    confidence: float = CONFIDENCE,
    batch: int = 1,
) -> list[tuple[str, str]]:
    """Titles and SVG texts.

    Args:
        stages: the report's rows.
        latencies_ms: single calls, by stage.
        layer_bytes: of the original and of the result, by layer.
        confidence: of the metric's intervals.
        batch: of each call.
    """
    judged = any(row.measured.accuracy is not None for row in stages)
    figures = [
        (f"What each stage gives and takes: the metric against latency (bars: {percent(confidence)} confidence)",
         _tradeoff(stages, batch)),
        (f"{'Accuracy, and agreement' if judged else 'Agreement'} with the original", _quality(stages)),
        (f"Latency of a single call at batch {batch} (line: median, box: middle half, whiskers: percentiles 1 and 99)",
         _latency(stages, latencies_ms)),
        ("Size of the model file", _bars(stages)),
    ]  # fmt: skip
    channels = next((row.details["channels"] for row in stages if "channels" in row.details), None)
    if channels:
        figures.append(("Output channels of each layer, before and after pruning", _channels(channels)))
    before, after = layer_bytes
    common = {name: [size / 1e3, after[name] / 1e3] for name, size in before.items() if name in after}
    if common:
        figures.append(
            ("Weights of each layer in kB, before and after", _before_after(common, "kB", "{:.3g} of {:.3g}"))
        )
    sensitivity = next((row.details["sensitivity"] for row in stages if row.details.get("sensitivity")), None)
    if sensitivity:
        figures.append(
            ("Share of the output error that goes when a layer alone is in float", _sensitivity(sensitivity))
        )
    return [(title, svg) for title, svg in figures if svg]


def axes_of(height: float) -> tuple[Figure, Axes]:
    """An empty plot as wide as the page, its height in inches."""
    figure = Figure(figsize=(8, height), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def svg_of(figure: Figure) -> str:
    """A figure as an SVG element in the page's own ink; texts whose gid is "cell" keep their colour."""
    style: dict[Any, Any] = {
        "svg.fonttype": "none",
        "font.family": "sans-serif",
        "font.size": 10,
        "svg.hashsalt": "report",
        "text.parse_math": False,
    }
    style |= dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK)
    plain(figure)
    with own_settings(style):
        for axes in figure.axes:
            axes.tick_params(colors=INK)
            axes.xaxis.label.set_color(INK)
            axes.yaxis.label.set_color(INK)
            for spine in axes.spines.values():
                spine.set_color(INK)
            for text in axes.texts:
                if text.get_gid() != "cell":
                    text.set_color(INK)
            if (legend := axes.get_legend()) is not None:
                for text in legend.get_texts():
                    text.set_color(INK)
        text_file = io.StringIO()
        figure.savefig(text_file, format="svg", transparent=True, metadata={"Date": None})
    svg = text_file.getvalue()
    return svg[svg.index("<svg") :].replace(INK, "currentColor")


def _colour(row: StageReport) -> str:
    if row.stage.startswith("quantize"):
        return INT8
    return TORCH if row.measured.runtime == "torch eager" else ONNX


def _quality(stages: Sequence[StageReport]) -> str:
    rows = [row for row in stages if row.measured.agreement is not None]
    if not rows:
        return ""
    figure, axes = axes_of(0.45 * len(rows) + 1.2)
    at = np.arange(len(rows))
    series = [("agreement", [row.measured.agreement or 0.0 for row in rows], "#bdbdbd", 0.2)]
    if all(row.measured.accuracy is not None for row in rows):
        series.insert(0, ("accuracy", [row.measured.accuracy or 0.0 for row in rows], ONNX, -0.2))
    for name, values, colour, offset in series:
        bars = axes.barh(at + offset, [100 * value for value in values], 0.38, color=colour, label=name)
        axes.bar_label(bars, [f"{100 * value:.1f}" for value in values], padding=3, fontsize=8)
    axes.set_yticks(at, [row.stage for row in rows])
    axes.invert_yaxis()
    axes.set_xlim(0, 108)
    axes.set_xlabel("% of evaluation samples")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False)
    axes.margins(y=0.02)
    return svg_of(figure)


def _latency(stages: Sequence[StageReport], latencies_ms: Mapping[str, Sequence[float]]) -> str:
    rows = [row for row in stages if row.stage in latencies_ms]
    if not rows:
        return ""
    figure, axes = axes_of(0.4 * len(rows) + 1)
    ink = {"color": INK}
    drawn = axes.boxplot(
        [latencies_ms[row.stage] for row in rows],
        orientation="horizontal", whis=(1, 99), showfliers=False, patch_artist=True,
        medianprops=dict(ink), whiskerprops=dict(ink), capprops=dict(ink), boxprops={"edgecolor": INK}, widths=0.6,
    )  # fmt: skip
    for box, row in zip(drawn["boxes"], rows, strict=True):
        box.set_facecolor(_colour(row))
    # In a column of their own: beside a whisker they would be taken for its end.
    at: dict[str, Any] = {"transform": axes.get_yaxis_transform(), "fontsize": 8, "va": "center"}
    axes.text(1.01, 0.4, "median, ms", **at)
    for index, row in enumerate(rows, 1):
        axes.text(1.01, index, ms_text(row.measured.latency_p50_ms or 0.0), **at)
    axes.set_yticks(range(1, len(rows) + 1), [row.stage for row in rows])
    axes.invert_yaxis()
    axes.margins(x=0.04)
    log_axis(axes)
    axes.set_xlabel("milliseconds, logarithmic")
    return svg_of(figure)


def _bars(stages: Sequence[StageReport]) -> str:
    rows = [row for row in stages if row.measured.size_bytes is not None]
    figure, axes = axes_of(0.4 * len(rows) + 1)
    largest = max((row.measured.size_bytes or 0 for row in rows), default=0)
    unit, one = ("MB", 1e6) if largest >= 1e6 else ("kB", 1e3)
    sizes = [(row.measured.size_bytes or 0) / one for row in rows]
    bars = axes.barh([row.stage for row in rows], sizes, 0.6, color=[_colour(row) for row in rows])
    axes.bar_label(bars, [f"{size:.3g} {unit}" for size in sizes], padding=3, fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel(unit)
    return svg_of(figure)


def _channels(channels: Mapping[str, Sequence[int]]) -> str:
    return _before_after(channels, "channels", "{:g} of {:g}")


MOST_LAYERS = 60
SHARES = ("top1", "top5", "f1_macro", "binary_accuracy", "f1_samples", "pixel_accuracy", "miou", "agreement")
LEAST_SPAN = 0.01  # of the metric's axis, as a share of its largest value


def _before_after(layers: Mapping[str, Sequence[float]], unit: str, text: str) -> str:
    """Two bars a layer; of very many layers, the largest."""
    largest = sorted(layers, key=lambda name: -layers[name][0])[:MOST_LAYERS]
    names = [name for name in layers if name in set(largest)]
    figure, axes = axes_of(0.26 * len(names) + 1)
    bars = axes.barh(names, [layers[name][0] for name in names], 0.75, color="#bdbdbd", label="before")
    axes.barh(names, [layers[name][1] for name in names], 0.75, color=ONNX, label="after")
    axes.bar_label(bars, [text.format(layers[n][1], layers[n][0]) for n in names], padding=3, fontsize=7)
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize=8)
    axes.set_xlabel(unit)
    axes.margins(x=0.1, y=0.02)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False)
    return svg_of(figure)


def _sensitivity(shares: Mapping[str, float]) -> str:
    names = sorted(shares, key=lambda name: -shares[name])[:MOST_LAYERS]
    figure, axes = axes_of(0.24 * len(names) + 1)
    bars = axes.barh(names, [100 * shares[name] for name in names], 0.7, color=INT8)
    axes.bar_label(bars, [f"{shares[name]:+.1%}" for name in names], padding=3, fontsize=7)
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize=8)
    axes.set_xlabel("% of the squared output error")
    axes.margins(x=0.12, y=0.02)
    return svg_of(figure)


def _tradeoff(stages: Sequence[StageReport], batch: int) -> str:
    rows = [row for row in stages if row.measured.value is not None and row.measured.latency_p50_ms]
    if len(rows) < 2:
        return ""
    figure, axes = axes_of(3.8 + 0.12 * max(0, len(rows) - 6))
    spots = [(row.measured.latency_p50_ms or 0.0, row.measured.value or 0.0) for row in rows]
    steps = [spot for row, spot in zip(rows, spots, strict=True) if row.stage != "original_onnx"]  # no step on the way
    axes.plot([x for x, _ in steps], [y for _, y in steps], color="#bbbbbb", lw=1, zorder=0)
    bars = []
    for row, at in zip(rows, spots, strict=True):
        m = row.measured
        if m.value_low is not None and m.value_high is not None:
            bars.append(((at[0], m.value_low), (at[0], m.value_high)))
            axes.plot([at[0]] * 2, [m.value_low, m.value_high], color=_colour(row), lw=1.5, alpha=0.7)
        axes.scatter(*at, s=45, color=_colour(row))
    axes.margins(x=0.16, y=0.3)
    log_axis(axes)
    _metric_axis(axes, rows)
    axes.set_xlabel(f"p50 at batch {batch} in milliseconds, logarithmic")
    lines = [*pairwise(steps), *bars]
    label_points(axes, spots, [row.stage for row in rows], lines=lines)
    return svg_of(figure)


def log_axis(axes: Axes, which: Literal["x", "y"] = "x") -> None:
    """Make an axis logarithmic, with as many figures as have room: of any range, from a part of a decade to many.

    What is drawn and its margins are to be as they will be.
    """
    axis = axes.xaxis if which == "x" else axes.yaxis
    axes.set_xscale("log") if which == "x" else axes.set_yscale("log")
    low, high = sorted(axes.get_xlim() if which == "x" else axes.get_ylim())
    decades = math.log10(high / low) if low > 0 else 1.0
    if decades < 0.7:
        ticks = [tick for tick in MaxNLocator(6).tick_values(low, high) if low <= tick <= high]
        axis.set_major_locator(FixedLocator(ticks))
    else:
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if decades < 2.5 else (1.0,), numticks=8))
    axis.set_major_formatter(FuncFormatter(lambda value, _position: f"{value:g}"))
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())


def _metric_axis(axes: Axes, rows: Sequence[StageReport]) -> None:
    """A span in which rounding shows no difference, and no figure that the metric can't have."""
    metric = rows[0].measured.metric or ""
    low, high = axes.get_ylim()
    size = max(abs(row.measured.value or 0.0) for row in rows)
    if high - low < (least := LEAST_SPAN * size):
        middle = (low + high) / 2
        low, high = middle - least / 2, middle + least / 2
        axes.set_ylim(low, high)
    ticks = [tick for tick in MaxNLocator(7).tick_values(low, high) if low <= tick <= high]
    if metric in SHARES or metric == "cosine":
        ticks = [tick for tick in ticks if -1.0 <= tick <= 1.0 + 1e-9 and (tick > -1e-9 or metric == "cosine")]
    axes.yaxis.set_major_locator(FixedLocator(ticks))
    axes.yaxis.set_major_formatter(
        FuncFormatter(lambda value, _position: f"{100 * value:.4g}%" if metric in SHARES else f"{value:.5g}")
    )
    axes.set_ylabel(metric)
