"""Models whose keys share what they use: ensembles with what they ask, and those that answer for each other's names."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from serve.gateway.access.accounts import Silence, Works
from serve.gateway.access.admission import Admission
from serve.gateway.access.fairness import Fairness

__all__ = ["Families", "Told"]


@dataclass(frozen=True)
class Told:
    """Of a model, on all servers; see `Fairness`.

    Attributes:
        instances: that work at the same time.
        together: requests that one of them answers at a time at most; 0 where nobody knows.
        waits_s: for how long one that is free waits for more of a batch, at most.
        latest: as of `Works`.
    """

    instances: int
    together: int
    waits_s: float
    latest: str = ""


class Families:
    """Those of one gateway.

    Args:
        silence: of its model servers.
    """

    def __init__(self, silence: Silence) -> None:
        self._silence = silence
        self._told: dict[str, Told] = {}
        self._servers = 1
        self._asks: dict[str, frozenset[str]] = {}
        self._answer: frozenset[frozenset[str]] = frozenset()
        self._settled: dict[str, tuple[Admission, Told | None]] = {}

    def works(self, model: str, told: Told, asks: Sequence[str], servers: int) -> None:
        """So a model works, on so many servers; it asks others."""
        self._told[model] = told
        self._servers = servers
        if (asks or model in self._asks) and self._asks.get(model) != frozenset((model, *asks)):
            self._asks[model] = frozenset((model, *asks))
            self._settled.clear()

    def answer_for(self, groups: Collection[frozenset[str]]) -> bool:
        """Models of one group answer for each other, and no others do; whether that is new."""
        told = frozenset(group for group in groups if len(group) > 1)
        if told == self._answer:
            return False
        self._answer = told
        self._settled.clear()
        return True

    def settle(self, places: Mapping[str, Admission]) -> None:
        """Have the places of each family share what their keys use, and those of different ones not.

        Those who came last to a family go on with what is known in it; what is with the server stays where it began.
        """
        taken: set[Fairness] = set()
        known = {model: (own, self._told.get(model)) for model, own in places.items()}
        if known == self._settled:
            return
        bound = _joined(self._asks.values())
        for family in self._families(places):
            own = [places[model] for model in family]
            theirs = sorted(own, key=lambda each: -each.in_flight)
            fairness = next((each.fairness for each in theirs if each.fairness not in taken), None)
            if fairness is None:
                fairness = Fairness(own[0].bounds.target_s)
            taken.add(fairness)
            told = {each: self._told[each] for each in family if each in self._told}
            fairness.instances = max(1, min((each.instances for each in told.values()), default=1))
            together = [each.together for each in told.values()]
            fairness.most_together = 0 if 0 in together else max(together, default=0)
            fairness.servers = self._servers
            fairness.works = {model: self._works(model, bound.get(model, {model})) for model in family}
            only = fairness.works[family[0]] if len(told) == len(family) == len(self._steps(family[0])) == 1 else None
            fairness.waits_s = math.inf if only is None else only.waits_s
            fairness.any_number = 0 in together
            fairness.silence = self._silence
            for each in own:
                for kind in each.kinds:
                    kind.join(fairness)
        self._settled = known

    def _works(self, model: str, bound: Collection[str]) -> Works:
        """How a model works, with those that it is `bound` to as they ask one another."""
        told = self._told.get(model, Told(0, 0, math.inf))
        known = [self._told[each] for each in bound if each in self._told]
        together = [each.together for each in known]
        return Works(
            told.instances // self._servers,
            self._steps(model),
            self._asked(model),
            0 if 0 in together else max(together, default=0),
            max((each.waits_s for each in known), default=math.inf),
            told.latest,
            min(bound) if len(bound) > 1 else "",
        )

    def _asked(self, model: str) -> frozenset[str]:
        return self._asks.get(model, frozenset((model,)))

    def _steps(self, model: str) -> frozenset[str]:
        """Models whose instances may be at work on what asks one."""
        group = next((each for each in self._answer if model in each), frozenset((model,)))
        return frozenset().union(*map(self._asked, group))

    def _families(self, models: Collection[str]) -> Iterator[list[str]]:
        """The models, each with those that it is bound to in one way or another."""
        groups = (*self._asks.values(), *self._answer)
        found = _joined({each for each in group if each in models} for group in groups)
        done: set[str] = set()
        for model in models:
            if model not in done:
                family = sorted(found.get(model, {model}))
                done.update(family)
                yield family


def _joined(groups: Iterable[Collection[str]]) -> dict[str, set[str]]:
    """Each of some groups with those of all groups that it is in, and with those of theirs."""
    found: dict[str, set[str]] = {}
    for group in groups:
        there = set(group).union(*(found.get(each, ()) for each in group))
        for each in there:
            found[each] = there
    return found
