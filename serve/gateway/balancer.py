"""Several model servers behind one gateway: the least busy one is asked, one that fails is left alone for a while, and
what it lost is asked of another.

Two ways lead out: probes of /v2/health/ready each second, and failures in a row of the requests themselves (outlier
ejection). A server that was ejected comes back on trial (half-open): one request decides. Requests are tried again only
where that is safe, and only while the budget lasts: a fifth of all requests, so that a failing fleet is not asked twice
as much (Google, "Site Reliability Engineering", chapter 22, "Retries").
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import time
from collections.abc import Callable, Sequence

from serve.http_body import GrowingBody
from serve.http_client import Address, ExchangeError, Pool, Response
from serve.http_message import Held

__all__ = ["Balancer", "Node"]

READY = b"/v2/health/ready"
PROBE_TIMEOUT_S = 2.0
FAILED_PROBES = 2
FAILURES = 3
EJECTED_S = 1.0
LONGEST_EJECTION_S = 30.0
BUDGET_SHARE = 0.2
BUDGET_MOST = 50.0
# Triton's words while it stops; it answers 503, or 404 for models that it has unloaded already.
STOPPING = (b"not ready", b"unavailable", b"stopping", b"exiting", b"shutting down", b"unknown model")


class Node:
    """One model server.

    Attributes:
        in_flight: requests with it.
        ready: whether its last probe said so; True before the first.
        ejected_until: the time until which it is left alone, after failures; 0 when it is not.
    """

    def __init__(
        self, address: Address, max_connections: int, timeout_s: float, hold: Callable[[], Held] | None = None
    ) -> None:
        self.address = address
        self.pool = Pool(address, max_connections=max_connections, timeout_s=timeout_s, hold=hold)
        self.probes = Pool(address, max_connections=1, timeout_s=PROBE_TIMEOUT_S)
        self.in_flight = 0
        self.ready = True
        self.failed_probes = 0
        self.failures = 0
        self.ejections = 0
        self.ejected_until = 0.0
        self.trial = False

    def usable(self, now: float) -> bool:
        """Whether to ask it: ready, and not ejected, or ejected for long enough and not yet on trial."""
        return self.ready and (not self.ejected_until or (now >= self.ejected_until and not self.trial))

    def succeeded(self) -> None:
        self.failures = 0
        self.trial = False
        if self.ejected_until:
            self.ejected_until = 0.0
            self.ejections = 0

    def failed(self, now: float) -> None:
        self.failures += 1
        if self.trial or self.failures >= FAILURES:
            self.trial = False
            self.ejected_until = now + min(EJECTED_S * 2 ** min(self.ejections, 10), LONGEST_EJECTION_S)
            self.ejections += 1


class Balancer:
    """Exchanges with whichever server is best.

    Args:
        addresses: at least one.
        max_connections: to each of them.
        timeout_s: for a whole exchange, tries included.
        on_error: called with the kind of each failed exchange.
        on_retry: called for each further try.
        discover: whether each address is a name that stands for a set of servers, which changes.
        hold: makes what counts a long answer's bytes; None to count none.
    """

    def __init__(
        self,
        addresses: Sequence[Address],
        *,
        max_connections: int,
        timeout_s: float,
        on_error: Callable[[str], None] = lambda _: None,
        on_retry: Callable[[], None] = lambda: None,
        discover: bool = False,
        hold: Callable[[], Held] | None = None,
    ) -> None:
        self._names = list(addresses) if discover else []
        self._bounds = (max_connections, timeout_s, hold)
        self.nodes = [Node(address, *self._bounds) for address in addresses]
        self._leaving: list[Node] = []
        self.timeout_s = timeout_s
        self._only = self.nodes[0] if len(self.nodes) == 1 and not discover else None
        self._turn = itertools.count()
        self._budget = BUDGET_MOST / 5
        self._on_error = on_error
        self._on_retry = on_retry

    async def exchange(
        self,
        method: bytes,
        target: bytes,
        headers: Sequence[tuple[bytes, bytes]] = (),
        body: bytes | GrowingBody = b"",
        *,
        timeout_s: float | None = None,
        repeatable: Callable[[], bool] = lambda: True,
    ) -> Response:
        """Send a request to one server, and to another where the first could not answer.

        Args:
            timeout_s: for all tries together.
            repeatable: whether a server that has begun the request may have another do it again.

        Raises:
            ExchangeError: none gave a whole answer.
        """
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        if self._only is not None:
            return await self._one(self._only, method, target, headers, body, timeout_s)
        deadline = time.monotonic() + timeout_s
        self._budget = min(BUDGET_MOST, self._budget + BUDGET_SHARE)
        tried: list[Node] = []
        while True:
            node = self.pick(tried)
            tried.append(node)
            last = len(tried) >= len(self.nodes)
            try:
                answer = await self._one(node, method, target, headers, body, deadline - time.monotonic())
            except ExchangeError as err:
                if last or not self._worth_another(err, repeatable) or time.monotonic() >= deadline:
                    raise
            else:
                if last or not _is_leaving(answer) or not self.spend():
                    return answer
            self._on_retry()

    async def watch(self, every_s: float) -> None:
        """Look the servers up where they are to be discovered, and probe them, until cancelled."""
        while True:
            await self.look_up()
            await asyncio.gather(*map(self._probe, self.nodes))
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
            except OSError:
                return
            found |= {Address(str(entry[4][0]), name.port): None for entry in told}
        if not found:
            return
        known = {node.address: node for node in self.nodes}
        self._leaving += [node for address, node in known.items() if address not in found]
        self.nodes = [known.get(address) or Node(address, *self._bounds) for address in sorted(found, key=str)]
        for node in [each for each in self._leaving if not each.in_flight]:
            self._leaving.remove(node)
            await node.pool.close()
            await node.probes.close()

    async def any_ready(self) -> bool:
        """Whether a server says, now, that it is ready."""
        await asyncio.gather(*map(self._probe, self.nodes))
        return any(node.ready and not node.failed_probes for node in self.nodes)

    async def close(self) -> None:
        for node in (*self.nodes, *self._leaving):
            await node.pool.close()
            await node.probes.close()

    def pick(self, tried: Sequence[Node]) -> Node:
        """The least busy of those that can be asked; where none can, of the others: an attempt beats a refusal."""
        now = time.monotonic()
        left = [node for node in self.nodes if node not in tried] or self.nodes
        able = [node for node in left if node.usable(now)] or left
        first = next(self._turn) % len(able)
        node = min(able[first:] + able[:first], key=lambda node: node.in_flight)
        if node.ejected_until:
            node.trial = True
        return node

    async def _one(
        self,
        node: Node,
        method: bytes,
        target: bytes,
        headers: Sequence[tuple[bytes, bytes]],
        body: bytes | GrowingBody,
        timeout_s: float,
    ) -> Response:
        node.in_flight += 1
        try:
            answer = await node.pool.request(method, target, headers, body, timeout_s=timeout_s)
        except ExchangeError as err:
            self._on_error(err.kind)
            if err.kind not in ("busy", "stalled"):
                node.failed(time.monotonic())
            raise
        except asyncio.CancelledError:
            node.trial = False
            raise
        finally:
            node.in_flight -= 1
        if node.failures or node.ejected_until:
            node.succeeded()
        return answer

    def _worth_another(self, err: ExchangeError, repeatable: Callable[[], bool]) -> bool:
        """Never after a time-out (the client has no time left, and the next server no more of it either)."""
        if err.kind in ("timeout", "stalled", "too_large"):
            return False
        return (err.kind in ("refused", "busy") or repeatable()) and self.spend()

    def spend(self) -> bool:
        """Take one try from the budget; False when it is used up."""
        if self._budget < 1.0:
            return False
        self._budget -= 1.0
        return True

    async def _probe(self, node: Node) -> None:
        try:
            answer = await node.probes.request(b"GET", READY)
        except ExchangeError:
            node.failed_probes += 1
            if node.failed_probes >= FAILED_PROBES:
                self._down(node)
        else:
            node.failed_probes = 0
            node.ready = answer.status == 200

    def _down(self, node: Node) -> None:
        """What waits for a server that does not even answer probes is better asked of another."""
        others = any(other.ready and other is not node for other in self.nodes)
        node.ready = False
        if others:
            node.pool.abort()


def _is_leaving(answer: Response) -> bool:
    """Whether this is how Triton turns requests away when it stops."""
    return answer.status in (400, 404, 503) and any(words in answer.body[:400].lower() for words in STOPPING)
