"""What a generator hands on: records as they are, and counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["COLUMNS", "NS_PER_S", "Batch", "Ending"]

Ending = Literal["", "whole", "stopped", "cut"]
"""How a generator's part came out: "" while more is to come; all of it; told to stop; broken off by whatever else."""

NS_PER_S = 1_000_000_000
COLUMNS = ("due", "taken", "sent", "end", "bytes", "request", "kind")
"""Of a record; times in nanoseconds from the beginning of the measured part, `kind` an index of `Batch.kinds`."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What was measured since the last one.

    Attributes:
        records: int64, `COLUMNS` for each request, one after the other.
        kinds: how requests came out, by number; the first is "", a success.
        right, labelled: answers that named their label, of so many.
        began: measured requests that were begun so far, in all.
        warmup: requests of the warm-up so far, in all.
        waiting: requests that are due and have no connection yet.
        cpu_s: of this process so far, since its load began.
        memory_bytes: the most it has had resident.
        ended: how, once nothing more will come.
    """

    records: bytes
    kinds: tuple[str, ...]
    right: int
    labelled: int
    began: int
    warmup: int
    waiting: int
    cpu_s: float
    memory_bytes: int
    ended: Ending
