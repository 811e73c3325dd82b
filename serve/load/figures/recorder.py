"""Turns the generators' records into seconds: counts and histograms that add up exactly, whoever sent the requests."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from serve.load.figures.histogram import Histogram, Ints
from serve.load.send.batch import COLUMNS, NS_PER_S, Batch
from serve.load.send.job import Job

__all__ = ["Recorder", "Tally"]

DUE, TAKEN, SENT, END, BYTES, REQUEST, KIND = range(len(COLUMNS))


@dataclass
class Tally:
    """What belongs to one second.

    Attributes:
        due: requests that were due in it and have ended.
        answers, rows: successes that ended in it, and their inferences.
        errors: failures that ended in it, by kind.
        bytes_in, bytes_out: of the successes that ended in it.
        latency_ns, service_ns, lateness_ns, waiting_ns: sums over the successes that were due in it: from when a
            request was due, from when it was sent, until the generator came to it, until a connection was free.
        longest_ns: the longest latency, exact.
        latency, service: histograms of these successes; lateness: of all that were due in it.
    """

    due: int = 0
    answers: int = 0
    rows: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    bytes_in: int = 0
    bytes_out: int = 0
    latency_ns: int = 0
    service_ns: int = 0
    lateness_ns: int = 0
    waiting_ns: int = 0
    longest_ns: int = 0
    latency: Histogram = field(default_factory=Histogram.empty)
    service: Histogram = field(default_factory=Histogram.empty)
    lateness: Histogram = field(default_factory=Histogram.empty)


class Recorder:
    """What was measured so far, of one load.

    Attributes:
        seconds: by number, from the beginning of the measured part; past its end, what was waited for.
        last_success_ns: from that beginning; None without any.
        right, labelled: answers that named their label, of so many.
        began, warmup, waiting: as the generators tell them, all together.
        cpu_s: of the generators, since the load began.
        gone: whether the load was ended because the server did not answer any more.
    """

    def __init__(self, job: Job) -> None:
        self._rows = np.array([request.rows for request in job.requests], np.int64)
        self._sizes = np.array([len(request.wire) for request in job.requests], np.int64)
        self._told: dict[int, Batch] = {}
        self.seconds: dict[int, Tally] = {}
        self.last_success_ns: int | None = None
        self.gone = False

    def add(self, batch: Batch, part: int = 0) -> None:
        """Take what a generator hands on."""
        self._told[part] = batch
        records = np.frombuffer(batch.records, np.int64).reshape(-1, len(COLUMNS))
        if not len(records):
            return
        well = records[:, KIND] == 0
        self._add_due(records, well)
        self._add_ended(records[well])
        failed = records[~well]
        for second, kind in zip((failed[:, END] // NS_PER_S).tolist(), failed[:, KIND].tolist(), strict=True):
            self._second(second).errors[batch.kinds[kind]] += 1

    @property
    def count(self) -> int:
        """Successes."""
        return sum(tally.answers for tally in self.seconds.values())

    @property
    def errors(self) -> Counter[str]:
        total: Counter[str] = Counter()
        for tally in self.seconds.values():
            total.update(tally.errors)
        return total

    @property
    def began(self) -> int:
        return sum(batch.began for batch in self._told.values())

    @property
    def warmup(self) -> int:
        return sum(batch.warmup for batch in self._told.values())

    @property
    def waiting(self) -> int:
        return sum(batch.waiting for batch in self._told.values())

    @property
    def right(self) -> int:
        return sum(batch.right for batch in self._told.values())

    @property
    def labelled(self) -> int:
        return sum(batch.labelled for batch in self._told.values())

    @property
    def cpu_s(self) -> float:
        return math.fsum(batch.cpu_s for batch in self._told.values())

    @property
    def memory_bytes(self) -> int:
        """The largest generator's."""
        return max((batch.memory_bytes for batch in self._told.values()), default=0)

    def latency(self) -> Histogram:
        """Of all successes, from when each was due."""
        return Histogram.merged(tally.latency for tally in self.seconds.values())

    def service(self) -> Histogram:
        """The same from when each was sent."""
        return Histogram.merged(tally.service for tally in self.seconds.values())

    def lateness(self) -> Histogram:
        """How late the generator came to each request."""
        return Histogram.merged(tally.lateness for tally in self.seconds.values())

    def _second(self, number: int) -> Tally:
        found = self.seconds.get(number)
        if found is None:
            found = self.seconds[number] = Tally()
        return found

    def _add_due(self, records: Ints, well: Ints) -> None:
        due = records[:, DUE]
        seconds = due // NS_PER_S
        for number in np.unique(seconds).tolist():
            mine = seconds == number
            tally = self._second(number)
            tally.due += int(mine.sum())
            lateness = records[mine, TAKEN] - due[mine]
            tally.lateness = Histogram.merged((tally.lateness, Histogram.of(lateness)))
            mine &= well
            if not mine.any():
                continue
            latency = records[mine, END] - due[mine]
            service = records[mine, END] - records[mine, SENT]
            tally.latency = Histogram.merged((tally.latency, Histogram.of(latency)))
            tally.service = Histogram.merged((tally.service, Histogram.of(service)))
            tally.latency_ns += int(latency.sum())
            tally.service_ns += int(service.sum())
            tally.lateness_ns += int((records[mine, TAKEN] - due[mine]).sum())
            tally.waiting_ns += int((records[mine, SENT] - records[mine, TAKEN]).sum())
            tally.longest_ns = max(tally.longest_ns, int(latency.max()))

    def _add_ended(self, records: Ints) -> None:
        if not len(records):
            return
        self.last_success_ns = max(self.last_success_ns or 0, int(records[:, END].max()))
        seconds = records[:, END] // NS_PER_S
        for number in np.unique(seconds).tolist():
            mine = records[seconds == number]
            tally = self._second(number)
            tally.answers += len(mine)
            tally.rows += int(self._rows[mine[:, REQUEST]].sum())
            tally.bytes_in += int(mine[:, BYTES].sum())
            tally.bytes_out += int(self._sizes[mine[:, REQUEST]].sum())
