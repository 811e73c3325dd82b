"""The bounds of the gateway's latency histogram; apart, so that rules can be written where no gateway is installed."""

from __future__ import annotations

__all__ = ["BUCKETS_S"]

BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
