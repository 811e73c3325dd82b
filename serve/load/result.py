"""What a load test measured."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

__all__ = ["LoadResult", "Second", "percentile_or_none"]

SCHEMA_VERSION = 1
MIN_BEYOND = 10


@dataclass(frozen=True)
class Second:
    """One second of the measured window.

    Attributes:
        second: counted from 0.
        successes, errors: answers and failures that ended in it.
        p50_ms: median latency of its successes; None where they are too few.
    """

    second: int
    successes: int
    errors: int
    p50_ms: float | None


@dataclass(frozen=True)
class LoadResult:
    """Requests that were begun after the warm-up, every one of them waited for.

    Latencies are those of successes alone (status 200); a failure is counted in `errors`, never as a fast answer.
    A percentile is None with fewer than ten samples beyond it.

    Attributes:
        model, url, concurrency: what was asked of whom.
        seconds: the measured window, from the end of the warm-up to its planned end, or to the last success
            where that came later (or the count was reached sooner).
        count: successes.
        throughput: successes per second, count / seconds.
        p50_ms, p90_ms, p99_ms, mean_ms, max_ms: latency of successes, in milliseconds.
        errors: failures by kind: "status 503", "timeout", "refused", "closed", ...
        warmup_count: requests begun in the warm-up, whatever became of them.
        bytes_in, bytes_out: received and sent with the successes, HTTP heads included.
        request_bytes: one request's, head included.
        client_cpu_share: share of one core that this client used itself; near 1, it is the client that is measured.
        interrupted: stopped before its time.
        series: one entry a second.
    """

    model: str
    url: str
    concurrency: int
    seconds: float
    count: int
    throughput: float
    p50_ms: float | None
    p90_ms: float | None
    p99_ms: float | None
    mean_ms: float | None
    max_ms: float | None
    errors: Mapping[str, int]
    warmup_count: int
    bytes_in: int
    bytes_out: int
    request_bytes: int
    client_cpu_share: float
    interrupted: bool = False
    series: tuple[Second, ...] = ()

    @property
    def error_count(self) -> int:
        return sum(self.errors.values())

    def to_dict(self) -> dict[str, Any]:
        """JSON values by stable names, read again by `from_dict`."""
        data = dataclasses.asdict(self)
        return {"schema_version": SCHEMA_VERSION, **data, "series": list(data["series"])}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        fields = {key: value for key, value in data.items() if key != "schema_version"}
        fields["series"] = tuple(Second(**entry) for entry in fields["series"])
        return cls(**fields)


def percentile_or_none(ordered_ms: Any, percent: float) -> float | None:
    """The nearest-rank percentile of sorted samples, None with fewer than ten samples beyond it.

    Args:
        ordered_ms: latencies in ascending order, a sequence or an array.
        percent: 0 to 100.
    """
    rank = math.ceil(len(ordered_ms) * percent / 100)
    if len(ordered_ms) - rank < MIN_BEYOND:
        return None
    return float(ordered_ms[max(rank, 1) - 1])
