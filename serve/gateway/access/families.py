"""Models whose keys share what they use: ensembles with what they ask, and those that answer for each other's names."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from serve.gateway.access.admission import Admission
from serve.gateway.access.fairness import Fairness, Silence

__all__ = ["Families"]


class Families:
    """Those of one gateway.

    Args:
        silence: of its model servers.
    """

    def __init__(self, silence: Silence) -> None:
        self._silence = silence
        self._instances: dict[str, int] = {}
        self._together: dict[str, int] = {}
        self._servers = 1
        self._asks: dict[str, frozenset[str]] = {}
        self._answer: frozenset[frozenset[str]] = frozenset()
        self._settled: dict[str, tuple[Admission, int, int]] = {}

    def works(self, model: str, instances: int, asks: Sequence[str] = (), servers: int = 1, together: int = 0) -> None:
        """So many instances of a model work at the same time, on so many servers, each on so many requests; it asks
        others."""
        self._instances[model] = instances
        self._together[model] = together
        self._servers = servers
        if asks or model in self._asks:
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
        known = {
            model: (own, self._instances.get(model, 0), self._together.get(model, 0)) for model, own in places.items()
        }
        if known == self._settled:
            return
        for family in self._families(places):
            own = [places[model] for model in family]
            theirs = sorted(own, key=lambda each: -each.in_flight)
            fairness = next((each.fairness for each in theirs if each.fairness not in taken), None)
            if fairness is None:
                fairness = Fairness(own[0].bounds.target_s)
            taken.add(fairness)
            fairness.instances = max(
                1, min((self._instances[each] for each in family if each in self._instances), default=1)
            )
            together = [self._together[each] for each in family if each in self._together]
            fairness.most_together = 0 if 0 in together else max(together, default=0)
            fairness.servers = self._servers
            fairness.works = {
                each: (self._instances[each] // self._servers, len(self._asks.get(each, (each,))))
                for each in family
                if each in self._instances
            }
            fairness.any_number = 0 in together
            fairness.silence = self._silence
            for each in own:
                for kind in each.kinds:
                    kind.join(fairness)
        self._settled = known

    def _families(self, models: Collection[str]) -> Iterator[list[str]]:
        """The models, each with those that it is bound to in one way or another."""
        found: dict[str, set[str]] = {}
        for group in (*self._asks.values(), *self._answer):
            there = {each for each in group if each in models}
            for each in [*there]:
                there |= found.get(each, set())
            for each in there:
                found[each] = there
        done: set[str] = set()
        for model in models:
            if model not in done:
                family = sorted(found.get(model, {model}))
                done.update(family)
                yield family
