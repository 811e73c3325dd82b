"""Kubernetes' horizontal pod autoscaler, as it decides (and KEDA, which decides by it).

Source: "Horizontal Pod Autoscaling" in Kubernetes' documentation: algorithm details, tolerance, stabilization window,
scaling policies.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from compress.errors import ServerError

__all__ = ["Autoscaler", "Scaling"]


@dataclass(frozen=True)
class Scaling:
    """What an autoscaler is set to.

    Attributes:
        target: requests a second that one replica shall have.
        least, most: replicas.
        period_s: between two looks.
        window_s: over which the rate is the mean, at each look.
        tolerance: no change while the rate is this near to the target, as a share of it.
        down_window_s: down only to the most that was wanted in the last so many seconds.
        up_share, up_pods: the most that may be added in a period: the larger of a share of what there is, and pods.
    """

    target: float
    least: int = 1
    most: int = 100
    period_s: float = 15.0
    window_s: float = 60.0
    tolerance: float = 0.1
    down_window_s: float = 300.0
    up_share: float = 1.0
    up_pods: int = 4

    def __post_init__(self) -> None:
        for name, holds in (
            ("target", self.target > 0), ("least", self.least >= 1), ("most", self.most >= self.least),
            ("period_s", self.period_s > 0), ("window_s", self.window_s > 0),
            ("down_window_s", self.down_window_s >= 0),
        ):  # fmt: skip
            if not holds:
                raise ServerError(
                    "can't scale so", why=f"{name} is {getattr(self, name)}", mend=f"give {name} another value"
                )


class Autoscaler:
    """Asked at each period; remembers what it wanted."""

    def __init__(self, scaling: Scaling) -> None:
        self.scaling = scaling
        self._wanted: deque[int] = deque(maxlen=max(math.ceil(scaling.down_window_s / scaling.period_s), 1))

    def replicas(self, now: int, rate: float) -> int:
        """How many there shall be.

        Args:
            now: replicas that are asked for now, those that still start included.
            rate: requests a second of all together.
        """
        scaling = self.scaling
        wanted = math.ceil(rate / scaling.target - 1e-9)
        if abs(rate / (scaling.target * now) - 1) <= scaling.tolerance:
            wanted = now
        wanted = min(max(wanted, scaling.least), scaling.most)
        self._wanted.append(wanted)
        if wanted < now:
            return max(min(max(self._wanted), now), scaling.least)
        return min(wanted, now + max(math.floor(now * scaling.up_share), scaling.up_pods))
