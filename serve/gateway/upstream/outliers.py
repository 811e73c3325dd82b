"""Outlier detection: a server whose answers fail where those of the others do not is left alone for a while.

The words and rules are Envoy's (its documentation, "Outlier detection" and "Slow start mode"): consecutive 5xx,
consecutive gateway failures, success rate with a minimum of hosts and of request volume, a base ejection time that
grows with each ejection up to a bound and shrinks with each interval in service, a largest share of ejected hosts, and
slow start on return. `docs/decisions/0042-outlier-detection.md` says where this differs, and why.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

__all__ = ["Outliers", "Record", "State", "Verdict"]

CONSECUTIVE_5XX = 5
CONSECUTIVE_GATEWAY_FAILURE = 3
INTERVAL_S = 10.0
SUCCESS_RATE_MINIMUM_HOSTS = 2
SUCCESS_RATE_REQUEST_VOLUME = 100
SUCCESS_RATE_ERRORS = 4.0  # standard errors by which a host must be worse than the others
SUCCESS_RATE_LEAST = 0.05  # and by how much at least
BASE_EJECTION_TIME_S = 1.0
MAX_EJECTION_TIME_S = 30.0
MAX_EJECTION_PERCENT = 50
ALIKE = 0.25  # share of the others' answers that fail, from which on to fail is nothing special
SLOW_START_S = 5.0
MIN_WEIGHT = 0.1

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


class State(Enum):
    """Whether to ask a host."""

    IN = "in service"
    DUE = "due"
    """Its ejection is over: one request is its trial."""
    OUT = "ejected"


@dataclass(slots=True)
class Record:
    """What is known of one host.

    Attributes:
        consecutive_5xx, consecutive_gateway_failures: in a row; the first counts the second, too.
        good, bad: answers of this interval.
        good_before, bad_before: of the last one.
        ejected: whether it is out of service.
        ejected_until: when its trial is due, on the monotonic clock.
        ejections: that made the present one so long.
        on_trial: whether its trial is under way.
        returned: when it last came into service.
        epoch: another number after each ejection and return; answers to requests of an earlier one say nothing.
    """

    consecutive_5xx: int = 0
    consecutive_gateway_failures: int = 0
    good: int = 0
    bad: int = 0
    good_before: int = 0
    bad_before: int = 0
    ejected: bool = False
    ejected_until: float = 0.0
    ejections: int = 0
    on_trial: bool = False
    returned: float = -math.inf
    epoch: int = 0

    def state(self, now: float) -> State:
        if not self.ejected:
            return State.IN
        return State.DUE if now >= self.ejected_until and not self.on_trial else State.OUT

    def weight(self, now: float) -> float:
        """Its share of what it would get, which grows to 1 after it has come into service."""
        return min(1.0, max(MIN_WEIGHT, (now - self.returned) / SLOW_START_S))


class Outliers(Generic[Host]):
    """The records of all hosts for one model, or for the servers as a whole.

    Args:
        what: the model, for messages; "" for the servers as a whole.
        now: on the monotonic clock.
        on_eject: called with the kind of each ejection, in Envoy's words.
    """

    def __init__(self, what: str, now: float, on_eject: Callable[[Host, str], None] = lambda *_: None) -> None:
        self.what = what
        self._on_eject = on_eject
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

    def note(self, host: Host, verdict: Verdict, *, epoch: int, trial: bool, now: float, hosts: Sequence[Host]) -> None:
        """Learn from one exchange.

        Args:
            epoch: of the host's record when it began.
            trial: whether it was the host's trial.
            hosts: all there are.
        """
        record = self.of(host)
        if trial:
            record.on_trial = False
        if verdict is Verdict.NOTHING or epoch != record.epoch or (record.ejected and not trial):
            return
        if trial:
            if verdict is Verdict.GOOD:
                self._return(record, now)
            else:
                self._eject(host, record, "trial", now)
            return
        if now - self._interval_from >= INTERVAL_S:
            self._end_interval(now, hosts)
            if record.ejected:
                return
        if verdict is Verdict.GOOD:
            record.good += 1
            record.consecutive_5xx = record.consecutive_gateway_failures = 0
            return
        record.bad += 1
        record.consecutive_5xx += 1
        lost = verdict is Verdict.GATEWAY_FAILURE
        record.consecutive_gateway_failures = record.consecutive_gateway_failures + 1 if lost else 0
        if record.consecutive_gateway_failures >= CONSECUTIVE_GATEWAY_FAILURE:
            kind = "consecutive_gateway_failure"
        elif record.consecutive_5xx >= CONSECUTIVE_5XX:
            kind = "consecutive_5xx"
        else:
            return
        if self._may_eject(host, hosts) and not self._alike(host, hosts):
            self._eject(host, record, kind, now)

    def joined(self, host: Host, now: float) -> None:
        """A host has come into service: slowly."""
        self.of(host).returned = now

    def _may_eject(self, host: Host, hosts: Sequence[Host]) -> bool:
        out = sum(self.of(other).ejected for other in hosts if other is not host)
        return len(hosts) > 1 and out < max(1, len(hosts) * MAX_EJECTION_PERCENT // 100)

    def _alike(self, host: Host, hosts: Sequence[Host]) -> bool:
        """Whether the others fail, too: then it is the requests, or the model, and no host is an outlier."""
        good, bad = self._others(host, hosts)
        return bad >= CONSECUTIVE_5XX and bad >= ALIKE * (good + bad)

    def _others(self, host: Host, hosts: Sequence[Host]) -> tuple[int, int]:
        """Good and bad answers of the other hosts in service, in this interval and the last."""
        others = [self.of(each) for each in hosts if each is not host]
        seen = [each for each in others if not each.ejected]
        return sum(each.good + each.good_before for each in seen), sum(each.bad + each.bad_before for each in seen)

    def _eject(self, host: Host, record: Record, kind: str, now: float) -> None:
        record.ejections += 1
        seconds = min(BASE_EJECTION_TIME_S * record.ejections, MAX_EJECTION_TIME_S)
        record.ejected, record.ejected_until = True, now + seconds
        record.epoch += 1
        record.consecutive_5xx = record.consecutive_gateway_failures = 0
        of = f" for {self.what}" if self.what else ""
        logger.warning("%s is left alone%s for %.0f s: %s", getattr(host, "address", host), of, seconds, kind)
        self._on_eject(host, kind)

    def _return(self, record: Record, now: float) -> None:
        record.ejected = False
        record.epoch += 1
        record.returned = now
        record.good = record.bad = record.good_before = record.bad_before = 0

    def _end_interval(self, now: float, hosts: Sequence[Host]) -> None:
        worst = self._worst(hosts)
        if worst is not None and self._may_eject(worst, hosts):
            self._eject(worst, self.of(worst), "success_rate", now)
        stale = now - self._interval_from >= 2 * INTERVAL_S
        self._interval_from = now
        for record in self._records.values():
            record.good_before, record.bad_before = (0, 0) if stale else (record.good, record.bad)
            record.good = record.bad = 0
            if record.ejections and not record.ejected and now - record.returned >= INTERVAL_S:
                record.ejections -= 1

    def _worst(self, hosts: Sequence[Host]) -> Host | None:
        """The host whose success rate lies furthest below that of the others, if it is beyond chance."""
        busy = [
            (host, self.of(host))
            for host in hosts
            if not self.of(host).ejected and self.of(host).good + self.of(host).bad >= SUCCESS_RATE_REQUEST_VOLUME
        ]
        if len(busy) < SUCCESS_RATE_MINIMUM_HOSTS:
            return None
        good, bad = sum(record.good for _, record in busy), sum(record.bad for _, record in busy)
        failing = bad / (good + bad)
        found, most = None, 0.0
        for host, record in busy:
            own = record.good + record.bad
            others = good + bad - own
            difference = record.bad / own - (bad - record.bad) / others
            error = math.sqrt(failing * (1 - failing) * (1 / own + 1 / others))
            if difference > max(most, SUCCESS_RATE_LEAST, SUCCESS_RATE_ERRORS * error):
                found, most = host, difference
        return found
