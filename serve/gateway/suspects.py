"""Which request ended a model's process: those that were with it are suspected, and the one that does it twice is
refused.

After a death all requests in flight are suspects. A suspect that is answered is cleared. Until then a key's suspects
for a model are asked one at a time. When the process dies again with one of them in flight and no request of another
key, that one did it: whoever shares a death with others may be their victim. It is refused from then on, by the
fingerprint of what it says, for its own key only and for a bounded time.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import orjson
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from serve.gateway.errors import BadInputError, OverloadedError
from serve.http_body import GrowingBody

__all__ = ["Flight", "PoisonError", "StreamFlight", "Suspect", "Suspects"]

REMEMBERED_S, REMEMBERED = 600.0, 1024
LOST_S, LOST_BYTES = 2.0, 64 * 1024 * 1024  # a dead server's connections break a moment before its death is known
LONG_BYTES = 256 * 1024
MOST_WAITING = 16  # suspects of one key for one model
_OF_QUEUES = frozenset(("timeout", "priority", "binary_data_output"))  # no model sees these
_OF_INPUT = frozenset(("binary_data_size", "shared_memory_region", "shared_memory_offset", "shared_memory_byte_size"))


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
        body: that it sends; b"" where it is not to be told from others.
    """

    __slots__ = ("body", "key", "model", "suspect")

    def __init__(self, key: str, model: str, body: bytes | GrowingBody) -> None:
        self.key = key
        self.model = model
        self.body = body
        self.suspect: Suspect | None = None


@dataclass
class _Turn:
    """Whose turn it is among the suspects of one key for one model."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    there: int = 0


class StreamFlight:
    """The messages of a stream: one request as far as deaths go, in flight while answers are due.

    Args:
        suspects: are told.
    """

    def __init__(self, suspects: Suspects) -> None:
        self._suspects = suspects
        self._flying: list[Flight] = []

    def sent(self, key: str, model: str) -> None:
        """A message goes to the model server."""
        flight = Flight(key, model, b"")
        self._flying.append(flight)
        self._suspects.take_off(flight)

    def answered(self) -> None:
        """An answer came: the oldest message is over."""
        if self._flying:
            self._suspects.land(self._flying.pop(0), answered=True)

    def end(self) -> None:
        """The stream is over; what was not answered is lost."""
        while self._flying:
            self._suspects.land(self._flying.pop(), answered=False)


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
        self._turns: dict[tuple[str, str], _Turn] = {}

    def watches(self, key: str, model: str) -> bool:
        """Whether this key's requests for the model are to be told apart; they then have to be read whole."""
        return bool(self._watched) and (key, model) in self._watched

    async def examine(self, flight: Flight, patience_s: float) -> None:
        """To be awaited where `watches` says so, before a place is taken; `land` must follow.

        A suspect waits until it is the only one of its key for the model.

        Args:
            flight: the request.
            patience_s: how long it may wait.

        Raises:
            PoisonError: it is known to end the model's process.
            OverloadedError: its turn did not come in time, or too many wait for theirs.
        """
        self._forget(self._clock())
        suspect = await asyncio.to_thread(_named, flight) if len(flight.body) > LONG_BYTES else _named(flight)
        self._check(suspect)
        if suspect not in self._deaths:
            return
        whose = flight.key, flight.model
        turn = self._turns.setdefault(whose, _Turn())
        if turn.there > MOST_WAITING:
            raise _one_at_a_time(flight.model)
        turn.there += 1
        try:
            async with asyncio.timeout(patience_s):
                await turn.lock.acquire()
        except BaseException as err:
            self._leave(whose)
            if isinstance(err, TimeoutError):
                raise _one_at_a_time(flight.model) from None
            raise
        flight.suspect = suspect
        try:
            self._check(suspect)  # while it waited, one like it may have been found out
        except PoisonError:
            self._release(flight)
            flight.suspect = None
            raise

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
            suspect = flight.suspect
            self._release(flight)
            if answered and self._deaths.get(suspect, (2, 0.0))[0] < 2:
                del self._deaths[suspect]
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
        keys = {flight.key for flight in flights}
        alone = len(flights) == 1 or (len(keys) == 1 and "" not in keys)
        examined = {flight.suspect for flight in flights if flight.suspect is not None} if alone else set()
        blamed = [flight for flight in flights if flight.suspect is not None] if examined else flights
        found = await asyncio.to_thread(lambda: list(dict.fromkeys(map(_named, blamed)))[:REMEMBERED])
        now = self._clock()
        for suspect in found:
            if suspect.fingerprint:
                count, _ = self._deaths.pop(suspect, (0, now))
                self._deaths[suspect] = count + 1 if suspect in examined else max(count, 1), now
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

    def _release(self, flight: Flight) -> None:
        whose = flight.key, flight.model
        self._turns[whose].lock.release()
        self._leave(whose)

    def _leave(self, whose: tuple[str, str]) -> None:
        turn = self._turns[whose]
        turn.there -= 1
        if not turn.there:
            del self._turns[whose]

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


def _one_at_a_time(model: str) -> OverloadedError:
    return OverloadedError(
        f"the model {model!r} is asked this one at a time",
        why="such a request was in flight when the model's process ended",
        mend="try again when Retry-After says",
    )


def _named(flight: Flight) -> Suspect:
    body = flight.body
    if isinstance(body, GrowingBody):
        if not body.whole:
            return Suspect(flight.key, flight.model, "")
        body = body.so_far()
    if not body:
        return Suspect(flight.key, flight.model, "")
    digest = hashlib.blake2b(flight.model.encode() + b"\0" + _essence(body), digest_size=12)
    return Suspect(flight.key, flight.model, digest.hexdigest())


def _essence(body: bytes) -> bytes:
    """What a request says to the model: without its id, and without what is read by queues alone.

    Long ones are taken as they are, and so is what can't be read.
    """
    if len(body) > LONG_BYTES:
        return body
    if body.lstrip()[:1] == b"{":
        with suppress(ValueError, TypeError, AttributeError, KeyError, RecursionError):
            text = body.decode("latin-1")  # raw tensors may follow
            asked, end = json.JSONDecoder().raw_decode(text, len(text) - len(text.lstrip()))
            return orjson.dumps(_plain(asked), option=orjson.OPT_SORT_KEYS) + body[end:]
    with suppress(Exception):  # protobuf's DecodeError, whose class depends on its implementation
        from tritonclient.grpc import service_pb2 as messages

        message = messages.ModelInferRequest()
        message.ParseFromString(body)
        message.ClearField("id")
        for name in _OF_QUEUES:
            message.parameters.pop(name, None)
        for tensor in message.inputs:
            for name in set(tensor.parameters) - _OF_INPUT:
                del tensor.parameters[name]
        found: bytes = message.SerializeToString(deterministic=True)
        return found
    return body


def _plain(asked: dict[str, Any]) -> dict[str, Any]:
    """A request's JSON, but for its id and the parameters that no model sees."""
    found = {name: value for name, value in asked.items() if name in ("inputs", "outputs", "parameters")}
    found["parameters"] = {
        name: value for name, value in (asked.get("parameters") or {}).items() if name not in _OF_QUEUES
    }
    found["inputs"] = [
        item | {"parameters": {k: v for k, v in (item.get("parameters") or {}).items() if k in _OF_INPUT}}
        for item in asked["inputs"]
    ]
    return found
