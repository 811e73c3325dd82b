"""How long a rollout's step is yet to take."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from serve.rollout.store import Row

__all__ = ["time_left"]

SILENT_S = 3.0
FIRST_GUESS = 0.05  # of a proof: before that its pace says nothing


def time_left(row: Row) -> str:
    """In words, at the rate at which the least proven question was answered in it; "" where that can't be told.

    Proof comes faster as it grows, so it is rather too long than too short.
    """
    required = [seen for seen in row.evidence.values() if seen["required"]]
    if row.state != "running" or not required or any(seen.get("waits") for seen in required):
        return ""
    least = min(required, key=lambda seen: (seen["proof"], seen["count"]))
    if not least["count"] and row.seconds >= SILENT_S:
        return "nothing was compared in this step yet: is the model asked?"
    if least["proof"] < FIRST_GUESS:
        return ""
    seconds = max(row.plan.step_s - row.seconds, row.seconds * (1 / min(1.0, least["proof"]) - 1))
    if seconds <= 0:
        return ""
    told = f"{seconds / 60:.0f} min" if seconds >= 100 else f"{max(1, round(seconds))} s"
    return f"about {told} more in this step, at the rate so far"
