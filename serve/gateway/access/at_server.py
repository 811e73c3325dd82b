"""What is in one queue of the requests that share an account, and what was answered of it last."""

from __future__ import annotations

import math
from collections import Counter, defaultdict

from serve.gateway.access.accounts import Account, Work
from serve.gateway.health.flights import NOWHERE, At

__all__ = ["BATCH_S", "Answered", "AtServer"]

BATCH_S = 0.001  # between answers of one batch

Answered = tuple[Account, int, float, float, float, float]
"""One that was answered: its size, what it was charged beyond its cost until that settles, since when an instance was
at work on it, or on the batch that it is of, for how many seconds of all instances' time, and, for one that is taken to
have been read early, for how many if it was not."""


class AtServer:
    """Those of one model at one server, which works on them as they came; or all of which nobody knows that.

    Attributes:
        at: the server and the model, with its version where several are served; nowhere for all others.
        instances: of the model there.
        most_together, waits_s: of the model, as of `Works`.
        passes_on: whether the model asks others, one after the other: one of them may be free while another is not.
        next: requests that are not yet begun with, as they came, by model.
        at_work_of: those that are, by the models whose instances they may be with.
        is_in_order: whether it is known in which order it works on them.
        answered_at: the last answer.
        before: the last answer before those of one batch.
        began: the first of the moment that is not settled yet.
        batch: what was answered in it.
        is_any_due: whether one of them was the next to be answered.
        overtook: one of them that was answered while overdue ones seem at work.
    """

    __slots__ = (
        "answered_at", "at", "at_work_of", "batch", "before", "began", "instances", "is_any_due", "is_in_order",
        "most_together", "next", "overtook", "passes_on", "waits_s",
    )  # fmt: skip

    def __init__(self, at: At = NOWHERE) -> None:
        self.at = at
        self.instances = self.most_together = 0
        self.waits_s = math.inf
        self.next: defaultdict[str, dict[Work, None]] = defaultdict(dict)
        self.at_work_of: Counter[str] = Counter()
        self.answered_at = self.before = self.began = -math.inf
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
