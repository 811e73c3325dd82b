"""Which model servers answer: asked at intervals, and at once where one is quiet while something waits for it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

from serve.gateway.upstream.deaths import Deaths
from serve.gateway.upstream.node import DOUBTED_S, Node
from serve.gateway.upstream.silence import Silence

__all__ = ["Probes"]

logger = logging.getLogger(__name__)


class Probes:
    """Probes of all servers, one at a time of each.

    Args:
        nodes: the servers that there are now.
        came: called with one that has become ready.
        silence: is told when one that others answered beside has answered, or was given up.

    Attributes:
        deaths: is told of each probe; None where nobody follows deaths.
    """

    def __init__(self, nodes: Callable[[], Sequence[Node]], came: Callable[[Node], None], silence: Silence) -> None:
        self._nodes = nodes
        self._came = came
        self._silence = silence
        self._asked: dict[Node, asyncio.Task[None]] = {}
        self.deaths: Deaths | None = None

    async def all(self) -> None:
        """Probe each server."""
        if asked := [self._ask(node) for node in self._nodes()]:
            await asyncio.wait(asked)

    def doubt(self, node: Node) -> None:
        """Probe one now; who asks for it next has it probed again while it stays quiet."""
        self._ask(node)

    async def close(self) -> None:
        asked = list(self._asked.values())
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        if self.deaths is not None:
            await self.deaths.close()

    def _ask(self, node: Node) -> asyncio.Task[None]:
        task = self._asked.get(node)
        if task is None:
            task = self._asked[node] = asyncio.ensure_future(self._probe(node))
            task.add_done_callback(partial(self._over, node))
        return task

    def _over(self, node: Node, task: asyncio.Task[None]) -> None:
        del self._asked[node]
        if not task.cancelled() and (err := task.exception()) is not None:
            logger.error("the model server %s could not be probed", node.name, exc_info=err)

    async def _probe(self, node: Node) -> None:
        before, begun = node.ready, time.monotonic()
        await node.probe()
        others = [other for other in self._nodes() if other.ready and other is not node]
        if time.monotonic() - begun > DOUBTED_S and any(other.heard_at > begun for other in others):
            self._silence.ended(node)
        if any(other.heard_at > node.deaf_since for other in others):  # else all may wait for the same machine
            node.give_up()
        if self.deaths is not None:
            await self.deaths.probed(node)
        if node.ready and not before:
            self._came(node)
        if node.silent and others:
            node.abort()  # what waits for it is better asked of another
