"""Deaths of model servers that somebody else starts, told by their connections alone.

A server that answered has died where a request with it is lost, it then refuses connections, and nothing that it had
before goes on. What else ends connections is told from that:

- A Triton that stops in order (24.10) takes connections and closes them at once, while it goes on answering on those
  that it has, and says there that it is ready. So it is asked over a new connection, too: one that it refuses says the
  same. A pod that is replaced is no longer among the servers.
- A cut network, or an address that is gone, does not refuse: it is silent, or says that there is no way.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from collections.abc import Callable, Sequence

from serve.gateway.health.flights import Flight
from serve.gateway.health.incidents import Incidents
from serve.gateway.upstream.node import READY, Node
from serve.http.client import ExchangeError, Pool

__all__ = ["Deaths"]

LOOK_TIMEOUT_S = 2.0
LOOKS, BETWEEN_S = 4, 0.1  # a process that ends may close its connections a moment before its port
ENDING_S, STEP_S = 1.0, 0.02  # in which all that was with a dead server is lost
STOPPING_S = 120.0  # who stops does so within this
TOLD = 5
MOST_DEAD = 1024

logger = logging.getLogger(__name__)


class Deaths:
    """Looks after lost exchanges, and tells who is suspected of what.

    It also says where keys take turns: on one server, beside which the others go on for the keys that are not
    suspected, if there are others.

    Args:
        incidents: are told.
        nodes: the servers that there are now.
    """

    def __init__(self, incidents: Incidents, nodes: Callable[[], Sequence[Node]]) -> None:
        self._outages = incidents.outages
        self._suspects = incidents.suspects
        self._nodes = nodes
        self._died: dict[str, float] = {}  # and are not ready again; pods come back under other names, too
        self._apart: Node | None = None
        self._looking: dict[Node, asyncio.Task[None]] = {}
        self._returning: set[asyncio.Task[None]] = set()
        self._suspects.fleet = self

    def lost(self, node: Node, flight: Flight | None) -> None:
        """The server closed a connection before it had answered.

        Args:
            flight: the request, where it is known.
        """
        if node.name in self._died:  # it dies no second time before it was seen to be back
            return
        if flight is not None:
            self._suspects.lose(flight, node.name)
        if node not in self._looking:
            task = self._looking[node] = asyncio.get_running_loop().create_task(self._look(node))
            task.add_done_callback(lambda _: self._looking.pop(node, None))

    async def probed(self, node: Node) -> None:
        """A probe has come to its end; one that is answered says that a new process serves, or one that stops."""
        if not node.answers:
            return
        kind = await self._knock(node)
        if kind is None:
            node.stopping_since = None
            node.ready = node.says_ready
        elif kind in ("closed", "refused"):
            self._stops(node)
        if kind is None and node.ready:
            since = self._died.pop(node.name, None)
            if since is not None:
                self._suspects.began(None, max(since, node.refused_at), node.name)
            self._suspects.resume()

    def isolated(self) -> str:
        """The server on which keys take turns; "" while none do, or none is there."""
        node = self._isolated()
        return "" if node is None else node.name

    def others(self, without: str = "") -> bool:
        """Whether there are servers in service besides this one."""
        return any(node.name != without for node in self._serving())

    def choose(
        self, flight: Flight, able: list[Node], due: Node | None, tried: Sequence[Node]
    ) -> tuple[list[Node], Node | None]:
        """Which of these servers a request may be asked of: one in its turn of that server, others of the rest."""
        node = self._isolated()
        if node is None:
            return able, due
        if flight.turn:
            return ([node], None) if node not in tried else (able, None)
        rest = [each for each in able if each is not node]
        return (rest or able), (None if due is node else due)

    async def close(self) -> None:
        tasks = [*self._looking.values(), *self._returning]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _serving(self) -> list[Node]:
        return [node for node in self._nodes() if node.ready and node.name not in self._died]

    def _isolated(self) -> Node | None:
        if not self._suspects.apart:
            self._apart = None
            return None
        serving = self._serving()
        if self._apart not in serving:
            self._apart = min(serving, key=lambda node: node.in_flight, default=None)
        return self._apart

    async def _look(self, node: Node) -> None:
        try:
            lost_at = time.monotonic()
            stopping = node.stopping_since is not None and lost_at - node.stopping_since < STOPPING_S
            if stopping or not await self._refuses(node):
                return
            names = {node.name, ""} if len(self._nodes()) == 1 else {node.name}
            while self._suspects.was_with(names, lost_at):  # it answers those, or was not what was lost
                if time.monotonic() - lost_at > ENDING_S:
                    return
                await asyncio.sleep(STEP_S)
            if node not in self._nodes():
                return
            self._died[node.name] = node.refused_at = time.monotonic()
            if len(self._died) > MOST_DEAD:
                del self._died[next(iter(self._died))]
            node.ready = node.answers = False
            task = asyncio.get_running_loop().create_task(self._return(node))
            self._returning.add(task)
            task.add_done_callback(self._returning.discard)
            found = await self._suspects.died(None, node.name)
            self._outages.deaths[""] += 1
            told = ", ".join(map(str, found[:TOLD])) + (f" and {len(found) - TOLD} more" if len(found) > TOLD else "")
            logger.warning("the model server %s has died; in flight: %s", node.name, told or "nothing that is known")
        except Exception:  # what tells of deaths must not be what ends
            logger.exception("it could not be told whether the model server %s has died", node.name)

    async def _return(self, node: Node) -> None:
        """Look for its new process more often than probes do: whoever ends it again must find it known."""
        while node.name in self._died and node in self._nodes():
            await asyncio.sleep(BETWEEN_S)
            kind = await self._knock(node)
            if kind is None:
                await node.probe()
                await self.probed(node)
            elif kind == "refused":
                node.refused_at = time.monotonic()

    async def _refuses(self, node: Node) -> bool:
        """Whether nobody listens there any more."""
        for _ in range(LOOKS):
            kind = await self._knock(node)
            if kind != "closed":
                return kind == "refused"
            await asyncio.sleep(BETWEEN_S)
        self._stops(node)
        return False

    async def _knock(self, node: Node) -> str | None:
        """How it fails to answer on a new connection, as `ExchangeError` has it; None where it answers."""
        pool = Pool(node.address, max_connections=1, timeout_s=LOOK_TIMEOUT_S)
        try:
            await pool.request(b"GET", READY)
        except ExchangeError as err:
            return "unreachable" if err.kind == "refused" and not _is_refusal(err.__cause__) else err.kind
        finally:
            await pool.close()
        return None

    def _stops(self, node: Node) -> None:
        node.ready = False  # what it has is answered; others are asked from now on
        if node.stopping_since is None:
            node.stopping_since = time.monotonic()


def _is_refusal(cause: BaseException | None) -> bool:
    """Whether all of an address's ends refused; an address with several tells of them in one text."""
    if isinstance(cause, ConnectionRefusedError):
        return True
    told = str(cause)
    return isinstance(cause, OSError) and 0 < told.count("[Errno") == told.count(f"[Errno {errno.ECONNREFUSED}]")
