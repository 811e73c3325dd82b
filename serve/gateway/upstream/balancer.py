"""Several model servers behind one gateway: the least busy one is asked, one that fails is left alone for a while, and
what it lost is asked of another.

Two ways lead out of service: probes of /v2/health/ready (active health checking), and the requests themselves (outlier
detection, for each model by itself and for the server as a whole). A server that was ejected comes back on trial (one
request decides), and slowly. Where fewer than half of the servers would be left, ejections count for nothing (Envoy's
panic threshold).

Requests are tried again only where that is safe, and only while the model's budget lasts: a fifth of its requests, so
that a failing fleet is not asked twice as much (Google, "Site Reliability Engineering", chapter 22, "Retries").
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import random
import re
import socket
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from typing import Any

from serve.gateway.health.flights import ABOARD, NO_NEEDS, At, Flight, Needed, Needs
from serve.gateway.health.incidents import Incidents
from serve.gateway.upstream.deadline import tells
from serve.gateway.upstream.deaths import Deaths
from serve.gateway.upstream.ejections import State
from serve.gateway.upstream.node import LONGEST, PROBE_TIMEOUT_S, Node
from serve.gateway.upstream.outliers import Outliers, Verdict
from serve.gateway.upstream.probes import Probes
from serve.gateway.upstream.scopes import MODELS, Budget, Scope
from serve.gateway.upstream.sequences import Sequences
from serve.gateway.upstream.silence import Silence
from serve.gateway.upstream.verdicts import STOPPING, is_leaving, verdict_of
from serve.http.body import GrowingBody
from serve.http.client import Address, ExchangeError, Response
from serve.http.connection import LEFT
from serve.http.message import Held

__all__ = ["MOST_SENT", "STOPPING", "Attempt", "Balancer", "Node", "model_of", "path_of", "scope_of"]

HEALTHY_PANIC_PERCENT = 50
CONNECT_S = 1.5  # a little more than until the kernel asks a second time; an address that is gone never answers
MOST_SENT = 2  # servers that a request may have reached: one that ends a server must not end them all
LOST_S, MOST_LOST, LOST_BYTES = 600.0, 1024, 256 * 1024  # requests whose connection was lost, by their hash
ONE_DEATH_S = 1.0  # in which a dead server's connections are all found to be closed
MOST_SCOPES, MOST_UNKNOWN = 1000, 64
SMOOTHING = 0.05
_SCOPE = re.compile(rb"(/v2/models/[^/]+(?:/versions/[^/]+)?)(?:/[a-z]+)?")

logger = logging.getLogger(__name__)


def scope_of(target: bytes) -> bytes:
    """The model (and version) that a path asks for, as the path that leads to it; b"" for none."""
    if target.endswith(b"/infer"):
        return target[:-6]
    match = _SCOPE.fullmatch(target)
    return match[1] if match is not None else b""


def path_of(target: bytes) -> str:
    """The model that a path asks for, by its name, with its version where that is asked for; the path itself where none
    is."""
    return (scope_of(target) or target).decode("latin-1").removeprefix(MODELS)


def model_of(target: bytes) -> str:
    """The model that a path asks for, whatever its version; the path itself where it asks for none."""
    return path_of(target).partition("/versions/")[0]


class Attempt:
    """A request with one server, from `Balancer.begin` on; `end` must be called, once.

    Attributes:
        node: the server.
        begun: when, on the monotonic clock.
        needs: what it keeps at work there.
        place: what it was sent to, by the name of what has instances of its own.
        trial: whether it decides on the server's return.
    """

    __slots__ = ("_balancer", "_tickets", "begun", "needs", "node", "place", "scope")

    def __init__(
        self, balancer: Balancer, node: Node, scope: Scope, now: float, *, who: str, trial: bool, needs: Needs
    ) -> None:
        self.node = node
        self.scope = scope
        self.needs = needs
        self.place = needs.place(scope.model, scope.path)
        self._balancer = balancer
        self.begun = now
        self._tickets = [level.begin(node, who, now, trial=trial) for level in balancer.levels(scope)]
        node.took(self, now)

    @property
    def was_behind(self) -> bool:
        """Whether it waited there for others that take long, as far as can be told: its time says nothing."""
        needed = self.needs.of(self.scope.model, self.scope.path)
        return self.node.is_taken(needed, self.scope.seconds, time.monotonic(), before=self.begun)

    @property
    def trial(self) -> bool:
        return any(ticket.trials for ticket in self._tickets)

    def end(self, server: Verdict, model: Verdict, still: asyncio.Future[Any] | None = None) -> None:
        """Tell how it went.

        Args:
            server: what it says of the server as a whole.
            model: what it says of the model there.
            still: is done when the server is through with what nobody waits for any more; None where it is.
        """
        balancer, node, scope = self._balancer, self.node, self.scope
        if still is None or still.done():
            node.over(self)
        else:
            still.add_done_callback(partial(node.let_go, self))
        now = time.monotonic()
        if server is Verdict.GOOD:
            node.heard_at = now
        if model is Verdict.GOOD:
            seconds = now - self.begun
            scope.seconds += (seconds - scope.seconds) * (SMOOTHING if scope.seconds else 1.0)
        elif Verdict.NOTHING not in (server, model) and (until := self.begun + scope.seconds) > now:
            node.hold(until)
        for level, verdict, ticket in zip(balancer.levels(scope), (server, model), self._tickets, strict=True):
            level.note(node, verdict, ticket, now=now, hosts=balancer.nodes)


class Balancer:
    """Exchanges with whichever server is best.

    Args:
        addresses: at least one.
        max_connections: to each of them.
        timeout_s: for a whole exchange, tries included.
        on_error: called with the kind of each failed exchange.
        on_retry: called for each further try.
        on_eject: called with the server's address, the model's path ("" for the server as a whole), and the kind of
            each ejection.
        discover: whether each address is a name that stands for a set of servers, which changes.
        hold: makes what counts a long answer's bytes for the key that asked; None to count none.
        max_answer_bytes: longest answer that is accepted.

    Attributes:
        connect_s: until another server is asked than one that is not reached; infinite where there is one alone.
    """

    def __init__(
        self,
        addresses: Sequence[Address],
        *,
        max_connections: int,
        timeout_s: float,
        on_error: Callable[[str], None] = lambda _: None,
        on_retry: Callable[[], None] = lambda: None,
        on_eject: Callable[[Address, str, str], None] = lambda *_: None,
        discover: bool = False,
        hold: Callable[[str], Held] | None = None,
        max_answer_bytes: int = LONGEST,
    ) -> None:
        self._names = list(addresses) if discover else []
        self.connect_s = CONNECT_S if discover or len(addresses) > 1 else math.inf
        self._bounds = (max_connections, timeout_s, hold, max_answer_bytes, self.connect_s)
        self.nodes = [Node(address, *self._bounds) for address in addresses]
        self._leaving: list[Node] = []
        self._unfound: set[Address] = set()
        self.timeout_s = timeout_s
        self._only = self.nodes[0] if len(self.nodes) == 1 and not discover else None
        self._turn = itertools.count()
        self._on_error = on_error
        self._on_retry = on_retry
        self._on_eject = on_eject
        self._servers = self._outliers("", by_key=False)
        self._scopes: dict[bytes, Scope] = {}
        self._unknown: OrderedDict[bytes, Scope] = OrderedDict()
        self._unknown_budget = Budget()
        self._sequences: Sequences[Node] = Sequences()
        self._lost: OrderedDict[bytes, tuple[Node, float]] = OrderedDict()
        self._probed = asyncio.Event()
        self.silence = Silence(lambda: self.nodes)
        self._probes = Probes(lambda: self.nodes, self._came, self.silence)

    def follow_deaths(self, incidents: Incidents) -> None:
        """Tell of servers that die; for those that nobody else looks after."""
        self._probes.deaths = Deaths(incidents, lambda: self.nodes)

    @property
    def deaths(self) -> Deaths | None:
        """What tells of servers that die, where this does."""
        return self._probes.deaths

    def _came(self, node: Node) -> None:
        self._servers.joined(node, time.monotonic())

    @property
    def sole(self) -> Node | None:
        """The server where there is one only, and will be."""
        return self._only

    def failed(self, err: ExchangeError) -> None:
        """An exchange that was not made here has failed."""
        self._on_error(err.kind)
        if self._only is not None:
            self._look_after(self._only, err)

    def lost(self, node: Node, flight: Flight | None) -> None:
        """A server closed a connection before it had answered; see `Deaths.lost`."""
        if self.deaths is not None:
            self.deaths.lost(node, flight)

    def _look_after(self, node: Node, err: ExchangeError, flight: Flight | None = None) -> None:
        if err.kind == "closed":
            self.lost(node, flight)

    def _outliers(self, what: str, *, by_key: bool = True) -> Outliers[Node]:
        def ejected(node: Node, kind: str) -> None:
            self._on_eject(node.address, what, kind)

        return Outliers(what, time.monotonic(), ejected, by_key=by_key)

    def scope(self, name: bytes) -> Scope:
        """What is known of a model, or of a name that may be one."""
        scope = self._scopes.get(name) or self._unknown.get(name)
        if scope is None:
            what = name.decode("latin-1").removeprefix(MODELS)
            scope = self._unknown[name] = Scope(name, self._outliers(what), self._unknown_budget)
            if len(self._unknown) > MOST_UNKNOWN:
                self._unknown.popitem(last=False)
        return scope

    def known(self, scope: Scope) -> None:
        """A server has answered for this model."""
        if not scope.known and scope.name and len(self._scopes) < MOST_SCOPES:
            self._unknown.pop(scope.name, None)
            self._scopes[scope.name] = scope
            scope.known, scope.budget = True, Budget()

    def levels(self, scope: Scope) -> tuple[Outliers[Node], Outliers[Node]]:
        """Who may eject a server: all its requests together, and those of the model."""
        return self._servers, scope.outliers

    def _every_level(self) -> list[Outliers[Node]]:
        scopes = (*self._scopes.values(), *self._unknown.values())
        return [self._servers, *(scope.outliers for scope in scopes)]

    def ejected(self) -> list[tuple[Node, str]]:
        """Which servers are ejected now, for all or for some key, and for which model ("" for all)."""
        now, levels = time.monotonic(), self._every_level()
        return [(node, level.what) for level in levels for node in self.nodes if level.of(node).ejected(now)]

    async def exchange(
        self,
        method: bytes,
        target: bytes,
        headers: Sequence[tuple[bytes, bytes]] = (),
        body: bytes | GrowingBody = b"",
        *,
        timeout_s: float | None = None,
        sequence: bytes | None = None,
        who: str = "",
    ) -> Response:
        """Send a request to one server, and to another where the first could not answer.

        Args:
            timeout_s: for all tries together.
            sequence: id of the sequence that it belongs to: it is asked once, of the server that has the others.
            who: the id of the key that asks, for its share of the connections, for `hold`, and for whose failures
                are whose.

        Raises:
            ExchangeError: none gave a whole answer.
        """
        given = self.timeout_s if timeout_s is None else timeout_s
        flight = ABOARD.get() if method == b"POST" else None
        if self._only is not None:
            if flight is not None and flight.on_sent is not None:
                flight.goes_to(At(self._only.name, path_of(target)))
            try:
                return await self._only.pool.request(
                    method,
                    target,
                    headers,
                    body,
                    timeout_s=given,
                    repeatable=sequence is None,
                    whose=(model_of(target), who),
                )
            except ExchangeError as err:
                self.failed(err)
                err.early = not tells(given, self.timeout_s)
                raise
        deadline = time.monotonic() + given
        scope = self.scope(scope_of(target))
        scope.budget.earn()
        tried: list[Node] = []
        sent = 0
        suspect = b""
        while True:
            attempt = self.begin(scope, tried, sequence, who=who, flight=flight)
            tried.append(attempt.node)
            left = deadline - time.monotonic()
            may = sequence is None and len(tried) < len(self.nodes)
            try:
                answer = await self._one(
                    attempt, method, target, headers, body, left, repeatable=sequence is None, who=who
                )
            except ExchangeError as err:
                sent += err.kind not in ("refused", "busy", "share")
                self._look_after(attempt.node, err, flight)
                if err.kind == "refused" and sequence is not None:
                    self._sequences.forget(_place(scope, sequence))
                again = may and sent < MOST_SENT and err.kind not in ("timeout", "stalled", "too_large")
                again = again and not (flight is not None and flight.turn and err.kind != "refused")
                if again and err.unanswered:
                    suspect = suspect or _hash_of(scope, body)
                    again = not self._lost_before(suspect, attempt)
                if not again or time.monotonic() >= deadline or not scope.budget.spend():
                    raise
            else:
                if answer.status == 200 and method == b"POST":
                    self.known(scope)
                elsewhere = is_leaving(answer) or (attempt.trial and answer.status >= 500)
                if not (elsewhere and may and sent < MOST_SENT and scope.budget.spend()):
                    if not is_leaving(answer):  # it does not end whom it is answered by
                        self._lost.pop(suspect, None)
                    return answer
                sent += answer.status >= 500 and not is_leaving(answer)
            self._on_retry()

    def _lost_before(self, suspect: bytes, attempt: Attempt) -> bool:
        """Whether the very same request was lost before: it may be what ends servers.

        A server that dies loses all that is with it, and what meets its other connections a moment later: requests that
        say the same are then lost together, by one death.

        Args:
            suspect: the request, by its hash; b"" for one that is not known whole.
            attempt: in which it was lost now.
        """
        if not suspect:
            return False
        now = time.monotonic()
        node, when = self._lost.pop(suspect, (None, 0.0))
        together = node is attempt.node and attempt.begun <= when + ONE_DEATH_S
        self._lost[suspect] = attempt.node, when if together else now
        if len(self._lost) > MOST_LOST:
            self._lost.popitem(last=False)
        return node is not None and not together and now - when < LOST_S

    def retried(self) -> None:
        """A request is asked of another server."""
        self._on_retry()

    async def watch(self, every_s: float) -> None:
        """Look the servers up where they are to be discovered, and probe them, until cancelled."""
        while True:
            try:
                await self.look_up()
                await self._probes.all()
            except Exception:  # one round that went wrong must not be the last
                logger.exception("the model servers could not be probed")
            self._probed.set()
            await asyncio.sleep(every_s)

    async def look_up(self) -> None:
        """Take up servers that a name stands for now, and let go those that it does not, once they have answered.

        A name that can't be looked up, or stands for nothing, changes nothing: what was there may still answer.
        """
        if not self._names:
            return
        loop = asyncio.get_running_loop()
        found: dict[Address, None] = {}
        for name in self._names:
            try:
                told = await loop.getaddrinfo(name.host, name.port, type=socket.SOCK_STREAM)
            except (OSError, UnicodeError) as err:  # Python's own: a name with an empty or too long part
                if name not in self._unfound:
                    logger.warning("%s can't be looked up: %s; the servers stay as they are known", name.host, err)
                self._unfound.add(name)
                return
            self._unfound.discard(name)
            found |= {Address(str(entry[4][0]), name.port): None for entry in told}
        if not found:
            return
        now = time.monotonic()
        known = {node.address: node for node in self.nodes}
        leaving = [node for address, node in known.items() if address not in found]
        for node in leaving:
            node.pool.let_go()
        self._leaving += leaving
        self.nodes = [known.get(address) or Node(address, *self._bounds) for address in sorted(found, key=str)]
        for level in self._every_level():
            level.keep(self.nodes)
        if self._probed.is_set():
            for node in self.nodes:
                if node.address not in known:
                    self._servers.joined(node, now)
        for node in [each for each in self._leaving if not each.in_flight]:
            self._leaving.remove(node)
            await node.close()

    async def health(self) -> tuple[bool, bool]:
        """Whether a server answered when it was last probed, and whether one said that it is ready; asks none."""
        if not self._probed.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(2 * PROBE_TIMEOUT_S):
                    await self._probed.wait()
        answer = [node for node in self.nodes if node.answers]
        return bool(answer), any(node.ready for node in answer)

    async def close(self) -> None:
        await self._probes.close()
        for node in (*self.nodes, *self._leaving):
            await node.close()

    def begin(
        self,
        scope: Scope,
        tried: Sequence[Node] = (),
        sequence: bytes | None = None,
        *,
        who: str = "",
        trial: bool = True,
        flight: Flight | None = None,
    ) -> Attempt:
        """Choose a server for a request, and count the request as being with it.

        Args:
            tried: servers that had it already.
            sequence: id of the sequence that it belongs to.
            who: the id of the key that asks.
            trial: whether it may decide on a server's return; nobody knows when a stream ends.
            flight: the request; None where it is none of a model's.
        """
        now = time.monotonic()
        aboard = ABOARD.get()
        needs = NO_NEEDS if aboard is None else aboard.needs
        needed = needs.of(scope.model, scope.path)
        for node in self.nodes if len(self.nodes) > 1 else ():
            if node.quiet(now):
                self._probes.doubt(node)
        able, due = self._able(scope, tried, now, who)
        if flight is not None and self.deaths is not None:
            able, due = self.deaths.choose(flight, able, due, tried)
        if sequence is not None:
            place = _place(scope, sequence)
            node = self._sequences.host(place, self.nodes, lambda node: str(node.address), able)
        elif due is not None and trial and not due.is_taken(needed, scope.seconds, now):
            node = due
        else:
            node = self._least(scope, able, now, who, needed)
        if flight is not None:
            if self.deaths is not None:
                flight.server = node.name
            flight.goes_to(At(node.name, scope.path))
        return Attempt(self, node, scope, now, who=who, trial=trial, needs=needs)

    def _able(self, scope: Scope, tried: Sequence[Node], now: float, who: str) -> tuple[list[Node], Node | None]:
        """Servers that may be asked, best ones only, and one whose trial is due.

        Where none is as it should be, the others: an attempt beats a refusal.
        """
        levels = self.levels(scope)
        ready = [node for node in self.nodes if node.ready] or self.nodes
        ready = [node for node in ready if not node.doubted(now)] or ready
        states = {node: [level.of(node).state(now, who) for level in levels] for node in ready}
        inside = [node for node in ready if all(state is State.IN for state in states[node])]
        if 100 * len(inside) < HEALTHY_PANIC_PERCENT * len(ready):
            inside = ready
        due = next(
            (
                node
                for node in ready
                if node not in tried and State.OUT not in states[node] and State.DUE in states[node]
            ),
            None,
        )
        able = [node for node in inside if node not in tried]
        able = able or [node for node in ready if node not in tried]
        return able or [node for node in self.nodes if node not in tried] or self.nodes, due

    def _least(self, scope: Scope, able: list[Node], now: float, who: str, needed: Needed) -> Node:
        """The least busy one, of those that have an instance free of what takes long.

        One of these that came into service a short while ago has a share only.
        """
        if len(able) > 1:
            able = [node for node in able if not node.is_taken(needed, scope.seconds, now)] or able
        levels = self.levels(scope)
        weights = [min(level.of(node).weight(now, who) for level in levels) for node in able]
        if min(weights) < 1.0:
            drawn = random.random()  # noqa: S311  no secret
            able = [node for node, weight in zip(able, weights, strict=True) if drawn < weight] or able
        first = next(self._turn) % len(able)
        return min(able[first:] + able[:first], key=lambda node: node.load(now, needed))

    async def _one(
        self,
        attempt: Attempt,
        method: bytes,
        target: bytes,
        headers: Sequence[tuple[bytes, bytes]],
        body: bytes | GrowingBody,
        timeout_s: float,
        *,
        repeatable: bool,
        who: str,
    ) -> Response:
        server = model = Verdict.NOTHING
        still: asyncio.Future[Any] | None = None
        leaving = LEFT.get()
        others = 0 if leaving is None else len(leaving.connections)
        try:
            answer = await attempt.node.pool.request(
                method,
                target,
                headers,
                body,
                timeout_s=timeout_s,
                repeatable=repeatable,
                whose=(model_of(target), who),
            )
            server = Verdict.GOOD
            if method == b"POST" and attempt.scope.name and (attempt.scope.known or not is_leaving(answer)):
                model = verdict_of(answer, body)
            return answer
        except ExchangeError as err:
            self._on_error(err.kind)
            err.early = not tells(timeout_s, self.timeout_s)
            still = err.through
            if err.kind == "timeout" and not err.early and not attempt.was_behind:
                model = Verdict.GATEWAY_FAILURE
            elif err.kind in ("refused", "closed", "malformed"):
                server = Verdict.GATEWAY_FAILURE
            raise
        finally:
            left = () if leaving is None else leaving.connections[others:]
            attempt.end(server, model, left[-1].through if left else still)


def _place(scope: Scope, sequence: bytes) -> bytes:
    """What says which server has a sequence, whether or not a request names the version that Triton chooses."""
    return scope.name.partition(b"/versions/")[0] + b"/" + sequence


def _hash_of(scope: Scope, body: bytes | GrowingBody) -> bytes:
    """What a request says, to know it by; b"" for one that has not come whole."""
    said = body if isinstance(body, bytes) else body.so_far() if body.whole else b""
    if not said:
        return b""
    return blake2b(b"%b %d " % (scope.name, len(said)) + said[:LOST_BYTES], digest_size=12).digest()
