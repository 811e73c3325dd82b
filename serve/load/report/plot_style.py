"""How the load tester's plots look: inline SVG in the page's own ink, so that they read in light and dark."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from compress.errors import MissingExtraError
from serve.load.figures.histogram import Histogram
from serve.load.figures.result import MIN_BEYOND

__all__ = [
    "BLUE", "CYCLE", "GREEN", "GREY", "INK", "NINES", "ORANGE", "RED", "check", "figure_of", "legend_of", "nines",
    "own_settings", "plain_log", "spectrum", "svg_of",
]  # fmt: skip

INK = "#0a0b0c"  # stands for the page's text colour
BLUE, ORANGE, GREEN, RED, PURPLE, GREY = "#3b8bc4", "#e0812b", "#2ca25f", "#d6403a", "#8c6bb1", "#8a9099"
CYCLE = (BLUE, ORANGE, GREEN, PURPLE, RED, "#b8860b", "#17a2a2", GREY)
NINES = (0.0, 50.0, 90.0, 99.0, 99.9, 99.99, 99.999)


def check(extra: str = "load") -> None:
    """Raise where nothing can be drawn.

    Args:
        extra: that would bring what is missing.

    Raises:
        MissingExtraError: there is no matplotlib.
    """
    try:
        import matplotlib as mpl  # noqa: F401
    except ImportError as err:
        raise MissingExtraError("can't draw the report", module="matplotlib", extra=extra) from err


@contextmanager
def own_settings(style: dict[Any, Any] | None = None, extra: str = "load") -> Iterator[None]:
    """Draw by matplotlib's defaults and this style, whatever was set before; what was set is put back.

    matplotlib reads a file `matplotlibrc` of the current folder, else of the user, as it is imported: it may have texts
    set by a TeX that is then started, or images too large for the machine. Artists keep some settings as they are made,
    others count as they are drawn: both belong inside.

    Args:
        style: rcParams by name.
        extra: see `check`.

    Raises:
        MissingExtraError: there is no matplotlib.
    """
    check(extra)
    import matplotlib as mpl

    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(style or {})
        yield


def figure_of(height: float, columns: int = 1, rows: int = 1) -> tuple[Any, Any]:
    check()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.6, height), layout="constrained")
    axes = figure.subplots(rows, columns, sharex=rows > 1)
    for each in np.ravel(axes):
        each.spines[["top", "right"]].set_visible(False)
    return figure, axes


def legend_of(axes: Any, **where: Any) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, **where)


def plain_log(axis: Any) -> None:
    from matplotlib.ticker import LogLocator

    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_minor_formatter("")


def nines(percent: float) -> float:
    """50% at 0.3, 90% at 1, 99% at 2, 99.9% at 3."""
    return float(-np.log10(max(1 - percent / 100, 1e-9)))


def spectrum(histogram: Histogram) -> tuple[Any, Any]:
    below = np.cumsum(histogram.counts) / histogram.total
    shown = below <= 1 - MIN_BEYOND / max(histogram.total, MIN_BEYOND + 1)
    shown[0] = True
    return -np.log10(np.maximum(1 - below[shown], 1e-9)), histogram.highest[shown] / 1e6


def svg_of(figure: Any) -> str:
    """As an SVG element in the page's own ink."""
    style: dict[Any, Any] = {
        "svg.fonttype": "none",
        "font.family": "sans-serif",
        "font.size": 10,
        "svg.hashsalt": "load",
    }
    with own_settings(style):
        for axes in figure.axes:
            axes.tick_params(colors=INK, which="both")
            for text in (axes.xaxis.label, axes.yaxis.label, *axes.texts):
                text.set_color(INK)
            for spine in axes.spines.values():
                spine.set_color(INK)
            legend = axes.get_legend()
            for text in legend.get_texts() if legend else ():
                text.set_color(INK)
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    svg = file.getvalue()
    return svg[svg.index("<svg") :].replace(INK, "currentColor")
