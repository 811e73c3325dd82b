"""Durations in words."""

from __future__ import annotations

__all__ = ["duration"]


def duration(seconds: float) -> str:
    """Seconds, minutes and seconds, or hours and minutes."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60}:{minutes % 60:02d} h"
    return f"{minutes}:{rest:02d} min" if minutes else f"{rest} s"
