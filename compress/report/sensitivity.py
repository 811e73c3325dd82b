"""A sensitivity told: terminal table, and a self-contained page with a heat map of layers by ratio."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.colors import LogNorm
from rich.markup import escape
from rich.table import Table

from compress.console.wording import counted
from compress.evaluate.gains import in_points, signed
from compress.prune.sensitivity import WORST, GroupSensitivity, Sensitivity
from compress.report.pages import page
from compress.report.plot_settings import own_settings
from compress.report.plots import axes_of, svg_of
from compress.storage.files import write_files

__all__ = ["heat_map", "sensitivity_table", "write_sensitivity"]

LEAST = 0.1  # points; what is below is nobody's loss
DARK = 0.4  # relative luminance below which figures are white


def sensitivity_table(found: Sensitivity, max_drop: float) -> Table:
    """Drops in points by layer and ratio, and the share of channels that each layer bears."""
    limits = found.limits(max_drop)
    points = " in points" if in_points(found.metric) else ""
    table = Table(
        title=f"drop of {found.metric}{points} when one layer alone is pruned (of {found.original:.4f}, "
        f"{counted(found.samples, 'samples')})",
        title_justify="left",
    )
    table.add_column("layers", overflow="fold")
    table.add_column("channels", justify="right")
    for ratio in found.columns:
        table.add_column(f"−{ratio:.0%}", justify="right")
    table.add_column(f"bears for {counted(max_drop, 'points')}", justify="right")
    for group in found.groups:
        names = ", ".join(group.layers[:3]) + (f" +{len(group.layers) - 3}" if len(group.layers) > 3 else "")
        drops = _cells(found, group)
        table.add_row(escape(names), str(group.width), *drops, f"{limits[group.layers[0]]:.0%}")
    return table


def _cells(found: Sensitivity, group: GroupSensitivity) -> list[str]:
    """Drops, each with the share that was taken away where it is another than was asked for."""
    return [
        signed(drop, found.metric) + ("" if f"{taken:.0%}" == f"{asked:.0%}" else f" (−{taken:.0%})")
        for drop, taken, asked in zip(group.drops, group.ratios, found.columns, strict=True)
    ]


@own_settings()
def heat_map(found: Sensitivity) -> str:
    """Layers down, ratios across, colour and figure the drop in points; inline SVG."""
    drops = np.array([group.drops for group in found.groups])
    cells = [_cells(found, group) for group in found.groups]
    figure, axes = axes_of(0.3 * len(found.groups) + 1.2)
    # A squared error is in the outputs' own unit, where any loss may be small.
    known = drops[drops < WORST]
    least = LEAST if found.metric != "mse" or not known.size else max(float(known.max()) / 1000, 1e-30)
    most = max(float(known.max(initial=0)), 10 * least)
    shown = np.clip(drops, least, most)
    image = axes.imshow(shown, cmap="YlOrRd", norm=LogNorm(least, most), aspect="auto")
    for row, column in np.ndindex(*drops.shape):
        red, green, blue, _ = image.cmap(image.norm(shown[row, column]))
        dark = 0.21 * red + 0.72 * green + 0.07 * blue < DARK
        axes.text(
            column, row, cells[row][column], ha="center", va="center", fontsize=8,
            color="#fefefe" if dark else "#222222", gid="cell",
        )  # fmt: skip
    axes.set_yticks(range(len(drops)), [group.layers[0] for group in found.groups])
    axes.set_xticks(range(drops.shape[1]), [f"−{ratio:.0%} channels" for ratio in found.columns])
    axes.xaxis.tick_top()
    axes.tick_params(length=0, labelsize=8)
    axes.spines[:].set_visible(False)
    return svg_of(figure)


def write_sensitivity(found: Sensitivity, folder: Path, max_drop: float) -> None:
    """Write sensitivity.json and sensitivity.html into a folder, made if missing."""
    html = page("sensitivity.html", found=found, plot=heat_map(found), limits=found.limits(max_drop), max_drop=max_drop)
    write_files({folder / "sensitivity.json": found.text(), folder / "sensitivity.html": html})
