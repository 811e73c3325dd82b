"""What keeps the instances of a server's models at work, as far as the gateway knows."""

from __future__ import annotations

import itertools
from collections import defaultdict

from serve.gateway.health.flights import Needed

__all__ = ["Occupied"]

LONG_S = 0.25  # a request that is there for so long is in the way of others


class Occupied:
    """Requests with one server, by what has instances of its own: a model, or a version of one."""

    def __init__(self) -> None:
        self._at: defaultdict[str, dict[object, float]] = defaultdict(dict)  # since when, the longest ago first
        self._long_at: defaultdict[str, dict[object, float]] = defaultdict(dict)  # those known to take long among them

    def __len__(self) -> int:
        return sum(map(len, self._at.values()))

    def enter(self, place: str, what: object, now: float, *, long: bool) -> None:
        """A request is there from now on; it may be known to take long."""
        self._at[place][what] = now
        if long:
            self._long_at[place][what] = now

    def leave(self, place: str, what: object) -> None:
        """The server is through with it."""
        for each in (self._at, self._long_at):
            if place in each:
                each[place].pop(what, None)
                if not each[place]:
                    del each[place]

    def in_the_way(self, needed: Needed, now: float) -> int:
        """How many are there for long."""
        there = (self._at[place].values() for place, _ in needed if place in self._at)
        return sum(1 for times in there for _ in itertools.takewhile(lambda since: now - since > LONG_S, times))

    def is_taken(self, needed: Needed, longest: float, before: float) -> bool:
        """Whether all instances that are needed of any are with requests that take long.

        Args:
            longest: what is there from before then takes long.
            before: only what came until then counts.
        """
        for place, instances in needed:
            if not (there := self._at.get(place)):
                continue
            known = self._long_at.get(place, {})
            count = sum(1 for _ in itertools.takewhile(lambda since: since < before, known.values()))
            old = itertools.takewhile(lambda each: each[1] < longest, there.items())
            if count + sum(each not in known for each, _ in old) >= instances:
                return True
        return False
