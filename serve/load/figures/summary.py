"""A run's figures from what was recorded, and whether they can be believed."""

from __future__ import annotations

from collections.abc import Sequence

from serve.load.figures.recorder import Recorder, Tally
from serve.load.figures.result import Latency, LoadResult, Second, percentile_or_none
from serve.load.figures.server_side import Observation, breakdown, use_between
from serve.load.options import LoadOptions
from serve.load.send.batch import NS_PER_S
from serve.load.send.job import Job

__all__ = ["lateness_bound_ms", "summarize"]

MIN_SECOND_SAMPLES = 20
LATE_SHARE = 0.2
LEAST_BOUND_MS = 1.0
"""Less is the noise of an idle machine."""
LEAST_APART_MS = 10.0
"""Of workers' schedules, half of two round trips: what a network takes within a region."""
BUSY = 0.95
"""Share of a core from which a closed loop's generator is what is measured."""


def summarize(
    recorder: Recorder,
    options: LoadOptions,
    job: Job,
    *,
    request_bytes: int,
    began_ns: int,
    ended_ns: int,
    started: float,
    processes: int,
    lost: Sequence[str],
    stopped: bool,
    seen: Sequence[Observation],
    clock_error_ns: int | None = None,
) -> LoadResult:
    """The figures.

    Args:
        began_ns, ended_ns: of the whole load, warm-up included.
        lost: generators that went away, in words.
        stopped: before its time.
        seen: the server at the beginning and at the end of the measured part.
        clock_error_ns: by how much workers' schedules may have been apart; None where one machine sent.
    """
    tallies = recorder.seconds.values()
    measured_ns = ended_ns - began_ns - int(job.warmup_s * NS_PER_S)
    planned_ns = int(job.duration_s * NS_PER_S)
    last_ns = recorder.last_success_ns or 0
    spent = job.max_requests is not None and recorder.began >= job.max_requests
    if spent or stopped:
        window_ns = last_ns if spent and last_ns else min(measured_ns, planned_ns)
    else:
        window_ns = max(planned_ns, last_ns)
    seconds = max(window_ns, 1) / NS_PER_S
    count = recorder.count
    latency_histogram, service_histogram = recorder.latency(), recorder.service()
    latency = Latency.of(
        latency_histogram, sum(t.latency_ns for t in tallies), max((t.longest_ns for t in tallies), default=0)
    )
    service = Latency.of(service_histogram, sum(t.service_ns for t in tallies))
    lateness = Latency.of(recorder.lateness())
    estimated = None
    if job.arrivals is None and count:
        estimated = Latency.of(service_histogram.corrected(max(service_histogram.value_at(50), 1)))
    errors = recorder.errors
    cpu_share = recorder.cpu_s / max((ended_ns - began_ns) / NS_PER_S, 1e-9)
    rate = None if job.arrivals is None else _rate(job)
    return LoadResult(
        model=options.model or job.host,
        url=options.url,
        concurrency=0 if job.arrivals is not None else job.concurrency,
        rate=rate,
        arrivals=options.arrivals if job.arrivals is not None else "",
        seconds=seconds,
        count=count,
        throughput=count / seconds,
        inferences=sum(tally.rows for tally in tallies) / seconds,
        latency=latency,
        service=service,
        estimated=estimated,
        lateness=lateness,
        waiting_ms=sum(tally.waiting_ns for tally in tallies) / max(count, 1) / 1e6,
        errors=dict(sorted(errors.items())),
        warmup_count=recorder.warmup,
        unfinished=max(recorder.began - count - errors.total(), 0),
        bytes_in=sum(tally.bytes_in for tally in tallies),
        bytes_out=sum(tally.bytes_out for tally in tallies),
        request_bytes=request_bytes,
        labelled=recorder.labelled,
        accuracy=recorder.right / recorder.labelled if recorder.labelled else None,
        client_cpu_share=cpu_share,
        client_memory_bytes=recorder.memory_bytes,
        processes=processes,
        server=use_between(seen[0], seen[-1]) if len(seen) > 1 else None,
        server_untold=seen[-1].untold if seen else "",
        breakdown=breakdown(seen[0], seen[-1], options.model) if len(seen) > 1 else None,
        invalid=(
            *_invalid(options, job, latency, lateness, cpu_share, processes, gone=recorder.gone),
            *_apart(options, job, latency, clock_error_ns),
            *lost,
        ),
        interrupted=stopped,
        started=started,
        seed=options.seed,
        series=_series(recorder),
        clock_error_ms=None if clock_error_ns is None else clock_error_ns / 1e6,
    )


def lateness_bound_ms(options: LoadOptions, latency: Latency) -> float:
    """p99 of the generator's lateness from which an open loop's figures are its own."""
    if options.max_lateness_ms is not None:
        return options.max_lateness_ms
    p99_ms = latency.at("p99") or latency.max_ms or 0.0
    return max(LEAST_BOUND_MS, p99_ms * LATE_SHARE)


def _invalid(
    options: LoadOptions, job: Job, latency: Latency, lateness: Latency, cpu_share: float, processes: int, *, gone: bool
) -> list[str]:
    if gone:
        return ["the server did not answer any more, so that the load was ended"]
    more = "send from another machine (--worker), or from more processes on free cores (--processes)"
    if job.arrivals is not None and lateness.count:
        bound_ms = lateness_bound_ms(options, latency)
        late_ms = lateness.at("p99")
        which = "p99" if late_ms is not None else "up to"  # too few samples for a p99
        late_ms = lateness.max_ms if late_ms is None else late_ms
        if late_ms is not None and late_ms > bound_ms:
            told = f"{which} {late_ms:.3g} ms where {bound_ms:.3g} ms are allowed"
            return [f"the generator itself was late: {told}; {more}"]
    if job.arrivals is None and cpu_share > BUSY * processes:
        return [f"the generator was busy all the time, so that it may be what was measured; {more}"]
    return []


def _apart(options: LoadOptions, job: Job, latency: Latency, clock_error_ns: int | None) -> list[str]:
    """Whether several machines' parts of an open loop's schedule may have been too far apart to be one."""
    if job.arrivals is None or clock_error_ns is None:
        return []
    error_ms, bound_ms = clock_error_ns / 1e6, max(LEAST_APART_MS, lateness_bound_ms(options, latency))
    if error_ms <= bound_ms:
        return []
    told = f"by up to {error_ms:.3g} ms where {bound_ms:.3g} ms are allowed"
    return [f"the workers' schedules may have been apart {told}; send from machines that are nearer to this one"]


def _rate(job: Job) -> float:
    """Mean requests a second of the measured part."""
    assert job.arrivals is not None  # noqa: S101
    if job.arrivals.kind == "trace":
        return len(job.arrivals.times_s) / max(job.duration_s, 1e-9)
    legs = job.arrivals.legs[1:] if job.warmup_s > 0 else job.arrivals.legs
    return sum(leg.requests for leg in legs) / max(sum(leg.seconds for leg in legs), 1e-9)


def _series(recorder: Recorder) -> tuple[Second, ...]:
    last = max(recorder.seconds, default=-1)
    return tuple(_second(number, recorder.seconds.get(number, Tally())) for number in range(last + 1))


def _second(number: int, tally: Tally) -> Second:
    many = tally.latency.total >= MIN_SECOND_SAMPLES
    return Second(
        number,
        tally.due,
        tally.answers,
        tally.rows,
        tally.errors.total(),
        tally.latency.value_at(50) / 1e6 if many else None,
        percentile_or_none(tally.latency, 99),
        tally.longest_ns / 1e6 if tally.latency.total else None,
        tally.lateness.value_at(100) / 1e6,
        tally.latency.encode() if tally.latency.total else "",
    )
