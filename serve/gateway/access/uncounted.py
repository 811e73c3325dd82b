"""Requests that count for no key, and keep a model at work all the same: copies for a candidate, and what it takes long
for, so that the baseline was asked for the client."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from serve.gateway.access.accounts import Work
from serve.gateway.access.admission import Admission
from serve.gateway.access.memory import Share
from serve.gateway.health.flights import ABOARD, At, Flight

__all__ = ["goes_on", "uncounted"]


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


def goes_on(places: Admission, path: str, task: asyncio.Task[Any], held: Share, size: int) -> None:
    """What the task at hand is about goes to another model now; this one is at work on it until that task is done.

    Args:
        path: of this model, with its version.
        held: holds the request until then, of so many bytes.
    """
    flight, work = ABOARD.get(), None
    if flight is not None:
        flight.gone = path
        flight.going_on = (*flight.going_on, task)
        if flight.at.path == path:
            work = places.fairness.begin_uncounted(places.model, flight.at, places.now)
    held.hold(size)

    def over(_: object) -> None:
        held.close()
        if work is not None:
            work.fairness.end_uncounted(work, places.now)

    task.add_done_callback(over)
