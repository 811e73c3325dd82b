"""What clients bring forth of a candidate, with and without each of them: where there are several, none decides alone.

For each key there is the evidence of all the others. A decision has to hold whichever of them is left out: what one key
says or asks, true or not, then neither ends a release nor helps a bad one through. Each of these is evidence by itself,
so that its error rate holds for the least of them, too.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, Self

from serve.rollout.evidence import Measure

__all__ = ["Speakers"]

PAIRED = 64
MOST = 16  # keys that are told apart; further ones are left out together
REST = "…"
Side = Literal["worse", "fine"]


class _Paired:
    """What was bad of both models' answers, which are weighed against each other once there are some of each."""

    def __init__(self, measure: Measure) -> None:
        self.measure = measure
        self._unpaired: tuple[deque[bool], deque[bool]] = (deque(maxlen=PAIRED), deque(maxlen=PAIRED))

    def add(self, which: Literal[0, 1], *, bad: bool) -> None:
        self._unpaired[which].append(bad)
        mine, theirs = self._unpaired
        if mine and theirs:
            self.measure.add(sum(mine) / len(mine) - sum(theirs) / len(theirs))
            mine.clear()
            theirs.clear()

    def copy(self) -> Self:
        return copy.deepcopy(self)


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
        self._all = _Paired(self.measure)
        self._fresh = fresh
        self._without: dict[str, _Paired] = {}
        self.several = False

    def __len__(self) -> int:
        """How many keys have spoken; 0 where there are none."""
        return sum(map(bool, self._without))

    def say(self, key: str, which: Literal[0, 1], *, bad: bool) -> None:
        """A key has got, or spoken of, an answer of the candidate (0) or of the baseline (1)."""
        for each in self._heard(key):
            each.add(which, bad=bad)

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

    def _heard(self, key: str) -> Iterator[_Paired]:
        """The evidence that what a key says goes to."""
        if key not in self._without and len(self._without) >= MOST - 1:
            key = REST
        if key not in self._without:
            self._without[key] = self._all.copy()  # what was said so far was said by others
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
            each = self._without[str(key)] = _Paired(self._fresh())
            each.measure.resume(finite(worse), finite(fine), int(count), *map(finite, total[:1]))
