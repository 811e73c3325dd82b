"""Plots of a training, from the figures that it leaves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from compress.report.plot_settings import own_settings
from compress.report.plots import INK, ONNX, TORCH, axes_of, log_axis, svg_of

__all__ = ["settings_of", "training_plots", "trial_rows"]

LOST = "#c0392b"


@own_settings()
def training_plots(details: Mapping[str, Any], name: str = "the training") -> list[tuple[str, str]]:
    """Titles and SVG texts.

    Args:
        details: of a stage that trains.
        name: of that stage.
    """
    figures = [
        (f"Settings that were tried for {name}", _trials(details)),
        (f"Loss of {name}, and the learning rate", _curve(details)),
        (f"Validation after each epoch of {name}", _validation(details)),
        (f"Where the time of a step of {name} goes", _shares(details)),
        (f"Samples a second, by the batch sizes that were tried for {name}", _sizes(details)),
        (f"The GPU during {name}", _gpu(details)),
    ]
    return [(title, svg) for title, svg in figures if svg]


def settings_of(details: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the settings that a search has tried; none where there was no search."""
    trials = (details.get("tuning") or {}).get("trials") or [{}]
    return tuple(trials[0].get("settings", {}))


def trial_rows(details: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """A row of text for each trial of a search: number, settings, score, seconds, and how it ended."""
    tuning = details.get("tuning") or {"trials": []}
    rows = []
    for number, trial in enumerate(tuning["trials"]):
        score = "–" if trial["value"] is None else f"{trial['value']:.4f}"
        how = trial["failed"]
        if trial["pruned_at"] is not None:
            last = trial["reported"][str(trial["pruned_at"])]
            how = f"ended at {trial['pruned_at']}/4 of its epochs, with {last:.4f}"
        if number == tuning["best"]:
            how = "best"
        settings = (f"{value:g}" for value in trial["settings"].values())
        asked = " (as asked for)" if number == 0 else ""
        rows.append((f"{number + 1}{asked}", *settings, score, f"{trial['seconds']:.1f}", how))
    return rows


def _trials(details: Mapping[str, Any]) -> str:
    """Scores by the number of the trial, and the best so far."""
    tuning = details.get("tuning") or {}
    trials = tuning.get("trials") or []
    if len(trials) < 2:
        return ""
    figure, axes = axes_of(3)
    whole = {at: trial["value"] for at, trial in enumerate(trials, 1) if trial["value"] is not None}
    better = max if tuning["higher_is_better"] else min
    so_far = [better(value for at, value in whole.items() if at <= last) for last in whole]
    axes.step([*whole, len(trials)], [*so_far, so_far[-1]], where="post", color="#bdbdbd", lw=1.2, label="best so far")
    axes.scatter(list(whole), list(whole.values()), color=ONNX, s=26, zorder=3, label="trained to the end")
    _crosses(axes, trials)
    best = tuning["best"] + 1
    axes.scatter(best, whole[best], s=90, facecolors="none", edgecolors=INK, zorder=4, label="kept")
    axes.set_xlabel("trial (the first as asked for)")
    axes.set_ylabel(str(tuning["metric"]))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False, ncols=5, loc="lower center", bbox_to_anchor=(0.5, 1))
    return svg_of(figure)


def _crosses(axes: Axes, trials: Sequence[Mapping[str, Any]]) -> None:
    """Of trials that have no score: what was last known of them, or where they failed."""
    ended = {at: each["reported"][str(each["pruned_at"])] for at, each in enumerate(trials, 1) if each["pruned_at"]}
    if ended:
        axes.scatter(list(ended), list(ended.values()), color=TORCH, marker="x", s=26, zorder=3, label="ended early")
    failed = [at for at, each in enumerate(trials, 1) if each["failed"]]
    if failed:
        bottom = axes.get_ylim()[0]
        axes.scatter(failed, [bottom] * len(failed), color=LOST, marker="v", s=26, zorder=3, label="failed")


def _curve(details: Mapping[str, Any]) -> str:
    curve = details.get("curve") or []
    if len(curve) < 2:
        return ""
    figure, axes = axes_of(3.2)
    steps, losses, rates = zip(*curve, strict=True)
    axes.plot(steps, losses, color=ONNX, lw=1.2, label="loss")
    if min(losses) > 0:
        log_axis(axes, "y")
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    right = axes.twinx()
    right.plot(steps, rates, color=TORCH, lw=1, ls="--", label="learning rate")
    right.set_ylim(bottom=0)
    right.set_ylabel("learning rate")
    right.spines["top"].set_visible(False)
    lines = [*axes.get_lines(), *right.get_lines()]
    axes.legend(lines, [str(line.get_label()) for line in lines], frameon=False, loc="upper right")
    return svg_of(figure)


def _validation(details: Mapping[str, Any]) -> str:
    rows = [row for row in details.get("history", ()) if "validation" in row]
    if len(rows) < 2:
        return ""
    figure, axes = axes_of(2.6)
    axes.plot([row["epoch"] for row in rows], [row["validation"] for row in rows], color=ONNX, marker="o", ms=4, lw=1)
    best = details.get("best_epoch")
    for row in rows:
        if row["epoch"] == best:
            axes.scatter(best, row["validation"], s=80, facecolors="none", edgecolors=INK, label="kept")
    axes.set_xlabel("epoch")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel(str(details.get("validation_metric", "")))
    axes.legend(frameon=False)
    return svg_of(figure)


def _shares(details: Mapping[str, Any]) -> str:
    shares = (details.get("profile") or {}).get("shares")
    if not shares:
        return ""
    figure, axes = axes_of(0.32 * len(shares) + 0.8)
    bars = axes.barh(list(shares), [100 * share for share in shares.values()], 0.65, color=ONNX)
    axes.bar_label(bars, [f"{share:.0%}" for share in shares.values()], padding=3, fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.set_xlabel("% of a step")
    return svg_of(figure)


def _sizes(details: Mapping[str, Any]) -> str:
    tried = {size: speed for size, speed in (details.get("batch_sizes_tried") or {}).items() if speed}
    if not tried:
        return ""
    figure, axes = axes_of(0.32 * len(tried) + 0.8)
    chosen = str(details.get("batch_size"))
    bars = axes.barh(list(tried), list(tried.values()), 0.65, color=[ONNX if s == chosen else "#bdbdbd" for s in tried])
    axes.bar_label(bars, [f"{speed:,.0f}" for speed in tried.values()], padding=3, fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_ylabel("batch size")
    axes.set_xlabel("samples a second")
    return svg_of(figure)


def _gpu(details: Mapping[str, Any]) -> str:
    samples = details.get("gpu") or []
    if len(samples) < 2:
        return ""
    figure, axes = axes_of(3)
    seconds = [sample["seconds"] for sample in samples]
    axes.plot(seconds, [sample["utilization"] for sample in samples], color=ONNX, lw=1, label="utilization, %")
    axes.plot(seconds, [sample["memory_bytes"] / 1e9 for sample in samples], color=TORCH, lw=1, label="memory, GB")
    axes.plot(seconds, [sample["power_watts"] / 10 for sample in samples], color="#cc6633", lw=1, label="power, 10 W")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("seconds")
    axes.legend(frameon=False, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1))
    return svg_of(figure)
