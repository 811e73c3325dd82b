"""Which request each of a load's numbers sends, and which of several processes has which numbers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from serve.load.send.job import Job

__all__ = ["numbers", "order_of", "share"]

DRAWN = 4096
TURNS = 4093  # a prime, so that no count of requests comes round with it


def order_of(job: Job) -> list[int]:
    """Which request each number sends: in turn, or drawn by weight."""
    if not job.weights:
        return list(range(len(job.requests)))
    weights = np.asarray(job.weights, np.float64)
    drawn = np.random.default_rng(job.seed).choice(len(job.requests), DRAWN, p=weights / weights.sum())
    found: list[int] = drawn.tolist()
    return found


def numbers(job: Job, part: int, parts: int) -> Iterator[int]:
    """A closed loop's numbers of one process: of each `parts` that follow one another, every process has one, by lot.

    Always the same one would leave each with requests of its own wherever the count of requests and that of processes
    have a divisor in common, and a process whose own are answered fast would send more of them.
    """
    lots: list[int] = np.random.default_rng(job.seed).integers(parts, size=TURNS).tolist()  # all draw the same
    turn = 0
    while True:
        yield turn * parts + (part + lots[turn % TURNS]) % parts
        turn += 1


def share(whole: int | None, part: int, parts: int) -> int | None:
    """One process's part of a count; together they are the whole."""
    return None if whole is None else whole // parts + (part < whole % parts)
