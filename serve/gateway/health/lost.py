"""Requests that went to a server and did not come back: they may have ended it, or may still be at work there."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable

from serve.gateway.health.fingerprints import Suspect
from serve.gateway.health.flights import Flight, may_be, within

__all__ = ["LostFlights"]

LOST_S, LOST_BYTES = 2.0, 64 * 1024 * 1024  # a dead server's connections break a moment before its death is known
FLIGHT_BYTES = 4096  # that one of these counts, besides its body
MOST_GHOSTS = 4096


class LostFlights:
    """The lost, whole for a moment; after that, or where there are too many, as ghosts: by key, model and server.

    Args:
        clock: seconds that never go back.
        remembered_s: how long a ghost may haunt.

    Attributes:
        held_bytes: of memory that the whole ones take.
    """

    def __init__(self, clock: Callable[[], float], remembered_s: float) -> None:
        self._clock = clock
        self._remembered_s = remembered_s
        self._flights: dict[int, Flight] = {}
        self.held_bytes = 0
        self._ghosts: OrderedDict[tuple[str, str, str], float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._flights)

    def add(self, flight: Flight) -> None:
        """It was lost."""
        if self.held_bytes >= LOST_BYTES:
            self._haunt(flight)
            return
        self._flights[id(flight)] = flight
        flight.counted = FLIGHT_BYTES + len(flight.body)
        self.held_bytes += flight.counted
        asyncio.get_running_loop().call_later(LOST_S, self._fade, id(flight))

    def of(self, models: frozenset[str] | None, server: str) -> list[Flight]:
        """Those that asked these models (None for all) of this server ("" for any)."""
        return [each for each in self._flights.values() if within(each.model, models) and may_be(each.server, server)]

    def drop(self, flight: Flight) -> None:
        """It is blamed, or over."""
        self._take(id(flight))

    def lay(self, models: frozenset[str] | None, server: str) -> list[Suspect]:
        """The ghosts that may have been at work for these models; they are now over."""
        oldest = self._clock() - self._remembered_s
        there = [ghost for ghost in self._ghosts if within(ghost[1], models) and may_be(ghost[2], server)]
        return [Suspect(*ghost[:2], "") for ghost in there if self._ghosts.pop(ghost) >= oldest]

    def _fade(self, which: int) -> None:
        if (flight := self._take(which)) is not None:
            self._haunt(flight)

    def _haunt(self, flight: Flight) -> None:
        """Nobody waits for a request any more; the model may be at work on it for long."""
        ghost = flight.key, flight.model, flight.server
        self._ghosts[ghost] = self._clock()
        self._ghosts.move_to_end(ghost)
        if len(self._ghosts) > MOST_GHOSTS:
            self._ghosts.popitem(last=False)

    def _take(self, which: int) -> Flight | None:
        flight = self._flights.pop(which, None)
        if flight is not None:
            self.held_bytes -= flight.counted
        return flight
