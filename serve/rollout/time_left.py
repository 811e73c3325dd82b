"""How long a step of a rollout has yet to go, in words, by the rate at which it was proven so far."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from serve.rollout.store import Row

__all__ = ["time_left"]

PAIRS = 600  # some: of two models that are alike, by the default bounds
FEW = 30  # observations that tell of no rate


def time_left(row: Row) -> str:
    """For a step that runs; "" where it can't be told.

    A proof grows with the observations, so a share of it tells how many are needed: those there are, over the share.
    """
    asked = {name: seen for name, seen in row.evidence.items() if seen["required"]}
    if not asked or any(seen.get("waits") for seen in asked.values()):
        return ""
    after = len(row.plan.weights) - 1 - row.step
    more = f", and {after} more step{'s' * (after > 1)} after it" if after else ""
    if not any(seen["count"] for seen in asked.values()):
        copies = f", {row.plan.shadow:g}% of the requests being copied" if not row.weight else ""
        return f"no traffic: this step takes some {PAIRS} requests that both models answered{copies}{more}"
    seconds = 0.0
    for seen in asked.values():
        if seen["proof"] >= 1:
            continue
        if seen["count"] < FEW or seen["proof"] <= 0:
            return f"too early to tell how long this step takes: some {PAIRS} requests that both answered{more}"
        seconds = max(seconds, row.seconds * (1 / seen["proof"] - 1))
    seconds = max(seconds, row.plan.step_s - row.seconds)
    return f"at the rate so far this step takes some {_words(seconds)} more{more}" if seconds > 0 else ""


def _words(seconds: float) -> str:
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(1, round(seconds))} s"
