"""Which request ended a model's process: those that were with it are suspected, and the one that does it twice is
refused.

After a death all requests in flight are suspects. A suspect that is answered is cleared. Until then suspects are asked
one at a time, beside all others: when the process dies again with one of them in flight, that one did it. It is refused
from then on, by the fingerprint of what it says, for its own key only and for a bounded time.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from serve.gateway.errors import BadInputError, OverloadedError
from serve.http_body import GrowingBody

__all__ = ["Flight", "PoisonError", "Suspect", "Suspects"]

REMEMBERED_S, REMEMBERED = 600.0, 1024
LOST_S, LOST_BYTES = 2.0, 64 * 1024 * 1024  # a dead server's connections break a moment before its death is known
LONG_BYTES = 256 * 1024


class PoisonError(BadInputError):
    """A request that has ended the model's process twice."""

    def __init__(self, model: str) -> None:
        super().__init__(
            f"the model {model!r} is not asked this again",
            why="this very request has ended the model's process twice",
            mend="send another one; the server's log names this one by its fingerprint, for whoever mends the model",
        )


@dataclass(frozen=True)
class Suspect:
    """A request by what may be told of it.

    Attributes:
        key: the id of its key.
        model: that was asked.
        fingerprint: of what it says, in hex; "" for one that had not come to its end.
    """

    key: str
    model: str
    fingerprint: str

    def __str__(self) -> str:
        key = f"key {self.key}" if self.key else "no key"
        return f"{self.model} ({key}, fingerprint {self.fingerprint or 'unknown'})"


class Flight:
    """A request that is with the model server.

    Args:
        key: the id of its key.
        model: that is asked.
        body: that it sends.
    """

    __slots__ = ("body", "key", "model", "suspect")

    def __init__(self, key: str, model: str, body: bytes | GrowingBody) -> None:
        self.key = key
        self.model = model
        self.body = body
        self.suspect: Suspect | None = None


class Suspects(Collector):
    """The requests in flight, and those that were when something died.

    Args:
        clock: seconds that never go back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.refused: Counter[str] = Counter()
        self._clock = clock
        self._flying: dict[int, Flight] = {}
        self._lost: dict[int, Flight] = {}
        self._deaths: OrderedDict[Suspect, tuple[int, float]] = OrderedDict()
        self._watched: set[tuple[str, str]] = set()
        self._one = asyncio.Lock()

    def watches(self, key: str, model: str) -> bool:
        """Whether this key's requests for the model are to be told apart; they then have to be read whole."""
        return bool(self._watched) and (key, model) in self._watched

    async def examine(self, flight: Flight, patience_s: float) -> None:
        """To be awaited before `take_off` where `watches` says so; a suspect waits until it is the only one.

        Args:
            flight: the request.
            patience_s: how long it may wait.

        Raises:
            PoisonError: it is known to end the model's process.
            OverloadedError: its turn did not come in time.
        """
        self._forget(self._clock())
        suspect = await asyncio.to_thread(_named, flight) if len(flight.body) > LONG_BYTES else _named(flight)
        self._check(suspect)
        if suspect not in self._deaths:
            return
        try:
            async with asyncio.timeout(patience_s):
                await self._one.acquire()
        except TimeoutError:
            raise OverloadedError(
                f"the model {flight.model!r} is asked this one at a time",
                why="such a request was in flight when the model's process ended",
                mend="try again when Retry-After says",
            ) from None
        try:
            self._check(suspect)  # while it waited, one like it may have been found out
        except PoisonError:
            self._one.release()
            raise
        flight.suspect = suspect

    def take_off(self, flight: Flight) -> None:
        """The request goes to the model server; `land` must follow."""
        self._flying[id(flight)] = flight

    def land(self, flight: Flight, *, answered: bool) -> None:
        """The request is over.

        Args:
            flight: the request.
            answered: whether the model's process has answered it, with whatever; not where the client left.
        """
        there = self._flying.pop(id(flight), None) is not None
        if there and not answered and sum(len(other.body) for other in self._lost.values()) < LOST_BYTES:
            self._lost[id(flight)] = flight
            asyncio.get_running_loop().call_later(LOST_S, self._lost.pop, id(flight), None)
        if flight.suspect is not None:
            self._one.release()
            if answered and self._deaths.get(flight.suspect, (2, 0.0))[0] < 2:
                del self._deaths[flight.suspect]
                self._watched = {(each.key, each.model) for each in self._deaths}

    async def died(self, models: Collection[str] | None) -> list[Suspect]:
        """The requests that may have ended the process of these models; None for the whole model server's."""
        flights = [
            flight
            for flight in (*self._lost.values(), *self._flying.values())
            if models is None or flight.model in models
        ]
        for flight in flights:  # each is blamed for one death, however long its connection hangs
            self._flying.pop(id(flight), None)
            self._lost.pop(id(flight), None)
        blamed = [flight for flight in flights if flight.suspect is not None] or flights
        found = await asyncio.to_thread(lambda: list(dict.fromkeys(map(_named, blamed)))[:REMEMBERED])
        now = self._clock()
        for suspect in found:
            if suspect.fingerprint:
                count, _ = self._deaths.pop(suspect, (0, now))
                self._deaths[suspect] = count + 1, now
                self._watched.add((suspect.key, suspect.model))
        self._forget(now)
        return found

    def collect(self) -> Iterator[Metric]:
        """Prometheus metrics."""
        refused = CounterMetricFamily(
            "gateway_poison_refused", "Requests refused that have ended the model's process twice.", labels=["model"]
        )
        for model, count in list(self.refused.items()):
            refused.add_metric([model], count)
        yield refused

    def _check(self, suspect: Suspect) -> None:
        if self._deaths.get(suspect, (0, 0.0))[0] >= 2:
            self.refused[suspect.model] += 1
            raise PoisonError(suspect.model)

    def _forget(self, now: float) -> None:
        old = [suspect for suspect, (_, when) in self._deaths.items() if now - when > REMEMBERED_S]
        old += list(self._deaths)[: max(0, len(self._deaths) - REMEMBERED)]
        for suspect in old:
            self._deaths.pop(suspect, None)
        if old:
            self._watched = {(each.key, each.model) for each in self._deaths}


def _named(flight: Flight) -> Suspect:
    body = flight.body
    if isinstance(body, GrowingBody):
        if not body.whole:
            return Suspect(flight.key, flight.model, "")
        body = body.so_far()
    digest = hashlib.blake2b(flight.model.encode() + b"\0" + body, digest_size=12)
    return Suspect(flight.key, flight.model, digest.hexdigest())
