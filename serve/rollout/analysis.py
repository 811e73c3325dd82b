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
from functools import partial
from typing import Any, Literal

from serve.rollout.evidence import Measure
from serve.rollout.pairs import Place
from serve.rollout.plan import Plan
from serve.rollout.speakers import Speakers
from serve.rollout.waits import AGAINST, ALONE, beside, near, unanswered, uncopied, withheld

__all__ = ["Analysis", "Outcome", "Question"]

PAIRED = 64
KEPT = 500
TAIL = 0.95
TAIL_MARGIN = 0.05
LOOK_AGAIN = 25
MOST_UNANSWERED, MOST_WITHHELD = 1000, 100_000  # that a restart knows of
UNRULED = "single numbers are judged with --tolerance or --agree alone"

Question = Literal["errors", "latency", "slowest", "feedback", "disagreement"]


@dataclass(frozen=True)
class Outcome:
    """How a model answered a request.

    Attributes:
        failed: whether it gave no good answer, through no fault of the client's.
        seconds: that the answer took; None where it failed, or where that says nothing of the model.
    """

    failed: bool
    seconds: float | None


class Analysis:
    """The evidence of one step.

    Args:
        plan: says what is allowed.
        weight: the candidate's share of the requests; at 0 there are copies only, and latency is not judged: copies
            meet another load.

    Attributes:
        judged: the questions that can end it.
        required: those that have to be answered for the step to be passed.
        speakers: who gives feedback.
        going_on: requests of which the candidate's answer does not count yet, and for which the baseline was asked.
    """

    # Where several keys ask, none alone ends a step by other answers or feedback, nor passes one by these or by errors.
    # A failure is the model's own, so one key's failures end it: with each client kept with one model there may be only
    # one key that meets the candidate.

    def __init__(self, plan: Plan, weight: float) -> None:
        self._plan = plan
        self._slower = 1.0 + plan.max_latency_increase
        self._heard: dict[Question, Speakers] = {
            "errors": Speakers(partial(Measure, plan.max_error_increase, -1.0, 1.0)),
            "feedback": Speakers(partial(Measure, plan.max_wrong_increase, -1.0, 1.0)),
            "disagreement": Speakers(partial(Measure, plan.max_disagreement, 0.0, 1.0)),
        }
        self.speakers = self._heard["feedback"]
        self.measures: dict[Question, Measure] = {"errors": self._heard["errors"].measure}
        if weight:
            self.measures["latency"] = Measure(0.5, 0.0, 1.0)
            self.measures["slowest"] = Measure(TAIL_MARGIN, -1.0, 1.0)
            self.measures["feedback"] = self.speakers.measure
        if plan.shadow:
            self.measures["disagreement"] = self._heard["disagreement"].measure
        self.judged = [name for name in self.measures if name != "disagreement" or not plan.expect_change]
        optional = ("disagreement" if weight else "", "" if plan.require_feedback else "feedback")
        self.required = [name for name in self.judged if name not in optional]
        alarms = len(plan.weights) * len(self.judged)
        self._alarm = math.log(alarms / plan.error_rate)
        self._proof = math.log(1.0 / plan.error_rate)
        self._untimed: tuple[deque[float], deque[float]] = (deque(maxlen=PAIRED), deque(maxlen=PAIRED))
        self._seconds: tuple[deque[float], deque[float]] = (deque(maxlen=KEPT), deque(maxlen=KEPT))
        self._counts = [[0, 0], [0, 0]]  # of the candidate, of the baseline: answers and failures
        self._reported = [[0, 0], [0, 0]]  # the same: answers that clients spoke of, and of these the wrong ones
        self._tail = math.inf
        self._late = [0.0, 0.0, 0.0]  # times that the share of slow answers was looked at, and the sums of both shares
        self._until_look = LOOK_AGAIN
        self._met: tuple[int, str] = (0, "")
        self._dropped: tuple[int, str] = (0, "")
        self._suspected = 0  # of these, what may have ended a process
        self._compared = [0, 0, 0.0]  # requests, those of which nothing was judged, the sum of their disagreeing shares
        self.going_on = 0
        self._unanswered = 0  # of gateways before this one
        self._withheld = 0
        self._numbers = [0, 0.0, 0.0]  # items, the sum of their differences, the largest one

    def asked(self, who: Literal["candidate", "baseline"], *, key: str = "") -> Place:
        """A client, whose key has this id, asks one of the two: what comes of it is weighed by when it was asked.

        Whoever asked says what came of it to `candidate` or `baseline`, or to the place, that nothing is known of it.
        """
        return self._heard["errors"].ask(key, 0 if who == "candidate" else 1)

    def go_on(self, before: Analysis) -> None:
        """What was asked in the step before, and has no answer yet, is evidence of this one."""
        self._heard["errors"].go_on(before._heard["errors"])
        self.going_on = before.going_on

    def candidate(self, outcome: Outcome, *, key: str = "", place: Place | None = None) -> None:
        """The candidate has answered a client, whose key has this id.

        Args:
            place: from when it was asked; None for now.
        """
        self._take(0, outcome, key, place)

    def baseline(self, outcome: Outcome, *, paired: bool = False, key: str = "", place: Place | None = None) -> None:
        """The baseline has answered a client.

        Args:
            key: the id of the client's key.
            place: from when it was asked; None for now.
            paired: whether `copied` tells of this answer, too: a failure is evidence once, or the second time a gambler
                would know beforehand what he bets on.
        """
        if paired:
            self._judge_time(1, outcome)
        else:
            self._take(1, outcome, key, place)

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

    def met(self, key: str) -> None:
        """How long a request took with the candidate does not count: it met others, that asked it by another name.

        Args:
            key: the id of the key of one of these.
        """
        self._met = self._met[0] + 1, key

    def withheld(self) -> None:
        """A request was kept from the candidate, as that answers none or has no process, and the baseline has answered.

        Were it left out, a candidate that hangs or dies now and then would be judged by the time between.
        """
        self._withheld += 1
        self.measures["errors"].miss()

    def dropped(self, key: str, *, suspected: bool = False) -> None:
        """A copy was not made, because the candidate or the gateway had enough to do.

        Args:
            key: the id of one that asks the candidate by another name; "" for none.
            suspected: whether it was that it may end a process, or that it is being found out what has.
        """
        self._dropped = self._dropped[0] + 1, key or self._dropped[1]
        self._suspected += suspected

    def copied(self, candidate: Outcome, baseline: Outcome, *, key: str = "") -> None:
        """Both have answered the same request of a key's, which was chosen before either answer was known."""
        self._count(0, Outcome(candidate.failed, None))  # how long a copy takes is not judged
        self._count(1, baseline)
        self._heard["errors"].weigh(key, float(candidate.failed) - float(baseline.failed))

    def compared(
        self, items: int, disagreed: int, difference: float, largest: float, *, judged: bool = True, key: str = ""
    ) -> None:
        """The answers to a copied request have been compared. A request counts once, however many items it holds.

        Args:
            items: that the request held.
            disagreed: for how many of them the answers are others.
            difference: mean absolute difference of their numbers.
            largest: the largest one.
            judged: whether anything of them was held to a rule; False for single numbers, which have none by default.
            key: the id of the key that sent it.
        """
        requests, unjudged, shares = self._compared
        self._compared = [requests + 1, unjudged + (not judged), shares + disagreed / items]
        all_items, differences, most = self._numbers
        self._numbers = [all_items + items, differences + items * difference, max(most, largest)]
        self._heard["disagreement"].weigh(key, disagreed / items)

    def reported(self, who: Literal["candidate", "baseline"], *, wrong: bool, key: str = "") -> None:
        """A client has said of an answer whether it was wrong.

        Args:
            key: the id of its key.
        """
        if "feedback" not in self.measures:
            return
        which: Literal[0, 1] = 0 if who == "candidate" else 1
        self._reported[which][0] += 1
        self._reported[which][1] += wrong
        self.speakers.say(key, which, bad=wrong)

    def expect_others(self, expected: bool) -> None:
        """Whether other keys may yet ask: until then, one that asks alone ends nothing by other answers."""
        self._heard["disagreement"].several = expected

    def worse(self) -> Question | None:
        """A question whose evidence says that the candidate is worse than allowed."""
        for name in self.judged:
            if self._alarm_of(name) >= self._alarm:
                return name
        return None

    def proven(self) -> bool:
        """Whether it is proven for each required question that the candidate is not.

        What it has not answered yet, so that the baseline was asked, may have failed, and counts as such.
        """
        return all(self._proof_of(name) >= self._proof for name in self.required)

    def told(self, questions: Iterable[Question]) -> str:
        """What was seen, in words; sorts what was measured, so it is for decisions, not for each answer."""
        return "; ".join(map(self._told, questions))

    def passed(self) -> str:
        """What was seen of the questions that a step is passed by, in words, and of what is only recorded."""
        extra = {*self.measures.keys() - set(self.judged), "feedback"} - set(self.required)
        return self.told([*self.required, *(name for name in self.measures if name in extra and self._known(name))])

    def _take(self, who: Literal[0, 1], outcome: Outcome, key: str, place: Place | None) -> None:
        self._count(who, outcome)
        (place or self._heard["errors"].ask(key, who)).say(outcome.failed)
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

        Of the slowest answers it is the candidate's share of those that took over "times" the 95th percentile of the
        baseline's answers at the time, and the baseline's of those over that percentile itself. Where a question
        waits for more than observations, "waits" says for what.
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
                "alarm": round(max(0.0, self._alarm_of(name)) / self._alarm, 3) if name in self.judged else 0.0,
                "required": name in self.required and not (name == "disagreement" and self._uncompared),
                "judged": name in self.judged,
            }
            if waits := self._waits(name):
                found[name]["waits"] = waits
        if "slowest" in found:
            found["slowest"]["times"] = self._slower
        if self._numbers[0]:
            items, differences, largest = self._numbers
            found["disagreement"] |= {
                "difference": differences / items, "largest": largest, "not_compared": self._uncompared
            }  # fmt: skip
        if "feedback" in found:
            found["feedback"]["keys"] = len(self.speakers)
        return found

    def decisive(self) -> dict[Question, str]:
        """By question, the id of the one key whose requests or words stand between what all show and a decision."""
        found: dict[Question, str] = {}
        for name in self.judged:
            if name in ("latency", "slowest"):
                key: str | None = self._met[1] if self._waits(name) else None
            else:
                key = self._heard[name].without() if self._alone(name) else self._hiding(name)
                if not key and self._uncopied(name):
                    key = self._dropped[1]
            if key:
                found[name] = key
        return found

    def snapshot(self) -> dict[str, Any]:
        """What a later process needs to go on (see `restore`)."""
        return {
            "wealth": {name: measure.kept() for name, measure in self.measures.items()},
            "counts": self._counts,
            "seconds": [list(each) for each in self._seconds],
            "compared": self._compared,
            "numbers": self._numbers,
            "reported": self._reported,
            "heard": {name: speakers.snapshot() for name, speakers in self._heard.items()},
            "tail": None if math.isinf(self._tail) else self._tail,
            "late": self._late,
            "decisive": self.decisive(),
            "unanswered": self._unknown,
            "withheld": self._withheld,
            "doubted": [self._unanswered, *self.measures["errors"].fine.stake()],
        }

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Go on from a snapshot: the wealth stays, the stakes begin small again.

        Raises:
            ArithmeticError, AttributeError, LookupError, TypeError, ValueError: it is none, and partly taken.
        """
        for name, (worse, fine, count, *total) in snapshot.get("wealth", {}).items():
            if (measure := self.measures.get(name)) is not None:
                measure.resume(_finite(worse), _finite(fine), int(count), *map(_finite, total[:1]))
        self._counts = _both(snapshot.get("counts", self._counts))
        before, seen, *sums = snapshot.get("doubted", (0, 0, 0.0, 0.0))
        left = max(0, int(snapshot.get("unanswered", 0)))
        self._unanswered = min(MOST_UNANSWERED, max(0, int(before)) + left)
        self._withheld = min(MOST_WITHHELD, max(0, int(snapshot.get("withheld", 0))))
        if left:
            self.measures["errors"].doubt(self._unanswered + self._withheld)
        elif self._unanswered or self._withheld:
            # These were missed when they were met, or proof was thrown away for them: what was gained since stays.
            self.measures["errors"].fine.resume_stake(max(0, int(seen)), *map(_finite, sums))
        self._reported = _both(snapshot.get("reported", self._reported))
        for kept, seconds in zip(self._seconds, snapshot.get("seconds", ()), strict=False):
            kept.extend(map(_finite, seconds))
        self.speakers.restore(snapshot.get("speakers", {}), _finite)  # as an earlier release wrote it
        for name, speakers in self._heard.items():
            speakers.restore(snapshot.get("heard", {}).get(name, {}), _finite)
        if "numbers" in snapshot:  # else of an earlier release: figures begin anew, the evidence does not
            requests, unjudged, shares = snapshot["compared"]
            self._compared = [int(requests), int(unjudged), _finite(shares)]
            items, differences, most = snapshot["numbers"]
            self._numbers = [int(items), _finite(differences), _finite(most)]
        self._tail = math.inf if (tail := snapshot.get("tail")) is None else _finite(tail)
        late = [_finite(each) for each in snapshot.get("late", self._late)]
        if len(late) == len(self._late):
            self._late = late

    def _proof_of(self, name: Question) -> float:
        """The wealth of who bets that the candidate is no worse.

        Complaints alone say nothing: all that is reported of either is wrong then, and a candidate of which clients
        complain ten times as often looks like the baseline. What one key asks does not hide what the others meet: of
        errors and answers the others need no proof of their own (they may be few), but must not speak against it.
        """
        if name == "feedback":
            complaints = any(count == wrong for count, wrong in self._reported)
            return 0.0 if complaints else self.speakers.least("fine")
        if self._hiding(name) is not None:
            return 0.0
        return self.measures[name].fine.lowest(self._unknown if name == "errors" else 0)

    def _hiding(self, name: Question) -> str | None:
        """The id of a key without which the others' requests speak against the candidate."""
        return self._heard[name].hiding() if name in ("errors", "disagreement") else None

    def _alarm_of(self, name: Question) -> float:
        """The wealth of who bets that the candidate is worse."""
        if name in ("feedback", "disagreement"):
            return self._heard[name].least("worse")
        return self.measures[name].worse.log_wealth

    def _alone(self, name: Question) -> bool:
        """Whether all requests say that the candidate is worse, and those of all keys but one do not."""
        return self.measures[name].worse.log_wealth >= self._alarm > self._alarm_of(name)

    def _waits(self, name: Question) -> str:
        """What a decision waits for, besides more observations; "" for nothing."""
        if name not in self.judged:
            return ""
        if self._alone(name):
            return ALONE
        measure = self.measures[name]
        if measure.fine.log_wealth >= self._proof and self._hiding(name) is not None:
            return AGAINST
        unproven = self._proof_of(name) < self._proof
        if told := self._uncopied(name):
            return told
        if name == "errors" and self._awaits:
            return unanswered(self.going_on)
        if name == "errors" and unproven and self._withheld > self._plan.max_error_increase * self._counts[0][0]:
            return withheld(self._withheld)
        if name in ("latency", "slowest") and unproven:
            return beside(self._met[0], self.measures["latency"].count)
        share, _ = self._seen(name)
        if name != "disagreement" or share is None or not unproven:
            return ""
        bound = self._plan.max_disagreement
        lacks = self._alarm - self._alarm_of(name) if share > bound else self._proof - self._proof_of(name)
        return near(share, bound, measure.count, lacks)

    def _uncopied(self, name: Question) -> str:
        """What to say where it waits for copies that are not made; "" where it does not."""
        if name not in ("errors", "disagreement") or self._proof_of(name) >= self._proof:
            return ""
        suspected = 2 * self._suspected > self._dropped[0]
        return uncopied(self._dropped[0], self.measures[name].count, direct=bool(self._dropped[1]), suspected=suspected)

    @property
    def _unknown(self) -> int:
        """Requests that the candidate may have failed, or has, and that are not weighed yet."""
        return self.going_on + self._heard["errors"].unweighed

    @property
    def _awaits(self) -> bool:
        """Whether it is what has no answer that keeps it from being proven, or would."""
        if not self.going_on or self._proof_of("errors") >= self._proof:
            return False
        few = self._plan.max_error_increase * (self._counts[0][0] + self.going_on)
        return self.going_on > few or self.measures["errors"].fine.log_wealth >= self._proof

    @property
    def _uncompared(self) -> bool:
        """Whether there was nothing to judge in any of the answers that were compared."""
        requests, unjudged, shares = self._compared
        return bool(requests) and requests == unjudged and not shares

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
            requests, _, shares = self._compared
            return (shares / requests if requests and not self._uncompared else None), None
        if name == "slowest":
            times, *sums = self._late
            return tuple(each / times if times else None for each in sums)  # type: ignore[return-value]
        return self._quantiles(0.5)

    def _quantiles(self, q: float) -> tuple[float | None, float | None]:
        return tuple(_quantile(each, q) if each else None for each in self._seconds)  # type: ignore[return-value]

    def _told(self, name: Question) -> str:
        candidate, baseline = self._seen(name)
        if name == "errors":
            mine, theirs = (f"{count:,}" for count, _ in self._counts)
            return f"{_percent(candidate)} of its {mine} requests fail, {_percent(baseline)} of the baseline's {theirs}"
        if name == "feedback":
            alone = " (all of it by one key)" if len(self.speakers) == 1 else ""
            told = f"{_percent(candidate)} of its answers are reported wrong, {_percent(baseline)} of the baseline's"
            return told + alone
        if name == "disagreement":
            requests = self._compared[0]
            if self._uncompared:
                return f"its answers to {requests} requests are not compared: {UNRULED}"
            share = _percent(candidate)
            return f"it disagrees with the baseline on {share} of a request's items, over {requests} requests"
        if name == "slowest":
            mine, theirs = map(_ms, self._quantiles(TAIL))
            if not self._late[0]:  # nothing was judged yet
                return f"its 95th percentile is {mine}, the baseline's {theirs}"
            return (
                f"{_percent(candidate)} of its answers took over {self._slower:g} times the baseline's 95th percentile "
                f"at the time, {_percent(baseline)} of the baseline's over that percentile itself (95th percentiles of "
                f"the last answers, {KEPT} at most: {mine} and {theirs})"
            )
        return f"its median is {_ms(candidate)}, the baseline's {_ms(baseline)}"


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
