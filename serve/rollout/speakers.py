"""What clients say of answers, with and without each of them: where there are several, none decides alone.

For each key there is the evidence of all the others. A decision has to hold whichever of them is left out: what one key
says, true or not, then neither ends a release nor helps a bad one through. Each of these is evidence by itself, so that
its error rate holds for the least of them, too.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol, Self

__all__ = ["Speakers"]

PAIRED = 64
MOST = 16  # keys that are told apart; further ones are left out together
REST = "…"
Side = Literal["worse", "fine"]


class _Wealth(Protocol):
    log_wealth: float
    count: int

    def resume(self, log_wealth: float, count: int) -> None: ...


class _Measure(Protocol):
    @property
    def worse(self) -> _Wealth: ...

    @property
    def fine(self) -> _Wealth: ...

    def add(self, value: float) -> None: ...


class _Paired:
    """Reports of both models' answers, which are weighed against each other once there are some of each."""

    def __init__(self, measure: _Measure) -> None:
        self.measure = measure
        self._unpaired: tuple[deque[bool], deque[bool]] = (deque(maxlen=PAIRED), deque(maxlen=PAIRED))

    def add(self, which: Literal[0, 1], *, wrong: bool) -> None:
        self._unpaired[which].append(wrong)
        mine, theirs = self._unpaired
        if mine and theirs:
            self.measure.add(sum(mine) / len(mine) - sum(theirs) / len(theirs))
            mine.clear()
            theirs.clear()

    def copy(self) -> Self:
        return copy.deepcopy(self)


class Speakers:
    """The evidence of feedback.

    Args:
        measure: takes how much more often the candidate is reported wrong, of what all say.
        fresh: makes another such.

    Attributes:
        several: whether answers were given to more than one key that may speak of them.
    """

    def __init__(self, measure: _Measure, fresh: Callable[[], _Measure]) -> None:
        self._all = _Paired(measure)
        self._fresh = fresh
        self._without: dict[str, _Paired] = {}
        self.several = False

    def __len__(self) -> int:
        """How many keys have spoken; 0 where there are none."""
        return sum(map(bool, self._without))

    def say(self, key: str, which: Literal[0, 1], *, wrong: bool) -> None:
        """A key has spoken of an answer of the candidate (0) or of the baseline (1)."""
        if key not in self._without and len(self._without) >= MOST - 1:
            key = REST
        if key not in self._without:
            self._without[key] = self._all.copy()  # what was said so far was said by others
        self._all.add(which, wrong=wrong)
        for other, evidence in self._without.items():
            if other != key:
                evidence.add(which, wrong=wrong)

    def least(self, side: Side) -> float:
        """The logarithm of the wealth of who bets on this, whichever key is left out."""
        considered = list(self._without.values()) if self.several or len(self) > 1 else []
        measures = [each.measure for each in (self._all, *considered)]
        return min((each.worse if side == "worse" else each.fine).log_wealth for each in measures)

    def snapshot(self) -> dict[str, list[float]]:
        """By key, the wealth of the evidence without it: for `restore`."""
        return {
            key: [each.measure.worse.log_wealth, each.measure.fine.log_wealth, each.measure.worse.count]
            for key, each in self._without.items()
        }

    def restore(self, snapshot: Mapping[str, Any], finite: Callable[[Any], float]) -> None:
        """Go on from a snapshot; raises what `finite` raises, and what a mapping of others than that does."""
        for key, (worse, fine, count) in list(snapshot.items())[:MOST]:
            each = self._without[str(key)] = _Paired(self._fresh())
            each.measure.worse.resume(finite(worse), int(count))
            each.measure.fine.resume(finite(fine), int(count))
