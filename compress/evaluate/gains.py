"""What was gained, in figures and in words; of what could be chance, no claim is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from compress.artifact import Measured, StageReport
from compress.runtime.latency import Ratio, ratio

__all__ = ["Gain", "apart", "drop_told", "gains_of", "in_points", "signed", "speed", "times", "within"]

MOST_DECIMALS = 6
LARGE = 1e6  # points that nobody reads to two decimals


def in_points(metric: str | None, scale: float | None = None) -> bool:
    """Whether a metric's drops are in points, of which two decimals tell enough; others may be small or large.

    Args:
        metric: its name. Of a user's (`package.module:name`) only the scale tells.
        scale: see `compress.artifact.Measured.metric_scale`; None where nobody knows it.
    """
    return metric is None or (metric != "mse" and ":" not in metric) if scale is None else scale == 100


def signed(points: float, metric: str | None, scale: float | None = None) -> str:
    """A change of a metric, or what it has dropped by; 0 has a + whatever it was rounded from.

    Args:
        points: to two decimals; what is in no points is told to four digits.
        metric, scale: whose, see `in_points`.
    """
    exactly = not in_points(metric, scale) or abs(points) >= LARGE
    return f"{points + 0.0:+.4g}" if exactly else f"{round(points, 2) + 0.0:+.2f}"


def within(low: float | None, high: float | None, metric: str | None, scale: float | None = None) -> str:
    """The ends of an interval of such figures; empty where there is none."""
    return "" if low is None or high is None else f"{signed(low, metric, scale)} to {signed(high, metric, scale)}"


def drop_told(
    drop: float, low: float | None = None, high: float | None = None, *, metric: str | None, scale: float | None = None
) -> str:
    """What a metric has dropped by, above 0 for a loss, wherever it stands in words: its sign says nothing alone."""
    between = within(low, high, metric, scale)
    points = " points" if in_points(metric, scale) else ""
    return f"drop {signed(drop, metric, scale)}{points}" + (f" ({between})" if between else "")


def times(value: float) -> str:
    """A ratio of 1 or more in words, with the decimals that keep it from 1: of 24, 1.9 or 1.02."""
    return f"{value:.0f}×" if value >= 20 else f"{value:.1f}×" if value >= 1.05 else f"{value:.2f}×"


def apart(before: float, after: float, decimals: int = 3) -> tuple[str, str]:
    """Two figures with as many decimals as it takes to tell them apart."""
    for places in range(decimals, MOST_DECIMALS + 1):
        if f"{before:.{places}f}" != f"{after:.{places}f}":
            return f"{before:.{places}f}", f"{after:.{places}f}"
    return f"{before:.{decimals}f}", f"{after:.{decimals}f}"


def speed(before: Measured, after: Measured) -> Ratio | None:
    """How many times as fast `after` is: paired by round; with no interval where rounds were not kept."""
    paired = ratio(before.latency_rounds_ms or (), after.latency_rounds_ms or ())
    if paired is not None:
        return paired
    if not before.latency_p50_ms or not after.latency_p50_ms:
        return None
    return Ratio(before.latency_p50_ms / after.latency_p50_ms)


@dataclass(frozen=True)
class Gain:
    """One figure of what a run gained or lost.

    Attributes:
        figure: a ratio; never below 1, since the words say which way.
        words: "faster than torch eager", "slower than …", "as fast as …".
        interval: in words, where there is one.
        kind: whether it is one.
    """

    figure: str
    words: str
    interval: str
    kind: Literal["gain", "loss", "neither"]

    def __str__(self) -> str:
        return " ".join(part for part in (self.figure, self.words, self.interval) if part)


def gains_of(rows: Sequence[StageReport]) -> list[Gain]:
    """The result against the original: size, work and time.

    Args:
        rows: "original" first, and "original_onnx" where that is none itself; the result last.
    """
    by_name = {row.stage: row.measured for row in rows}
    original, last = by_name["original"], rows[-1].measured
    onnx = by_name.get("original_onnx", original)
    exported = onnx is not original
    of = "the original's ONNX" if exported else "the original"
    found = [
        _counted(onnx.size_bytes, last.size_bytes, "smaller", "larger", of),
        _counted(onnx.macs, last.macs, "fewer", "more", "multiply-accumulates"),
        _timed(speed(original, last), "torch eager") if exported else None,
        _timed(speed(onnx, last), "the original in ONNX Runtime"),
    ]
    return [gain for gain in found if gain is not None]


def _counted(before: int | None, after: int | None, less: str, more: str, of: str) -> Gain | None:
    """A ratio of what is counted, and so is certain."""
    if not before or not after:
        return None
    than = of if less == "fewer" else f"than {of}"
    if times(max(before, after) / min(before, after)) == times(1.0):
        return None if less == "fewer" else Gain("", f"as large as {of}", "", "neither")
    smaller = after < before
    return Gain(
        times(before / after if smaller else after / before), f"{less if smaller else more} {than}", "",
        "gain" if smaller else "loss",
    )  # fmt: skip


def _timed(found: Ratio | None, than: str) -> Gain | None:
    """A ratio that was measured: with its interval, and no more than it allows."""
    if found is None:
        return None
    if found.low is None or found.high is None:  # too few rounds
        figure = times(max(found.value, 1 / found.value))
        return Gain(figure, f"{'faster' if found.value >= 1 else 'slower'} than {than}", "(no interval)", "neither")
    low, high = found.low, found.high
    slower = found.slower
    figure = times(1 / found.value if slower else max(found.value, 1.0))
    if not (found.faster or slower):
        return Gain("", f"as fast as {than}", f"({low:.2f} to {high:.2f} times, within noise)", "neither")
    ends = (1 / high, 1 / low) if slower else (low, high)
    interval = "({} to {})".format(*apart(*ends, decimals=1 if found.value >= 1.05 or slower else 2))
    return Gain(figure, f"{'slower' if slower else 'faster'} than {than}", interval, "loss" if slower else "gain")
