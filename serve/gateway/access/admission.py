"""How many requests of a model are with the model server at a time, and which of the others wait or are turned away.

Triton's queues have no bound, so a load above what it can do would only make every answer late. The number in flight
is kept where answers take `target` s: it grows by a little while they are faster, and shrinks by a part when they are
slower (additive increase, multiplicative decrease: Chiu and Jain, "Analysis of the Increase and Decrease Algorithms
for Congestion Avoidance in Computer Networks", 1989, applied to requests). Those beyond it wait, the better priority
first, within a priority the keys in turn (Nagle, "On Packet Switches with Infinite Storage", RFC 970, 1985). One whose
wait would be too long is refused at once, while its client can still go elsewhere (Little's law gives the wait:
requests ahead of it, over requests answered a second). The first of a key is not: a wait that another's slow requests
make is no reason to refuse it, and its turn comes.

What an answer may take is learnt for each kind of request (its size, by powers of two): a batch of 64 is no sign of
load where requests of one item came before.
"""

from __future__ import annotations

import asyncio
import math
import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from serve.gateway.access.accounts import Account, Work
from serve.gateway.access.fairness import Fairness
from serve.gateway.access.left_behind import OVERDUE_S, any_answered, leave_once_through, once_through
from serve.gateway.access.memory import Share
from serve.gateway.access.queues import Queues, Waiter
from serve.gateway.errors import OverloadedError
from serve.gateway.health.flights import At, Needs

__all__ = ["Admission", "Beside", "Bounds"]

WINDOW_S = 0.1
WINDOW_ANSWERS = 8
FASTEST_FOR_S = 30.0
LOWEST_FOR_S = 2.0
SHRINK = 0.8
SMOOTHING = 0.3
FADING = 0.9  # of what the slowest answer took, with each window
FASTEST_FACTOR = 8
SHORTEST_TARGET_S = 0.05
NOBODY = Account()  # stands for those who have no key, between whom nothing is fair
LEFT_S = 10.0  # that a request which was given up keeps its key from others, where such are not known to take long


@dataclass(frozen=True)
class Bounds:
    """What is set.

    Attributes:
        most: requests in flight at most.
        least: the limit never falls below it.
        target_s: seconds that the model server may take under load; None for eight times its fastest answer, at least
            50 ms.
        wait_s: longest wait for a place, in seconds; None for the same as the target.
        waiting: requests that wait at most.
        factor: of the fastest answer, where there is no target.
    """

    most: int = 128
    least: int = 2
    target_s: float | None = None
    wait_s: float | None = None
    waiting: int = 1024
    factor: float = FASTEST_FACTOR


@dataclass(eq=False)
class Beside:
    """Other places of the same model, as they concern some: `most` bounds both together.

    Attributes:
        places: the others.
        yields: the part of the limit of these that is left while the others have something with the model.
        excused: whether an answer to these may take one of the others longer: it may have waited behind it.
        met: whether that may have been so in this window.
    """

    places: Admission
    yields: float = 1.0
    excused: bool = False
    met: bool = False

    def limit(self, limit: float) -> float:
        """What is left of a limit now."""
        if self.yields == 1.0 or not self.places.in_flight:
            return limit
        return max(1.0, self.yields * limit)

    def excuse_s(self) -> float:
        """How much longer than their target answers of this window may have taken."""
        return self.places.latency if self.excused and (self.met or self.places.in_flight) else 0.0


@dataclass(eq=False, slots=True)
class _Kind:
    """Answers to requests of a kind: how many, what the fastest of them took, and whose it was."""

    answers: int
    shortest: float
    whose: str


class Admission:
    """The places of one model.

    Args:
        model: its name, for messages.
        bounds: what is set.
        clock: seconds that never go back; the event loop's time.
        fairness: between the keys, where these are not the only places of the model; one of their own by default.

    Attributes:
        limit: requests in flight at most, now.
        in_flight: requests with the model server.
        left: of those, how many clients have left.
        shed: requests refused so far.
        latency: of answers, in seconds, smoothed; 0 until some came.
        beside: other places of the same model, if there are any.
        fairness: between the keys.
    """

    def __init__(
        self, model: str, bounds: Bounds, clock: Callable[[], float], fairness: Fairness | None = None
    ) -> None:
        self.model = model
        self.bounds = bounds
        self.in_flight = self.left = 0
        self.shed = 0
        self.latency = 0.0
        self.beside: Beside | None = None
        self.limit = float(min(bounds.most, max(bounds.least, 32)))
        self.fairness = Fairness(bounds.target_s) if fairness is None else fairness
        self.fairness.sharers.append(self)
        self._clock = clock
        self._works: dict[str, deque[Work]] = {}  # of each key, those that have places
        self._later: asyncio.TimerHandle | None = None  # when a key may have its turn by time alone
        self._queues = Queues()
        self._fastest: dict[int, tuple[float, float, str]] = {}  # by kind: seconds, since when, and whose it was
        self._target = math.inf  # of the requests of the last window
        self._lowest_from = math.inf  # since when the limit is as low as it gets
        self._slowest = 0.0  # of the answers of late
        self._begin_window(clock())

    def _begin_window(self, now: float) -> None:
        self._from = now
        self._answers = 0
        self._seconds = self._longest = 0.0
        self._kinds: dict[int, _Kind] = {}
        self._peak = self.in_flight
        if self.beside is not None:
            self.beside.met = False

    @property
    def now(self) -> float:
        """By the clock of these places."""
        return self._clock()

    @property
    def waiting(self) -> int:
        """Requests that wait for a place."""
        return self._queues.waiting

    def join(self, fairness: Fairness) -> None:
        """Share what the keys use from here on with other places of the same servers."""
        if self.fairness is not fairness:
            self.fairness.sharers.remove(self)
            self.fairness = fairness
            fairness.sharers.append(self)

    @property
    def awaited(self) -> bool:
        """Whether anybody waits for what is with the model server, or for a place."""
        return self.in_flight > self.left or self.waiting > 0

    @property
    def free(self) -> bool:
        """Whether a place is free, and nobody waits for it."""
        return self._room and not self.waiting

    def free_for(self, who: str, priority: int = 5) -> bool:
        """Whether a place is free for a key, and nobody waits who could have it."""
        return self.offer(who, priority) is not None

    def offer(self, who: str, priority: int = 5) -> Account | None:
        """The account of a key for which a place is free that nobody waits for who could have it; None for none.

        It may be taken by `seat` before anything else is asked of these places.
        """
        limit = self.limit if self.beside is None else self.beside.limit(self.limit)
        others = 0 if self.beside is None else self.beside.places.in_flight
        if self.in_flight + 1 > limit or self.in_flight + others >= self.bounds.most:
            return None
        waiting = self._queues.waiting
        if not who:
            return None if waiting else NOBODY
        now, fairness = self._clock(), self.fairness
        account = fairness.of(who, priority, now)
        if (account.target_s != math.inf or account.overdue) and not fairness.may(account, limit, now, self.model):
            return None
        return account if not waiting or self._whose(now) is None else None

    def seat(self, account: Account) -> Work | None:
        """Take the place that was offered to an account; to be left by `rise`, with what this gives."""
        self.in_flight += 1
        if self.beside is not None and self.beside.places.in_flight:
            self.beside.met = True
        if self.in_flight > self._peak:
            self._peak = self.in_flight
        return None if account is NOBODY else self.fairness.begin(account, self._clock(), self.model)

    def rise(self, work: Work | None, seconds: float | None, size: int, who: str) -> None:
        """Leave the place that `seat` took.

        Args:
            work: that it gave.
            seconds, size, who: as of `leave`.
        """
        if work is None:
            self.leave(seconds, size, who)
            return
        if seconds is not None and work.account.is_usual:
            self._learn(seconds, size.bit_length(), who)
        work.fairness.end(work, size, self._clock(), answered=seconds is not None)
        self._free()

    def stand(self, work: Work | None, who: str) -> None:
        """What `seat` gave is left by `leave_after`, `abandon` or `outlast`."""
        if work is not None:
            insort(self._works.setdefault(who, deque()), work, key=lambda each: each.begun)

    def needs(self, who: str) -> Needs:
        """What a request of a key keeps at work at one of several servers; nothing where there is one."""
        return self.fairness.needs(who, self.model)

    def sent(self, who: str, was: At, at: At) -> None:
        """One of a key's that have places goes to a server, for a model.

        Args:
            was: where it went before.
        """
        work = next((each for each in self._works.get(who, ()) if each.sent_to == was), None)
        if work is not None:
            work.fairness.sent(work, at, self._clock())

    @property
    def kinds(self) -> tuple[Admission, ...]:
        """These places, and those beside them."""
        return (self,) if self.beside is None else (self, self.beside.places)

    @property
    def _room(self) -> bool:
        others = 0 if self.beside is None else self.beside.places.in_flight
        return self.in_flight + 1 <= self._limit_now and self.in_flight + others < self.bounds.most

    @property
    def _limit_now(self) -> float:
        return self.limit if self.beside is None else self.beside.limit(self.limit)

    @property
    def target_s(self) -> float:
        """What an answer may take, of requests such as were answered last; infinite until some were."""
        return self._target if self.bounds.target_s is None else self.bounds.target_s

    def _target_of(self, kind: int) -> float:
        if self.bounds.target_s is not None:
            return self.bounds.target_s
        fastest = min((found[0] for each, found in self._fastest.items() if each >= kind), default=math.inf)
        return max(SHORTEST_TARGET_S, self.bounds.factor * fastest)

    @property
    def wait_s(self) -> float:
        """How long a request may wait for a place."""
        return self.target_s if self.bounds.wait_s is None else self.bounds.wait_s

    def try_enter(self, who: str = "", priority: int = 5) -> bool:
        """Take a place if one is free for a key and nobody waits; each must be given back with `leave`."""
        account = self.offer(who, priority)
        if account is None:
            return False
        self._note(self.seat(account), who)
        return True

    def check(self, priority: int, patience_s: float, who: str = "", *, times: float = 1.0) -> None:
        """Raises OverloadedError where a request that came now would wait too long; for those not yet read.

        Args:
            priority: 1 is served first.
            patience_s: how long the client would wait for a place at most, in seconds.
            who: id of its key.
            times: the longest wait, that it may wait.
        """
        if self.free_for(who, priority):
            return
        ahead = self._queues.ahead(priority, who)
        expected = self._expected_s(ahead, priority, who)
        if ahead >= self.bounds.waiting:
            self._refuse(expected, f"{ahead} requests wait")
        longest = times * (self.wait_s + self._held_back_s(priority, who))
        if expected > (patience_s if self._is_first(priority, who) else min(longest, patience_s)):
            self._refuse(expected, f"it would wait {1000 * expected:.0f} ms for its turn")

    def _expected_s(self, ahead: int, priority: int, who: str) -> float:
        """How long a request that came now would wait, at least."""
        expected = (ahead + 1) * self.latency / self._limit_now
        if who:
            account = self.fairness.of(who, priority, self._clock())
            own = self._queues.count(priority, who) + 1
            expected = max(expected, self.fairness.turn_s(account, own))
        return expected

    def _held_back_s(self, priority: int, who: str) -> float:
        """How much longer a request may wait here, as its key's are not sent before their turn for others' sake."""
        if not who:
            return 0.0
        account = self.fairness.of(who, priority, self._clock())
        held_s = self.fairness.alone_s(account)
        return held_s if self.bounds.target_s is None else min(held_s, self.bounds.target_s)

    def _is_first(self, priority: int, who: str) -> bool:
        """Whether none of the key's waits: its turn is next among the keys, and what one answer takes is others' doing.

        Where there are no keys, all clients are one.
        """
        return bool(who) and not self._queues.count(priority, who)

    def _longest_s(self, priority: int, who: str) -> float:
        """How long a request that comes now may wait: until its turn, for the first of a key."""
        longest = 2 * (self.wait_s + self._held_back_s(priority, who))
        if self._is_first(priority, who):
            turn_s = self.fairness.turn_s(self.fairness.of(who, priority, self._clock()), 1)
            rounds = max(1.0, (self._queues.ahead(priority, who) + 1) / self._limit_now)
            longest = max(longest, 2 * self._slowest * rounds, 2 * turn_s)
        return longest

    async def enter(self, priority: int, patience_s: float, who: str = "", *, patient: bool = False) -> None:
        """Take a place, waiting for it if need be; each must be given back with `leave`.

        Args:
            priority, patience_s, who: as of `check`.
            patient: whether it waits as long as the client would, whatever is foretold.

        Raises:
            OverloadedError: the wait would be, or became, too long.
        """
        if self.try_enter(who, priority):
            return
        if not patient:
            self.check(priority, patience_s, who)
        if self.waiting >= self.bounds.waiting:
            self._displace(priority, who)
        longest = patience_s if patient else min(self._longest_s(priority, who), patience_s)
        loop = asyncio.get_running_loop()
        waiter = Waiter(priority, who, loop.create_future(), loop.time() + patience_s)
        if self._is_first(priority, who):
            self.fairness.comes(self.fairness.of(who, priority, self._clock()))
        self._queues.add(waiter)
        self.wake()
        if longest < math.inf:
            waiter.timer = loop.call_later(longest, self._expire, waiter)
        try:
            await waiter.place
        except asyncio.CancelledError:
            if waiter.place.done() and not waiter.place.cancelled() and waiter.place.exception() is None:
                self.take_back(who)  # the place came too late for us
            elif waiter.place.cancelled():
                self._queues.drop(waiter)
            raise
        finally:
            if waiter.timer is not None:
                waiter.timer.cancel()

    def leave(
        self, seconds: float | None, size: int = 0, who: str = "", at: At | None = None, begun: float = -math.inf
    ) -> None:
        """Give a place back.

        Args:
            seconds: that the model server took for its answer (or until it was given up); None where that says
                nothing of its load.
            size: of the request, in bytes.
            who: the key that had it.
            at: where it went, as far as was told; None where who gives it back does not know.
            begun: when it was taken, on the clock of these places; else it counts as the key's oldest.
        """
        if seconds is not None and (not who or self.fairness.is_usual(who)):
            self._learn(seconds, size.bit_length(), who)
        if who and (work := self._work_of(who, begun, at)) is not None:
            work.fairness.end(work, size, self._clock(), answered=seconds is not None)
        self._free()

    def outlast(
        self,
        seconds: float | None,
        size: int = 0,
        who: str = "",
        through: Sequence[asyncio.Future[Any]] = (),
        at: At | None = None,
        begun: float = -math.inf,
    ) -> None:
        """Give a place back whose answer did not come in time: the server is at work on the request all the same.

        For its key it goes on to count, until the server is through with it, or OVERDUE_S have passed.

        Args:
            seconds, size, who, begun: as of `leave`.
            through: each is done when the server is, True or an answer where it answered.
            at: as of `leave`.
        """
        if seconds is not None and (not who or self.fairness.is_usual(who)):
            self._learn(seconds, size.bit_length(), who)
        if who and (work := self._work_of(who, begun, at)) is not None:
            still = [each for each in through if not each.done()]
            if still:
                self._follow_overdue(work, still, size)
            else:
                work.fairness.end(work, size, self._clock(), answered=False)
        self._free()

    def _follow_overdue(self, work: Work, through: Sequence[asyncio.Future[Any]], size: int) -> None:
        """Count what is over for its client as overdue, until the server is through with it."""
        work.fairness.outlasts(work, self._clock())

        def over() -> None:
            late.cancel()
            self._is_over(work, size, answered=any_answered(through))

        late = asyncio.get_running_loop().call_later(OVERDUE_S, self._is_over, work, size)
        once_through(through, over)

    def leave_after(
        self,
        ended: Sequence[asyncio.Future[Any]],
        started: float,
        size: int = 0,
        held: Share | None = None,
        who: str = "",
        through: Sequence[asyncio.Future[Any]] = (),
        at: At | None = None,
    ) -> None:
        """Give a place back whose client gave up, once the model server is through with what it was sent.

        It does not hear of it, and goes on: a place given back at once would let who never waits have as many requests
        there as it likes.

        Args:
            ended: each is done when the server is, True or an answer where it answered, or has had as long as it may
                take.
            started: when the server was asked, on the monotonic clock.
            size: of the request, in bytes.
            held: for its key, holds the request until then, which may still be on its way.
            who: the key that had it.
            through: each is done when the server is, where that may be later.
            at: as of `leave`.
        """

        def leave(answered: bool) -> None:
            self.left -= 1
            if answered or all(each.done() for each in through):
                self.leave(time.monotonic() - started if answered else None, size, who, at)
            else:
                self.outlast(None, size, who, through, at)

        self.left += 1
        leave_once_through(ended, leave, size, held)

    def abandon(self, seconds: float, who: str = "", ended: Sequence[asyncio.Future[Any]] = (), size: int = 0) -> None:
        """Give a place back, whose client gave up after so many seconds, once its answer would have come.

        Of its key's share of the model it goes on to count, as the server may be at work on it: until that is through,
        or, where nothing tells, for as long as one of the key's takes.

        Args:
            seconds: since the server was asked.
            who: the key that had it.
            ended: each is done when the server is through, where it keeps no place meanwhile.
            size: of the request, in bytes.
        """
        loop = asyncio.get_running_loop()
        work = self._work_of(who, self._clock() - seconds) if who else None
        left = self.latency - seconds
        if work is not None and not ended:
            loop.call_later(max(0.0, left, work.account.met_s - seconds), self._is_over, work, size)
        elif work is not None:
            self._follow(work, ended, size)
        if left > 0:
            self.left += 1
            loop.call_later(left, self._free_left)
        else:
            self._free()

    def _free_left(self) -> None:
        self.left -= 1
        self._free()

    def _follow(self, work: Work, ended: Sequence[asyncio.Future[Any]], size: int) -> None:
        """End what was given up when its server is through, or soon where it only hangs."""

        def over() -> None:
            late.cancel()
            self._is_over(work, size)

        def hangs() -> None:
            if not work.account.heavy:
                self._is_over(work, size)

        late = asyncio.get_running_loop().call_later(LEFT_S, hangs)
        once_through(ended, over)

    def _is_over(self, work: Work, size: int, *, answered: bool = False) -> None:
        if not work.over:
            work.fairness.end(work, size, self._clock(), answered=answered)
            self._wake_all()

    def opens(self) -> None:
        """The time of this model's answers does not tell how busy it is: there are as many places as may be."""
        self.limit = float(self.bounds.most)

    def wanted(self) -> None:
        """More would be asked if there were more places: the limit may grow as if all were in use."""
        self._peak = max(self._peak, int(self.limit))

    def late(self) -> OverloadedError:
        """What refuses a request that waited elsewhere for a place, in vain."""
        self.shed += 1
        return self._error(self.wait_s, "its turn did not come in time")

    def take(self, who: str = "", priority: int = 5) -> None:
        """Take a place that `free_for` has just told of; to be given back in the same way."""
        self._note(self.seat(self.fairness.of(who, priority, self._clock()) if who else NOBODY), who)

    def _note(self, work: Work | None, who: str) -> None:
        """Who gives this one back says only whose it is."""
        if work is not None:
            works = self._works.get(who)
            if works is None:
                self._works[who] = deque((work,))
            else:
                works.append(work)

    def _work_of(self, who: str, begun: float = -math.inf, at: At | None = None) -> Work | None:
        """One of a key's that have places, which is over with it: of those begun by then the last, else the oldest.

        Args:
            at: where it went, if one of the key's did; None for any.
        """
        works = self._works.get(who)
        if works is None:
            return None
        there = works if at is None else [each for each in works if each.sent_to == at]
        found, *later = there or works
        for each in later:
            if each.begun > begun:
                break
            found = each
        works.remove(found)
        if not works:
            del self._works[who]
        return found

    def take_back(self, who: str, begun: float = math.inf) -> None:
        """Give a place back as if it had not been taken: nothing was sent, or what was waits for other than the model.

        Args:
            who: the key that has it.
            begun: as of `leave`; else it is the key's newest.
        """
        if who and (work := self._work_of(who, begun)) is not None:
            work.fairness.undo(work)
        self._free()

    def _free(self) -> None:
        self.in_flight -= 1
        self._wake_all()

    def _wake_all(self) -> None:
        # The others first, so that they take turns where `most`, or a key's part, is what all wait for.
        for each in self.fairness.sharers:
            if each.waiting and each is not self:
                each.wake()
        if self._queues.waiting:
            self.wake()

    def wake(self) -> None:
        """Let those have places who wait, as far as they may."""
        while self._room and (waiter := self._next()) is not None:
            if not waiter.place.done():  # its client has left, and will be told
                self.take(waiter.who, waiter.priority)
                waiter.place.set_result(None)
        self._look_later()

    def _look_later(self) -> None:
        """Wake when time alone gives a key its turn."""
        if self._later is not None:
            self._later.cancel()
            self._later = None
        if self.waiting and self._room:
            self._later = asyncio.get_running_loop().call_later(self.fairness.next_s(self._clock()), self.wake)

    def _whose(self, now: float) -> tuple[int, str] | None:
        """Priority and key of whose turn it is: of those that may, who has used least; among equals in turn."""
        fairness, limit = self.fairness, self._limit_now
        for priority, keys in self._queues:
            if keys == [""]:
                return priority, ""
            accounts = ((fairness.of(who, priority, now), who) for who in keys)
            may = [(account.used, who) for account, who in accounts if fairness.may(account, limit, now, self.model)]
            if may:
                return priority, min(may, key=lambda each: each[0])[1]
        return None

    def _next(self) -> Waiter | None:
        found = self._whose(self._clock()) if self.waiting else None
        return None if found is None else self._queues.next_of(*found)

    def _expire(self, waiter: Waiter) -> None:
        if waiter.place.done():
            return
        loop = asyncio.get_running_loop()
        left = waiter.until - loop.time()
        if left > 0 and waiter.who and self.fairness.is_behind(waiter.who, self._clock()):
            waiter.timer = loop.call_later(min(left, self.wait_s), self._expire, waiter)
        else:
            self._send_away(waiter, "its turn did not come in time")

    def _displace(self, priority: int, who: str) -> None:
        """Make room among those that wait, or refuse the newcomer."""
        last = self._queues.displaced_by(priority, who)
        if last is None:
            self._refuse(self.wait_s, f"{self.waiting} requests wait")
        else:
            self._send_away(last, "requests of a better priority, or of a key with fewer, took its place")

    def _send_away(self, waiter: Waiter, why: str) -> None:
        self._queues.drop(waiter)
        self.shed += 1
        waiter.place.set_exception(self._error(self.wait_s, why))

    def _refuse(self, retry_after_s: float, why: str) -> None:
        self.shed += 1
        raise self._error(retry_after_s, why)

    def _error(self, retry_after_s: float, why: str) -> OverloadedError:
        return OverloadedError(
            f"the model {self.model!r} has more requests than it can answer in time",
            why=why,
            mend="wait as long as Retry-After says, then try again",
            retry_after_s=min(retry_after_s, 60.0),
        )

    def _learn(self, seconds: float, kind: int, who: str) -> None:
        self._answers += 1
        self._seconds += seconds
        if seconds > self._longest:
            self._longest = seconds
        found = self._kinds.get(kind)
        if found is None:
            self._kinds[kind] = _Kind(1, seconds, who)
        else:
            found.answers += 1
            if seconds < found.shortest:
                found.shortest, found.whose = seconds, who
        if self._answers < WINDOW_ANSWERS or (now := self._clock()) - self._from < WINDOW_S:
            return
        mean = self._seconds / self._answers
        self._slowest = max(self._longest, FADING * self._slowest)
        self.latency += (mean - self.latency) * (SMOOTHING if self.latency else 1.0)
        bounds = self.bounds
        # The fastest answer is an idle server's: under load it may only fall, or the target would follow the load.
        quiet = self._peak <= 2 * bounds.least
        for each, of_kind in self._kinds.items():
            shortest, whose = of_kind.shortest, of_kind.whose
            fastest, since, of = self._fastest.get(each, (math.inf, -math.inf, ""))
            # Where the limit is as low as it gets, and answers stay slow, it is not their number that makes them so.
            slow = now - self._lowest_from > LOWEST_FOR_S and shortest > self._target_of(each)
            # One whose requests are lighter than most others' may have asked before them.
            strange = bool(of) and not self.fairness.is_usual(of)
            if shortest < fastest or strange or (quiet and (now - since > FASTEST_FOR_S or slow)):
                self._fastest[each] = shortest, now, whose
        weighed = (found.answers * self._target_of(each) for each, found in self._kinds.items())
        self._target = sum(weighed) / self._answers
        excuse_s = self.fairness.excuse_s()
        if self.beside is not None:
            excuse_s += self.beside.excuse_s()
        if mean > self._target + excuse_s:
            self.limit = max(float(bounds.least), self.limit * SHRINK)
            if self.limit <= bounds.least:
                self._lowest_from = min(self._lowest_from, now)
        elif self._peak >= int(self.limit):
            self.limit = min(float(bounds.most), self.limit + max(1.0, 0.05 * self.limit))
            self._lowest_from = math.inf
        self._begin_window(now)
