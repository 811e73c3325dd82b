"""What is in one queue of the requests that share an account, and what was answered of it last."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from typing import NamedTuple

from serve.gateway.access.accounts import Work
from serve.gateway.health.flights import NOWHERE, At

__all__ = ["BATCH_S", "READ_S", "Answered", "AtServer"]

BATCH_S = 0.001  # between answers of one batch
READ_S = 0.01  # that a gateway may take for answers of one moment, which it reads in any order


class Answered(NamedTuple):
    """One that was answered.

    Attributes:
        size: of the request.
        more: what it was charged beyond its cost until that settles.
        since: when an instance was at work on it, or on the batch that it is of.
        seconds: of all instances' time, for which one was.
        at: when it was read.
        most_s: that it took, as far as anybody can know, if what was sent before is at work yet.
    """

    work: Work
    size: int
    more: float
    since: float
    seconds: float
    at: float
    most_s: float = math.inf


class AtServer:
    """Those of one model at one server, or of several that ask one another; or all of which nobody knows their order.

    Attributes:
        at: the server and the model, with its version where several are served, or what all are bound by that ask one
            another; nowhere for all others.
        most_together, waits_s: as of `Works`.
        passes_on: whether models ask one another: one of them may be free while another is not.
        next: requests that are not yet begun with, as they came, by what is asked.
        at_work_of: those that are, by what has instances that they may be with.
        is_in_order: whether it is known in which order it works on them.
        answered_at: the last answer.
        before: the last answer before those of one batch.
        began: the first of the moment that is not settled yet; `last` is the last one before that.
        batch: what was answered in it.
        is_any_due: whether one of them was the next to be answered.
        overtook: one of them that was answered while overdue ones seem at work.
    """

    __slots__ = (
        "answered_at", "at", "at_work_of", "batch", "before", "began", "is_any_due", "is_in_order",
        "last", "most_together", "next", "overtook", "passes_on", "waits_s",
    )  # fmt: skip

    def __init__(self, at: At = NOWHERE) -> None:
        self.at = at
        self.most_together = 0
        self.waits_s = math.inf
        self.next: defaultdict[str, dict[Work, None]] = defaultdict(dict)
        self.at_work_of: Counter[str] = Counter()
        self.answered_at = self.before = self.began = self.last = -math.inf
        self.batch: list[Answered] = []
        self.is_any_due = self.is_in_order = self.passes_on = False
        self.overtook: Work | None = None

    def answers(self, now: float) -> None:
        """One of them was answered."""
        if now - self.answered_at > BATCH_S:
            self.before = self.answered_at
        self.answered_at = now

    @property
    def idle(self) -> bool:
        """Whether it has nothing."""
        return not (any(self.next.values()) or any(self.at_work_of.values()))
