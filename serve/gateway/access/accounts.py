"""What is counted of the keys that ask one model, and what those who count are told of the model and its servers."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from serve.gateway.health.flights import NOWHERE

if TYPE_CHECKING:
    from serve.gateway.access.at_server import AtServer
    from serve.gateway.access.fairness import Fairness

__all__ = [
    "BATCHED",
    "FACTOR",
    "FALLS",
    "FEWEST",
    "LONGEST_WAIT_S",
    "SHORTEST_TARGET_S",
    "SOON_S",
    "TRIES",
    "Account",
    "NoSilence",
    "Overdue",
    "Sharer",
    "Silence",
    "Work",
    "Works",
]

RISES, FALLS = 0.3, 0.05  # smoothing of what a request takes: who sends heavy ones now and then is not soon believed
FEWEST = 4  # answers, before which nothing is heavy; the fastest of as many tells how long the server works on one
HALF_LIFE_S = 10.0  # of what is remembered of heavy requests among light ones
USUAL_S = 1.0  # of the time, that a key's usual requests count beside those
BATCHED = 1.5  # requests answered together, from which they come in batches
LONGEST_WAIT_S = 1.0  # that others wait behind heavy ones which are with all instances, however little they use these
FACTOR = 8  # times what requests of most others take, as a model's answers may, too
SHORTEST_TARGET_S = 0.05
SOON_S = 0.25  # the longest pause between requests that are near
TRIES = 2.0  # as many are taken to be, until they are known not to be, ...
UNBATCHED = 0.25  # smoothing of how many are answered together, where more could have been


@dataclass(eq=False, slots=True)
class Account:
    """One key's.

    Attributes:
        in_flight: requests with the model server, those that were given up among them.
        overdue: of these, those that were not answered in time.
        unanswered: whether nothing was answered since the last of them.
        odd_until: until when one more that takes far longer than its usual ones is believed to be its own doing.
        used: seconds of the model's time, where they count from the least that is served.
        cost: seconds of the model's time that one request takes, on the whole.
        long_at: when one of its requests was over last that took longer than others wait behind such.
        bulk_s, bulk_s2: sums of what its requests took and of the squares, which fade with time; their quotient is what
            one takes that others meet, where they come at any time.
        answers: so far.
        seen: when it last asked, or was answered.
        priority: of its last request.
        target_s: what an answer to the others may take; infinite where there are none.
        heavy: whether one of its requests takes longer than that; kept back, its next may be sent from `not_before` on.
        large: whether so few take as long that a batch server would not see two at a time.
        light: whether they take so much less than those of most others that these are no standard for them.
        pause_s: from an answer to its next request, on the whole.
        spent: the time until which its part is spent, that it may keep heavy ones back for without using the model.
        keeps_until: until when heavy ones are kept back by its own answers alone.
        alone_s: the least that one of its first requests took, of those that were answered alone.
        doubtful: whether the last of its first requests passed the target.
        together: how many of its requests, or of such as take as long, the server answers at a time.
        tried: when that was last taken for more than was seen.
        took: seconds that its last requests were with the server.
        batches: whether it was seen to be more than one.
    """

    in_flight: int = 0
    overdue: int = 0
    unanswered: bool = False
    odd_until: float = -math.inf
    used: float = 0.0
    cost: float = 0.0
    answers: int = 0
    seen: float = 0.0
    priority: int = 5
    target_s: float = math.inf
    heavy: bool = False
    large: bool = False
    light: bool = False
    not_before: float = -math.inf
    took: deque[float] = field(default_factory=lambda: deque(maxlen=FEWEST))
    long_at: float = -math.inf
    bulk_s: float = 0.0
    bulk_s2: float = 0.0
    bulk_at: float = 0.0
    pause_s: float = 2 * SOON_S
    answered_at: float = -math.inf
    spent: float = -math.inf
    keeps_until: float = -math.inf
    alone_s: float = math.inf
    doubtful: bool = False
    together: float = TRIES
    tried: float = -math.inf
    batches: bool = False

    def saw(self, seconds: float, now: float) -> None:
        """One request took so long, or a batch of its own; no other key's was in it."""
        fades = 0.5 ** ((now - self.bulk_at) / HALF_LIFE_S)
        self.bulk_s = fades * self.bulk_s + seconds
        self.bulk_s2 = fades * self.bulk_s2 + seconds * seconds
        self.bulk_at = now

    @property
    def is_new(self) -> bool:
        """Whether nothing is known that tells whether it is heavy."""
        return not self.answers or (self.doubtful and not self.heavy and self.answers < FEWEST)

    @property
    def is_usual(self) -> bool:
        """Whether its requests are such as most others'."""
        return not (self.heavy or self.large or self.light)

    @property
    def met_s(self) -> float:
        """What one of its requests takes of the model's time, where others meet it."""
        return max(self.cost, (self.bulk_s2 + USUAL_S * self.cost) / (self.bulk_s + USUAL_S))

    def met(self, together: int, could: bool) -> None:
        """So many were answered together, where there may have been more."""
        if together > self.together:
            self.together = together
        elif could:
            self.together += UNBATCHED * (together - self.together)
        self.batches = self.together >= BATCHED and (self.batches or together > 1)

    def charge(self, seconds: float) -> None:
        """One request has taken so much of the model's time."""
        self.used += seconds - self.cost
        self.answers += 1
        self.cost += (seconds - self.cost) * max(RISES if seconds > self.cost else FALLS, 1.0 / self.answers)

    def charge_more(self, charged: float, seconds: float) -> None:
        """A request that was charged for so many seconds has taken more by now, all in all."""
        self.used += seconds - charged
        if seconds > self.cost:
            self.cost += (seconds - max(charged, self.cost)) * max(RISES, 1.0 / self.answers)


class Work:
    """One request with the model server; to be told to those who began it when it is over.

    Args:
        fairness: that counts it, whatever its model shares its keys with by the time that it is over.
        account: of its key.
        begun: when it was sent.
        model: that was asked, of those which share the account.
        steps, there: the attributes.
        beside_heavy: whether heavy requests of others were there.

    Attributes:
        sent_to: where it went, as far as was told.
        runs: the model whose instances have it: the one that was asked, until it is told that another is in its place.
        steps: models whose instances it may be with.
        there: the queue that it is in; of several, what is in none that is known, until it is told.
        line: what it is asked for there: that model, with its version where several are served.
        takes: what has instances there, that it keeps at work.
        at: since when an instance may be at work on it; infinite while all are on others.
        before: since when that instance was at work on the one before it, of whose batch it may be.
        guards: what counts it, as heavy ones are kept back while it is with the server, up to GUARDS_S.
        priority: that it had then.
        overtaken_at: when one of another key was answered first that was sent after it; `overtaken_by` are those keys.
        over: whether that was told.
        overdue: what is charged for it so far, where it was not answered in time; else None.
    """

    __slots__ = (
        "account",
        "at",
        "before",
        "begun",
        "beside_heavy",
        "fairness",
        "guards",
        "line",
        "model",
        "over",
        "overdue",
        "overtaken_at",
        "overtaken_by",
        "priority",
        "runs",
        "sent_to",
        "steps",
        "takes",
        "there",
    )

    def __init__(
        self,
        fairness: Fairness,
        account: Account,
        begun: float,
        model: str,
        steps: Collection[str],
        there: AtServer,
        *,
        beside_heavy: bool,
    ) -> None:
        self.fairness = fairness
        self.account = account
        self.begun = begun
        self.model = self.runs = self.line = model
        self.sent_to = NOWHERE
        self.steps = self.takes = steps
        self.there = there
        self.beside_heavy = beside_heavy
        self.at = self.before = self.overtaken_at = math.inf
        self.overtaken_by: frozenset[Account] = frozenset()
        self.guards: tuple[Counter[int], ...] = ()
        self.priority = 0
        self.over = False
        self.overdue: Overdue | None = None


@dataclass(eq=False, slots=True)
class Overdue:
    """What is charged for a request that was not answered in time, as the server goes on with it.

    Attributes:
        usual_s: what its key's requests took before, where this one is so odd among them that it is not believed; None
            where it is.
        behind: whether it waits at its server for others that are overdue, as far as is known.
        ahead: when the last of those ended.
        since: when an instance began with it; infinite until that is charged for.
        charged: seconds of the model's time.
    """

    usual_s: float | None = None
    behind: bool = False
    ahead: float = -math.inf
    since: float = math.inf
    charged: float = 0.0


class Sharer(Protocol):
    """Places of a model, or of what its keys share with it."""

    @property
    def waiting(self) -> int:
        """Requests that wait for one."""

    def wake(self) -> None:
        """Let those have places who wait, as far as they may."""


class Silence(Protocol):
    """Servers of several that answer nothing while others do."""

    @property
    def over_at(self) -> float:
        """When such a silence ended last, on the clock of who counts."""

    @property
    def astray(self) -> int:
        """Requests with such servers now."""

    @property
    def servers(self) -> int:
        """That are ready, at least one; 0 where nobody knows."""

    def over_at_of(self, server: str) -> float:
        """`over_at` of one of them; of all, where its name is ""."""

    def hides(self, server: str) -> bool:
        """Whether one of them is silent now; any of those that have requests, where its name is ""."""


@dataclass(frozen=True)
class Works:
    """How a model works.

    Attributes:
        instances: that work at the same time on one server, of several models of that which has fewest; 0 where nobody
            knows.
        steps: models that it is, or asks, or that answer for it.
        asks: models that work on a request of it, one after the other, with itself.
        together: requests that one of its instances answers at a time at most; 0 where nobody knows.
        waits_s: for how long one that is free waits for more of a batch, at most; infinite where it does not work on
            requests in the order in which they came, or nobody knows. Both are of all that are bound to it.
        latest: the version that those get who name none, where several are served, each with instances of its own; ""
            where one is.
        bound: names all that ask one another, whose requests meet; "" where it is alone.
    """

    instances: int = 0
    steps: frozenset[str] = frozenset(("",))
    asks: frozenset[str] = frozenset(("",))
    together: int = 0
    waits_s: float = math.inf
    latest: str = ""
    bound: str = ""


@dataclass(frozen=True)
class NoSilence:
    """Of servers of which nobody tells."""

    over_at: float = -math.inf
    astray: int = 0
    servers: int = 0

    def over_at_of(self, _server: str) -> float:
        """None was silent."""
        return self.over_at

    def hides(self, _server: str) -> bool:
        """None is silent."""
        return False
