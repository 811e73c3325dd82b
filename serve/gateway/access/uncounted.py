"""Requests that count for no key, and keep a model at work all the same: copies for a candidate, and what was taken
back from it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from serve.gateway.access.accounts import Work
from serve.gateway.access.admission import Admission
from serve.gateway.access.left_behind import once_through
from serve.gateway.health.flights import ABOARD, At, Flight

__all__ = ["taken_back", "uncounted"]


@contextmanager
def uncounted(places: Admission, flight: Flight) -> Iterator[None]:
    """While one is asked: those of the model's requests that stand behind it are not taken to be at work."""
    works: list[Work] = []

    def over() -> None:
        while works:
            work = works.pop()
            work.fairness.end_uncounted(work, places.now)

    def sent(_: At, at: At) -> None:
        over()  # at a server before this one
        works.append(places.fairness.begin_uncounted(places.model, at, places.now))

    flight.on_sent = sent
    try:
        yield
    finally:
        over()


def taken_back(places: Admission, ended: Sequence[asyncio.Future[Any]]) -> None:
    """What the task is about goes to another model now, and this one is at work on it until these are done."""
    if ended and (flight := ABOARD.get()) is not None:
        work = places.fairness.begin_uncounted(places.model, flight.at, places.now)
        once_through(ended, lambda: work.fairness.end_uncounted(work, places.now))
