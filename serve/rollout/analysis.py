"""Is the candidate worse than the baseline? Judged after every answer, with error rates that hold all the same.

Every question is about pairs of answers of about the same time, one of each model: what hits both (a busy machine, a
client that sends rubbish) cancels out. Each has two gamblers: one bets that the candidate is worse than allowed, the
other that it is not. The first to become rich decides; while neither is, the step goes on.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from serve.rollout.evidence import Bet
from serve.rollout.plan import Plan

__all__ = ["Analysis", "Measure", "Outcome", "Question"]

WINDOW = 100
PAIRED = 64
KEPT = 500
TAIL = 0.95
TAIL_MARGIN = 0.05
LOOK_AGAIN = 25

Question = Literal["errors", "latency", "slowest", "feedback", "disagreement"]


@dataclass(frozen=True)
class Outcome:
    """How a model answered a request.

    Attributes:
        failed: whether it gave no good answer, through no fault of the client's.
        seconds: that the answer took; None where it failed.
    """

    failed: bool
    seconds: float | None


class Measure:
    """One question with its two gamblers; bound, low and high of its values."""

    def __init__(self, bound: float, low: float, high: float) -> None:
        self.worse = Bet(bound, low=low, high=high, window=WINDOW)
        self.fine = Bet(-bound, low=-high, high=-low)

    def add(self, value: float) -> None:
        """Take an observation: how much worse the candidate is."""
        self.worse.add(value)
        self.fine.add(-value)

    @property
    def count(self) -> int:
        """Of observations."""
        return self.worse.count


class Analysis:
    """The evidence of one step.

    Args:
        plan: says what is allowed.
        weight: the candidate's share of the requests; at 0 there are copies only, and latency is not judged: copies
            meet another load.

    Attributes:
        judged: the questions that can end it.
        required: those that have to be answered for the step to be passed.
    """

    def __init__(self, plan: Plan, weight: float) -> None:
        self._plan = plan
        self._slower = 1.0 + plan.max_latency_increase
        self.measures: dict[Question, Measure] = {"errors": Measure(plan.max_error_increase, -1.0, 1.0)}
        if weight:
            self.measures["latency"] = Measure(0.5, 0.0, 1.0)
            self.measures["slowest"] = Measure(TAIL_MARGIN, -1.0, 1.0)
            self.measures["feedback"] = Measure(plan.max_wrong_increase, -1.0, 1.0)
        if plan.shadow:
            self.measures["disagreement"] = Measure(plan.max_disagreement, 0.0, 1.0)
        self.judged = [name for name in self.measures if name != "disagreement" or not plan.expect_change]
        optional = ("disagreement" if weight else "", "" if plan.require_feedback else "feedback")
        self.required = [name for name in self.judged if name not in optional]
        alarms = len(plan.weights) * len(self.judged)
        self._alarm = math.log(alarms / plan.error_rate)
        self._proof = math.log(1.0 / plan.error_rate)
        self._unpaired: tuple[deque[bool], deque[bool]] = (deque(maxlen=PAIRED), deque(maxlen=PAIRED))
        self._untimed: tuple[deque[float], deque[float]] = (deque(maxlen=PAIRED), deque(maxlen=PAIRED))
        self._seconds: tuple[deque[float], deque[float]] = (deque(maxlen=KEPT), deque(maxlen=KEPT))
        self._counts = [[0, 0], [0, 0]]  # of the candidate, of the baseline: answers and failures
        self._unjudged: tuple[deque[bool], deque[bool]] = (deque(maxlen=PAIRED), deque(maxlen=PAIRED))
        self._reported = [[0, 0], [0, 0]]  # the same: answers that clients spoke of, and of these the wrong ones
        self._tail = math.inf
        self._late = [0.0, 0.0, 0.0]  # times that the share of slow answers was looked at, and the sums of both shares
        self._until_look = LOOK_AGAIN
        self.items = 0
        self.disagreed = 0
        self.difference = 0.0
        self.largest = 0.0

    def candidate(self, outcome: Outcome) -> None:
        """The candidate has answered a client."""
        self._take(0, outcome)

    def baseline(self, outcome: Outcome, *, paired: bool = False) -> None:
        """The baseline has answered a client.

        Args:
            paired: whether `copied` tells of this answer, too: a failure is evidence once, or the second time a gambler
                would know beforehand what he bets on.
        """
        if paired:
            self._judge_time(1, outcome)
        else:
            self._take(1, outcome)

    def left(self, who: Literal["candidate", "baseline"], seconds: float) -> None:
        """A client waited for so long, and then for no answer any more.

        That says something where hardly any answer of the baseline takes so long: an answer would have come later
        still. Were it left out, a model that hangs at some requests would be judged by the others.
        """
        if "slowest" not in self.measures:
            return
        if math.isinf(self._tail) and len(self._seconds[1]) >= LOOK_AGAIN:  # one that hangs at all has no pairs yet
            self._tail = self._slower * _quantile(self._seconds[1], TAIL)
        if seconds > self._tail:
            which: Literal[0, 1] = 0 if who == "candidate" else 1
            self._seconds[which].append(seconds)
            self._time(which, seconds)

    def copied(self, candidate: Outcome, baseline: Outcome) -> None:
        """Both have answered the same request, which was chosen before either answer was known."""
        self._count(0, Outcome(candidate.failed, None))  # how long a copy takes is not judged
        self._count(1, baseline)
        self.measures["errors"].add(float(candidate.failed) - float(baseline.failed))

    def compared(self, items: int, disagreed: int, difference: float, largest: float) -> None:
        """The answers to a copied request have been compared.

        Args:
            items: that the request held.
            disagreed: for how many of them the answers are others.
            difference: mean absolute difference of their numbers.
            largest: the largest one.
        """
        self.items += items
        self.disagreed += disagreed
        self.difference += items * difference
        self.largest = max(self.largest, largest)
        self.measures["disagreement"].add(disagreed / items)

    def reported(self, who: Literal["candidate", "baseline"], *, wrong: bool) -> None:
        """A client has said of an answer whether it was wrong."""
        if (measure := self.measures.get("feedback")) is None:
            return
        which = 0 if who == "candidate" else 1
        self._reported[which][0] += 1
        self._reported[which][1] += wrong
        self._unjudged[which].append(wrong)
        _pair(self._unjudged, measure)

    def worse(self) -> Question | None:
        """A question whose evidence says that the candidate is worse than allowed."""
        for name in self.judged:
            if self.measures[name].worse.log_wealth >= self._alarm:
                return name
        return None

    def proven(self) -> bool:
        """Whether it is proven for each required question that the candidate is not."""
        return all(self._proof_of(name) >= self._proof for name in self.required)

    def told(self, questions: Iterable[Question]) -> str:
        """What was seen, in words; sorts what was measured, so it is for decisions, not for each answer."""
        return "; ".join(map(self._told, questions))

    def passed(self) -> str:
        """What was seen of the questions that a step is passed by, in words, and of what is only recorded."""
        extra = {*self.measures.keys() - set(self.judged), "feedback"} - set(self.required)
        return self.told([*self.required, *(name for name in self.measures if name in extra and self._known(name))])

    def _take(self, who: Literal[0, 1], outcome: Outcome) -> None:
        self._count(who, outcome)
        self._unpaired[who].append(outcome.failed)
        _pair(self._unpaired, self.measures["errors"])
        self._judge_time(who, outcome)

    def _judge_time(self, who: Literal[0, 1], outcome: Outcome) -> None:
        if outcome.seconds is not None and "latency" in self.measures:
            self._time(who, outcome.seconds)

    def _count(self, who: Literal[0, 1], outcome: Outcome) -> None:
        self._counts[who][0] += 1
        self._counts[who][1] += outcome.failed
        if outcome.seconds is not None:
            self._seconds[who].append(outcome.seconds)

    def _time(self, who: Literal[0, 1], seconds: float) -> None:
        self._untimed[who].append(seconds if who == 0 else self._slower * seconds)
        candidate, baseline = self._untimed
        if not candidate or not baseline:
            return
        slower = [_later(mine, theirs) for mine in candidate for theirs in baseline]
        self.measures["latency"].add(_mean(slower))
        if math.isfinite(self._tail):
            late = [[taken > self._tail for taken in each] for each in (candidate, baseline)]
            shares = _mean(late[0]), _mean(late[1])
            self.measures["slowest"].add(shares[0] - shares[1])
            self._late = [sum(pair) for pair in zip(self._late, (1.0, *shares), strict=True)]
        self._until_look -= 1
        if self._until_look <= 0:  # the bound between slow and usual, from answers before those it is used on
            self._until_look = LOOK_AGAIN
            self._tail = self._slower * _quantile(self._seconds[1], TAIL)
        candidate.clear()
        baseline.clear()

    def evidence(self) -> dict[str, dict[str, Any]]:
        """By question: what was seen, the bound, and how far each gambler is from deciding (1.0).

        Of the slowest answers it is the candidate's share of those that take longer than "over_s" (seconds), and the
        baseline's of those that would if the candidate's longer time that is allowed were added to them.
        """
        found: dict[str, dict[str, Any]] = {}
        for name, measure in self.measures.items():
            if name == "feedback" and name not in self.required and not self._known(name):
                continue  # nobody says anything
            candidate, baseline = self._seen(name)
            found[name] = {
                "count": measure.count,
                "candidate": candidate,
                "baseline": baseline,
                "bound": self._bound(name),
                "proof": round(max(0.0, self._proof_of(name)) / self._proof, 3),
                "alarm": round(max(0.0, measure.worse.log_wealth) / self._alarm, 3) if name in self.judged else 0.0,
                "required": name in self.required,
                "judged": name in self.judged,
            }
        if "slowest" in found:
            found["slowest"]["over_s"] = None if math.isinf(self._tail) else self._tail
        if self.items:
            found["disagreement"]["difference"] = self.difference / self.items
            found["disagreement"]["largest"] = self.largest
        return found

    def snapshot(self) -> dict[str, Any]:
        """What a later process needs to go on (see `restore`)."""
        return {
            "wealth": {
                name: [measure.worse.log_wealth, measure.fine.log_wealth, measure.count]
                for name, measure in self.measures.items()
            },
            "counts": self._counts,
            "seconds": [list(each) for each in self._seconds],
            "compared": [self.items, self.disagreed, self.difference, self.largest],
            "reported": self._reported,
            "tail": None if math.isinf(self._tail) else self._tail,
            "late": self._late,
        }

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Go on from a snapshot: the wealth stays, the stakes begin small again.

        Raises:
            ArithmeticError, AttributeError, LookupError, TypeError, ValueError: it is none, and partly taken.
        """
        for name, (worse, fine, count) in snapshot.get("wealth", {}).items():
            if (measure := self.measures.get(name)) is not None:
                measure.worse.resume(_finite(worse), int(count))
                measure.fine.resume(_finite(fine), int(count))
        self._counts = _both(snapshot.get("counts", self._counts))
        self._reported = _both(snapshot.get("reported", self._reported))
        for kept, seconds in zip(self._seconds, snapshot.get("seconds", ()), strict=False):
            kept.extend(map(_finite, seconds))
        items, disagreed, difference, largest = snapshot.get("compared", (0, 0, 0.0, 0.0))
        self.items, self.disagreed = int(items), int(disagreed)
        self.difference, self.largest = _finite(difference), _finite(largest)
        self._tail = math.inf if (tail := snapshot.get("tail")) is None else _finite(tail)
        late = [_finite(each) for each in snapshot.get("late", self._late)]
        if len(late) == len(self._late):
            self._late = late

    def _proof_of(self, name: Question) -> float:
        """The wealth of who bets that the candidate is no worse.

        Complaints alone say nothing: all that is reported of either is wrong then, and a candidate of which clients
        complain ten times as often looks like the baseline.
        """
        if name == "feedback" and any(count == wrong for count, wrong in self._reported):
            return 0.0
        return self.measures[name].fine.log_wealth

    def _known(self, name: Question) -> bool:
        """Whether anything was seen of it."""
        return any(count for count, _ in self._reported) if name == "feedback" else self.measures[name].count > 0

    def _bound(self, name: Question) -> float:
        return {
            "errors": self._plan.max_error_increase,
            "latency": self._plan.max_latency_increase,
            "slowest": TAIL_MARGIN,
            "feedback": self._plan.max_wrong_increase,
            "disagreement": self._plan.max_disagreement,
        }[name]

    def _seen(self, name: Question) -> tuple[float | None, float | None]:
        """The candidate's and the baseline's value."""
        if name in ("errors", "feedback"):
            counts = self._counts if name == "errors" else self._reported
            return tuple(bad / count if count else None for count, bad in counts)  # type: ignore[return-value]
        if name == "disagreement":
            return (self.disagreed / self.items if self.items else None), None
        if name == "slowest":
            times, *sums = self._late
            return tuple(each / times if times else None for each in sums)  # type: ignore[return-value]
        return self._quantiles(0.5)

    def _quantiles(self, q: float) -> tuple[float | None, float | None]:
        return tuple(_quantile(each, q) if each else None for each in self._seconds)  # type: ignore[return-value]

    def _told(self, name: Question) -> str:
        candidate, baseline = self._seen(name)
        if name == "errors":
            return f"{_percent(candidate)} of its requests fail, {_percent(baseline)} of the baseline's"
        if name == "feedback":
            return f"{_percent(candidate)} of its answers are reported wrong, {_percent(baseline)} of the baseline's"
        if name == "disagreement":
            return f"it disagrees with the baseline on {_percent(candidate)} of {self.items} items"
        if name == "slowest":
            mine, theirs = map(_ms, self._quantiles(TAIL))
            if math.isinf(self._tail):  # nothing was judged yet
                return f"its 95th percentile is {mine}, the baseline's {theirs}"
            return (
                f"{_percent(candidate)} of its answers take longer than {_ms(self._tail)}, {_percent(baseline)} of the "
                f"baseline's longer than {_ms(self._tail / self._slower)} (95th percentiles {mine} and {theirs})"
            )
        return f"its median is {_ms(candidate)}, the baseline's {_ms(baseline)}"


def _pair(unpaired: tuple[deque[bool], deque[bool]], measure: Measure) -> None:
    """Observe how much worse the candidate was, once there is something of both."""
    candidate, baseline = unpaired
    if candidate and baseline:
        measure.add(_mean(candidate) - _mean(baseline))
        candidate.clear()
        baseline.clear()


def _finite(value: Any) -> float:
    if not math.isfinite(number := float(value)):
        raise ValueError(f"{number} is no number of a rollout")
    return number


def _both(counts: Any) -> list[list[int]]:
    """Of the candidate, and of the baseline: all, and the bad ones."""
    (all_of_candidate, bad_of_candidate), (all_of_baseline, bad_of_baseline) = counts
    return [[int(all_of_candidate), int(bad_of_candidate)], [int(all_of_baseline), int(bad_of_baseline)]]


def _later(mine: float, theirs: float) -> float:
    return 0.5 if mine == theirs else float(mine > theirs)


def _mean(values: Sequence[float] | Iterable[float]) -> float:
    each = list(values)
    return sum(each) / len(each)


def _quantile(values: Iterable[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def _percent(share: float | None) -> str:
    return "none" if share is None else f"{100 * share:.3g}%"


def _ms(seconds: float | None) -> str:
    return "unknown" if seconds is None else f"{1000 * seconds:.3g} ms"
