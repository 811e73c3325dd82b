"""A roofline told: a terminal table, and the plot."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
from rich.markup import escape
from rich.table import Table

from compress.console.wording import counted
from compress.report.plot_labels import label_points
from compress.report.plot_settings import own_settings
from compress.report.plots import axes_of, log_axis, svg_of
from compress.runtime.roofline import Roofline
from compress.runtime.roofs import Machine

__all__ = ["roofline_plot", "roofline_table"]

COLOURS = {"compute": "#3b8bc4", "memory": "#e08214", "overhead": "#999999"}
NAMED = 4
ALIKE = 0.3  # roofs nearer than this are drawn as one


def roofline_table(found: Roofline, rows: int = 20) -> Table:
    """The layers that take longest, and what bounds each."""
    roofs = found.machine
    speeds = f"{_speed(roofs, 'float')} GFLOP/s in float, {_speed(roofs, 'int8')} GOP/s in INT8"
    shares = ", ".join(f"{found.share(bound):.0%} {bound}" for bound in COLOURS)
    table = Table(
        title=f"{counted(roofs.threads, 'threads')}: {speeds}, {roofs.bytes_per_second / 1e9:.1f} GB/s. "
        f"Time by bound: {shares}",
        title_justify="left",
        caption="* by a layer itself: the machine was busy when its roof was measured" if roofs.lifted else None,
        caption_justify="left",
    )
    for column in ("layer", "kind", "µs", "ops/byte", "GOP/s", "bound by"):
        table.add_column(
            column, justify="left" if column in ("layer", "kind", "bound by") else "right", overflow="fold"
        )
    for layer in sorted(found.layers, key=lambda layer: -layer.microseconds)[:rows]:
        table.add_row(
            escape(layer.name), escape(layer.kind), f"{layer.microseconds:.0f}", f"{layer.intensity:.1f}",
            f"{layer.ops_per_second / 1e9:.1f}", layer.bound,
        )  # fmt: skip
    return table


def _speed(roofs: Machine, kind: str) -> str:
    """In units of 1e9 a second, with a star where a layer went above what was measured."""
    return f"{roofs.ops(kind) / 1e9:.0f}{'*' if kind in roofs.lifted else ''}"


@own_settings()
def roofline_plot(found: Roofline) -> str:
    """Layers under the roofs, larger the longer they take; inline SVG."""
    figure, axes = axes_of(4.4)
    roofs = found.machine
    layers = [layer for layer in found.layers if layer.ops > 0 and layer.microseconds > 0]
    if not layers:
        return ""
    total = sum(layer.microseconds for layer in layers)
    reach = np.logspace(
        np.log10(min(0.1, *(la.intensity for la in layers))), np.log10(max(500, *(la.intensity for la in layers)))
    )
    roofs_drawn = []
    alike = abs(roofs.int8_ops / roofs.float_ops - 1) < ALIKE
    drawn = (
        (roofs.float_ops, "float", "float and INT8" if alike else "float", "-"),
        (roofs.int8_ops, "int8", "INT8", "--"),
    )
    for peak, kind, name, style in drawn[: 1 if alike else 2]:
        height = np.minimum(reach * roofs.bytes_per_second, peak) / 1e9
        roofs_drawn.append(list(zip(reach.tolist(), height.tolist(), strict=True)))
        axes.plot(reach, height, color="#777777", ls=style, lw=1.2)
        axes.annotate(
            f"{name} {_speed(roofs, kind)} GOP/s",
            (reach[-1], peak / 1e9),
            (0, 4),
            textcoords="offset points",
            ha="right",
            fontsize=8,
        )
    for bound, colour in COLOURS.items():
        here = [layer for layer in layers if layer.bound == bound]
        axes.scatter(
            [layer.intensity for layer in here], [layer.ops_per_second / 1e9 for layer in here],
            s=[_area(layer.microseconds / total) for layer in here], color=colour, alpha=0.6, lw=0,
        )  # fmt: skip
        axes.scatter(
            [], [], s=50, color=colour, alpha=0.6, lw=0, label=f"{bound}, {found.share(bound):.0%} of the time"
        )
    axes.margins(x=0.12, y=0.12)
    log_axis(axes, "x")
    log_axis(axes, "y")
    axes.set_xlabel("operations for each byte moved")
    axes.set_ylabel("GOP/s")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False, fontsize=9)
    spots = [(layer.intensity, layer.ops_per_second / 1e9) for layer in layers]
    longest = sorted(range(len(layers)), key=lambda at: -layers[at].microseconds)
    label_points(
        axes,
        [spots[at] for at in longest[:NAMED]],
        [layers[at].name[-28:] for at in longest[:NAMED]],
        size=7,
        radii=[math.sqrt(_area(layers[at].microseconds / total)) / 2 for at in longest[:NAMED]],
        others=[spots[at] for at in longest[NAMED:]],
        lines=[(start, end) for roof in roofs_drawn for start, end in pairwise(roof)],
    )
    return svg_of(figure)


def _area(share: float) -> float:
    """Of a layer's bubble, in square points."""
    return 20 + 500 * share
