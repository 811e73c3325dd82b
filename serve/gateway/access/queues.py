"""Those that wait for a place of one model: by priority, and each key's in the order in which they came."""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass

from serve.gateway.access.keys import LOWEST

__all__ = ["Queues", "Waiter"]


@dataclass(eq=False)
class Waiter:
    """One request.

    Attributes:
        priority: 1 is served first.
        who: id of its key; "" where there are none.
        place: is done when it has one, or is sent away.
        until: when its client gives up, by the event loop's clock.
        timer: that looks whether it has waited too long; None where nothing bounds that.
    """

    priority: int
    who: str
    place: asyncio.Future[None]
    until: float = math.inf
    timer: asyncio.TimerHandle | None = None


class Queues:
    """Of one model.

    Attributes:
        waiting: requests in all.
    """

    def __init__(self) -> None:
        self.waiting = 0
        self._queues: list[OrderedDict[str, deque[Waiter]]] = [OrderedDict() for _ in range(LOWEST + 1)]
        self._live = [0] * (LOWEST + 1)

    def __iter__(self) -> Iterator[tuple[int, list[str]]]:
        """Priorities, the best first, with the keys of which requests wait: who was served longest ago first."""
        for priority, queues in enumerate(self._queues):
            if queues:
                yield priority, list(queues)

    def count(self, priority: int, who: str) -> int:
        """How many of a key wait."""
        return len(self._queues[priority].get(who, ()))

    def ahead(self, priority: int, who: str) -> int:
        """How many would be served before a request that came now, if keys were served in turn."""
        own = self.count(priority, who)
        others = (min(len(queue), own + 1) for key, queue in self._queues[priority].items() if key != who)
        return sum(self._live[:priority]) + own + sum(others)

    def add(self, waiter: Waiter) -> None:
        """One more, behind the others of its key."""
        self._queues[waiter.priority].setdefault(waiter.who, deque()).append(waiter)
        self._live[waiter.priority] += 1
        self.waiting += 1

    def next_of(self, priority: int, who: str) -> Waiter:
        """The first of a key, which goes behind the other keys."""
        queues = self._queues[priority]
        queue = queues.pop(who)
        if len(queue) > 1:
            queues[who] = queue
        self._live[priority] -= 1
        self.waiting -= 1
        return queue.popleft()

    def drop(self, waiter: Waiter) -> None:
        """One that waits no longer, if it still does."""
        queues = self._queues[waiter.priority]
        queue = queues.get(waiter.who)
        if queue is not None and waiter in queue:
            queue.remove(waiter)
            self._live[waiter.priority] -= 1
            self.waiting -= 1
            if not queue:
                del queues[waiter.who]

    def displaced_by(self, priority: int, who: str) -> Waiter | None:
        """The last of the key that has most waiting, of the worst priority; None where that is the newcomer's."""
        worst = next(each for each in range(LOWEST, -1, -1) if self._queues[each])
        queues = self._queues[worst]
        most = max(queues.values(), key=len)
        if worst < priority or (worst == priority and len(most) <= len(queues.get(who, ())) + 1):
            return None
        return most[-1]
