"""What the keys that ask one model take of its time: whose turn is next, and what a key may have there beside others.

A request can't be taken back once the model server has it, and is answered in the order in which it came. So what
counts is decided before: turns go by seconds of the model's time, not by requests (start-time fair queueing: Goyal, Vin
and Cheng, SIGCOMM 1996, with what a request costs learnt when it ends, as in the virtual token counter of Sheng et al.,
"Fairness in Serving Large Language Models", OSDI 2024); of all keys together no more are with the server than keep it
at work (its depth: Jin, Chase and Kaur, "Interposed Proportional Sharing for a Storage Service Utility", SIGMETRICS
2004, section 3.3); what a key has there beside others takes, all in all, no longer than an answer to the others may;
and requests of which one alone takes longer are heavy: they keep the instances at work and no more. As far as the
others use the model, heavy ones are kept back: they leave an instance free, and where there is but one, they have a
part of the time, which is never less than their keys' share.

What a request takes is seen from outside, as the time from when an instance could begin with it, as it was sent or as
one before it was answered, until its answer: of all instances' time. What is answered in one moment may have been one
batch, which shares its time by size; where the order is known in which a model works, only what can have been in it.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping

from serve.gateway.access.accounts import (
    BATCHED,
    FACTOR,
    FALLS,
    FEWEST,
    LONGEST_WAIT_S,
    SHORTEST_TARGET_S,
    SOON_S,
    TRIES,
    Account,
    NoSilence,
    Overdue,
    Sharer,
    Silence,
    Work,
    Works,
)
from serve.gateway.access.at_server import BATCH_S, READ_S, Answered, AtServer
from serve.gateway.access.model_queues import UNKNOWN, ModelQueues
from serve.gateway.health.flights import NO_NEEDS, At, Needs

__all__ = ["Fairness"]

BESIDE_S = 5.0  # after its last request, a key counts as one that is beside others
STANDARD_S = (
    60.0  # after its last request, a key's tell what takes long, so that it can come back beside those of others
)
NEW_AT_ONCE = 4  # first requests of keys, until one of them takes long
KNOWN_S = 300.0  # after its last request, what a key's requests take is remembered
LOOK_S = 0.1
LEAST_S = 0.0001  # that any request takes
LEAST_ODD_S, ODD_PART = 60.0, 10.0  # for so long, or so many times what it took, no other odd request is forgiven a key
HEAVY_SHARE = 0.25  # of the time, that all heavy requests have at least
GUARDS_S = 5.0  # that a light request with the server keeps heavy ones back: longer than it waits behind their batches
KEPT_S = 1.0  # that heavy ones are kept back ahead, at most, or that a key saves of its part
SOON = 1.5  # times a key's usual pause, in which its next request is waited for
GROWS = 1.5  # times what fills the batches that were seen may be there: else larger ones never would be
TRIES_AGAIN_S = 60.0  # ... and again after so long, ...
LONGEST_TRY_S = 0.5  # ... where one takes no longer: others wait behind all of them
PAUSES = 0.3  # smoothing of a key's pauses
MOST = 4096


class Fairness:
    """The keys of one model, by whatever way they ask it: alone, with lists, through an ensemble, or by another's name.

    Args:
        target_s: what an answer may take, where it is set.

    Attributes:
        instances: of the model, that work at the same time; of several, of that which has fewest.
        servers: that have them, each with a queue of its own; those that are ready, as far as is known.
        works: by name, of the models that share it, as far as is known.
        any_number: whether an instance may work on any number of requests at the same time.
        most_together: requests that an instance answers at a time at most; 0 where nobody knows.
        waits_s: of the only model, as of `Works`; infinite where there are others.
        queues: what is with the servers.
        heavy: requests of heavy keys that are with the server, and not overdue.
        silence: what its servers hide by being silent.
        sharers: those who are to look at who waits with them, if anybody does, when an answer has come.
    """

    def __init__(self, target_s: float | None = None) -> None:
        self.instances = self.servers = 1
        self.works: Mapping[str, Works] = {}
        self.any_number = False
        self.most_together = 0
        self.waits_s = math.inf
        self.heavy = 0
        self.silence: Silence = NoSilence()
        self.sharers: list[Sharer] = []
        self._set_target_s = target_s
        self._accounts: OrderedDict[str, Account] = OrderedDict()
        self._least = 0.0  # used by whom was served last
        self.queues = ModelQueues(self)
        self._unsettled: dict[AtServer, None] = {}  # those that have answered lately
        self._at_once: list[Account] = []  # whose requests were answered in much less time than one takes
        self._at_once_until = -math.inf
        self._held = 0  # requests with the server as the first of them was answered
        self._looked_at = -math.inf
        self._keys = 1  # that are beside each other
        self._share = 1.0  # of the time, for each heavy key
        self._met_s = 0.0  # what a heavy request takes that was with the server lately
        self._in_flight = self._there = 0  # requests with the server, and keys that have any there
        # Heavy ones that are with a server, by the models whose instances they may be with.
        self._heavy_of: Counter[str] = Counter()
        self._overdue: dict[Work, Overdue] = {}  # those that were not answered in time, the oldest first
        self._new: dict[Work, None] = {}  # of keys of which nothing is known, the oldest first
        self._doubted_at = -math.inf  # when one of them was last answered that took long
        self._is_usual_known = False
        self._is_any_unknown = False  # of several keys of which little is known, and that had no answer yet
        self._batches_heavy = 1.0  # heavy requests that an instance answers together, at most
        self._there_of: Counter[str] = Counter()  # that are with the server and not overdue, by the model asked
        self._depths: dict[str, int] = {}  # as of the last look
        self._instances_of = self.queues.instances_of
        self._batches = 1.0  # the most that an instance was seen to answer together, of those that are here
        self._guards: Counter[int] = Counter()  # light requests with the server, by priority
        self._guarding: deque[Work] = deque()  # they, and some that are over
        self._payers: Counter[int] = Counter()  # those among them that pay for all of it by what they use
        self._guard, self._guard_all = (self._guards,), (self._guards, self._payers)
        self._kept_part = 0.0  # of the time of late, that they were
        self._kept: dict[int, float] = {}  # by priority of the light ones: until when heavy ones are kept back

    def of(self, who: str, priority: int, now: float) -> Account:
        """The account of a key that asks."""
        found = self._accounts.get(who)
        if found is None or (now - found.seen > KNOWN_S and not found.in_flight):
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

    def may(self, account: Account, limit: float, now: float, model: str = "") -> bool:
        """Whether one more request of a key for a model may be with the server, of so many that are in all."""
        # One behind what is at work would be overdue, too; but what a light key has there keeps heavy ones back.
        if (
            account.unanswered
            and account.overdue >= max(1, self._instances_of[model])
            and (account.heavy or account.answers < FEWEST or account.target_s == math.inf)
        ):
            return False
        if account.target_s == math.inf:
            return True
        held = account.in_flight - account.overdue
        if self._is_full(held, model):
            return False
        if account.heavy:
            return self._may_be_heavy(account, limit, now, model)
        if not held:
            return not (account.is_new and self._is_usual_known) or self._may_be_new(now)
        if account.answers < FEWEST and (account.is_new or self._is_any_unknown):
            return False
        if account.large and self._in_flight < self._most_of(account) and self._kept_until(account, now) <= now:
            return True
        if held + 1 > max(1.0, limit - 1.0):  # never the last place
            return False
        return account.answers > 0 and account.met_s <= account.target_s >= (held + 1) * account.cost

    def _may_be_heavy(self, account: Account, limit: float, now: float, model: str) -> bool:
        """Whether one more heavy request may be: of those of each model whose instances it may be with."""
        together = self._together(account) if account.in_flight else self._batches_heavy
        is_kept = self._kept_until(account, now) > now
        for step in self.queues.works_of(model).steps:
            instances = self._instances_of[step]
            is_long = instances > 1 and (account.overdue > 0 or now - account.long_at < STANDARD_S)
            if not (is_kept or is_long):
                most = float(_filling(instances, together))
            elif instances > 1:
                most = max(1.0, min(instances, limit) - 1)
            else:
                most = float(now >= account.not_before)
            if self._heavy_of[step] >= most:
                return False
        return True

    def _is_full(self, held: int, model: str) -> bool:
        """Whether the server has all that keeps a model at work, for a key that has so many requests there."""
        there = self._there_of[model] - self.heavy
        try:
            most = self._depths[model]
        except KeyError:
            most = self._depths[model] = self._depth(model)
        if self.any_number:  # nobody knows what does: one of each key, in any case
            return held > 0 and there - self._there >= most
        return there >= most and there - self.silence.astray >= most

    def _depth(self, model: str) -> int:
        """Requests that are not heavy, of all keys together: one at work for each instance and one that waits.

        More where an instance answers several together, or where another model goes on with what this one has done.
        """
        instances = self._instances_of[model]
        filling = int(GROWS * (instances + 1) * self._batches) if self._batches >= BATCHED else 0
        return max(3, (len(self.queues.works_of(model).asks) + 1) * instances, filling)

    def _may_be_new(self, now: float) -> bool:
        """Whether one more request of a key of which nothing is known may be with the server.

        Once one takes long, one does at a time, as all of them may; what hangs there keeps no others out for good.
        """
        while self._new and now - (oldest := next(iter(self._new))).begun > GUARDS_S:
            del self._new[oldest]
        doubted = now - self._doubted_at < BESIDE_S
        if self._new and not doubted:
            oldest = next(iter(self._new))
            doubted = now - oldest.begun > oldest.account.target_s
        return len(self._new) < (max(1, self.instances - 1) if doubted else NEW_AT_ONCE * self.instances)

    def _most_of(self, account: Account) -> int:
        """Heavy requests that keep all instances at work, such as a key's: one each, or batches and one that waits."""
        return _filling(self.instances, self._together(account))

    def _together(self, account: Account) -> float:
        """How many of a key's requests an instance answers at a time: as seen, or as the model may, if that is less."""
        return min(account.together, self.most_together or account.together)

    def _kept_until(self, account: Account, now: float) -> float:
        """Until when a heavy key is kept back, for those of no worse priority."""
        until = max((at for priority, at in self._kept.items() if priority <= account.priority), default=-math.inf)
        self._let_go(now)
        # Between batches, what waits for who uses little would leave the server without work.
        guards = self._guards if self._together(account) < BATCHED else self._payers
        if any(count for priority, count in guards.items() if priority <= account.priority):
            until = max(until, now + SHORTEST_TARGET_S)
        return until

    def _keep_back(self, account: Account, now: float) -> None:
        """One of a light key's requests was answered: heavy ones are kept back for what it used, many times over.

        And until its next one, where that is to come soon: for its part of the time, all in all.
        """
        used_s = for_s = FACTOR * account.cost
        until_next_s = max(SHORTEST_TARGET_S, SOON * account.pause_s if account.pause_s < SOON_S else 0.0)
        if used_s < until_next_s and account.spent <= now:
            for_s = until_next_s
            account.spent = max(account.spent, now - KEPT_S) + self._keys * (for_s - used_s)
        most = now + max(KEPT_S, for_s)
        self._kept[account.priority] = min(max(self._kept.get(account.priority, now), now) + for_s, most)
        account.keeps_until = min(max(account.keeps_until, now) + for_s, most)

    def _keep_back_no_more(self, now: float) -> None:
        """Keys that are kept back themselves from here on keep nobody back by what they did before."""
        for work in self._guarding:
            if work.guards and (work.account.heavy or work.account.large):
                self._unguard(work)
        left: defaultdict[int, float] = defaultdict(float)
        longest = KEPT_S
        for each in self._accounts.values():
            if each.keeps_until > now and not (each.heavy or each.large):
                left[each.priority] += each.keeps_until - now
                longest = max(longest, each.keeps_until - now)
        self._kept = {priority: now + min(seconds, longest) for priority, seconds in left.items()}

    def next_s(self, now: float) -> float:
        """In how many seconds those who wait are to be looked at again, whatever is answered by then."""
        heavy = [each for each in self._accounts.values() if each.heavy]
        times = (at for each in heavy for at in (each.not_before, self._kept_until(each, now)))
        return min(LOOK_S, *(at - now for at in times if at > now), LOOK_S)

    def excuse_s(self) -> float:
        """How much longer answers of the last moments may have taken, as they may have waited behind heavy ones."""
        met_s, there = self._met_s, (each.met_s for each in self._accounts.values() if each.heavy and each.in_flight)
        self._met_s = max(there, default=0.0)
        return max(met_s, self._met_s)

    def needs(self, who: str, model: str) -> Needs:
        """What a request of a key for a model keeps at work at one of several servers; nothing where there is one."""
        if self.servers == 1 or self.any_number or (works := self.works.get(model)) is None:
            return NO_NEEDS
        account = self._accounts.get(who)
        each = {step: self.works.get(step, UNKNOWN).instances for step in works.steps}
        is_long = account is not None and account.heavy
        return Needs(each, all_of_them=len(works.asks) > 1, by_version=bool(works.latest), long=is_long)

    def is_usual(self, who: str) -> bool:
        """Whether the requests of a key are such as most others': only those tell how busy the model is."""
        account = self._accounts.get(who)
        return account is None or account.is_usual

    def is_behind(self, who: str, now: float) -> bool:
        """Whether what a key's requests wait for is another's that may take longer than an answer to them.

        They would wait for it with the server, too.
        """
        account = self._accounts.get(who)
        if account is None or not self.queues.at_work or account.heavy or account.large:
            return False
        longest = next((each for each in self.queues.at_work if each.account.in_flight), None)
        if longest is None:
            return False
        is_long = longest.account.heavy or longest.account.is_new or now - longest.at > account.target_s
        return is_long and longest.account is not account

    def turn_s(self, account: Account, count: int) -> float:
        """How long so many requests of a heavy key wait for their turn, at least, kept back as much as of late."""
        if not (account.heavy or account.large):
            return 0.0
        return count * account.cost * (1.0 + self._kept_part * (1.0 / self._share - 1.0))

    def alone_s(self, account: Account) -> float:
        """How much longer than others' a heavy key's requests may wait: as long as they might be with the server."""
        return FACTOR * min(account.took, default=0.0) if account.heavy or account.large else 0.0

    def comes(self, account: Account) -> None:
        """The first of its requests begins to wait: its turn is behind those that wait for as little already."""
        account.used = max(account.used, self._least)

    def begin(self, account: Account, now: float, model: str = "") -> Work:
        """A request for a model is sent to the server."""
        if not account.in_flight:
            pause_s = now - account.answered_at
            account.pause_s += PAUSES * (min(pause_s, 2 * SOON_S) - account.pause_s)
            self._there += 1
        account.in_flight += 1
        if account.used > self._least:
            self._least = account.used
        account.used = self._least + account.cost
        steps = self.works[model].steps if model in self.works else UNKNOWN.steps
        is_beside = not account.heavy and (True if self._overdue else self.heavy > 0)
        work = Work(self, account, now, model, steps, self.queues.anywhere, beside_heavy=is_beside)
        self._in_flight += 1
        self._there_of[model] += 1
        self.queues.enter(work, now)
        if account.answers < FEWEST and account.is_new:
            self._new[work] = None
        if account.heavy:
            self.heavy += 1
            self._heavy_of.update(work.steps)
            self._met_s = max(self._met_s, account.met_s)
            return work
        if account.large or account.target_s == math.inf:  # there are no others whom it would keep back
            return work
        pays = FACTOR * account.cost >= SHORTEST_TARGET_S
        if pays or account.spent <= now:
            work.guards = self._guard_all if pays else self._guard
            for each in work.guards:
                each[account.priority] += 1
            work.priority = account.priority
            self._guarding.append(work)
            if self._guarding[0].over or now - self._guarding[0].begun > GUARDS_S:
                self._let_go(now)
        return work

    def begin_uncounted(self, model: str, at: At, now: float) -> Work:
        """A request that counts for no key goes to a server: what stands behind it takes nothing meanwhile."""
        steps = self.queues.works_of(model).steps
        work = Work(self, Account(), now, model, steps, self.queues.anywhere, beside_heavy=False)
        self.queues.enter(work, now)
        self.sent(work, at, now)
        return work

    def end_uncounted(self, work: Work, now: float) -> None:
        """The server is through with it; what was answered with it, or is read before it, has its own time alone."""
        work.over = True
        if self._unsettled:
            self._settle_all(now)
        self._answers(work.there, now)
        work.there.is_any_due |= work.at < math.inf
        since = self.queues.since(work, now)
        seconds = (now - since) / self._instances_of[work.runs]
        work.there.batch.append(Answered(work, 1, 0.0, since, seconds, now))
        self.queues.leave(work, now, since)

    def _answers(self, there: AtServer, now: float) -> None:
        """An answer has come."""
        if there not in self._unsettled:
            there.began, there.last = now, there.answered_at
            self._unsettled[there] = None
        there.answers(now)

    def sent(self, work: Work, at: At, now: float) -> None:
        """It goes to a server, for a model; see `ModelQueues.move`."""
        work.sent_to = at
        if self.queues.is_split and not work.over and work.overdue is None:
            self.queues.move(work, at, now)

    def undo(self, work: Work) -> None:
        """It was not sent after all."""
        account = work.account
        work.over = True
        account.in_flight -= 1
        account.used -= account.cost
        self._over(work)

    def outlasts(self, work: Work, now: float) -> None:
        """A request was not answered in time; the server goes on with it, for which its key pays.

        It takes nobody's place any longer: how many others may have with the server goes without it.
        """
        account = work.account
        if self._was_silent(work, now):
            self.undo(work)
            return
        self._there_of[work.model] -= 1
        if account.heavy:
            self.heavy -= 1
        self._new.pop(work, None)
        if work.guards:
            self._unguard(work)
        is_odd = not (account.heavy or account.large) and account.answers >= FEWEST and now >= account.odd_until
        work.overdue = self._overdue[work] = Overdue(account.cost if is_odd else None)
        self._line_up(work.sent_to.server, now)
        account.overdue += 1
        account.unanswered = True
        self._charge_overdue(work, work.overdue, now)
        self._looked_at = -math.inf

    def _line_up(self, server: str, now: float) -> None:
        """Of what is overdue at a server, as many as it has instances are at work; others wait for them.

        Where it works on requests in their order, that is known already.
        """
        if not server:
            return
        there: Counter[str] = Counter()
        for work, overdue in self._overdue.items():
            if work.sent_to.server != server or work.there.is_in_order:
                continue
            of_one = ((step, self._instances_of[step] // self.servers) for step in work.steps)
            behind = any(there[step] >= max(1, instances) for step, instances in of_one)
            if overdue.behind and not behind:
                overdue.ahead = now
            overdue.behind = behind
            there.update(work.steps)

    def _was_silent(self, work: Work, now: float) -> bool:
        """Whether a silent server may be why a request took as long."""
        return (
            work.begun < self.silence.over_at_of(work.sent_to.server)
            and now - work.begun > SHORTEST_TARGET_S
            and not work.account.heavy
        )

    def _charge_overdue(self, work: Work, overdue: Overdue, now: float) -> None:
        """For what it has taken by now, once that is more than its key's take: what waits behind others took nothing.

        Where it is not known which server has it, that is known when it ends, if it may be behind a heavy one.
        """
        account = work.account
        if work.at == math.inf or overdue.behind or self.silence.hides(work.sent_to.server):
            return
        if work.beside_heavy and not work.there.is_in_order:
            return
        if overdue.charged or (now - work.at) / self._instances_of[work.runs] > account.cost:
            self._charge_in_all(work, overdue, now)

    def _charge_in_all(self, work: Work, overdue: Overdue, now: float) -> None:
        account, instances = work.account, self._instances_of[work.runs]
        if overdue.since == math.inf:
            overdue.since = max(self.queues.since(work, now), overdue.ahead)
        seconds = max(overdue.charged, (now - overdue.since) / instances)
        if overdue.charged:
            account.charge_more(overdue.charged, seconds)
        else:
            account.charge(seconds)
        overdue.charged = max(seconds, LEAST_S)
        was_alone = self.instances == 1 or work.at == work.begun or work.there.is_in_order
        if account.answers <= FEWEST and was_alone:
            account.alone_s = seconds * instances / self.instances
            account.doubtful = self._is_usual_known and seconds > account.target_s
            if account.doubtful:
                self._doubted_at = now

    def _end_overdue(self, work: Work, overdue: Overdue, now: float) -> None:
        """The server is through with one that was not answered in time, or nobody waits to know it any longer."""
        account = work.account
        was_behind = overdue.behind and overdue.usual_s is not None
        if not overdue.charged and (was_behind or self._was_silent(work, now)):
            account.used -= account.cost
        else:
            self._charge_in_all(work, overdue, now)
            if overdue.usual_s is None or overdue.charged <= account.target_s:
                account.saw(overdue.charged, now)
                account.took.append(overdue.charged * self._instances_of[work.runs])
            else:
                self._forgive(account, overdue, overdue.usual_s, now)
        if overdue.charged * self._instances_of[work.runs] > LONGEST_WAIT_S:
            account.long_at = now
        account.seen = account.answered_at = now
        work.over = True
        account.in_flight -= 1
        self._over(work, now)
        if overdue.usual_s is not None:
            self._looked_at = -math.inf
        elif account.heavy:
            account.not_before = now + overdue.charged * (1.0 / self._share - 1.0)
        elif not account.large and account.target_s < math.inf:
            self._keep_back(account, now)

    @staticmethod
    def _forgive(account: Account, overdue: Overdue, usual_s: float, now: float) -> None:
        """One odd request of a key whose others are as most are: the model hung, or another's was in its way.

        For so long the next one will be believed.
        """
        account.used -= overdue.charged - usual_s
        account.cost = min(account.cost, usual_s)
        account.odd_until = now + max(LEAST_ODD_S, ODD_PART * overdue.charged)

    def _end_gone(self, answered: Work, now: float) -> None:
        """One was answered that all instances seemed too busy for: an overdue one before it is with none of them.

        As where a model is loaded anew, and the old one goes on with what it has.
        """
        for work, overdue in self._overdue.items():
            is_there = work.there is answered.there and work.runs == answered.runs
            if is_there and work.at < math.inf and work.begun < answered.begun:
                self._end_overdue(work, overdue, now)
                return

    def end(self, work: Work, size: int, now: float, *, answered: bool = False) -> None:
        """The server is through with a request, however it ended; `answered` is whether by an answer that is one."""
        account, begun = work.account, work.begun
        if begun < self.silence.over_at and work.overdue is None and self._was_silent(work, now):
            self.undo(work)
            account.seen = account.answered_at = now
            return
        there = work.there
        if self._unsettled:
            self._settle_all(now)
        self._answers(there, now)
        if work.over:  # what was settled just now has shown that it is
            return
        if work.overdue is not None:
            there.is_any_due |= work.at < math.inf
            self._end_overdue(work, work.overdue, now)
            return
        work.over = True
        account.unanswered = account.unanswered and not answered
        account.in_flight -= 1
        since = self.queues.since(work, now)
        is_in_order = there.is_in_order
        instances = self._instances_of[work.runs]
        seconds = (now - since) / instances
        more = max(0.0, seconds - account.cost)
        is_due = work.at < math.inf
        there.is_any_due |= is_due
        late_s = 0.0 if is_due or since < now else (now - max(begun, there.before)) / instances
        most_s = account.cost if not is_due and self.queues.may_have_been_behind(work, now) else math.inf
        there.batch.append(Answered(work, size or 1, more, since, seconds, now, most_s))
        account.used += more  # until it is known what else was of its batch: whose turn is next is asked now
        account.took.append(now - begun)
        if now - (since if is_in_order else begun) > LONGEST_WAIT_S:
            account.long_at = now
        if account.answers < FEWEST:
            alone_s = seconds if self.instances == 1 or is_in_order else (now - begun) / instances
            self._saw_first(account, alone_s, now, at_once=work.at == begun)
        if now > self._at_once_until:
            self._count_at_once()
            self._at_once_until = now + max(BATCH_S, min(account.cost * self.instances / 2, min(account.took) / 10))
            self._held = self._in_flight
        self._at_once.append(account)
        account.seen = account.answered_at = now
        self._over(work, now, since)
        if account.heavy:
            account.not_before = now + max(seconds, late_s) * (1.0 / self._share - 1.0)
        elif not account.large and account.target_s < math.inf:
            self._keep_back(account, now)
        if self._overdue and answered and not is_due and is_in_order and not there.passes_on:
            there.overtook = work

    def _saw_first(self, account: Account, seconds: float, now: float, *, at_once: bool) -> None:
        """One of the first requests of a key was answered, so long after the server could begin with it at most."""
        if self.instances > 1:  # others are answered meanwhile
            account.alone_s = min(account.alone_s, seconds if at_once else math.inf)
        account.doubtful = self._is_usual_known and seconds > account.target_s
        if account.doubtful:
            self._doubted_at = now

    def _over(self, work: Work, now: float = -math.inf, since: float = math.inf) -> None:
        if self._new:
            self._new.pop(work, None)
        self.queues.leave(work, max(now, work.there.answered_at), since)
        self._in_flight -= 1
        self._there -= not work.account.in_flight
        if work.overdue is None:
            self._there_of[work.model] -= 1
            self.heavy -= work.account.heavy
        else:
            work.account.overdue -= 1
            del self._overdue[work]
            self._line_up(work.sent_to.server, now)
        if work.account.heavy:
            self._heavy_of.subtract(work.steps)
        if work.guards:
            self._unguard(work)

    def _let_go(self, now: float) -> None:
        """What is with the server for long may wait there for a heavy request: for a slot, until its sequence ends."""
        while self._guarding and (self._guarding[0].over or now - self._guarding[0].begun > GUARDS_S):
            gone = self._guarding.popleft()
            if gone.guards:
                self._unguard(gone)

    def _unguard(self, work: Work) -> None:
        for each in work.guards:
            each[work.priority] -= 1
        work.guards = ()

    def _settle_all(self, now: float) -> None:
        """Charge what was answered in moments that are over: the one that was due then may be read last."""
        for there in [*self._unsettled]:
            waits = there.is_in_order and not there.is_any_due
            if now - there.answered_at > BATCH_S and not (waits and now - there.began <= READ_S):
                del self._unsettled[there]
                self._settle(there)

    def _settle(self, there: AtServer) -> None:
        """Charge what a server answered in one moment, each batch by itself."""
        answered, overtook, is_any_due = there.batch, there.overtook, there.is_any_due
        there.batch, there.overtook, there.is_any_due = [], None, False
        if overtook is not None and not is_any_due:
            self._end_gone(overtook, there.answered_at)
        for together in self.queues.batches(there, answered, overtaking=not is_any_due):
            if len(answered) == self.instances == 1:
                account = together[0].work.account
                account.alone_s = min(account.alone_s, together[0].seconds)
            self._charge(together, there.answered_at)

    def _charge(self, batch: list[Answered], now: float) -> None:
        """Each for what it is known to take, and by its size."""
        if len(batch) == 1:
            account, seconds = batch[0].work.account, batch[0].seconds
            account.used -= batch[0].more
            account.saw(seconds, now)
            self._pay(account, seconds)
            return
        seconds = max(each.seconds for each in batch)
        accounts = [each.work.account for each in batch]
        if len(set(accounts)) == 1:
            accounts[0].saw(seconds, now)
        shares = [
            each.size * max(account.cost if account.answers else seconds, LEAST_S)
            for each, account in zip(batch, accounts, strict=True)
        ]
        whole = sum(shares)
        for each, account, share in zip(batch, accounts, shares, strict=True):
            account.used -= each.more
            self._pay(account, seconds * share / whole)

    def _pay(self, account: Account, seconds: float) -> None:
        account.charge(seconds)
        # From here on it may have more than one there, if it is not heavy.
        if account.answers == FEWEST and self._takes_s(account) > account.target_s:
            self._looked_at = -math.inf

    def _count_at_once(self) -> None:
        """How many requests of a key, or of such as take as long, were answered together."""
        for account in set(self._at_once):
            alike = sum(2 * each.cost >= account.cost for each in self._at_once)
            could = self._held >= self._most_of(account)
            # Each instance may just have answered one.
            together = alike if alike > self.instances else 1
            account.met(min(together, self.most_together or together), could)
        self._at_once.clear()

    def _takes_s(self, account: Account) -> float:
        """What one request of a key takes of the model's time, as far as is known."""
        if self.instances > 1 and len(account.took) == FEWEST and not self.queues.is_known:
            return max(account.met_s, min(account.took) / self.instances)
        return account.met_s

    def _first_s(self, account: Account) -> float:
        """The same of a key of which few were answered: by those alone that had the server for themselves."""
        return account.alone_s if self._is_usual_known and account.alone_s < math.inf else 0.0

    def _look(self, now: float) -> None:
        """Who is beside whom."""
        self._looked_at = now
        self._settle_all(now)
        takes_yet: dict[Account, float] = {}
        for work, overdue in self._overdue.items():
            self._charge_overdue(work, overdue, now)
            takes_yet[work.account] = max(takes_yet.get(work.account, 0.0), overdue.charged)
        if (servers := self.silence.servers) not in (0, self.servers):  # those that are gone work on nothing
            self.instances = max(1, self.instances // self.servers * servers)
            self.servers = servers
        kept = any(until > now for until in self._kept.values())
        self._kept_part += FALLS * (kept - self._kept_part)
        while self._accounts:
            who, oldest = next(iter(self._accounts.items()))
            if oldest.in_flight or (now - oldest.seen < KNOWN_S and len(self._accounts) <= MOST):
                break
            del self._accounts[who]
        there = [each for each in self._accounts.values() if each.in_flight or now - each.seen < STANDARD_S]
        there.sort(key=lambda each: each.priority)
        beside = [each for each in there if each.in_flight or now - each.seen < BESIDE_S]
        self._is_usual_known = sum(each.answers > 0 and not each.doubtful for each in beside) > 1
        few = [each.answers for each in beside if each.answers < FEWEST]
        self._is_any_unknown = 0 in few and len(few) > 2
        priorities = [each.priority for each in beside]
        heavies = 0
        kept_now = turned = False
        for target_s, each in self._targets(there):
            takes_s = self._takes_s(each) if each.answers >= FEWEST else self._first_s(each)
            if each in takes_yet:
                takes_s = max(takes_s, takes_yet[each])
            was, was_kept, each.heavy = each.heavy, each.heavy or each.large, takes_s > target_s
            if not each.heavy and bisect.bisect_right(priorities, each.priority) <= 1:  # it is alone
                target_s, each.light = math.inf, False
            each.target_s = target_s
            each.large = takes_s * (self.instances + 1) > target_s >= takes_s
            kept_now |= not was_kept and (each.heavy or each.large)
            turned |= was is not each.heavy
            heavies += each.heavy and (each.in_flight > 0 or now - each.seen < BESIDE_S)
            if takes_s * self.instances > LONGEST_TRY_S and (each in takes_yet or not each.batches):
                each.together, each.tried = 1.0, now
            elif each.together < BATCHED and now - each.tried > TRIES_AGAIN_S:
                each.together, each.tried = TRIES, now
        if turned:
            self._count_heavy()
        if kept_now:
            self._keep_back_no_more(now)
        self._keys = keys = len(beside)
        self._share = 1.0 if heavies in (0, keys) else max(1.0 / keys, HEAVY_SHARE / heavies)
        self._batches_heavy = max((self._together(each) for each in beside if each.heavy), default=1.0)
        self._batches = max((self._together(each) for each in beside), default=1.0)
        self.queues.look(self._unsettled)
        self._depths.clear()

    def _count_heavy(self) -> None:
        """Who is heavy has changed, with what is there."""
        waiting = itertools.chain.from_iterable(each for there in self.queues for each in there.next.values())
        heavy = [work for work in itertools.chain(self.queues.at_work, waiting) if work.account.heavy]
        self.heavy = sum(work.overdue is None for work in heavy)
        self._heavy_of = Counter(itertools.chain.from_iterable(work.steps for work in heavy))

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


def _filling(instances: int, together: float) -> int:
    """Requests that keep so many at work: one each, or so large batches and one that waits."""
    return instances if together < BATCHED else int((instances + 1) * together)


def _lower_median(ascending: list[float], without: float | None) -> float | None:
    """Of numbers, one of which may be left out; None for none."""
    if without is None:
        return ascending[(len(ascending) - 1) // 2] if ascending else None
    if len(ascending) < 2:
        return None
    middle = (len(ascending) - 2) // 2
    return ascending[middle + (bisect.bisect_left(ascending, without) <= middle)]
