"""The messages of one gRPC stream, in flight."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

from serve.gateway.health.flights import NOWHERE, At, Flight
from serve.gateway.health.occupied import Occupied
from serve.gateway.health.suspects import Suspects

__all__ = ["StreamFlight"]


class StreamFlight:
    """The messages of a stream: one request as far as deaths go, in flight while answers are due.

    Args:
        suspects: are told.

    Attributes:
        server: that it goes to, by its name; "" until that is known, and where nobody follows deaths.
    """

    def __init__(self, suspects: Suspects) -> None:
        self._suspects = suspects
        self._flying: list[Flight] = []
        self.server = ""
        self._told = ""
        self._paths: dict[Flight, str] = {}
        self._occupied: Occupied | None = None

    def goes_to(self, server: str) -> None:
        """The stream goes to this server."""
        self._told = server
        for flight in self._flying:
            flight.goes_to(self.at(self._paths[flight]))

    def at(self, path: str) -> At:
        """Where its messages go that ask this model; nowhere, until that is known."""
        return At(self._told, path) if self._told else NOWHERE

    def take_to(self, server: str, occupied: Occupied) -> None:
        """If it dies, this is the server that has them, and they keep instances there at work."""
        self.server, self._occupied = server, occupied
        for flight in self._flying:
            self._lands_at(flight)

    def _lands_at(self, flight: Flight) -> None:
        flight.server = self.server
        if self._occupied is not None and flight.needs.instances:
            self._occupied.enter(flight.model, flight, time.monotonic(), long=flight.needs.long)

    def _is_over(self, flight: Flight) -> None:
        del self._paths[flight]
        if self._occupied is not None:
            self._occupied.leave(flight.model, flight)

    @property
    def first(self) -> Flight | None:
        """The oldest message that is in flight."""
        return self._flying[0] if self._flying else None

    async def sent(
        self,
        key: str,
        model: str,
        patience_s: float,
        place: Callable[[], Awaitable[None]] | None = None,
        board: Callable[[Flight], None] | None = None,
        path: str = "",
    ) -> None:
        """A message goes to the model server, once it is its key's turn.

        Args:
            place: waits for its place, then; None where it needs none.
            board: says what it keeps at work, and who is told where it goes, once it has that.
            path: of the model, with its version where that was asked for.

        Raises:
            OverloadedError: it did not come in time.
        """
        flight = Flight(key, model, b"")
        if self._suspects.watches(key, model):
            await self._suspects.examine(flight, patience_s)
        if place is not None:
            try:
                await place()
            except BaseException:
                self._suspects.land(flight, answered=False, sent=False)
                raise
        if board is not None:
            board(flight)
        self._paths[flight] = path or model
        self._flying.append(flight)
        self._lands_at(flight)
        flight.goes_to(self.at(self._paths[flight]))
        self._suspects.take_off(flight)

    def answered(self) -> None:
        """An answer came: the oldest message is over."""
        if self._flying:
            self._is_over(flight := self._flying.pop(0))
            self._suspects.land(flight, answered=True)

    def end(self, *, left: bool = True) -> None:
        """The stream is over; what was not answered is lost.

        Args:
            left: whether it was not the model server that ended it.
        """
        while self._flying:
            self._is_over(flight := self._flying.pop())
            flight.left = left
            self._suspects.land(flight, answered=False)
