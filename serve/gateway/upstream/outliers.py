"""Outlier detection: a server whose answers fail where those of the others do not is left alone for a while.

The words and rules are Envoy's (its documentation, "Outlier detection" and "Slow start mode"): consecutive 5xx,
consecutive gateway failures, success rate with a minimum of hosts and of request volume, a base ejection time that
grows with each ejection up to a bound and shrinks with each interval in service, a largest share of ejected hosts, and
slow start on return. `docs/decisions/0042-outlier-detection.md` says where this differs, and why.

Unlike a proxy that knows no clients, this looks at whose requests fail: what one key's show, by themselves, holds for
that key alone. Whoever makes a model fail takes its servers from nobody else.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, TypeVar

from serve.gateway.upstream.ejections import MOST_KEYS, THE_REST, Ejection, State, Tally, counted_as

__all__ = ["Outliers", "Record", "Ticket", "Verdict"]

CONSECUTIVE_5XX, OF_OTHERS_5XX = 5, 2
CONSECUTIVE_GATEWAY_FAILURE, OF_OTHERS_LOST = 3, 1  # of them must be others' than those of the key with the most
INTERVAL_S = 10.0
SUCCESS_RATE_MINIMUM_HOSTS = 2
SUCCESS_RATE_REQUEST_VOLUME = 100
SUCCESS_RATE_ERRORS = 4.0  # standard errors by which a host must be worse than the others
SUCCESS_RATE_LEAST = 0.05  # and by how much at least
MAX_EJECTION_PERCENT = 50
ALIKE = 0.25  # share of the others' answers that fail, from which on to fail is nothing special

logger = logging.getLogger(__name__)
Host = TypeVar("Host")


class Verdict(Enum):
    """What an exchange says of the server."""

    GOOD = "good"
    SERVER_ERROR = "5xx"
    """It answered that it failed."""
    GATEWAY_FAILURE = "gateway failure"
    """No answer, or one that says that it is not there: Envoy's 502, 503, 504."""
    NOTHING = "nothing"
    """The client ended it, or never got as far as the server."""


@dataclass(slots=True)
class Record:
    """What is known of one host.

    Attributes:
        all: its ejection for everybody.
        alone: those for one key each.
        failed, lost: what failed in a row, by key; the first counts what was lost, too.
        tally: answers of this interval.
        before: of the last one.
    """

    all: Ejection = field(default_factory=Ejection)
    alone: dict[str, Ejection] = field(default_factory=dict)
    failed: dict[str, int] = field(default_factory=dict)
    lost: dict[str, int] = field(default_factory=dict)
    tally: Tally = field(default_factory=Tally)
    before: Tally = field(default_factory=Tally)

    def ejected(self, now: float) -> bool:
        """Whether it is out of service for anybody who may still come."""
        return self.all.out or any(each.out and not each.forgotten(now) for each in self.alone.values())

    def ejections(self, who: str) -> list[Ejection]:
        """Those that hold for a key."""
        alone = self.alone.get(who)
        return [self.all] if alone is None else [self.all, alone]

    def out(self, who: str | None) -> bool:
        """Whether it is out of service for a key; None: for all."""
        return self.all.out or (who is not None and (alone := self.alone.get(who)) is not None and alone.out)

    def state(self, now: float, who: str) -> State:
        states = {each.state(now, who) for each in self.ejections(who)}
        return next(state for state in (State.OUT, State.DUE, State.IN) if state in states)

    def weight(self, now: float, who: str) -> float:
        """A key's share of what it would get, which grows to 1 after it has come into service."""
        return min(each.weight(now) for each in self.ejections(who))

    def of_key(self, who: str) -> Ejection:
        """The ejection for one key, a new one where there was none; of too many the one that is over first goes."""
        if len(self.alone) >= MOST_KEYS and who not in self.alone:
            del self.alone[min(self.alone, key=lambda key: (self.alone[key].out, self.alone[key].until))]
        return self.alone.setdefault(who, Ejection())

    def forgive(self) -> None:
        """Nothing fails in a row any more."""
        self.failed.clear()
        self.lost.clear()


@dataclass(frozen=True, slots=True)
class Ticket:
    """A request that is with a host.

    Attributes:
        who: the id of the key that asks.
        epochs: of the ejections that held for it when it began.
        trials: ejections that it decides about.
    """

    who: str
    epochs: tuple[int, ...]
    trials: tuple[Ejection, ...]


class Outliers(Generic[Host]):
    """The records of all hosts for one model, or for the servers as a whole.

    Args:
        what: the model, for messages; "" for the servers as a whole.
        now: on the monotonic clock.
        on_eject: called with the kind of each ejection, in Envoy's words.
        by_key: whether what fails may be the requests' doing. A lost connection is not.
    """

    def __init__(
        self,
        what: str,
        now: float,
        on_eject: Callable[[Host, str], None] = lambda *_: None,
        *,
        by_key: bool = True,
    ) -> None:
        self.what = what
        self._on_eject = on_eject
        self._by_key = by_key
        self._records: dict[Host, Record] = {}
        self._interval_from = now

    def of(self, host: Host) -> Record:
        """A host's record."""
        record = self._records.get(host)
        if record is None:
            record = self._records[host] = Record()
        return record

    def keep(self, hosts: Sequence[Host]) -> None:
        """Forget all others."""
        self._records = {host: record for host, record in self._records.items() if host in hosts}

    def begin(self, host: Host, who: str, now: float, *, trial: bool) -> Ticket:
        """A request goes to a host.

        Args:
            who: the id of the key that asks.
            trial: whether it may decide on the host's return.
        """
        ejections = self.of(host).ejections(who)
        due = tuple(each for each in ejections if trial and each.state(now, who) is State.DUE)
        for each in due:
            each.try_(who, now)
        return Ticket(who, tuple(each.epoch for each in ejections), due)

    def note(self, host: Host, verdict: Verdict, ticket: Ticket, *, now: float, hosts: Sequence[Host]) -> None:
        """Learn from one exchange.

        Args:
            hosts: all there are.
        """
        record, who = self.of(host), ticket.who
        for each in ticket.trials:
            each.on_trial = False
        present = record.ejections(who)
        if verdict is Verdict.NOTHING or ticket.epochs != tuple(each.epoch for each in present):
            return
        if ticket.trials:
            self._tried(host, record, ticket, now, good=verdict is Verdict.GOOD)
            return
        if record.out(who):
            return
        if now - self._interval_from >= INTERVAL_S:
            self._end_interval(now, hosts)
            if record.out(who):
                return
        record.tally.add(who, good=verdict is Verdict.GOOD)
        if verdict is Verdict.GOOD:
            record.forgive()
            return
        _count(record.failed, who)
        if verdict is Verdict.GATEWAY_FAILURE:
            _count(record.lost, who)
        else:
            record.lost.clear()
        for kind, run, least, others in (
            ("consecutive_gateway_failure", record.lost, CONSECUTIVE_GATEWAY_FAILURE, OF_OTHERS_LOST),
            ("consecutive_5xx", record.failed, CONSECUTIVE_5XX, OF_OTHERS_5XX),
        ):
            if sum(run.values()) < least:
                continue
            whose = None if sum(run.values()) - max(run.values()) >= others or not self._by_key else who
            enough = whose is None or run.get(who, 0) >= least
            if enough and self._may_eject(host, hosts, whose) and not self._alike(host, hosts, whose):
                self._eject(host, record, kind, now, whose)
                return

    def joined(self, host: Host, now: float) -> None:
        """A host has come into service: slowly."""
        self.of(host).all.returned = now

    def _tried(self, host: Host, record: Record, ticket: Ticket, now: float, *, good: bool) -> None:
        """A trial has ended."""
        if good:
            for each in ticket.trials:
                each.take_back(now)
            if record.all in ticket.trials:
                record.forgive()
                record.tally, record.before = Tally(), Tally()
            for counts in (record.failed, record.lost, record.tally.by, record.before.by):
                counts.pop(ticket.who, None)
            return
        # A trial that fails for one key alone says nothing to the others: theirs is due.
        for_all = record.all in ticket.trials and (not self._by_key or record.all.failed not in (None, ticket.who))
        if record.all in ticket.trials and not for_all:
            record.all.failed = ticket.who
        self._eject(host, record, "trial", now, None if for_all else ticket.who)

    def _may_eject(self, host: Host, hosts: Sequence[Host], who: str | None) -> bool:
        out = sum(self.of(other).out(who) for other in hosts if other is not host)
        return len(hosts) > 1 and out < max(1, len(hosts) * MAX_EJECTION_PERCENT // 100)

    def _alike(self, host: Host, hosts: Sequence[Host], who: str | None) -> bool:
        """Whether the others fail, too: then it is the requests, or the model, and no host is an outlier.

        Args:
            who: whose requests to look at; None: all but those of the key that fails most, as it may do so by intent.
        """
        seen = [self.of(each) for each in hosts if each is not host]
        tallies = [tally for each in seen if not each.out(who) for tally in (each.tally, each.before)]
        most = None if who is not None or not self._by_key else _most_failing(tallies)
        counts = [tally.count(only=who, without=most) for tally in tallies]
        good, bad = sum(each[0] for each in counts), sum(each[1] for each in counts)
        return bad >= CONSECUTIVE_5XX and bad >= ALIKE * (good + bad)

    def _eject(self, host: Host, record: Record, kind: str, now: float, who: str | None) -> None:
        """Leave a host alone: for all, or for one key."""
        seconds = (record.all if who is None else record.of_key(who)).eject(now)
        if who is None:
            record.forgive()
        of = f" for {self.what}" if self.what else ""
        whom = "" if who is None else ", by the key whose requests fail"
        logger.warning("%s is left alone%s for %.0f s%s: %s", getattr(host, "address", host), of, seconds, whom, kind)
        self._on_eject(host, kind)

    def _end_interval(self, now: float, hosts: Sequence[Host]) -> None:
        worst = self._worst(hosts)
        whose = _most_failing([self.of(worst).tally]) if worst is not None and self._by_key else None
        clean = worst if whose is None else self._worst(hosts, without=whose)
        for host, who in {clean: None, worst: whose}.items() if clean is not worst else [(clean, None)]:
            if host is not None and not self.of(host).out(who) and self._may_eject(host, hosts, who):
                self._eject(host, self.of(host), "success_rate", now, who)
        stale = now - self._interval_from >= 2 * INTERVAL_S
        self._interval_from = now
        for record in self._records.values():
            record.before = Tally() if stale else record.tally
            record.tally = Tally()
            for each in (record.all, *record.alone.values()):
                if each.count and not each.out and now - each.returned >= INTERVAL_S:
                    each.count -= 1
            kept = {key: each for key, each in record.alone.items() if each.out or each.count}
            record.alone = {key: each for key, each in kept.items() if not each.forgotten(now)}

    def _worst(self, hosts: Sequence[Host], without: str | None = None) -> Host | None:
        """The host whose success rate lies furthest below that of the others, if it is beyond chance.

        Args:
            without: a key whose requests don't count.
        """
        busy = {
            host: counts
            for host in hosts
            if not (record := self.of(host)).all.out
            and sum(counts := record.tally.count(without=without)) >= SUCCESS_RATE_REQUEST_VOLUME
        }
        if len(busy) < SUCCESS_RATE_MINIMUM_HOSTS:
            return None
        good, bad = (sum(counts) for counts in zip(*busy.values(), strict=True))
        failing = bad / (good + bad)
        found, most = None, 0.0
        for host, (own_good, own_bad) in busy.items():
            own = own_good + own_bad
            others = good + bad - own
            difference = own_bad / own - (bad - own_bad) / others
            error = math.sqrt(failing * (1 - failing) * (1 / own + 1 / others))
            if difference > max(most, SUCCESS_RATE_LEAST, SUCCESS_RATE_ERRORS * error):
                found, most = host, difference
        return found


def _count(run: dict[str, int], who: str) -> None:
    who = counted_as(who, run)
    run[who] = run.get(who, 0) + 1


def _most_failing(tallies: Sequence[Tally]) -> str | None:
    """The key with the most bad answers; None where there are none. Those that are counted as one are several."""
    bad: dict[str, int] = {}
    for tally in tallies:
        for who, counts in tally.by.items():
            bad[who] = bad.get(who, 0) + counts[1] * (who != THE_REST)
    return max(bad, key=lambda who: bad[who]) if any(bad.values()) else None
