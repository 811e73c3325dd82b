"""Requests are weighed beside those that were asked at about the same time, whenever their answers come."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.rollout.analysis import Outcome
from serve.rollout.course import Course
from serve.rollout.evidence import Measure
from serve.rollout.pairs import Paired, Place
from serve.rollout.plan import Plan

GOOD, BAD = Outcome(False, None), Outcome(True, None)
PLAN = Plan(steps=(50.0,), step_s=5.0, max_error_increase=0.05)


class Noted(Measure):
    """Keeps what it is told."""

    def __init__(self) -> None:
        super().__init__(0.05, -1.0, 1.0)
        self.values: list[float] = []

    def add(self, value: float) -> None:
        self.values.append(value)
        super().add(value)


def weighed(asked: Sequence[Literal[0, 1]], said: Sequence[bool | None], order: Sequence[int]) -> list[float]:
    """What is told of requests, asked in their order and answered in another."""
    measure = Noted()
    paired = Paired(measure)
    places = [Place([paired], which) for which in asked]
    for number in order:
        places[number].say(said[number])
    return measure.values


requests = st.lists(st.tuples(st.sampled_from([0, 1]), st.booleans()), max_size=30)


@given(requests, st.randoms(use_true_random=False))
def test_the_order_of_the_answers_changes_no_pair(
    requests: list[tuple[Literal[0, 1], bool]], draw: random.Random
) -> None:
    asked, said = [which for which, _ in requests], [bad for _, bad in requests]
    order = [*range(len(asked))]
    in_order = weighed(asked, said, order)
    draw.shuffle(order)
    assert sorted(weighed(asked, said, order)) == sorted(in_order)


@given(requests, st.data())
def test_each_answer_is_in_one_pair_at_most_and_one_alone_waits(
    requests: list[tuple[Literal[0, 1], bool]], data: st.DataObject
) -> None:
    """What is forgotten takes nobody with it: whoever was asked beside it is weighed against the next."""
    said = [None if data.draw(st.integers(0, 3)) == 0 else bad for _, bad in requests]
    order = data.draw(st.permutations(range(len(requests))))
    values = weighed([which for which, _ in requests], said, order)
    each = [
        sum(which == model and bad is not None for (which, _), bad in zip(requests, said, strict=True))
        for model in (0, 1)
    ]
    assert len(values) <= min(each)
    assert bool(values) == all(each)


@pytest.mark.parametrize(
    ("asked", "said", "expected"),
    [
        ((0, 1), (True, False), [1.0]),
        ((0, 0, 1), (True, False, False), [0.5]),
        ((0, 1, 1, 0), (True, False, True, False), [1.0, -1.0]),
        ((0, 1, 1), (None, True, True), []),
        ((0, 1, 0), (None, False, True), [1.0]),
        ((0, 1, 0, 1), (True, None, None, False), [1.0]),
    ],
)
def test_of_one_model_any_number_and_one_of_the_other_make_a_pair(
    asked: Sequence[Literal[0, 1]], said: Sequence[bool | None], expected: list[float]
) -> None:
    assert weighed(asked, said, range(len(asked))) == expected


def test_of_whom_there_is_evidence_without_from_now_on_what_was_asked_before_counts() -> None:
    """What hangs, and so has no answer yet, is what may be bad."""
    analysis = Course(PLAN, 0.0).analysis
    hanging = [analysis.asked("candidate", key="a") for _ in range(16)]
    beside = [analysis.asked("baseline", key="a") for _ in range(16)]
    for place in beside:
        analysis.baseline(GOOD, key="a", place=place)
    for _ in range(60):
        analysis.candidate(GOOD, key="a")
        analysis.baseline(GOOD, key="a")
    analysis.candidate(GOOD, key="b")
    for place in hanging:
        analysis.candidate(BAD, key="a", place=place)
    for _ in range(1000):
        analysis.candidate(GOOD, key="b")
        analysis.baseline(GOOD, key="b")
    without = analysis._heard["errors"]._others()
    assert without["a"].mean == 0.0
    assert without["b"].mean > 0.0


def test_failures_that_come_all_at_once_count_each_for_itself() -> None:
    """A fifth of what a candidate is asked hangs, until the time of ten of these is over."""
    draw = random.Random(1)
    course = Course(PLAN, 0.0)
    hanging: list[Place] = []
    for number in range(2000):
        who: Literal["candidate", "baseline"] = draw.choice(("candidate", "baseline"))
        place = course.analysis.asked(who)
        if who == "baseline":
            course.analysis.baseline(GOOD, place=place)
        elif draw.random() < 0.8:
            course.analysis.candidate(GOOD, place=place)
        else:
            hanging.append(place)
        if len(hanging) == 10:
            for each in hanging:
                course.analysis.candidate(BAD, place=each)
            hanging.clear()
        course.analysis.going_on = len(hanging)
        course.look(number / 20)
    assert course.state == "aborted"


def proven_after(asked: int = 0, said: int = 0) -> int:
    """Good pairs that prove it, beside candidate's requests that have no answer, or failed beside a baseline's that
    has none."""
    analysis = Course(PLAN, 0.0).analysis
    analysis.required = ["errors"]
    analysis.going_on = asked
    for _ in range(said):
        failed = analysis.asked("candidate")
        analysis.asked("baseline")
        analysis.candidate(BAD, place=failed)
    pairs = 0
    while not analysis.proven():
        analysis.baseline(GOOD)
        analysis.candidate(GOOD)
        pairs += 1
    return pairs


def test_what_has_no_answer_yet_or_is_not_weighed_counts_as_failed_where_a_step_would_be_passed() -> None:
    none = proven_after()
    for some in (1, 5):
        assert proven_after(asked=some) == proven_after(said=some) > none + 20 * some


def test_what_was_asked_in_the_step_before_is_weighed_in_this_one_each_for_itself() -> None:
    def worse(*, later: bool) -> float:
        course = Course(Plan(steps=(50.0, 90.0)), 0.0)
        places = []
        for _ in range(16):
            places.append(course.analysis.asked("candidate"))
            course.analysis.baseline(GOOD)
        if later:
            course.promote(1.0, "")
        for place in places:
            course.analysis.candidate(BAD, place=place)
        assert course.analysis.measures["errors"].mean == 1.0
        return course.analysis.measures["errors"].worse.log_wealth

    assert worse(later=True) == worse(later=False) > 5


def test_a_later_process_proves_it_anew_beside_what_an_earlier_one_had_no_answer_to() -> None:
    def pairs(unanswered: int, restarts: int = 1, between: int = 0) -> int:
        analysis = Course(PLAN, 0.0).analysis
        analysis.going_on = unanswered
        for _ in range(200):
            analysis.baseline(GOOD)
            analysis.candidate(GOOD)
        for number in range(restarts):
            for _ in range(between if number else 0):
                analysis.baseline(GOOD)
                analysis.candidate(GOOD)
            kept = json.loads(json.dumps(analysis.snapshot()))
            analysis = Course(PLAN, 0.0).analysis
            analysis.restore(kept)
        analysis.required = ["errors"]
        count = 0
        while not analysis.proven():
            analysis.baseline(GOOD)
            analysis.candidate(GOOD)
            count += 1
        return count

    assert pairs(0) == 0
    assert 16 / 0.05 - 16 < pairs(16) < 1000
    assert pairs(16, restarts=5) == pairs(16)
    assert pairs(16, restarts=5, between=50) == pairs(16) - 4 * 50, "what was gained since is not thrown away again"
    assert pairs(16, restarts=5, between=200) == 0


@pytest.mark.parametrize("unanswered", [0, 1])
@pytest.mark.parametrize("withheld", [0, 100])
def test_a_later_process_remembers_what_was_kept_from_a_candidate_that_answered_none(
    withheld: int, unanswered: int
) -> None:
    def pairs(restarts: int) -> int:
        analysis = Course(PLAN, 0.0).analysis
        for at in range(100):
            analysis.baseline(GOOD)
            analysis.candidate(GOOD)
            if at < withheld:
                analysis.withheld()
        for _ in range(restarts):
            analysis.going_on = unanswered
            kept = json.loads(json.dumps(analysis.snapshot()))
            analysis = Course(PLAN, 0.0).analysis
            analysis.restore(kept)
        if withheld:
            assert "were kept from the candidate" in analysis.evidence()["errors"]["waits"]
        analysis.required = ["errors"]
        count = 0
        while not analysis.proven():
            analysis.baseline(GOOD)
            analysis.candidate(GOOD)
            count += 1
        return count

    assert pairs(1) >= pairs(0) - unanswered
    assert pairs(3) >= pairs(1)
    if withheld:
        assert pairs(1) > 1000
