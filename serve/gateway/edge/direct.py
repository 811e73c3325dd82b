"""The short way of an infer request, by callbacks: from a client's connection to Triton's and back, and no task.

It is for the requests that have nothing to wait for: short, whole, like one that was held against the model's contract
a moment ago, with a place and a connection to Triton that are free. Each check of the long way (`infer`) is made here
by the same objects; where one would refuse, or would have to wait, nothing has been counted or taken yet, and the
request goes the long way, which says so in its own words.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from typing import Protocol

from serve.gateway.access.accounts import Work
from serve.gateway.access.admission import Admission
from serve.gateway.access.gate import Gate
from serve.gateway.access.identity import Identity
from serve.gateway.edge.asked import Asked
from serve.gateway.edge.asking import CLIENT_LEFT
from serve.gateway.edge.infer_head import JSON, answer_lines, returned_lines
from serve.gateway.errors import EndsError, GatewayError, UpstreamTimeoutError, bare
from serve.gateway.health.flights import At, Flight
from serve.gateway.observe.telemetry import INFER_ROUTE, Observed, Telemetry
from serve.gateway.oip.contracts import JSON_AT_HAND, Contracts
from serve.gateway.release.releases import Releases
from serve.gateway.settings import Settings
from serve.gateway.upstream.balancer import path_of
from serve.gateway.upstream.upstream import Upstream, failure_of
from serve.http.client import Connection, ExchangeError, Pool, Response

__all__ = ["Client", "Direct"]

logger = logging.getLogger(__name__)
Header = tuple[bytes, bytes]


class Client(Protocol):
    """A client's connection."""

    address: str

    def answer(self, status: int, head: bytes, body: bytes, *, last: bool, who: str) -> None:
        """Send an answer; `last` closes the connection after it, and `who` is the id of the key that waits for it."""

    def when_leaving(self, call: _Call | None) -> None:
        """Have `left` called when the client leaves; None for nothing more."""


class Direct:
    """The short way of one gateway.

    Args:
        settings: of the gateway; it must not trace.
        gate, releases, contracts, upstream, telemetry: those of the long way.
    """

    def __init__(
        self,
        settings: Settings,
        gate: Gate,
        releases: Releases,
        contracts: Contracts,
        upstream: Upstream,
        telemetry: Telemetry,
    ) -> None:
        self.gate = gate
        self._releases = releases
        self.upstream = upstream
        self.telemetry = telemetry
        self._contracts = contracts
        self._timeout_s = settings.timeout_s
        self.calls: set[_Call] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def read(self, path: bytes, headers: list[Header]) -> Asked | None:
        """What a POST request asks for; None for one that goes the long way.

        Args:
            path: as it came, with what follows it.
            headers: their names in lower case.
        """
        return Asked.read(path, headers, self.gate.keys, JSON_AT_HAND)

    def begin(self, client: Client, asked: Asked, body: bytes) -> bool:
        """Send a request on its way; False, and nothing done, for one that goes the long way."""
        gate, target = self.gate, asked.target
        model = target.model
        identity = gate.keys.find(asked.digest)
        if identity is None or not identity.may(model) or model in gate.incidents.outages:
            return False
        if target.version is None and self._releases.get(model) is not None:
            return False
        if self._releases.beside(target) is not None:
            return False
        if gate.incidents.suspects.watches(identity.id, model):
            return False
        length = asked.header_length
        if not asked.is_plain(body[:length]):
            return False
        if length is not None:
            fitted = self._contracts.at_hand(target, body, length, shared_memory=identity.admin)
        elif gate.loop_time.is_up(identity.digest):
            return False
        else:
            began = time.perf_counter()
            fitted = self._contracts.at_hand(target, body, None, shared_memory=identity.admin)
            gate.loop_time.use(identity.digest, time.perf_counter() - began)
        if fitted is None:
            return False
        sent, length = fitted
        if gate.residency is not None and not gate.residency.at_hand(model, identity.id):
            return False
        node = self.upstream.sole
        places = gate.places(model)
        if node is None or (account := places.offer(identity.id, identity.priority)) is None:
            return False
        try:
            head = asked.head_for(node.pool, len(sent), length)
        except ValueError:
            return False
        connection = node.pool.take((model, identity.id))
        if connection is None:
            return False
        if not gate.memory.try_small(len(body)):
            node.pool.give(connection)
            return False
        if not identity.try_take():
            gate.memory.give_small(len(body))
            node.pool.give(connection)
            return False
        work = places.seat(account)
        if work is not None and places.fairness.queues.is_split:
            places.fairness.sent(work, At(node.name, path_of(target.path.encode())), places.now)
        call = _Call(self, client, asked, identity, places, work, node.pool, connection, len(body))
        self.telemetry.began()
        call.send(head, sent, call.started + self._timeout_s)
        return True

    def close(self) -> None:
        """End what is under way still."""
        for call in list(self.calls):
            call.end_early()

    def spawn(self, call: _Call, lost: ExchangeError) -> asyncio.Task[None]:
        """Go on with a request in a task."""
        task = asyncio.get_running_loop().create_task(call.again(lost))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def refusal(self, error: Exception) -> GatewayError:
        """What a failure means to the client."""
        if isinstance(error, ExchangeError):
            self.upstream.balancer.failed(error)
            return failure_of(error)
        if isinstance(error, GatewayError):
            return error
        logger.error("an infer request failed inside the gateway", exc_info=error)
        return GatewayError("the gateway failed", why=type(error).__name__)


class _Call(Observed):
    """A request on the short way, from `send` on until `_end` or `left`."""

    __slots__ = (
        "_again", "_asked", "_asking", "_body", "_client", "_connection", "_deadline", "_direct", "_flight", "_gone",
        "_head", "_identity", "_places", "_pool", "_work",
    )  # fmt: skip

    def __init__(
        self,
        direct: Direct,
        client: Client,
        asked: Asked,
        identity: Identity,
        places: Admission,
        work: Work | None,
        pool: Pool,
        connection: Connection,
        size: int,
    ) -> None:
        super().__init__(INFER_ROUTE, asked.target.model, client.address, None)
        self.key = identity.name
        self.received = size
        self._direct = direct
        self._client = client
        self._asked = asked
        self._identity = identity
        self._places = places
        self._work = work
        self._pool = pool
        self._connection = connection
        self._asking = self._gone = False
        self._again: asyncio.Task[None] | None = None

    def send(self, head: bytes, body: bytes, deadline: float) -> None:
        """Ask Triton; to be called once.

        Args:
            head, body: that Triton gets.
            deadline: on the monotonic clock.
        """
        direct = self._direct
        self._head, self._body, self._deadline = head, body, deadline
        self._flight = Flight(self._identity.id, self._asked.target.model, body)
        direct.calls.add(self)
        direct.gate.incidents.suspects.take_off(self._flight)
        self._client.when_leaving(self)
        self._pool.send(self._connection, head, body, deadline, self._done, self._identity.id)

    def left(self) -> None:
        """The client has closed its connection."""
        if self._again is not None:
            self._gone = True
            if self._asking:  # a task that is cancelled before it begins does nothing, not even give back what it has
                self._again.cancel()
            return
        ended = self._connection.leave()
        self._pool.give(self._connection)
        self._give_up(ended)

    def end_early(self) -> None:
        """The gateway ends."""
        if self._again is None:
            self._connection.cancel()
            self._pool.give(self._connection)
        else:
            self._again.cancel()
        self._end(None, EndsError())

    async def again(self, lost: ExchangeError) -> None:
        """Ask once more, where Triton closed the connection before it answered."""
        if self._gone:
            self._pool.give(self._connection)
            self._give_up()
            return
        self._asking = True
        answer, error = None, None
        try:
            answer = await self._pool.again(self._connection, lost, self._head, self._body, self._deadline)
        except asyncio.CancelledError:
            if self._gone:
                self._give_up()
            raise
        except Exception as err:
            error = err
        self._end(answer, error)

    def _done(self, answer: Response | None, error: Exception | None) -> None:
        if isinstance(error, ExchangeError) and error.unanswered:
            self._again = self._direct.spawn(self, error)
            return
        self._pool.give(self._connection)
        self._end(answer, error)

    def _end(self, answer: Response | None, error: Exception | None) -> None:
        self._client.when_leaving(None)
        direct = self._direct
        took = time.monotonic() - self.started
        seconds: float | None = None
        head = body = b""
        refusal: GatewayError | None = None
        late = False
        try:
            if answer is None:
                raise error or AssertionError
            direct.upstream.check_alive(answer, self._asked.path, self.started)
            if answer.status == 200:
                seconds = took
                direct.gate.known(self._asked.target.model)
            if answer.held is None:  # else it counts for the key already
                direct.gate.memory.check_for(self._identity.id, len(answer.body))
            else:  # from here on it counts where it waits for its reader
                answer.held.close()
            code, body = answer.status, answer.body
            head = returned_lines(answer.headers, self._identity.limit_lines())
            self.sent = len(body)
        except Exception as err:
            # Its frames hold the answer, and this one holds it.
            refusal = bare(direct.refusal(err))
            if isinstance(refusal, UpstreamTimeoutError):
                self._flight.left = late = True
                seconds = took
            code, body = refusal.status, refusal.body
            head = answer_lines([JSON], refusal.headers)
        self._let_go(answered=refusal is None)
        if late:
            through, work = self._connection.through, self._work
            self._places.stand(work, self._identity.id)
            begun = -math.inf if work is None else work.begun
            self._places.outlast(seconds, self.received, self._identity.id, [through] if through else [], begun=begun)
        else:
            self._places.rise(self._work, seconds, self.received, self._identity.id)
        self._client.answer(code, head, body, last=refusal is not None and refusal.closes, who=self._identity.id)
        direct.telemetry.observe(self, code)

    def _give_up(self, ended: asyncio.Future[bool] | None = None) -> None:
        """Nobody is left to answer; `ended` tells when Triton is through with it."""
        self._flight.left = True
        self._let_go(answered=False)
        work = self._work
        self._places.stand(work, self._identity.id)
        if ended is None:
            self._places.abandon(time.monotonic() - self.started, self._identity.id, (), self.received)
        else:
            through = self._connection.through
            self._places.leave_after(
                [ended], self.started, self.received, None, self._identity.id, () if through is None else (through,),
                None if work is None else work.sent_to,
            )  # fmt: skip
        self._direct.telemetry.observe(self, CLIENT_LEFT)

    def _let_go(self, *, answered: bool) -> None:
        gate = self._direct.gate
        self._direct.calls.discard(self)
        gate.incidents.suspects.land(self._flight, answered=answered)
        gate.memory.give_small(self.received)
