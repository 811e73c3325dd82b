"""What the keys that ask one model take of its time: whose turn is next, and what a key may have there beside others.

A request can't be taken back once the model server has it, and is answered in the order in which it came. So what
counts is decided before: turns go by seconds of the model's time, not by requests (start-time fair queueing: Goyal, Vin
and Cheng, SIGCOMM 1996, with what a request costs learnt when it ends, as in the virtual token counter of Sheng et al.,
"Fairness in Serving Large Language Models", OSDI 2024); what a key has with the server beside others takes, all in all,
no longer than an answer to the others may; and requests of which one alone takes longer are heavy: they leave an
instance free, and where there is but one, they have a part of the time, which is never less than their keys' share.

What a request takes is seen from outside, as the time from when the server could begin with it, which is when it had
answered the one before, until its answer. What is answered in one moment was one batch, and shares its time by size.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

__all__ = ["Account", "Fairness", "Work"]

BESIDE_S = 5.0  # after its last request, a key counts as one that is beside others
KNOWN_S = 300.0  # after its last request, what a key's requests take is remembered
LOOK_S = 0.1
BATCH_S = 0.001  # between answers of one batch
LEAST_S = 0.0001  # that any request takes
RISES, FALLS = 0.3, 0.05  # smoothing of what a request takes: who sends heavy ones now and then is not soon believed
FEWEST = 4  # answers, before which nothing is heavy; the fastest of as many tells how long the server works on one
FACTOR = 8  # times what requests of most others take, as a model's answers may, too
HALF_LIFE_S = 20.0  # of what is remembered of heavy requests among light ones
SHORTEST_TARGET_S = 0.05
HEAVY_SHARE = 0.25  # of the time, that all heavy requests have at least
MOST = 4096


@dataclass(eq=False, slots=True)
class Account:
    """One key's.

    Attributes:
        in_flight: requests with the model server, those that were given up among them.
        used: seconds of the model's time, where they count from the least that is served.
        cost: seconds of the model's time that one request takes, on the whole.
        bulk_s, bulk_s2: sums of what its requests took and of the squares, which fade with time; their quotient is what
            one takes that others meet, where they come at any time.
        answers: so far.
        seen: when it last asked, or was answered.
        priority: of its last request.
        target_s: what an answer to the others may take; infinite where there are none.
        heavy: whether one of its requests takes longer than that; the next may be sent from `not_before` on.
        light: whether they take so much less than those of most others that these are no standard for them.
    """

    in_flight: int = 0
    used: float = 0.0
    cost: float = 0.0
    answers: int = 0
    seen: float = 0.0
    priority: int = 5
    target_s: float = math.inf
    heavy: bool = False
    light: bool = False
    not_before: float = -math.inf
    took: deque[float] = field(default_factory=lambda: deque(maxlen=FEWEST))
    bulk_s: float = 0.0
    bulk_s2: float = 0.0
    bulk_at: float = 0.0

    def saw(self, seconds: float, now: float) -> None:
        """One request took so long, and was alone in it."""
        fades = 0.5 ** ((now - self.bulk_at) / HALF_LIFE_S)
        self.bulk_s = fades * self.bulk_s + seconds
        self.bulk_s2 = fades * self.bulk_s2 + seconds * seconds
        self.bulk_at = now

    @property
    def met_s(self) -> float:
        """What one of its requests takes of the model's time, where others meet it."""
        return max(self.cost, self.bulk_s2 / self.bulk_s if self.bulk_s else 0.0)

    def charge(self, seconds: float) -> None:
        """One request has taken so much of the model's time."""
        self.used += seconds - self.cost
        self.answers += 1
        self.cost += (seconds - self.cost) * max(RISES if seconds > self.cost else FALLS, 1.0 / self.answers)


@dataclass(eq=False, slots=True)
class Work:
    """One request with the model server; to be told to those who began it when it is over.

    Attributes:
        fairness: that counts it, whatever its model shares its keys with by the time that it is over.
        account: of its key.
        begun: when it was sent.
        over: whether that was told.
    """

    fairness: Fairness
    account: Account
    begun: float
    over: bool = False


class Fairness:
    """The keys of one model, by whatever way they ask it: alone, with lists, through an ensemble, or by another's name.

    Args:
        target_s: what an answer may take, where it is set.

    Attributes:
        instances: of the model, that work at the same time; of several, of that which has fewest.
        heavy: requests of heavy keys that are with the server.
        sharers: those who are to look at who waits with them, when an answer has come.
    """

    def __init__(self, target_s: float | None = None) -> None:
        self.instances = 1
        self.heavy = 0
        self.sharers: list[Callable[[], None]] = []
        self._set_target_s = target_s
        self._accounts: OrderedDict[str, Account] = OrderedDict()
        self._least = 0.0  # used by whom was served last
        self._answered_at = self._before = -math.inf  # the last answer; the last of the batch before
        self._batch: list[tuple[Account, int]] = []
        self._batch_s = 0.0
        self._looked_at = -math.inf
        self._share = 1.0  # of the time, for each heavy key
        self._met_s = 0.0  # what a heavy request takes that was with the server lately

    def of(self, who: str, priority: int, now: float) -> Account:
        """The account of a key that asks."""
        found = self._accounts.get(who)
        if found is None:
            found = self._accounts[who] = Account()
            self._looked_at = -math.inf
        elif now - found.seen > BESIDE_S:
            self._looked_at = -math.inf
        self._accounts.move_to_end(who)
        found.seen, found.priority = now, priority
        if now - self._looked_at >= LOOK_S:
            self._look(now)
        return found

    def __len__(self) -> int:
        return len(self._accounts)

    def may(self, account: Account, limit: float, now: float) -> bool:
        """Whether one more request of a key may be with the server, of so many that are in all."""
        if account.target_s == math.inf:
            return True
        if account.heavy:
            if self.instances > 1:
                return self.heavy < max(1.0, min(self.instances, limit) - 1)
            return not self.heavy and now >= account.not_before
        held = account.in_flight
        if not held:
            return True
        if held + 1 > max(1.0, limit - 1.0):  # never the last place
            return False
        return account.answers > 0 and account.met_s <= account.target_s >= (held + 1) * account.cost

    def next_s(self, now: float) -> float:
        """In how many seconds those who wait are to be looked at again, whatever is answered by then."""
        waits = [each.not_before - now for each in self._accounts.values() if each.heavy and each.not_before > now]
        return min(LOOK_S, *waits) if waits else LOOK_S

    def excuse_s(self) -> float:
        """How much longer answers of the last moments may have taken, as they may have waited behind heavy ones."""
        met_s, there = self._met_s, (each.cost for each in self._accounts.values() if each.heavy and each.in_flight)
        self._met_s = max(there, default=0.0)
        return max(met_s, self._met_s)

    def is_usual(self, who: str) -> bool:
        """Whether the requests of a key are such as most others': only those tell how busy the model is."""
        account = self._accounts.get(who)
        return account is None or not (account.heavy or account.light)

    def turn_s(self, account: Account) -> float:
        """How long one request of a heavy key waits for its turn, at least."""
        return account.cost / self._share if account.heavy else 0.0

    def begin(self, account: Account, now: float) -> Work:
        """A request is sent to the server."""
        account.in_flight += 1
        self._least = account.used = max(account.used, self._least)
        account.used += account.cost
        if account.heavy:
            self.heavy += 1
            self._met_s = max(self._met_s, account.cost)
        return Work(self, account, now)

    def undo(self, work: Work) -> None:
        """It was not sent after all."""
        account = work.account
        work.over = True
        account.in_flight -= 1
        account.used -= account.cost
        if account.heavy:
            self.heavy -= 1

    def end(self, work: Work, size: int, now: float) -> None:
        """The server is through with a request, however it ended."""
        account, begun = work.account, work.begun
        work.over = True
        account.in_flight -= 1
        if now - self._answered_at > BATCH_S:
            self._settle()
            self._before = self._answered_at
        self._answered_at = now
        seconds = now - max(begun, self._before)
        self._batch_s = max(self._batch_s, seconds)
        self._batch.append((account, max(size, 1)))
        account.took.append(now - begun)
        account.seen = now
        if account.heavy:
            self.heavy -= 1
            account.not_before = now + seconds * (1.0 / self._share - 1.0)

    def _settle(self) -> None:
        """Charge what was answered together: each for what it is known to take, and by its size."""
        seconds = self._batch_s
        if len(self._batch) == 1:
            self._batch[0][0].saw(seconds, self._answered_at)
        shares = [size * max(each.cost if each.answers else seconds, LEAST_S) for each, size in self._batch]
        whole = sum(shares)
        for (account, _), share in zip(self._batch, shares, strict=True):
            account.charge(seconds * share / whole)
        self._batch.clear()
        self._batch_s = 0.0

    def _takes_s(self, account: Account) -> float:
        """What one request of a key takes of the model's time, as far as is known."""
        if self.instances > 1 and len(account.took) == FEWEST:
            return max(account.met_s, min(account.took) / self.instances)
        return account.met_s

    def _look(self, now: float) -> None:
        """Who is beside whom."""
        self._looked_at = now
        while self._accounts:
            who, oldest = next(iter(self._accounts.items()))
            if oldest.in_flight or (now - oldest.seen < KNOWN_S and len(self._accounts) <= MOST):
                break
            del self._accounts[who]
        beside = [each for each in self._accounts.values() if each.in_flight or now - each.seen < BESIDE_S]
        beside.sort(key=lambda each: each.priority)
        heavies = 0
        for target_s, each in self._targets(beside):
            each.target_s = target_s
            was, each.heavy = each.heavy, each.answers >= FEWEST and self._takes_s(each) > target_s
            if was is not each.heavy:
                self.heavy += each.in_flight if each.heavy else -each.in_flight
            heavies += each.heavy
        keys = len(beside)
        self._share = 1.0 if heavies in (0, keys) else max(1.0 / keys, HEAVY_SHARE / heavies)

    def _targets(self, accounts: list[Account]) -> Iterator[tuple[float, Account]]:
        """Each with what an answer to the others may take: to most of those of its priority, and of better ones."""
        costs: list[float] = []
        count = 0
        for _, group in itertools.groupby(accounts, key=lambda each: each.priority):
            alike = list(group)
            count += len(alike)
            for account in alike:
                if account.answers:
                    bisect.insort(costs, account.cost)
            for account in alike:
                usual = _lower_median(costs, account.cost if account.answers else None)
                account.light = usual is not None and account.answers > 0 and FACTOR * account.cost < usual
                target_s = self._set_target_s or max(
                    SHORTEST_TARGET_S, FACTOR * (account.cost if usual is None else usual)
                )
                yield (target_s if count > 1 else math.inf), account


def _lower_median(ascending: list[float], without: float | None) -> float | None:
    """Of numbers, one of which may be left out; None for none."""
    if without is None:
        return ascending[(len(ascending) - 1) // 2] if ascending else None
    if len(ascending) < 2:
        return None
    middle = (len(ascending) - 2) // 2
    return ascending[middle + (bisect.bisect_left(ascending, without) <= middle)]
