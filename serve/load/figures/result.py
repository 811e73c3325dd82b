"""What a load test measured: one run, and a report of several."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from serve.load.figures.histogram import Histogram
from serve.load.figures.server_side import Breakdown, ModelTime, ServerUse

__all__ = ["PERCENTS", "SCHEMA_VERSION", "Latency", "LoadResult", "Second", "percentile_or_none"]

SCHEMA_VERSION = 2
MIN_BEYOND = 10
BY_BATCH = ("batches", "batch_ms")
PERCENTS = (50.0, 90.0, 95.0, 99.0, 99.9, 99.99)


@dataclass(frozen=True)
class Latency:
    """A distribution of times, in milliseconds.

    A percentile is None with fewer than ten samples beyond it.

    Attributes:
        count: samples.
        mean_ms, max_ms: exact; None without samples.
        percentiles_ms: by name, "p50" to "p99.99", to a thousandth of each.
        histogram: all of it, as HdrHistogram writes it (V2, base64), in nanoseconds.
    """

    count: int
    mean_ms: float | None
    max_ms: float | None
    percentiles_ms: Mapping[str, float | None]
    histogram: str = ""

    @classmethod
    def of(cls, histogram: Histogram, total_ns: int | None = None, longest_ns: int | None = None) -> Self:
        """Read a histogram; `total_ns` and `longest_ns` are exact where they are known."""
        count = histogram.total
        if not count:
            return cls(0, None, None, {f"p{percent:g}": None for percent in PERCENTS})
        total = float((histogram.highest * histogram.counts).sum()) if total_ns is None else total_ns
        longest = int(histogram.highest[-1]) if longest_ns is None else longest_ns
        return cls(
            count,
            total / count / 1e6,
            longest / 1e6,
            {f"p{percent:g}": percentile_or_none(histogram, percent) for percent in PERCENTS},
            histogram.encode(),
        )

    def at(self, name: str) -> float | None:
        """A percentile by name, such as "p99"; "mean" and "max", too."""
        if name in ("mean", "max"):
            return self.mean_ms if name == "mean" else self.max_ms
        if name in self.percentiles_ms:
            return self.percentiles_ms[name]
        return percentile_or_none(self.samples(), float(name.removeprefix("p")))

    def samples(self) -> Histogram:
        return Histogram.decode(self.histogram) if self.histogram else Histogram.empty()


@dataclass(frozen=True)
class Second:
    """One second, from the beginning of the measured part; what comes after its end was waited for.

    Attributes:
        second: counted from 0.
        due: requests that were due (a closed loop: begun) in it.
        successes, rows: answers that came in it, and their inferences.
        errors: failures that came in it.
        p50_ms, p99_ms, max_ms: latency of the answers to what was due in it; None where they are too few.
        late_ms: the largest lateness of the generator in it.
        latency: their histogram; "" where it is left out.
    """

    second: int
    due: int
    successes: int
    rows: int
    errors: int
    p50_ms: float | None
    p99_ms: float | None
    max_ms: float | None
    late_ms: float
    latency: str = ""


@dataclass(frozen=True)
class LoadResult:
    """Requests that were due after the warm-up, every one of them waited for.

    Latencies are those of successes alone (status 200, and the expected answer where one is expected); a failure is
    counted in `errors`, never as a fast answer.

    Attributes:
        model, url: what was asked of whom.
        concurrency: clients of a closed loop; 0 for an open one.
        rate: requests a second that an open loop was to send; None for a closed one.
        arrivals: how they were spread.
        seconds: the measured part, from the end of the warm-up to its planned end, or to the last success where that
            came later (or the count was reached sooner).
        count: successes. throughput: those per second. inferences: rows in them, per second.
        latency: from when a request was due; of a closed loop, from when it was sent.
        service: from when it was sent. Of an open loop, what a tool shows that does not count the wait.
        estimated: of a closed loop, what HdrHistogram's correction makes of it for clients that would not have waited.
        lateness: of the generator: from when a request was due until it came to it.
        waiting_ms: mean wait for a free connection, part of the latency.
        errors: failures by kind: "status 503", "timeout", "refused", "closed", "wrong values", …
        warmup_count: requests begun in the warm-up, whatever became of them.
        unfinished: begun and dropped when the run was stopped.
        bytes_in, bytes_out: received and sent with the successes, HTTP heads included.
        request_bytes: one request's, on average.
        accuracy: right answers as a share of `labelled`; None without labels.
        client_cpu_share: what the generators took of one core. client_memory_bytes: their largest.
        processes: generators. clock_error_ms: by how much the schedules of workers on several machines may have been
            apart; None where one machine sent.
        server: what the server took of this machine; None where it is on another, or not known to be the server.
        server_untold: why it is not known; empty where it is, and for another machine.
        breakdown: Triton's own account; None without one.
        invalid: why the figures say more about the generator than about the server; empty where they do not.
        interrupted: stopped before its time.
        started: seconds since 1970.
        seed: that arrivals and inputs were drawn with.
        series: one entry a second.
    """

    model: str
    url: str
    concurrency: int
    rate: float | None
    arrivals: str
    seconds: float
    count: int
    throughput: float
    inferences: float
    latency: Latency
    service: Latency
    estimated: Latency | None
    lateness: Latency
    waiting_ms: float
    errors: Mapping[str, int]
    warmup_count: int
    unfinished: int
    bytes_in: int
    bytes_out: int
    request_bytes: int
    labelled: int
    accuracy: float | None
    client_cpu_share: float
    client_memory_bytes: int
    processes: int
    server: ServerUse | None = None
    server_untold: str = ""
    breakdown: Breakdown | None = None
    invalid: tuple[str, ...] = ()
    interrupted: bool = False
    started: float = 0.0
    seed: int = 0
    series: tuple[Second, ...] = field(default=(), repr=False)
    clock_error_ms: float | None = None

    @property
    def p50_ms(self) -> float | None:
        return self.latency.at("p50")

    @property
    def p90_ms(self) -> float | None:
        return self.latency.at("p90")

    @property
    def p99_ms(self) -> float | None:
        return self.latency.at("p99")

    @property
    def mean_ms(self) -> float | None:
        return self.latency.mean_ms

    @property
    def max_ms(self) -> float | None:
        return self.latency.max_ms

    @property
    def error_count(self) -> int:
        return sum(self.errors.values())

    @property
    def error_share(self) -> float:
        return self.error_count / max(self.error_count + self.count, 1)

    @property
    def offered(self) -> str:
        """The load in words."""
        if self.rate is None:
            return f"{self.concurrency} at a time"
        return f"{self.rate:,.6g} requests/s"

    def to_dict(self) -> dict[str, Any]:
        """JSON values by stable names, read again by `from_dict`."""
        data = dataclasses.asdict(self)
        if data["breakdown"] is not None:
            for model in data["breakdown"]["models"]:
                for name in BY_BATCH:
                    model[name] = {str(size): value for size, value in model[name].items()}
            data["breakdown"]["models"] = list(data["breakdown"]["models"])
        return {**data, "invalid": list(self.invalid), "series": list(data["series"])}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """What `to_dict` gave.

        Raises:
            KeyError, TypeError, ValueError: it is something else.
        """
        values = dict(data)
        for name in ("latency", "service", "estimated", "lateness"):
            values[name] = None if values[name] is None else Latency(**values[name])
        if values["server"] is not None:
            values["server"] = ServerUse(**values["server"])
        if (told := values["breakdown"]) is not None:
            models = tuple(
                ModelTime(
                    **entry
                    | {name: {int(size): value for size, value in entry.get(name, {}).items()} for name in BY_BATCH}
                )
                for entry in told["models"]
            )
            values["breakdown"] = Breakdown(models, told["gateway_ms"])
        values["invalid"] = tuple(values["invalid"])
        values["series"] = tuple(Second(**entry) for entry in values["series"])
        return cls(**values)


def percentile_or_none(histogram: Histogram, percent: float) -> float | None:
    """A percentile in milliseconds, None with fewer than ten samples beyond it."""
    if histogram.total * (1 - percent / 100) < MIN_BEYOND - 1e-9:
        return None
    return histogram.value_at(percent) / 1e6
