"""Requests that count for no key, and keep a model at work all the same: copies for a candidate."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from serve.gateway.access.accounts import Work
from serve.gateway.access.admission import Admission
from serve.gateway.health.flights import At, Flight

__all__ = ["uncounted"]


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
