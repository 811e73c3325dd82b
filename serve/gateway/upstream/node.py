"""One model server, as the gateway sees it."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from serve.gateway.access.left_behind import OVERDUE_S
from serve.gateway.health.flights import Needed
from serve.gateway.health.occupied import LONG_S, Occupied
from serve.http.client import Address, ExchangeError, Pool
from serve.http.message import Held

if TYPE_CHECKING:
    from serve.gateway.upstream.balancer import Attempt

__all__ = ["LONGEST", "PROBE_TIMEOUT_S", "READY", "Node"]

READY = b"/v2/health/ready"
PROBE_TIMEOUT_S = 2.0
FAILED_PROBES = 2
QUIET_S = 0.5  # without any answer while something waits for one, after which it is probed at once
DOUBTED_S = 0.25  # that a probe waits, after which others are asked; it takes a millisecond
LONG_COUNTS = 3  # as so many one counts that is there for LONG_S
ODD_S, ODD = 0.05, 4.0  # or so many times what good answers take, from which a request keeps an instance for long
LATE = 1.5  # a probe whose time-out comes so much too late met a gateway that was busy, not a server
CONTROL_CONNECTIONS = 2
LONGEST = 1 << 30  # answer, where nobody bounds what is held


class Node:
    """One model server.

    Attributes:
        pool: connections for clients' requests.
        control: connections for what the gateway itself wants to know; probes have their own.
        ready: whether its probes say so; True before the first.
        answers: whether its last probes were answered; False before the first.
        heard_at: when it last answered anything, or began to have something to answer, on the monotonic clock.
        says_ready: whether the last probe that was answered said so; one that stops says it on connections that it has.
        name: of its address.
        occupied: what its models' instances are with.
        refused_at: when it was last seen to refuse connections, on the monotonic clock.
        deaf_since: when its last probe was sent, if that was not answered in time, nor was anything else that waits for
            it; infinite else.
        stopping_since: when it was seen to turn new connections away, on that clock; None while it takes them.
    """

    def __init__(
        self,
        address: Address,
        max_connections: int,
        timeout_s: float,
        hold: Callable[[str], Held] | None = None,
        max_answer_bytes: int = LONGEST,
        connect_s: float = math.inf,
    ) -> None:
        self.address = address
        self.name = str(address)
        self.refused_at = -math.inf
        self.stopping_since: float | None = None
        self.pool = Pool(
            address,
            max_connections=max_connections,
            timeout_s=timeout_s,
            max_response_bytes=max_answer_bytes,
            hold=hold,
            connect_s=connect_s,
            lingers_s=OVERDUE_S,
        )
        self.control = Pool(address, max_connections=CONTROL_CONNECTIONS, timeout_s=timeout_s)
        self._probes = Pool(address, max_connections=1, timeout_s=PROBE_TIMEOUT_S)
        self._held: deque[float] = deque()
        self._failed_probes = 0
        self._unanswered_since = math.inf
        self._calls: set[asyncio.Task[Any]] = set()
        self._with_it: dict[Attempt, float] = {}  # since when, the longest ago first
        self._anywhere: dict[Attempt, float] = {}  # those of which nobody knows what they need, as streams
        self.occupied = Occupied()
        self.heard_at = -math.inf
        self.deaf_since = math.inf
        self.ready = self.says_ready = True
        self.answers = False

    def load(self, now: float, needed: Needed = ()) -> int:
        """Requests with it, and those that failed too fast: each counts for as long as a good answer takes.

        Else a server that fails at once would always be the least busy one. What is there for long counts more: it
        keeps an instance from what comes behind it, of which nobody knows how long that will be.

        Args:
            needed: by the request that is to be sent, where that is known; what is there for long with other models is
                not in its way.
        """
        held = self._held
        while held and held[0] <= now:
            held.popleft()
        unknown = self._anywhere if needed else self._with_it
        long = sum(1 for _ in itertools.takewhile(lambda since: now - since > LONG_S, unknown.values()))
        long += self.occupied.in_the_way(needed, now)
        return len(self._with_it) + (LONG_COUNTS - 1) * long + len(held)

    def hold(self, until: float) -> None:
        """A request failed that counts until then."""
        self._held.append(until)

    @property
    def in_flight(self) -> int:
        """Requests with it, streams included."""
        return len(self._with_it)

    def is_taken(self, needed: Needed, usual_s: float, now: float, before: float = math.inf) -> bool:
        """Whether all its instances of a model that a request needs are with what takes long, as far as can be told.

        Behind that it would wait, however few are there: those of keys that are known for such, and what is there for
        much longer already than good answers take. Of one that passes several models nobody knows with which it is:
        those that are stuck behind it tell.

        Args:
            needed: by the request that is to be sent.
            usual_s: what good answers take.
            before: only what came until then.
        """
        longest = min(before, now - max(ODD_S, ODD * usual_s))
        return self.occupied.is_taken(needed, longest, before)

    def took(self, what: Attempt, now: float) -> None:
        """It has a request more."""
        if not self._with_it:
            self.heard_at = now
        self._with_it[what] = now
        if what.needs.instances:
            self.occupied.enter(what.place, what, now, long=what.needs.long)
        else:
            self._anywhere[what] = now

    def over(self, what: Attempt) -> None:
        """It is through with one."""
        del self._with_it[what]
        self._anywhere.pop(what, None)
        self.occupied.leave(what.place, what)

    def let_go(self, what: Attempt, ended: asyncio.Future[Any]) -> None:
        """It is through with one that nobody waited for: True or an answer where it answered."""
        self.over(what)
        if not (ended.cancelled() or ended.exception() is not None or ended.result() is False):
            self.heard_at = time.monotonic()

    def quiet(self, now: float) -> bool:
        """Whether something waits for it, and it has answered nothing for a while: it may be at work, or frozen."""
        return self.in_flight > 0 and now - self.heard_at > QUIET_S

    def doubted(self, now: float) -> bool:
        """Whether a probe has waited for longer than one should."""
        return now - self._unanswered_since > DOUBTED_S

    async def probe(self) -> None:
        """Ask for its readiness, on a connection that nothing else uses."""
        begun = time.monotonic()
        self._unanswered_since = min(self._unanswered_since, begun)
        try:
            answer = await self._probes.request(b"GET", READY, timeout_s=PROBE_TIMEOUT_S)
        except ExchangeError as err:
            if err.kind == "timeout" and time.monotonic() - begun > LATE * PROBE_TIMEOUT_S:
                self._unanswered_since = math.inf
                return
            self._failed_probes += 1
            self.deaf_since = begun if err.kind == "timeout" and self.in_flight and self.heard_at < begun else math.inf
            if err.kind == "refused":  # who had what lingers is gone
                self.refused_at = begun
                self.pool.let_go()
            if self._failed_probes >= FAILED_PROBES:
                self.ready = False
            if self._failed_probes >= FAILED_PROBES or err.kind == "refused":
                self.answers = False
        else:
            self._failed_probes = 0
            self.deaf_since = math.inf
            self._unanswered_since, self.heard_at = math.inf, time.monotonic()
            self.answers = True
            self.says_ready = answer.status == 200
            self.ready = self.says_ready and self.stopping_since is None

    def give_up(self) -> None:
        """It does not answer, as far as can be told: no further probe is waited for."""
        self._failed_probes = max(self._failed_probes, FAILED_PROBES)
        self.ready = self.answers = False

    @property
    def silent(self) -> bool:
        """Whether it does not even answer probes."""
        return self._failed_probes >= FAILED_PROBES

    def has(self, call: asyncio.Task[Any]) -> None:
        """A call is with it by another way than its pool: `abort` ends it, too."""
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    def abort(self) -> None:
        """End all that waits for its answers."""
        self.pool.abort()
        for call in list(self._calls):
            call.cancel()

    async def close(self) -> None:
        for pool in (self.pool, self.control, self._probes):
            await pool.close()
