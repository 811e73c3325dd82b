"""The latencies of one replica at each rate, simulated once, to be looked up for every second of a day."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from serve.plan.replica import capacity, open_loop, poisson
from serve.plan.service import Service

__all__ = ["BOUNDS_S", "Curve", "binned", "percentile_s", "simulate_curve"]

Floats = np.ndarray[Any, np.dtype[np.float64]]
BOUNDS_S: Floats = np.geomspace(1e-5, 600.0, 1200)
"""Upper ends of the bins that latencies are counted in, 1.5% apart; what is longer falls into the last."""
SHARES = (0.02, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.94, 0.97)
WARM = 0.1


@dataclass(frozen=True, eq=False)
class Curve:
    """What one replica does.

    Attributes:
        peak: requests a second that it answers at most: as simulated, but no more than was measured.
        rates: the simulated ones, ascending, all below.
        shares: for each, the share of the requests in each bin of BOUNDS_S.
        simulated_peak: without that bound.
    """

    peak: float
    rates: Floats
    shares: Floats
    simulated_peak: float = 0.0

    def at(self, rate: float) -> Floats:
        """The share of requests in each bin, of Poisson arrivals at a rate; at most the highest simulated one's."""
        place = float(np.interp(rate, self.rates, np.arange(len(self.rates))))
        low = int(place)
        high = min(low + 1, len(self.rates) - 1)
        found: Floats = self.shares[low] * (1 - (place - low)) + self.shares[high] * (place - low)
        return found

    def percentile_ms(self, rate: float, percent: float) -> float:
        return 1000 * percentile_s(self.at(rate), percent)

    def highest(self, keeps: Callable[[Floats], bool]) -> float:
        """The highest rate whose latencies keep an objective; 0 where none does."""
        low, high = 0.0, float(self.rates[-1])
        if not keeps(self.at(0.0)):
            return 0.0
        if keeps(self.at(high)):
            return high
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (middle, high) if keeps(self.at(middle)) else (low, middle)
        return low


def simulate_curve(
    service: Service, *, samples: int = 20_000, seed: int = 0, on_progress: Callable[[int, int], None] | None = None
) -> Curve:
    """Simulate a replica at a row of rates.

    Args:
        service: the replica.
        samples: requests at each rate.
        seed: the same one draws the same.
        on_progress: told how many of how many rates are done.
    """
    simulated = capacity(service, max(samples // 2, 2000))
    # Larger batches than any that were measured may give more; that is not counted on.
    peak = min(simulated, service.measured_peak or simulated)
    shares = []
    for number, share in enumerate(SHARES):
        times = poisson(share * peak, samples, seed)
        shares.append(binned(open_loop(service, times, warmup_s=float(times[int(WARM * samples)]), seed=seed)))
        if on_progress is not None:
            on_progress(number + 1, len(SHARES))
    # More load never makes a replica faster; where a draw says so, it is the draw.
    below = np.minimum.accumulate(np.cumsum(np.array(shares), axis=1), axis=0)
    return Curve(peak, np.array(SHARES) * peak, np.diff(below, axis=1, prepend=0.0), simulated)


def binned(latencies_s: Floats) -> Floats:
    """The share of them in each bin."""
    at = np.minimum(np.searchsorted(BOUNDS_S, latencies_s), len(BOUNDS_S) - 1)
    counts: Floats = np.bincount(at, minlength=len(BOUNDS_S)).astype(np.float64)
    return counts / max(len(latencies_s), 1)


def percentile_s(weights: Floats, percent: float) -> float:
    """Of latencies in bins, by weight; 0 without any."""
    below = np.cumsum(weights)
    if below[-1] <= 0:
        return 0.0
    return float(BOUNDS_S[min(int(np.searchsorted(below, percent / 100 * below[-1] - 1e-12)), len(BOUNDS_S) - 1)])
