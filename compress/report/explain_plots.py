"""Plots of which layer of a compressed file lost what."""

from __future__ import annotations

from typing import TYPE_CHECKING

from compress.console.wording import counted
from compress.report.plot_settings import own_settings
from compress.report.plots import INK, INT8, ONNX, axes_of, svg_of

if TYPE_CHECKING:
    from compress.jobs.explain import Explanation

__all__ = ["explained_plots"]

MOST = 25  # layers, the worst first
QUIET_DB = 120.0  # where tensors are drawn that are equal


@own_settings()
def explained_plots(found: Explanation) -> list[tuple[str, str]]:
    """Titles and SVG texts."""
    over = f"on {counted(found.samples, 'samples')}"
    shares = (
        f"Share of the outputs' error by INT8 that goes with a layer alone in float, {over} (lines: 95% confidence)"
    )
    noise = f"Signal to noise of each tensor that the float model has, too, in the order of the graph, {over}"
    figures = [(shares, _shares(found)), (noise, _noise(found))]
    return [(title, svg) for title, svg in figures if svg]


def _shares(found: Explanation) -> str:
    layers = found.layers[:MOST]
    if not layers:
        return ""
    figure, axes = axes_of(0.26 * len(layers) + 1)
    at = range(len(layers))
    kept = [layer.name in found.keep_float for layer in layers]
    axes.barh(at, [100 * layer.share for layer in layers], 0.7, color=[ONNX if each else INT8 for each in kept])
    for place, layer in zip(at, layers, strict=True):
        if layer.low is not None and layer.high is not None:
            axes.plot([100 * layer.low, 100 * layer.high], [place, place], color=INK, lw=1.5)
    axes.set_yticks(at, [layer.name for layer in layers], fontsize=8)
    axes.axvline(0, color="#999999", lw=0.8)
    axes.invert_yaxis()
    axes.set_xlabel("% of the squared output error" + (" (blue: --keep-float is recommended)" if any(kept) else ""))
    axes.margins(y=0.02)
    return svg_of(figure)


def _noise(found: Explanation) -> str:
    noises = [(each.snr_db, each.name) for each in found.tensors if each.snr_db is not None and each.snr_db < QUIET_DB]
    if len(noises) < 2:
        return ""
    figure, axes = axes_of(2.8)
    axes.plot([noise for noise, _ in noises], color=INT8, marker="o", ms=3, lw=1)
    least, name = min(noises)
    at = noises.index((least, name))
    axes.annotate(
        name, (at, least), xytext=(0, -12), textcoords="offset points",
        ha="right" if at > len(noises) / 2 else "left", fontsize=8,
    )  # fmt: skip
    axes.margins(y=0.2)
    axes.set_xlabel("tensor")
    axes.set_ylabel("dB")
    return svg_of(figure)
