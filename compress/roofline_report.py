"""A roofline told: a terminal table, and the plot."""

from __future__ import annotations

import numpy as np
from rich.markup import escape
from rich.table import Table

from compress.plots import axes_of, svg_of
from compress.roofline import Roofline
from compress.wording import counted

__all__ = ["roofline_plot", "roofline_table"]

COLOURS = {"compute": "#3b8bc4", "memory": "#e08214", "overhead": "#999999"}
NAMED = 4


def roofline_table(found: Roofline, rows: int = 20) -> Table:
    """The layers that take longest, and what bounds each."""
    roofs = found.machine
    speeds = f"{roofs.float_ops / 1e9:.0f} GFLOP/s in float, {roofs.int8_ops / 1e9:.0f} GOP/s in INT8"
    shares = ", ".join(f"{found.share(bound):.0%} {bound}" for bound in COLOURS)
    table = Table(
        title=f"{counted(roofs.threads, 'threads')}: {speeds}, {roofs.bytes_per_second / 1e9:.1f} GB/s. "
        f"Time by bound: {shares}",
        title_justify="left",
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
    for peak, name, style in ((roofs.float_ops, "float", "-"), (roofs.int8_ops, "INT8", "--")):
        axes.plot(reach, np.minimum(reach * roofs.bytes_per_second, peak) / 1e9, color="#777777", ls=style, lw=1.2)
        axes.annotate(
            f"{name} {peak / 1e9:.0f} GOP/s",
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
            s=[20 + 900 * layer.microseconds / total for layer in here], color=colour, alpha=0.6, lw=0,
        )  # fmt: skip
        axes.scatter(
            [], [], s=50, color=colour, alpha=0.6, lw=0, label=f"{bound}, {found.share(bound):.0%} of the time"
        )
    named: set[tuple[float, float]] = set()
    for layer in sorted(layers, key=lambda layer: -layer.microseconds):
        spot = (round(np.log10(layer.intensity), 1), round(np.log10(layer.ops_per_second), 1))
        if spot not in named and len(named) < NAMED:
            named.add(spot)
            at = (layer.intensity, layer.ops_per_second / 1e9)
            axes.annotate(layer.name[-28:], at, (7, -9), textcoords="offset points", fontsize=7)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("operations for each byte moved")
    axes.set_ylabel("GOP/s")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False, fontsize=9)
    return svg_of(figure)
