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

    def ended(self) -> None:
        """A server that was silent has answered, or was given up."""
        self.over_at = time.monotonic()
