"""What a generator process tells of its load, held against what it can have seen before it goes among the figures."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from serve.load.send.batch import COLUMNS, NS_PER_S, Batch
from serve.load.send.job import Job
from serve.load.send.turns import share
from serve.load.send.wire import WireError, batch_of

__all__ = ["Ledger"]

SLACK_NS = NS_PER_S
"""Of a time that is still to come: clocks of two machines are compared to less than that."""
ROUNDING_NS = 1000
LARGEST = 1 << 40
_NEVER_FEWER = ("right", "labelled", "began", "warmup")


class Ledger:
    """One generator's batches, each of which must fit the load and those before it.

    Args:
        job: what it was told to send.
        start_ns: when, a time of this process's `perf_counter_ns`.
        part, parts: which of the processes it is, of how many.

    Attributes:
        told: whether anything was taken.
    """

    def __init__(self, job: Job, start_ns: int, part: int, parts: int) -> None:
        self._job = job
        self._lasts = job.arrivals is None and job.max_requests is None and bool(share(job.concurrency, part, parts))
        self._begin_ns = start_ns + int(job.warmup_s * NS_PER_S)
        self._labels = np.array([len(each) for each in job.check.labels] if job.check is not None else [], np.int64)
        self._last: Batch | None = None
        self._records = self._labelled = 0

    @property
    def told(self) -> bool:
        return self._last is not None

    def take(self, message: Mapping[str, Any], blob: bytes) -> Batch:
        """Read what it sent.

        Raises:
            WireError: that can't be.
        """
        batch = batch_of(message, blob)
        if len(blob) % (8 * len(COLUMNS)):
            raise WireError("it sent records that are cut")
        self._check_records(np.frombuffer(blob, np.int64).reshape(-1, len(COLUMNS)), batch)
        self._check_counts(batch)
        self._last = batch
        return batch

    def _check_records(self, records: Any, batch: Batch) -> None:
        if not len(records):
            return
        due, taken, sent, end, size, request, kind = records.T
        latest_ns = time.perf_counter_ns() - self._begin_ns + SLACK_NS
        for odd, what in (
            ((kind < 0) | (kind >= len(batch.kinds)), "came out in a way that it does not name"),
            ((request < 0) | (request >= len(self._job.requests)), "were not to be sent"),
            ((size < 0) | (size > LARGEST), "can't have so many bytes"),
            ((due < 0) | (due > self._job.duration_s * NS_PER_S + ROUNDING_NS), "were not due in that time"),
            ((taken < due) | (sent < taken) | (end < sent), "ended before they began"),
            (end > latest_ns, "have not ended yet"),
        ):
            if odd.any():
                raise WireError(f"it sent figures of requests that {what}")
        self._records += len(records)
        if len(self._labels):
            self._labelled += int(self._labels[request[kind == 0]].sum())

    def _check_counts(self, batch: Batch) -> None:
        if self._records > batch.began:
            raise WireError("it sent figures of more requests than it began")
        if not batch.right <= batch.labelled <= self._labelled:
            raise WireError("it sent more right answers than there were answers")
        if self._last is not None and any(getattr(batch, name) < getattr(self._last, name) for name in _NEVER_FEWER):
            raise WireError("it sent counts that went down")
        most = self._job.max_requests
        if most is not None and batch.began > most:
            raise WireError("it began more requests than it was to send")
        early_ns = self._begin_ns + self._job.duration_s * NS_PER_S - SLACK_NS - time.perf_counter_ns()
        if batch.ended == "whole" and self._lasts and early_ns > 0:
            raise WireError(f"it ended {early_ns / NS_PER_S + 1:.0f} s before the load did")
