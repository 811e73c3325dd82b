"""Requests that two models were asked at about the same time, weighed against each other once they are answered.

Who stands beside whom is settled when they are asked. What makes an answer bad may also say when it comes: time-outs
come all at once, and would be one pair, by when they come, among the many of what is answered well.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, Self

from serve.rollout.evidence import Measure

__all__ = ["Block", "Paired", "Place"]

Which = Literal[0, 1]


class Block:
    """Of one model any number of requests, and one of the other; in pairs of numbers, one for each model."""

    __slots__ = ("asked", "bad", "said", "waiting")

    def __init__(self) -> None:
        self.asked, self.said, self.bad = [0, 0], [0, 0], [0, 0]
        self.waiting = 0

    def say(self, which: Which, bad: bool | None) -> None:
        """One was answered, well or not; None where nothing is known of it."""
        self.waiting -= 1
        if bad is None:
            self.asked[which] -= 1
        else:
            self.said[which] += 1
            self.bad[which] += bad


class Paired:
    """What a measure is told, of requests of both models.

    Attributes:
        unweighed: failures of the candidate that wait for answers to what was asked beside them.
    """

    def __init__(self, measure: Measure) -> None:
        self.measure = measure
        self.unweighed = 0
        self._last = Block()

    def ask(self, which: Which) -> Block:
        """The last of the requests, for now, is one of the candidate's (0), or of the baseline's (1)."""
        block = self._last
        block.asked[which] += 1
        block.waiting += 1
        if all(block.asked):
            self._last = Block()
        return block

    def say(self, block: Block, which: Which, bad: bool | None) -> None:
        """One was answered, well or not; None where nothing is known of it."""
        block.say(which, bad)
        self.unweighed += which == 0 and bool(bad)
        if block is not self._last and not block.waiting:
            self._weigh(block)

    def _weigh(self, block: Block) -> None:
        (mine, theirs), (all_of_mine, all_of_theirs) = block.bad, block.said
        if all_of_mine and all_of_theirs:
            self.unweighed -= mine
            self.measure.add(mine / all_of_mine - theirs / all_of_theirs)
            return
        last = self._last  # nothing came of those that these were asked beside
        for which in (0, 1):
            last.asked[which] += block.said[which]
            last.said[which] += block.said[which]
            last.bad[which] += block.bad[which]
        if all(last.asked):
            self._last = Block()
            if not last.waiting:
                self._weigh(last)

    def copy(self, waiting: Iterable[Block]) -> tuple[Self, dict[Block, Block]]:
        """The same, and its own of each block in which answers are waited for."""
        same = type(self)(copy.deepcopy(self.measure))
        twins = {block: copy.deepcopy(block) for block in {self._last, *waiting}}
        same._last, same.unweighed = twins[self._last], self.unweighed
        return same, twins


class Place:
    """Of one request among those of about the same time, until it is answered.

    Args:
        heard: who weighs it.
        which: the candidate (0) or the baseline (1).
        over: is told when it was answered.
    """

    __slots__ = ("_blocks", "_over", "_which")

    def __init__(self, heard: Sequence[Paired], which: Which, over: Callable[[Place], object] = lambda _: None) -> None:
        self._which = which
        self._over = over
        self._blocks = {each: each.ask(which) for each in heard}

    def among(self, heard: Paired) -> Block:
        """Those of about the same time, as one who weighs it has them."""
        return self._blocks[heard]

    def join(self, heard: Paired, block: Block) -> None:
        """Be weighed by one more."""
        self._blocks[heard] = block

    def say(self, bad: bool | None) -> None:
        """It was answered, well or not; None where nothing is known of it. What is said later counts no more."""
        blocks, self._blocks = self._blocks, {}
        self._over(self)
        for each, block in blocks.items():
            each.say(block, self._which, bad)
