"""Of several model servers, those that answer nothing while others do."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from serve.gateway.upstream.node import Node

__all__ = ["Silence"]


class Silence:
    """What it hides from those who count what requests take.

    Args:
        nodes: the servers that there are now.

    Attributes:
        over_at: when one ended last, whatever became of the server, on the monotonic clock.
    """

    def __init__(self, nodes: Callable[[], Sequence[Node]]) -> None:
        self._nodes = nodes
        self.over_at = -math.inf
        self._over_at_of: dict[str, float] = {}

    @property
    def astray(self) -> int:
        """Requests with such servers now; others might answer what comes next."""
        now = time.monotonic()
        nodes = self._nodes()
        silent = [node for node in nodes if node.doubted(now)]
        others = any(node.ready for node in nodes if node not in silent)
        return sum(node.in_flight for node in silent) if others else 0

    @property
    def servers(self) -> int:
        """That are ready, one at least."""
        return max(1, sum(node.ready for node in self._nodes()))

    def over_at_of(self, server: str) -> float:
        """When one of this server's ended last; of any, where its name is ""."""
        return self._over_at_of.get(server, -math.inf) if server else self.over_at

    def hides(self, server: str) -> bool:
        """Whether this server is silent; any of those that have requests, where its name is ""."""
        if not server:
            return self.astray > 0
        now = time.monotonic()
        return any(node.doubted(now) for node in self._nodes() if node.name == server)

    def ended(self, node: Node) -> None:
        """A server that was silent has answered, or was given up."""
        known = {each.name for each in self._nodes()}
        self.over_at = time.monotonic()
        self._over_at_of = {name: at for name, at in self._over_at_of.items() if name in known}
        self._over_at_of[node.name] = self.over_at
