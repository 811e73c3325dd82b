"""How long a server is left alone, for whom, and how it comes back."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum

__all__ = ["MOST_KEYS", "THE_REST", "Ejection", "State", "Tally", "counted_as"]

BASE_EJECTION_TIME_S = 1.0
MAX_EJECTION_TIME_S = 30.0
TRIAL_S = 1.0
SLOW_START_S = 5.0
MIN_WEIGHT = 0.1
MOST_KEYS = 64  # that are counted by themselves
THE_REST = "\0"  # stands for all other keys; none has this name


class State(Enum):
    """Whether to ask a host."""

    IN = "in service"
    DUE = "due"
    """Its ejection is over: one request is its trial."""
    OUT = "ejected"


@dataclass(slots=True)
class Ejection:
    """Whether a host is out of service, for all or for one key.

    Attributes:
        out: whether it is.
        until: when its trial is due, on the monotonic clock.
        count: of ejections, which made the present one so long.
        on_trial: whether its trial is under way.
        returned: when it last came into service.
        epoch: another number after each ejection and return; answers to requests of an earlier one say nothing.
        failed: the one key whose trials have failed since; None for none.
        trier, tried_at: whose the last trials were that have decided nothing, and when the first of these began.
    """

    out: bool = False
    until: float = 0.0
    count: int = 0
    on_trial: bool = False
    returned: float = -math.inf
    epoch: int = 0
    failed: str | None = None
    trier: str | None = None
    tried_at: float = -math.inf

    def state(self, now: float, who: str) -> State:
        """For a key: a trial that takes long, or says nothing again and again, keeps no other key from one."""
        if not self.out:
            return State.IN
        free = not self.on_trial or (who != self.trier and now - self.tried_at >= TRIAL_S)
        return State.DUE if now >= self.until and free else State.OUT

    def forgotten(self, now: float) -> bool:
        """Whether its trial has been due for so long that nobody seems to come for it."""
        return self.out and not self.on_trial and now >= self.until + MAX_EJECTION_TIME_S

    def try_(self, who: str, now: float) -> None:
        """A key's request is its trial."""
        self.on_trial = True
        if self.trier != who:
            self.trier, self.tried_at = who, now

    def weight(self, now: float) -> float:
        """Its share of what it would get, which grows to 1 after it has come into service."""
        return min(1.0, max(MIN_WEIGHT, (now - self.returned) / SLOW_START_S))

    def eject(self, now: float) -> float:
        """Take it out of service; the seconds until its trial."""
        self.count += 1
        seconds = min(BASE_EJECTION_TIME_S * self.count, MAX_EJECTION_TIME_S)
        self.out, self.until, self.failed, self.trier = True, now + seconds, None, None
        self.epoch += 1
        return seconds

    def take_back(self, now: float) -> None:
        """Its trial went well."""
        self.out, self.failed, self.trier, self.returned = False, None, None, now
        self.epoch += 1


def counted_as(who: str, known: Collection[str]) -> str:
    """The name that a key is counted under beside those that are."""
    return who if who in known or len(known) < MOST_KEYS else THE_REST


class Tally:
    """Good and bad answers, by whose requests they were."""

    __slots__ = ("by",)

    def __init__(self) -> None:
        self.by: dict[str, list[int]] = {}

    def add(self, who: str, *, good: bool) -> None:
        counts = self.by.setdefault(counted_as(who, self.by), [0, 0])
        counts[not good] += 1

    def count(self, *, only: str | None = None, without: str | None = None) -> tuple[int, int]:
        """Good and bad ones of one key, or of all but one."""
        if only is not None:
            good, bad = self.by.get(only, (0, 0))
            return good, bad
        good, bad = map(sum, zip((0, 0), *self.by.values(), strict=True))
        if without in self.by:
            good, bad = good - self.by[without][0], bad - self.by[without][1]
        return good, bad
