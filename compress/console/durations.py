"""Durations and sizes in words."""

from __future__ import annotations

__all__ = ["bytes_text", "duration", "left", "ms_text"]

PACE_SECONDS = 2.0  # that work has to go on before its pace says anything of what is left


def duration(seconds: float) -> str:
    """Seconds, minutes and seconds, or hours and minutes."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60}:{minutes % 60:02d} h"
    return f"{minutes}:{rest:02d} min" if minutes else f"{rest} s"


def left(seconds: float, done: float, total: float) -> str | None:
    """How long the rest takes at the pace so far, never 0; None where there is no rest, or no pace yet.

    Args:
        seconds: that it has gone on.
        done: of `total`, in that time.
    """
    if seconds < PACE_SECONDS or not 0 < done < total:
        return None
    return duration(max(1.0, seconds * (total - done) / done))


def ms_text(milliseconds: float) -> str:
    """With three decimals, or as many as make five figures: what is beyond is noise."""
    return f"{milliseconds:.{3 if milliseconds < 10 else 2 if milliseconds < 100 else 1}f}"


def bytes_text(size: float) -> str:
    """1234567 -> '1.23 MB' (powers of ten)."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            break
        size /= 1000
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.3g} {unit}"
