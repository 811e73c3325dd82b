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
import math
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from serve.gateway.errors import BadInputError
from serve.gateway.health.barred import BarredError, BarredKeys
from serve.gateway.health.fingerprints import LONG_BYTES, Suspect, suspect_of
from serve.gateway.health.flights import ABOARD, Came, Flight, may_be, within
from serve.gateway.health.lost import LostFlights
from serve.gateway.health.one_at_a_time import OneAtATime
from serve.gateway.health.turns import LONGEST_OVERRUN_S, OVERRUN_S, Turns

__all__ = ["Fleet", "PoisonError", "Suspects"]

REMEMBERED_S, REMEMBERED = 600.0, 1024
MOST_OF_KEY = 64  # suspects of one key
PROBATION_S = 10.0  # that keys take turns after a death


class PoisonError(BadInputError):
    """A request that has ended the model's process twice."""

    def __init__(self, model: str) -> None:
        super().__init__(
            f"the model {model!r} is not asked this again",
            why="this very request has ended the model's process twice",
            mend="send another one; the server's log names this one by its fingerprint, for whoever mends the model",
        )


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
        self._lost = LostFlights(clock, REMEMBERED_S)
        self._shared: set[str] = set()  # keys that shared a death since turns are taken
        self._deaths: OrderedDict[Suspect, _Death] = OrderedDict()
        self._watched: set[tuple[str, str]] = set()
        self._barred = BarredKeys(clock)
        self._queues = OneAtATime()
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
            or key in self._barred
        )

    async def suspected(self, key: str, model: str, body: bytes) -> bool:
        """Whether another model is not to be asked this, too: it may have ended a process of this one's, its key did so
        with nobody else there, or it is being found out who did.

        Args:
            key: the id of the request's key.
            model: that is asked.
            body: of the request.
        """
        if (self._turns.taken and self._turns.covers(model)) or self._barred.known(key, model):
            return True
        if (key, model) not in self._watched:
            return False
        named = await _suspect_of(Flight(key, model, body))
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
        try:  # a turn that it is lent may become its own while it waits
            self._check_key(flight)
            if (flight.key, flight.model) in self._watched:
                await self._suspected(flight, patience_s)
            if flight.suspect is not None:
                if not flight.key and not flight.turn:  # whose it is nobody knows: each suspect takes turns by itself
                    flight.owner = flight.suspect.fingerprint
                if (known := self._deaths.get(flight.suspect)) is not None:
                    several = known.shared > 1
                    flight.guest = self._turns.invite(known.models, at_once=several)
                    if flight.guest and several:
                        known.shared -= 1  # a client that leaves is neither cleared nor convicted: one turn a death
            left = max(0.0, patience_s - (self._clock() - began))
            if not flight.turn and self._needs_turn(flight):
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
        suspect = await _suspect_of(flight)
        self._check(suspect)
        if suspect not in self._deaths:
            return
        await self._queues.enter(flight.key, flight.model, patience_s)
        flight.suspect = suspect
        flight.first = True

    def take_off(self, flight: Flight) -> None:
        """The request goes to the model server; `land` must follow."""
        flight.sent = self._clock()
        self._flying[id(flight)] = flight

    def was_with(self, servers: Collection[str], before: float) -> bool:
        """Whether a request is with one of these servers that was sent before that time."""
        return any(flight.server in servers and flight.sent < before for flight in self._flying.values())

    def at_home(self, flight: Flight) -> None:
        """A request is asked of the model that it is known by; of others maybe before that."""
        flight.own = True
        if flight.away:
            flight.away = False
            self.take_off(flight)

    @asynccontextmanager
    async def instead(self, key: str, model: str, body: bytes, patience_s: float) -> AsyncIterator[Flight]:
        """What the task at hand is about is asked of another model than the one that it is known by, in its place.

        It is a suspect there by that model's name, and is examined as one that asks for it by that. A turn that the
        task has serves for it.

        Args:
            patience_s: how long it may wait.

        Raises:
            PoisonError, BarredError, OverloadedError: as of `examine`.
        """
        flight = Flight(key, model, body)
        if (whole := ABOARD.get()) is not None:
            flight.needs, flight.request = whole.needs, whole.whole()
            if whole.on_sent is not None:
                flight.on_sent = lambda _, at: whole.goes_to(at)
            if not whole.own and not whole.away:
                whole.away = True
                if self._flying.pop(id(whole), None) is not None:
                    self._turns.moved()
            if whole.turn:
                flight.owner = whole.owner
                flight.turn = flight.lends = True
                whole.borrowers = (*whole.borrowers, flight)
        try:
            if self.watches(key, model):
                await self.examine(flight, patience_s)
            with self._on_its_way(flight):
                yield flight
        finally:
            if whole is not None:
                whole.borrowers = tuple(each for each in whole.borrowers if each is not flight)

    @contextmanager
    def beside(self, key: str, model: str, body: bytes) -> Iterator[Flight]:
        """A request, on its way, is asked of another model, too."""
        with self._on_its_way(Flight(key, model, body)) as flight:
            yield flight

    @contextmanager
    def _on_its_way(self, flight: Flight) -> Iterator[Flight]:
        """It counts as answered where nothing is raised, unless its flight is said to be `lost`."""
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
            self.land(flight, answered=answered, sent=not flight.unsent)

    def goes_on(self, key: str, model: str, body: bytes, task: asyncio.Task[Any], ended: Callable[[Any], Came]) -> None:
        """What the task at hand is about is answered by another, and is with this model until that task is done.

        Until then it is suspected there, and has its turn.

        Args:
            ended: what comes of it.
        """
        flight = Flight(key, model, body)
        if (whole := ABOARD.get()) is not None:
            flight.server, flight.suspect, flight.owner = whole.server, whole.suspect, whole.owner
            flight.request = whole.whole()
            flight.first, flight.turn, flight.guest = whole.first, whole.turn, whole.guest
            whole.first = whole.guest = False
            whole.lends, whole.goes_on = whole.turn, True  # where that is asked goes by its turn all the same
        self.take_off(flight)

        def over(done: asyncio.Task[Any]) -> None:
            if whole is not None and id(whole) in self._flying:  # it is with the other still
                whole.first, whole.guest, whole.lends = flight.first, flight.guest, False
                flight.first = flight.turn = flight.guest = False
            known = not done.cancelled() and done.exception() is None
            answered, flight.left, sent = ended(done.result()) if known else Came(answered=False, left=True)
            self.land(flight, answered=answered, sent=sent)

        task.add_done_callback(over)

    def land(self, flight: Flight, *, answered: bool, sent: bool = True) -> None:
        """The request is over.

        Args:
            flight: the request.
            answered: whether a model's process has answered it, with whatever; not where the client left.
            sent: whether it has, or may have, reached the model server; one that found nobody there ended nothing.
        """
        there = self._flying.pop(id(flight), None) is not None
        if answered:
            self.answered_at = self._clock()
        answered = answered and not flight.unanswered  # another's answer clears it of nothing
        if there and not answered and sent and all(each.server != flight.server for each in flight.behind):
            self._lost.add(flight)
        for behind in flight.behind:
            behind.cleared = answered and not flight.goes_on
        self._hand_over(flight)
        self._release(flight)
        others = flight.goes_on or flight.away
        if answered and flight.suspect is not None and not others:
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
        behind.request = flight.whole()
        flight.behind = (*flight.behind, behind)
        self._lost.add(behind)

    async def died(self, models: Collection[str] | None, server: str = "") -> list[Suspect]:
        """The requests that may have ended the process of these models; None for the whole model server's.

        Args:
            models: that it served.
            server: its name, where there may be several.
        """
        scope = None if models is None else frozenset(models)
        flights = self._lost.of(scope, server)
        if not server:  # one that has a name is known for what it has lost: others found nobody
            flights += [flight for flight in self._flying.values() if within(flight.model, scope)]
        for flight in flights:  # each is blamed for one death, however long its connection hangs
            self._flying.pop(id(flight), None)
            self._lost.drop(flight)
        ghosts = self._lost.lay(scope, server)
        keys = {flight.key for flight in flights} | {ghost.key for ghost in ghosts}
        requests = {id(flight.request or flight) for flight in flights}
        alone = len(keys) == 1 and ("" not in keys or len(requests) + len(ghosts) == 1)
        self._count_keys(keys, flights, scope, alone=alone)
        examined = {flight.suspect for flight in flights if flight.suspect is not None} if alone else set()
        blamed = [flight for flight in flights if flight.suspect is not None] if examined else flights
        blamed = [flight for flight in blamed if not flight.cleared]
        long = sum(len(flight.body) for flight in blamed) > LONG_BYTES
        found = await asyncio.to_thread(_all_suspects, blamed) if long else _all_suspects(blamed)
        of_key = Counter(suspect.key for suspect in self._deaths)
        for suspect in found:
            if suspect.fingerprint:
                known = self._deaths.pop(suspect, None)
                count, shared = (0, 0) if known is None else (known.count, known.shared)
                count = count + 1 if suspect in examined else max(count, 1)
                self._deaths[suspect] = _Death(count, self._clock(), scope, shared + (not alone))
                of_key[suspect.key] += known is None
                if suspect.key and of_key[suspect.key] > MOST_OF_KEY:
                    oldest = next(each for each in self._deaths if each.key == suspect.key)
                    del self._deaths[oldest]
                    of_key[suspect.key] -= 1
        self._watch()
        self._forget(self._clock())
        return found + ghosts

    def _count_keys(self, keys: set[str], flights: list[Flight], models: frozenset[str] | None, *, alone: bool) -> None:
        """These keys were there when the models died; who of them did it is found by turns."""
        if not self._turns.taken:
            self._shared.clear()
        if keys and not alone:
            if self._turns.taken:  # those before it did not end in time
                self._turns.overrun_s = min(2.0 * self._turns.overrun_s, LONGEST_OVERRUN_S)
            self._take_turns(models)
            self._shared |= keys
        elif alone:
            self._turns.overrun_s = OVERRUN_S
            if self._turns.lasting:  # or the next one would be shared again, and tell nothing
                self._take_turns(models)
            self._barred.count(next(iter(keys)), models)
        stayed = {flight.key for flight in flights if not flight.left}
        if not alone and len(stayed) <= 1:
            for key in keys - stayed:
                self._barred.count_left(key, models)

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
        for flight in self._lost.of(scope, server):
            if since is None or flight.sent < since:
                self._lost.drop(flight)
        self._lost.lay(scope, server)
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
            and within(flight.model, models)
            and (not server or may_be(flight.server, server))
            for flight in self._flying.values()
        )

    def _check_key(self, flight: Flight) -> None:
        try:
            self._barred.check(flight.key, flight.model)
        except BarredError:
            self.refused[flight.model] += 1
            raise

    def _hand_over(self, flight: Flight) -> None:
        """Its turn goes to one that is under way for longer."""
        if flight.turn and not flight.lends and flight.borrowers:
            heir, *others = flight.borrowers
            heir.borrowers = (*heir.borrowers, *others)
            flight.turn = heir.lends = False

    def _release(self, flight: Flight) -> None:
        """Whoever waits for it may go on; more than once does no harm."""
        if flight.first:
            flight.first = False
            self._queues.leave(flight.key, flight.model)
        if flight.turn and not flight.lends:
            flight.turn = False
            self._turns.leave(flight.owner)
        if flight.guest:
            flight.guest = False
            self._turns.excuse()

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
        self._barred.forget(now - REMEMBERED_S)


async def _suspect_of(flight: Flight) -> Suspect:
    """The request as a suspect; a long one is read beside the event loop."""
    if len(flight.body) > LONG_BYTES:
        return await asyncio.to_thread(suspect_of, flight.key, flight.model, flight.body)
    return suspect_of(flight.key, flight.model, flight.body)


def _all_suspects(flights: Iterable[Flight]) -> list[Suspect]:
    return list(dict.fromkeys(suspect_of(each.key, each.model, each.body) for each in flights))[:REMEMBERED]
