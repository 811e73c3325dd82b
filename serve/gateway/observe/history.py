"""The last minutes of each model, for the page: rates and latencies between one look and the next."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque

from serve.gateway.access.gate import Gate
from serve.gateway.observe.buckets import BUCKETS_S
from serve.gateway.observe.telemetry import INFERENCE_ROUTES, Telemetry

__all__ = ["History", "quantile"]

EVERY_S = 2.0
KEPT = 150
MOST_MODELS = 100


class History:
    """Samples of what telemetry has counted, taken every two seconds for five minutes.

    Args:
        telemetry: counts.
        gate: has the places.
    """

    def __init__(self, telemetry: Telemetry, gate: Gate) -> None:
        self._telemetry = telemetry
        self._gate = gate
        self._points: dict[str, deque[list[float | None]]] = {}
        self._before: dict[str, list[int]] = {}
        self._failed: Counter[str] = Counter()
        self._at = time.monotonic()

    async def watch(self) -> None:
        """Take samples until cancelled."""
        while True:
            await asyncio.sleep(EVERY_S)
            self.sample()

    def sample(self) -> None:
        """Note what has happened since the last sample."""
        now = time.monotonic()
        seconds, self._at = now - self._at, now
        failed: Counter[str] = Counter()
        for (model, route, code), count in self._telemetry.requests.items():
            if route in INFERENCE_ROUTES and code >= 400:
                failed[model] += count
        for model, durations in list(self._telemetry.durations.items())[:MOST_MODELS]:
            before = self._before.get(model) or [0] * len(durations.counts)
            self._before[model] = list(durations.counts)
            new = [count - old for count, old in zip(durations.counts, before, strict=True)]
            # Most answers between two bounds are not in the middle: it is an estimate, and the page says so.
            latencies = [1000 * quantile(new, q) if any(new) else None for q in (0.5, 0.95, 0.99)]
            kinds = self._gate.places(model).kinds
            held = sum(each.in_flight for each in kinds), sum(each.waiting for each in kinds)
            errors = (failed[model] - self._failed[model]) / seconds
            point = [round(time.time(), 1), sum(new) / seconds, errors, *latencies, *held]
            self._points.setdefault(model, deque(maxlen=KEPT)).append(point)
        self._failed = failed

    def shown(self) -> dict[str, list[list[float | None]]]:
        """By model: [time, requests/s, errors/s, p50, p95, p99 in ms (None without requests), in flight, waiting]."""
        return {model: list(points) for model, points in self._points.items()}


def quantile(counts: list[int], q: float) -> float:
    """Of a histogram over `BUCKETS_S`, straight within a bucket; in seconds.

    Args:
        counts: of each bucket, and of what lies beyond the last, for which its bound stands.
    """
    wanted = q * sum(counts)
    low = 0.0
    for high, count in zip(BUCKETS_S, counts, strict=False):
        if count >= wanted and count:
            return low + (high - low) * wanted / count
        wanted -= count
        low = high
    return low
