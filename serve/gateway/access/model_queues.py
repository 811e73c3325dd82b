"""The queues in which requests that share an account are worked on, by server, model and version."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from typing import Protocol

from serve.gateway.access.accounts import FACTOR, LONGEST_WAIT_S, SHORTEST_TARGET_S, Work, Works
from serve.gateway.access.at_server import BATCH_S, READ_S, Answered, AtServer
from serve.gateway.health.flights import At

__all__ = ["UNKNOWN", "How", "ModelQueues"]

VERSIONS = "/versions/"
UNKNOWN = Works()


class How(Protocol):
    """How the models work; see `Fairness`."""

    instances: int
    servers: int
    works: Mapping[str, Works]
    most_together: int
    waits_s: float


class _Instances(dict[str, int]):
    """By model, on all servers; of one of which nothing is known, as many as that has which has fewest."""

    def __init__(self, how: How) -> None:
        super().__init__()
        self._how = how

    def __missing__(self, model: str) -> int:
        works = self._how.works.get(model.partition(VERSIONS)[0], UNKNOWN)
        self[model] = found = works.instances * self._how.servers or self._how.instances
        return found


class ModelQueues:
    """Those of the models that share an account.

    Args:
        how: the models work.

    Attributes:
        anywhere: what is in the only queue, or in any.
        each: of several, what is known to be in each.
        at_work: those that a server has begun with, the longest ago first.
        instances_of: by model, on all servers; as of the last look.
        is_split: whether there are several, so that it has to be told where each request goes.
        is_known: whether it is known in which order requests came to each.
    """

    def __init__(self, how: How) -> None:
        self._how = how
        self.anywhere = AtServer()
        self.each: dict[At, AtServer] = {}
        self.at_work: dict[Work, None] = {}
        self.instances_of = _Instances(how)
        self.is_split = self.is_known = False

    def __iter__(self) -> Iterator[AtServer]:
        yield self.anywhere
        yield from self.each.values()

    def works_of(self, model: str) -> Works:
        """How a model works, by its name, with a version or without."""
        return self._how.works.get(model.partition(VERSIONS)[0], UNKNOWN)

    def enter(self, work: Work, now: float) -> None:
        """One is sent; it is anywhere, until it is told where."""
        work.there.next[work.line][work] = None
        self._take_up(work.there, work.line, now)

    def move(self, work: Work, at: At, now: float) -> None:
        """One goes to a server, for a model, for the first time or after another.

        Where that works on requests in their order, what it has there is a queue of its own.
        """
        model, _, version = at.path.partition(VERSIONS)
        version = str(int(version)) if version.isdecimal() else version  # Triton takes 02 for 2
        there, line = self.anywhere, work.line
        takes: Collection[str] = work.takes
        works = self._how.works.get(model)
        if works is not None:
            work.runs = model
            if works.waits_s < math.inf:
                line = f"{model}{VERSIONS}{version or works.latest}" if works.latest else model
                takes = works.asks if works.bound else (line,)
                there = self._queue(At(at.server, works.bound or line))
        if there is work.there:
            return
        self.leave(work, now)
        work.there, work.line, work.takes, work.at, work.before = there, line, takes, math.inf, math.inf
        self.enter(work, now)

    def leave(self, work: Work, now: float, since: float = math.inf) -> None:
        """What a server had it has no more: its instances go on with what waits there.

        Args:
            since: when one began with it; infinite where it did not end there.
        """
        there = work.there
        if work.at == math.inf:
            del there.next[work.line][work]
            return
        del self.at_work[work]
        for step in work.takes:
            there.at_work_of[step] -= 1
        if there.passes_on:
            self._take_up(there, work.line, now, since)
            return
        for line, waiting in there.next.items():
            if waiting:
                self._take_up(there, line, now, since if line == work.line else math.inf)

    def look(self, unsettled: Collection[AtServer]) -> None:
        """See how each works by now, and forget those that have nothing, and are none of those that must stay."""
        how = self._how
        for there in self.each.values():
            self._knows(there)
        several = len(how.works) > 1 or any(each.latest for each in how.works.values())
        self.is_split = how.servers > 1 or several or bool(self.each)
        only = self.anywhere
        only.waits_s, only.most_together = how.waits_s, how.most_together
        only.is_in_order = how.waits_s < math.inf and not self.is_split
        in_order = all(each.waits_s < math.inf for each in how.works.values())
        self.is_known = only.is_in_order or (in_order and bool(self.each))
        self.each = {at: each for at, each in self.each.items() if each in unsettled or not each.idle}
        self.instances_of.clear()

    def may_have_been_behind(self, work: Work, now: float) -> bool:
        """Whether one that is answered before others may have stood behind one of another key's until then.

        That is with the next model by now, of which another instance was free. What began after others had overtaken it
        did not stand behind it there; at a later model it may, which a key is believed once.
        """
        there, account = work.there, work.account
        if not there.passes_on:
            return False
        found = False
        for each in self.at_work:
            if each.there is there and each.begun < work.begun and each.account is not account:
                found |= work.begun < each.overtaken_at or account not in each.overtaken_by
                each.overtaken_at = min(each.overtaken_at, now)
                each.overtaken_by = each.overtaken_by | {account}
        return found

    def instances_at(self, there: AtServer, step: str) -> int:
        """That work on what is in a queue, of a model."""
        instances = self.instances_of[step]
        return max(1, instances // self._how.servers) if there.at.server else instances

    def since(self, work: Work, now: float) -> float:
        """When an instance began with a request that is answered now, or with the batch that it is of."""
        there = work.there
        if not there.is_in_order:
            answered = max(work.begun, there.before)
            if work.at == math.inf:
                return answered
            since = work.before if now - work.at <= BATCH_S and work.before < work.at else work.at
            # It may have been with one whose instances are all at heavy ones.
            return max(since, answered) if work.beside_heavy else since
        since, most = work.at, work.begun - BATCH_S - there.waits_s  # a batch that began before that did so without it
        if since == math.inf:  # it is read before what was answered first
            since = now
            if there.most_together != 1 and not there.passes_on:  # there, those of one batch part again
                ours = (first for first in self.at_work if first.line == work.line and first.there is there)
                since = next((first.at for first in ours if first.at >= most), now)
        elif there.most_together != 1 and now - since <= BATCH_S and most <= work.before < since:
            since = work.before
        return since

    def batches(self, there: AtServer, answered: list[Answered], *, overtaking: bool) -> list[list[Answered]]:
        """What was answered in one moment, each batch by itself.

        Where nobody knows the order, nobody knows what was one; and of a model without batches, nothing was.

        Args:
            overtaking: whether what was sent before is at work yet: the order is another.
        """
        if not there.is_in_order:
            return [answered] if answered else []
        if overtaking and answered:
            answered = [*self._overtaking(there, answered)]
        batches: defaultdict[float, list[Answered]] = defaultdict(list)
        for number, each in enumerate(answered):
            batches[number if there.most_together == 1 else each.since].append(each)
        return [*batches.values()] if overtaking else _with_those_that_overtook([*batches.values()])

    def _overtaking(self, there: AtServer, answered: list[Answered]) -> Iterator[Answered]:
        """Those that were sent first have had the time since the answers before; the others were worked on as they
        ended, or with them."""
        by_age = sorted(answered, key=lambda each: each.work.begun)
        ended = by_age[0].at
        for number, each in enumerate(by_age):
            work, begun = each.work, each.work.begun
            took_s = 0.0
            if begun >= ended:
                took_s = each.at - begun
            elif number < self.instances_at(there, work.line):
                took_s = each.at - max(begun, there.last)
            if took_s > LONGEST_WAIT_S:
                work.account.long_at = each.at
            seconds = max(each.seconds, min(took_s / self.instances_of[work.runs], each.most_s))
            yield each._replace(since=each.at if begun >= ended else ended, seconds=seconds)

    def _queue(self, at: At) -> AtServer:
        there = self.each.get(at)
        if there is None:
            there = self.each[at] = AtServer(at)
            self._knows(there)
        return there

    def _knows(self, there: AtServer) -> None:
        works = self.works_of(there.at.path)
        there.most_together, there.waits_s = works.together, works.waits_s
        there.is_in_order, there.passes_on = works.waits_s < math.inf, bool(works.bound)
        if there.passes_on:  # versions are named by who asks
            for line in [line for line, waiting in there.next.items() if not waiting]:
                del there.next[line]

    def _take_up(self, there: AtServer, line: str, now: float, before: float = math.inf) -> None:
        """Instances that are free begin with what of a model has waited for longest."""
        if there.passes_on:
            self._take_up_all(there, line, now, before)
            return
        waiting = there.next[line]
        while waiting:
            work = next(iter(waiting))
            for step in work.takes:
                if there.at_work_of[step] >= self.instances_at(there, step):
                    return
            self._take(work, there, now, before)

    def _take_up_all(self, there: AtServer, line: str, now: float, before: float) -> None:
        """The same of models that ask one another: what is asked for itself stands in line with what others ask."""
        heads = {each: next(iter(waiting)) for each, waiting in there.next.items() if waiting}
        needed: set[str] = set()  # by some that came before
        while heads:
            first = min(heads, key=lambda each: heads[each].begun)
            work = heads.pop(first)
            full = (there.at_work_of[step] >= self.instances_at(there, step) for step in work.takes)
            if not needed.isdisjoint(work.takes) or any(full):
                needed.update(work.takes)
                continue
            self._take(work, there, now, before if first == line else math.inf)
            if waiting := there.next[first]:
                heads[first] = next(iter(waiting))

    def _take(self, work: Work, there: AtServer, now: float, before: float) -> None:
        """An instance begins with it."""
        del there.next[work.line][work]
        work.at, work.before = (now if now > work.begun else work.begun), before
        self.at_work[work] = None
        for step in work.takes:
            there.at_work_of[step] += 1


def _with_those_that_overtook(batches: list[list[Answered]]) -> list[list[Answered]]:
    """Of what was answered in one moment, one that seems to have taken far more than its keys' requests, with what was
    sent right behind it by keys whose requests take as long: that overtook it on its way, and it stood behind.
    """
    for batch in batches if len(batches) > 1 else ():
        seconds = max(each.seconds for each in batch)
        if seconds <= SHORTEST_TARGET_S or any(_takes(each, seconds) for each in batch):
            continue
        begun = min(each.work.begun for each in batch)
        for other in batches:
            if any(begun <= each.work.begun <= begun + READ_S and _takes(each, seconds) for each in other):
                return [*(each for each in batches if each not in (batch, other)), batch + other]
    return batches


def _takes(answered: Answered, seconds: float) -> bool:
    """Whether requests of its key are known to take about so long."""
    return FACTOR * answered.work.account.cost >= seconds
