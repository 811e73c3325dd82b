"""What clients bring forth of a candidate, with and without each of them: where there are several, none decides alone.

For each key there is the evidence of all the others. A decision has to hold whichever of them is left out: what one key
says or asks, true or not, then neither ends a release nor helps a bad one through. Each of these is evidence by itself,
so that its error rate holds for the least of them, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

from serve.rollout.evidence import Measure
from serve.rollout.pairs import Paired, Place

__all__ = ["Speakers"]

MOST = 16  # keys that are told apart; further ones are left out together
REST = "…"
Side = Literal["worse", "fine"]


class Speakers:
    """The evidence of one question.

    Args:
        fresh: makes the measure of it.

    Attributes:
        measure: of what all say.
        several: whether more than one key may speak, though only one did.
    """

    def __init__(self, fresh: Callable[[], Measure]) -> None:
        self.measure = fresh()
        self._all = Paired(self.measure)
        self._fresh = fresh
        self._without: dict[str, Paired] = {}
        self._open: set[Place] = set()
        self.several = False

    def __len__(self) -> int:
        """How many keys have spoken; 0 where there are none."""
        return sum(map(bool, self._without))

    def ask(self, key: str, which: Literal[0, 1]) -> Place:
        """A key has asked the candidate (0) or the baseline (1)."""
        place = Place([*self._heard(key)], which, self._open.discard)
        self._open.add(place)
        return place

    def say(self, key: str, which: Literal[0, 1], *, bad: bool) -> None:
        """A key has spoken of an answer of the candidate (0) or of the baseline (1)."""
        self.ask(key, which).say(bad)

    def weigh(self, key: str, value: float) -> None:
        """Both models have answered a key's request: how much worse the candidate's answer is."""
        for each in self._heard(key):
            each.measure.add(value)

    def least(self, side: Side) -> float:
        """The logarithm of the wealth of who bets on this, whichever key is left out."""
        measures = [self.measure, *self._others().values()]
        return min((each.worse if side == "worse" else each.fine).log_wealth for each in measures)

    def without(self) -> str | None:
        """The key without which least says that the candidate is worse; None where one speaks alone."""
        others = self._others()
        return min(others, key=lambda key: others[key].worse.log_wealth, default=None)

    def hiding(self) -> str | None:
        """A key without which the rest speaks against the candidate; None for none."""
        return next((key for key, measure in self._others().items() if measure.against), None)

    def _others(self) -> dict[str, Measure]:
        """By key, the evidence without it, where more than one may speak."""
        if not self.several and len(self._without) < 2:
            return {}
        return {key: each.measure for key, each in self._without.items()}

    def _by_others(self) -> Paired:
        """What was said so far, and what is yet to be said to what was asked."""
        same, twins = self._all.copy(place.among(self._all) for place in self._open)
        for place in self._open:
            place.join(same, twins[place.among(self._all)])
        return same

    @property
    def unweighed(self) -> int:
        """Failures of the candidate that wait for answers to what was asked beside them."""
        return self._all.unweighed

    def go_on(self, before: Speakers) -> None:
        """What was asked in the step before, and is not weighed yet, is evidence of this one."""
        self._all, self._without, self._open = before._all, before._without, before._open
        self._all.measure = self.measure
        for each in self._without.values():
            each.measure = self._fresh()

    def _heard(self, key: str) -> Iterator[Paired]:
        """The evidence that what a key says goes to."""
        if key not in self._without and len(self._without) >= MOST - 1:
            key = REST
        if key not in self._without:
            self._without[key] = self._by_others()
        yield self._all
        for other, evidence in self._without.items():
            if other != key:
                yield evidence

    def snapshot(self) -> dict[str, list[float]]:
        """By key, the evidence without it: for `restore`."""
        return {key: each.measure.kept() for key, each in self._without.items()}

    def restore(self, snapshot: Mapping[str, Any], finite: Callable[[Any], float]) -> None:
        """Go on from a snapshot; raises what `finite` raises, and what a mapping of others than that does."""
        for key, (worse, fine, count, *total) in list(snapshot.items())[:MOST]:
            each = self._without[str(key)] = Paired(self._fresh())
            each.measure.resume(finite(worse), finite(fine), int(count), *map(finite, total[:1]))
