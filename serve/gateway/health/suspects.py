"""Which request ended a model's process: those that were with it are suspected, and the one that does it twice is
refused.

After a death all requests in flight are suspects. A suspect that is answered is cleared. When the process dies with one
of them in flight and no request of another key, that one did it: whoever shares a death with others may be their
victim. It is refused from then on, by the fingerprint of what it says, for its own key only and for a bounded time.

For it to be found beside others' traffic, keys take turns (`serve.gateway.health.turns`): for a while after a death
that several shared, and for each suspect that comes later. A key whose requests, never the same, end the process again
and again with nobody else's in flight is refused for a while.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import orjson
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from serve.gateway.errors import BadInputError, OverloadedError
from serve.gateway.health.turns import LONGEST_OVERRUN_S, OVERRUN_S, Turns
from serve.http.body import GrowingBody

__all__ = ["ABOARD", "BarredError", "Fleet", "Flight", "PoisonError", "StreamFlight", "Suspect", "Suspects"]

REMEMBERED_S, REMEMBERED = 600.0, 1024
LOST_S, LOST_BYTES = 2.0, 64 * 1024 * 1024  # a dead server's connections break a moment before its death is known
FLIGHT_BYTES = 4096  # that one of these counts, besides its body
LONG_BYTES = 256 * 1024
MOST_WAITING = 16  # suspects of one key for one model
MOST_OF_KEY = 64  # suspects of one key
PROBATION_S = 10.0  # that keys take turns after a death
DEATHS_OF_KEY = 4  # in a row, of one key alone: it is then refused for a while
BARRED_S, LONGEST_BARRED_S = 15.0, 600.0
MOST_GHOSTS = 4096
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


class BarredError(OverloadedError):
    """A key whose requests end the model's process again and again."""

    def __init__(self, model: str, seconds: float) -> None:
        super().__init__(
            f"the model {model!r} is not asked for this key for now",
            why="its process has ended several times while it had this key's requests",
            mend="try again when Retry-After says, with other requests",
            retry_after_s=seconds,
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

    Attributes:
        left: whether its client did not wait for it any more, or the gateway: the model may be at work on it.
        server: that has it, by its name; "" where there is one only, or it is not known.
        turn: whether it has its turn.
    """

    __slots__ = (
        "behind", "body", "cleared", "counted", "first", "guest", "key", "left", "lost", "model", "owner", "sent",
        "server", "suspect", "turn",
    )  # fmt: skip

    def __init__(self, key: str, model: str, body: bytes | GrowingBody) -> None:
        self.key = key
        self.model = model
        self.body = body
        self.suspect: Suspect | None = None
        self.owner = key
        self.sent = 0.0
        self.counted = 0
        self.first = self.turn = self.guest = self.lost = self.left = self.cleared = False
        self.server = ""
        self.behind: list[Flight] = []


ABOARD: ContextVar[Flight | None] = ContextVar("aboard", default=None)
"""The request that a task is about."""


class Fleet(Protocol):
    """Several servers, each of which may die by itself."""

    def isolated(self) -> str:
        """The server on which keys take turns; "" while none do, or none is there."""

    def others(self, without: str = "") -> bool:
        """Whether there are servers in service besides this one."""


@dataclass
class _Death:
    """What is known of a suspect: how often it did it, when it was there at last, what died, how often with others."""

    count: int
    when: float
    models: frozenset[str] | None
    shared: int


@dataclass
class _Record:
    """How often a key alone ended these models (None for the model server), and until when it is refused.

    `left` counts deaths that it may have brought about without waiting for them.
    """

    models: frozenset[str] | None
    count: int
    when: float
    until: float
    left: int = 0


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


class Suspects(Collector):
    """The requests in flight, and those that were when something died.

    Args:
        clock: seconds that never go back.

    Attributes:
        answered_at: when a request was answered at last, on the clock.
        fleet: the servers, where there may be several; None where there is one only.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.refused: Counter[str] = Counter()
        self.answered_at = -math.inf
        self.fleet: Fleet | None = None
        self._clock = clock
        self._flying: dict[int, Flight] = {}
        self._lost: dict[int, Flight] = {}
        self._lost_bytes = 0
        self._shared: set[str] = set()  # keys that shared a death since turns are taken
        self._ghosts: OrderedDict[tuple[str, str, str], float] = OrderedDict()
        self._deaths: OrderedDict[Suspect, _Death] = OrderedDict()
        self._watched: set[tuple[str, str]] = set()
        self._alone: dict[str, list[_Record]] = {}
        self._barred: set[str] = set()
        self._waiting: dict[tuple[str, str], _Turn] = {}
        self._turns = Turns(self._strangers, clock)

    @property
    def apart(self) -> bool:
        """Whether turns are taken."""
        return self._turns.taken

    def watches(self, key: str, model: str) -> bool:
        """Whether this key's requests for the model are to be told apart; they then have to be read whole."""
        return (
            (bool(self._watched) and (key, model) in self._watched)
            or (self._turns.taken and self._turns.covers(model))
            or (bool(self._barred) and key in self._barred)
        )

    async def suspected(self, key: str, model: str, body: bytes) -> bool:
        """Whether another model is not to be asked this, too: it may have ended a process, its key did so with nobody
        else there, or it is being found out who did.

        Args:
            key: the id of the request's key.
            model: that is asked.
            body: of the request.
        """
        if (self._turns.taken and self._turns.covers(model)) or (key and key in self._alone):
            return True
        if (key, model) not in self._watched:
            return False
        flight = Flight(key, model, body)
        named = await asyncio.to_thread(_named, flight) if len(body) > LONG_BYTES else _named(flight)
        return not named.fingerprint or named in self._deaths

    async def examine(self, flight: Flight, patience_s: float) -> None:
        """To be awaited where `watches` says so, before a place is taken; `land` must follow.

        A suspect waits until it is the only one of its key for the model, and whoever asks what has died of late until
        no other key does.

        Args:
            flight: the request.
            patience_s: how long it may wait.

        Raises:
            PoisonError: it is known to end the model's process.
            BarredError: its key is.
            OverloadedError: its turn did not come in time, or too many wait for theirs.
        """
        began = self._clock()
        self._forget(began)
        self._check_key(flight)
        if (flight.key, flight.model) in self._watched:
            await self._suspected(flight, patience_s)
        try:
            if flight.suspect is not None:
                if not flight.key:  # whose it is nobody knows: each suspect takes turns by itself
                    flight.owner = flight.suspect.fingerprint
                if (known := self._deaths.get(flight.suspect)) is not None:
                    several = known.shared > 1
                    flight.guest = self._turns.invite(known.models, at_once=several)
                    if flight.guest and several:
                        known.shared -= 1  # a client that leaves is neither cleared nor convicted: one turn a death
            left = max(0.0, patience_s - (self._clock() - began))
            if self._needs_turn(flight):
                flight.turn = await self._turns.take(flight.owner, flight.model, left)
            self._check_key(flight)
            if flight.suspect is not None:
                self._check(flight.suspect)  # while it waited, one like it may have been found out
        except BaseException:
            self._release(flight)
            flight.suspect = None
            raise

    def _needs_turn(self, flight: Flight) -> bool:
        """Whether it goes where turns are taken, and not to another server."""
        if self.fleet is None or flight.suspect is not None or flight.key in self._shared:
            return True
        return not self.fleet.others(self.fleet.isolated())

    async def _suspected(self, flight: Flight, patience_s: float) -> None:
        """Where it is a suspect: wait until it is the only one of its key for the model."""
        suspect = await asyncio.to_thread(_named, flight) if len(flight.body) > LONG_BYTES else _named(flight)
        self._check(suspect)
        if suspect not in self._deaths:
            return
        whose = flight.key, flight.model
        turn = self._waiting.setdefault(whose, _Turn())
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
        flight.first = True

    def take_off(self, flight: Flight) -> None:
        """The request goes to the model server; `land` must follow."""
        flight.sent = self._clock()
        self._flying[id(flight)] = flight

    def was_with(self, servers: Collection[str], before: float) -> bool:
        """Whether a request is with one of these servers that was sent before that time."""
        return any(flight.server in servers and flight.sent < before for flight in self._flying.values())

    @contextmanager
    def beside(self, key: str, model: str, body: bytes) -> Iterator[Flight]:
        """A request, on its way, is asked of another model, too, or in its place.

        It counts as answered where nothing is raised, unless its flight is said to be `lost`.
        """
        flight = Flight(key, model, body)
        self.take_off(flight)
        answered = False
        above = ABOARD.set(flight)
        try:
            yield flight
            answered = not flight.lost
        except asyncio.CancelledError:
            flight.left = True
            raise
        finally:
            ABOARD.reset(above)
            self.land(flight, answered=answered)

    def land(self, flight: Flight, *, answered: bool, sent: bool = True) -> None:
        """The request is over.

        Args:
            flight: the request.
            answered: whether the model's process has answered it, with whatever; not where the client left.
            sent: whether it has, or may have, reached the model server; one that found nobody there ended nothing.
        """
        there = self._flying.pop(id(flight), None) is not None
        if answered:
            self.answered_at = self._clock()
        if there and not answered and sent and all(each.server != flight.server for each in flight.behind):
            self._lose(flight)
        for behind in flight.behind:
            behind.cleared = answered
        self._release(flight)
        if answered and flight.suspect is not None:
            known = self._deaths.get(flight.suspect)
            if known is not None and known.count < 2:
                del self._deaths[flight.suspect]
                self._watch()
        if there:
            self._turns.moved()

    def lose(self, flight: Flight, server: str) -> None:
        """The request was lost with this server, and may be asked of another: it is suspected of the one's death.

        Being answered by the other clears it, but its key was there all the same.
        """
        behind = Flight(flight.key, flight.model, flight.body)
        behind.suspect, behind.sent, behind.server = flight.suspect, flight.sent, server
        flight.behind.append(behind)
        self._lose(behind)

    def _lose(self, flight: Flight) -> None:
        if self._lost_bytes < LOST_BYTES:
            self._lost[id(flight)] = flight
            flight.counted = FLIGHT_BYTES + len(flight.body)
            self._lost_bytes += flight.counted
            asyncio.get_running_loop().call_later(LOST_S, self._haunt, id(flight))
        else:
            self._haunt(id(flight), flight)

    async def died(self, models: Collection[str] | None, server: str = "") -> list[Suspect]:
        """The requests that may have ended the process of these models; None for the whole model server's.

        Args:
            models: that it served.
            server: its name, where there may be several.
        """
        scope = None if models is None else frozenset(models)
        there = [flight for flight in self._lost.values() if _is(flight.server, server)]
        there += [] if server else self._flying.values()  # that one is known for what it has lost: others found nobody
        flights = [flight for flight in there if _within(flight.model, scope)]
        for flight in flights:  # each is blamed for one death, however long its connection hangs
            self._flying.pop(id(flight), None)
            self._no_longer_lost(id(flight))
        ghosts = self._lay(scope, server)
        keys = {flight.key for flight in flights} | {ghost.key for ghost in ghosts}
        alone = len(keys) == 1 and ("" not in keys or len(flights) + len(ghosts) == 1)
        examined = {flight.suspect for flight in flights if flight.suspect is not None} if alone else set()
        blamed = [flight for flight in flights if flight.suspect is not None] if examined else flights
        blamed = [flight for flight in blamed if not flight.cleared]
        if not self._turns.taken:
            self._shared.clear()
        if keys and not alone:
            if self._turns.taken:  # those before it did not end in time
                self._turns.overrun_s = min(2.0 * self._turns.overrun_s, LONGEST_OVERRUN_S)
            self._take_turns(scope)
            self._shared |= keys
        elif alone:
            self._turns.overrun_s = OVERRUN_S
            if self._turns.lasting:  # or the next one would be shared again, and tell nothing
                self._take_turns(scope)
            self._count_key(next(iter(keys)), scope)
        stayed = {flight.key for flight in flights if not flight.left}
        if not alone and len(stayed) <= 1:
            for key in keys - stayed:
                self._count_left(key, scope)
        long = sum(len(flight.body) for flight in blamed) > LONG_BYTES
        found = await asyncio.to_thread(_all_named, blamed) if long else _all_named(blamed)
        now = self._clock()
        of_key = Counter(suspect.key for suspect in self._deaths)
        for suspect in found:
            known = self._deaths.pop(suspect, None)
            if suspect.fingerprint:
                count, shared = (0, 0) if known is None else (known.count, known.shared)
                count = count + 1 if suspect in examined else max(count, 1)
                self._deaths[suspect] = _Death(count, now, scope, shared + (not alone))
                of_key[suspect.key] += known is None
                if suspect.key and of_key[suspect.key] > MOST_OF_KEY:
                    oldest = next(each for each in self._deaths if each.key == suspect.key)
                    del self._deaths[oldest]
                    of_key[suspect.key] -= 1
        self._watch()
        self._forget(now)
        return found + ghosts

    def _take_turns(self, models: frozenset[str] | None) -> None:
        if self.fleet is not None and self.fleet.others():  # which go on meanwhile
            self._turns.begin(models, PROBATION_S)
        else:
            self._turns.suspend(models)

    def began(self, models: Collection[str] | None, since: float | None = None, server: str = "") -> None:
        """These models (None for all) are served by new processes; what was with the old ones is over.

        Args:
            models: that are served.
            since: when the new processes were started, on the clock; None for now. They may have died meanwhile.
            server: the name of theirs, where there may be several.
        """
        scope = None if models is None else frozenset(models)
        for which, flight in list(self._lost.items()):
            there = _within(flight.model, scope) and _is(flight.server, server)
            if there and (since is None or flight.sent < since):
                self._no_longer_lost(which)
        self._lay(scope, server)
        self._turns.resume(scope, PROBATION_S)

    def resume(self) -> None:
        """A server is in service: turns that wait for one begin."""
        self._turns.resume(None, PROBATION_S)

    def collect(self) -> Iterator[Metric]:
        """Prometheus metrics."""
        refused = CounterMetricFamily(
            "gateway_poison_refused", "Requests refused that have ended the model's process twice.", labels=["model"]
        )
        for model, count in list(self.refused.items()):
            refused.add_metric([model], count)
        yield refused

    def _strangers(self, owner: str, models: frozenset[str] | None) -> bool:
        server = "" if self.fleet is None else self.fleet.isolated()
        return any(
            not flight.turn
            and flight.owner != owner
            and _within(flight.model, models)
            and (not server or _is(flight.server, server))
            for flight in self._flying.values()
        )

    def _haunt(self, which: int, flight: Flight | None = None) -> None:
        """Nobody waits for a request any more; the model may be at work on it for long."""
        flight = flight or self._no_longer_lost(which)
        if flight is not None:
            ghost = flight.key, flight.model, flight.server
            self._ghosts[ghost] = self._clock()
            self._ghosts.move_to_end(ghost)
            if len(self._ghosts) > MOST_GHOSTS:
                self._ghosts.popitem(last=False)

    def _no_longer_lost(self, which: int) -> Flight | None:
        flight = self._lost.pop(which, None)
        if flight is not None:
            self._lost_bytes -= flight.counted
        return flight

    def _lay(self, models: frozenset[str] | None, server: str) -> list[Suspect]:
        """Requests that nobody waits for any more and that may have been at work; they are now over."""
        oldest = self._clock() - REMEMBERED_S
        there = [ghost for ghost in self._ghosts if _within(ghost[1], models) and _is(ghost[2], server)]
        return [Suspect(*ghost[:2], "") for ghost in there if self._ghosts.pop(ghost) >= oldest]

    def _record(self, key: str, models: frozenset[str] | None) -> _Record:
        now = self._clock()
        records = self._alone.setdefault(key, [])
        record = next((each for each in records if each.models == models), None)
        if record is None:
            record = _Record(models, 0, now, 0.0)
            records.append(record)
        record.when = now
        return record

    def _count_left(self, key: str, models: frozenset[str] | None) -> None:
        """It had left requests that these models may have been at work on when they died, with one other key there.

        Either of the two did it. Whoever leaves each time is refused for a short time, so that the next death tells:
        else two keys, one of which leaves, could end the models for ever, and so could one that leaves before they do.
        """
        if not key:
            return
        record = self._record(key, models)
        record.left += 1
        if record.left >= DEATHS_OF_KEY:
            record.left = 0
            self._barred.add(key)
            record.until = max(record.until, record.when + BARRED_S)

    def _count_key(self, key: str, models: frozenset[str] | None) -> None:
        """It ended these models, with nobody else there."""
        if not key:
            return
        record = self._record(key, models)
        now = record.when
        record.count += 1
        if record.count >= DEATHS_OF_KEY:
            self._barred.add(key)
            record.until = now + min(BARRED_S * 2.0 ** min(record.count - DEATHS_OF_KEY, 16), LONGEST_BARRED_S)

    def _check_key(self, flight: Flight) -> None:
        for record in self._alone.get(flight.key, ()):
            if _within(flight.model, record.models) and (left := record.until - self._clock()) > 0:
                self.refused[flight.model] += 1
                raise BarredError(flight.model, left)

    def _release(self, flight: Flight) -> None:
        """Whoever waits for it may go on; more than once does no harm."""
        if flight.first:
            flight.first = False
            whose = flight.key, flight.model
            self._waiting[whose].lock.release()
            self._leave(whose)
        if flight.turn:
            flight.turn = False
            self._turns.leave(flight.owner)
        if flight.guest:
            flight.guest = False
            self._turns.excuse()

    def _leave(self, whose: tuple[str, str]) -> None:
        turn = self._waiting[whose]
        turn.there -= 1
        if not turn.there:
            del self._waiting[whose]

    def _check(self, suspect: Suspect) -> None:
        known = self._deaths.get(suspect)
        if known is not None and known.count >= 2:
            self.refused[suspect.model] += 1
            raise PoisonError(suspect.model)

    def _watch(self) -> None:
        self._watched = {(each.key, each.model) for each in self._deaths}

    def _forget(self, now: float) -> None:
        old = [suspect for suspect, death in self._deaths.items() if now - death.when > REMEMBERED_S]
        old += list(self._deaths)[: max(0, len(self._deaths) - REMEMBERED)]
        for suspect in old:
            self._deaths.pop(suspect, None)
        if old:
            self._watch()
        for key, records in list(self._alone.items()):
            self._alone[key] = [each for each in records if now - max(each.when, each.until) <= REMEMBERED_S]
            if not self._alone[key]:
                del self._alone[key]
                self._barred.discard(key)


def _within(model: str, models: frozenset[str] | None) -> bool:
    return models is None or model in models


def _is(server: str, which: str) -> bool:
    """Whether this may be that server: where one of the two is not known, it may."""
    return not server or not which or server == which


def _one_at_a_time(model: str) -> OverloadedError:
    return OverloadedError(
        f"the model {model!r} is asked this one at a time",
        why="such a request was in flight when the model's process ended",
        mend="try again when Retry-After says",
    )


def _all_named(flights: Iterable[Flight]) -> list[Suspect]:
    return list(dict.fromkeys(map(_named, flights)))[:REMEMBERED]


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
