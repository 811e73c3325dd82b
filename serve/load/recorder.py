"""Keeps each measured request until the end: 16 bytes for a success, a count for a failure."""

from __future__ import annotations

from array import array
from collections import Counter
from typing import Any

import numpy as np

from serve.load.result import LoadResult, Second, percentile_or_none

__all__ = ["Recorder"]

NS_PER_S = 1_000_000_000
MIN_SECOND_SAMPLES = 20


class Recorder:
    """What was measured so far. Times are of `perf_counter_ns`."""

    def __init__(self) -> None:
        self.warmup_count = 0
        self.bytes_in = 0
        self.errors: Counter[str] = Counter()
        self._ends_ns = array("q")
        self._latencies_ns = array("q")
        self._error_ends_ns = array("q")

    @property
    def count(self) -> int:
        """Successes."""
        return len(self._ends_ns)

    @property
    def total(self) -> int:
        """Successes and failures."""
        return len(self._ends_ns) + len(self._error_ends_ns)

    def success(self, start_ns: int, end_ns: int, wire_bytes: int) -> None:
        self._ends_ns.append(end_ns)
        self._latencies_ns.append(end_ns - start_ns)
        self.bytes_in += wire_bytes

    def failure(self, kind: str, end_ns: int) -> None:
        self._error_ends_ns.append(end_ns)
        self.errors[kind] += 1

    def last_success_ns(self) -> int | None:
        return max(self._ends_ns) if self._ends_ns else None

    def result(
        self,
        *,
        model: str,
        url: str,
        concurrency: int,
        begin_ns: int,
        end_ns: int,
        request_bytes: int,
        client_cpu_share: float,
        interrupted: bool,
    ) -> LoadResult:
        """The figures over the window from `begin_ns` to `end_ns`."""
        seconds = max(end_ns - begin_ns, 1) / NS_PER_S
        latencies = np.sort(np.frombuffer(self._latencies_ns, dtype=np.int64)) / 1e6
        return LoadResult(
            model=model,
            url=url,
            concurrency=concurrency,
            seconds=seconds,
            count=self.count,
            throughput=self.count / seconds,
            p50_ms=percentile_or_none(latencies, 50),
            p90_ms=percentile_or_none(latencies, 90),
            p99_ms=percentile_or_none(latencies, 99),
            mean_ms=float(latencies.mean()) if self.count else None,
            max_ms=float(latencies[-1]) if self.count else None,
            errors=dict(sorted(self.errors.items())),
            warmup_count=self.warmup_count,
            bytes_in=self.bytes_in,
            bytes_out=self.count * request_bytes,
            request_bytes=request_bytes,
            client_cpu_share=client_cpu_share,
            interrupted=interrupted,
            series=self._series(begin_ns),
        )

    def _series(self, begin_ns: int) -> tuple[Second, ...]:
        seconds = self._seconds(self._ends_ns, begin_ns)
        failed = self._seconds(self._error_ends_ns, begin_ns)
        latencies_ms = np.frombuffer(self._latencies_ns, dtype=np.int64) / 1e6
        last = max((int(part.max()) for part in (seconds, failed) if len(part)), default=-1)
        entries: list[Second] = []
        order = np.argsort(seconds, kind="stable")
        bounds = np.searchsorted(seconds[order], np.arange(last + 2))
        errors = np.bincount(failed, minlength=last + 1) if len(failed) else np.zeros(last + 1, dtype=np.int64)
        for second in range(last + 1):
            part = np.sort(latencies_ms[order[bounds[second] : bounds[second + 1]]])
            p50 = percentile_or_none(part, 50) if len(part) >= MIN_SECOND_SAMPLES else None
            entries.append(Second(second, len(part), int(errors[second]), p50))
        return tuple(entries)

    @staticmethod
    def _seconds(ends_ns: array[int], begin_ns: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        ends = np.frombuffer(ends_ns, dtype=np.int64) if ends_ns else np.zeros(0, dtype=np.int64)
        return (ends - begin_ns) // NS_PER_S
