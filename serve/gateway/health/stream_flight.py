"""The messages of one gRPC stream, in flight."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from serve.gateway.health.flights import Flight
from serve.gateway.health.suspects import Suspects

__all__ = ["StreamFlight"]


class StreamFlight:
    """The messages of a stream: one request as far as deaths go, in flight while answers are due.

    Args:
        suspects: are told.
    """

    def __init__(self, suspects: Suspects) -> None:
        self._suspects = suspects
        self._flying: list[Flight] = []
        self._server = ""

    def take_to(self, server: str) -> None:
        """The stream goes to this server."""
        self._server = server
        for flight in self._flying:
            flight.server = server

    @property
    def first(self) -> Flight | None:
        """The oldest message that is in flight."""
        return self._flying[0] if self._flying else None

    async def sent(
        self, key: str, model: str, patience_s: float, place: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """A message goes to the model server, once it is its key's turn.

        Args:
            place: waits for its place, then; None where it needs none.

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
        flight.server = self._server
        self._flying.append(flight)
        self._suspects.take_off(flight)

    def answered(self) -> None:
        """An answer came: the oldest message is over."""
        if self._flying:
            self._suspects.land(self._flying.pop(0), answered=True)

    def end(self, *, left: bool = True) -> None:
        """The stream is over; what was not answered is lost.

        Args:
            left: whether it was not the model server that ended it.
        """
        while self._flying:
            flight = self._flying.pop()
            flight.left = left
            self._suspects.land(flight, answered=False)
