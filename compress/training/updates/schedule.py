"""How the learning rate goes over a training, as a factor on its peak.

Warm-up and cosine: Loshchilov & Hutter, SGDR, 2017, section 3. One cycle: Smith & Topin, Super-Convergence, 2018,
section 3, with the cosine ramps of fast.ai.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

__all__ = ["SCHEDULES", "one_cycle_momentum"]

WARM_UP = 0.1  # of the steps
CLIMB = 0.3
LOW, END = 1 / 25, 1e-4  # of the peak: where one cycle starts and ends
MOMENTUM = 0.95, 0.85  # at the ends of the cycle, and at its peak


def _cosine(step: int, steps: int) -> float:
    warm_up = max(1, int(steps * WARM_UP))
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.5 * (1 + math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up)))


def _one_cycle(step: int, steps: int) -> float:
    climb = max(1, int(steps * CLIMB))
    if step < climb:
        return _between(LOW, 1, step / climb)
    return _between(1, END, (step - climb) / max(1, steps - climb))


def one_cycle_momentum(step: int, steps: int) -> float:
    """Falls while the rate climbs, and rises again."""
    climb = max(1, int(steps * CLIMB))
    high, low = MOMENTUM
    if step < climb:
        return _between(high, low, step / climb)
    return _between(low, high, (step - climb) / max(1, steps - climb))


def _between(start: float, end: float, share: float) -> float:
    return end + (start - end) * 0.5 * (1 + math.cos(math.pi * share))


# Factor on the peak from the step, 0 to steps - 1, and the number of steps.
SCHEDULES: Mapping[str, Callable[[int, int], float]] = {
    "cosine": _cosine,
    "one-cycle": _one_cycle,
    "constant": lambda _step, _steps: 1.0,
}
