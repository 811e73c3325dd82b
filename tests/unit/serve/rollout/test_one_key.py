"""Where several keys ask, none of them alone decides what becomes of a candidate."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping

import pytest

from serve.rollout.analysis import Outcome
from serve.rollout.course import Course
from serve.rollout.plan import Plan

COPIES = Plan(steps=(), shadow=100.0, step_s=0.0)
MINUTE = Plan(steps=(), shadow=100.0, step_s=60.0)
GOOD, BAD = Outcome(False, 0.01), Outcome(True, None)


def copies(course: Course, shares: Mapping[str, tuple[float, float]], requests: int) -> int:
    """Copied requests, until it ends.

    Args:
        shares: by key, its share of the requests (they are drawn by it), and the share of these that disagree.

    Returns:
        How many it took; one a second.
    """
    draw = random.Random(1)
    keys, weights = list(shares), [share for share, _ in shares.values()]
    for number in range(requests):
        (key,) = draw.choices(keys, weights)
        course.analysis.copied(GOOD, GOOD, key=key)
        course.analysis.compared(1, int(draw.random() < shares[key][1]), 0.0, 0.0, key=key)
        if course.look(float(number)) is not None:
            return number + 1
    return requests


HONEST = {"a": (1.0, 0.0), "b": (1.0, 0.0), "c": (1.0, 0.0)}
DIFFER = {key: (share, 0.3) for key, (share, _) in HONEST.items()}


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (DIFFER | {"flood": (150.0, 0.0)}, "but not where those of one key are left out"),
        (HONEST | {"flood": (30.0, 1.0)}, "by the requests of one key alone"),
        (HONEST | {"flood": (1.0, 1.0)}, "by the requests of one key alone"),
        (DIFFER | {"flood": (200.0, 0.001)}, "but not where those of one key are left out"),
    ],
    ids=["hides that others differ", "asks where they differ", "asks no more than others", "differs now and then"],
)
@pytest.mark.parametrize("later", [False, True], ids=["one process", "a later process"])
def test_what_one_of_several_keys_asks_neither_promotes_a_candidate_nor_takes_it_back(
    keys: dict[str, tuple[float, float]], says: str, later: bool
) -> None:
    course = Course(MINUTE, 0.0)
    course.shared = True
    assert copies(course, keys, 5000) == 5000
    if later:
        kept = json.loads(json.dumps(course.analysis.snapshot()))
        course = Course(MINUTE, 0.0)
        course.restore(0.0, kept)
        assert copies(course, keys, 2000) == 2000
    assert course.state == "running"
    assert says in course.analysis.evidence()["disagreement"]["waits"]
    assert course.analysis.decisive() == {"disagreement": "flood"}
    assert json.loads(json.dumps(course.analysis.snapshot()))["decisive"] == {"disagreement": "flood"}


@pytest.mark.parametrize(
    ("shared", "joined", "least", "most"), [(False, False, 5, 30), (True, False, 61, 61), (True, True, 100, 100)]
)
def test_a_key_that_asks_alone_decides_once_others_had_the_time_to_ask(
    shared: bool, joined: bool, least: int, most: int
) -> None:
    course = Course(MINUTE, 0.0)
    course.shared, course.joined = shared, joined
    assert least <= copies(course, {"alone": (1.0, 0.9)}, 100) <= most
    assert course.state == ("running" if joined else "aborted")


@pytest.mark.parametrize("count", [1, 2, 3, 40])
def test_what_all_meet_takes_a_candidate_back(count: int) -> None:
    course = Course(COPIES, 0.0)
    assert copies(course, {f"k{number}": (1.0, 0.3) for number in range(count)}, 300) < 300
    assert course.state == "aborted"


def test_who_agrees_alone_does_not_save_a_candidate_from_what_the_others_meet() -> None:
    course = Course(COPIES, 0.0)
    copies(course, DIFFER | {"friend": (1.0, 0.0)}, 500)
    assert course.state == "aborted"


@pytest.mark.parametrize("differs", [0.0, 0.005])
def test_a_good_candidate_is_promoted_as_fast_for_many_keys_as_for_one(differs: float) -> None:
    took = []
    for count in (1, 2, 5, 40):
        course = Course(COPIES, 0.0)
        draw = random.Random(3)
        for number in range(10_000):
            key = f"k{number % count}"
            course.analysis.copied(GOOD, GOOD, key=key)
            course.analysis.compared(1, int(draw.random() < differs), 0.0, 0.0, key=key)
            if course.look(float(number)) is not None:
                break
        assert course.state == "promoted"
        took.append(number)
    assert took == took[:1] * 4


@pytest.mark.parametrize("disagreed", [0, 1])
def test_a_single_request_of_another_key_holds_nothing_up(disagreed: int) -> None:
    course = Course(COPIES, 0.0)
    course.analysis.compared(1, disagreed, 0.0, 0.0, key="once")
    copies(course, {"main": (1.0, 0.0)}, 3000)
    assert course.state == "promoted"


def test_one_key_s_good_requests_do_not_hide_what_fails_for_the_others() -> None:
    course = Course(Plan(steps=(50.0,), shadow=0.0, step_s=0.0), 0.0)
    draw = random.Random(0)
    for number in range(6000):
        key = "flood" if number % 50 else "honest"
        failed = key == "honest" and draw.random() < 0.3
        course.analysis.candidate(BAD if failed else GOOD, key=key)
        course.analysis.baseline(GOOD, key=key)
        course.look(float(number))
    assert course.state == "running"
    assert course.analysis.measures["errors"].fine.log_wealth > 4.7, "all together were proof"
    assert course.analysis.decisive() == {"errors": "flood"}
    assert "one key are left out" in course.analysis.evidence()["errors"]["waits"]


def test_what_fails_for_one_key_alone_takes_a_candidate_back() -> None:
    """The failure is the model's; where each client stays with one model, one key may be all that meets it."""
    course = Course(Plan(steps=(50.0,), shadow=0.0), 0.0)
    for number in range(30):
        course.analysis.baseline(GOOD, key="a")
        course.analysis.candidate(BAD, key="b")
        course.look(float(number))
    assert course.state == "aborted"


def test_so_many_keys_at_most_are_told_apart() -> None:
    course = Course(COPIES, 0.0)
    for number in range(1000):
        course.analysis.compared(1, 0, 0.0, 0.0, key=f"k{number}")
        course.analysis.copied(GOOD, GOOD, key=f"k{number}")
    assert {name: len(keys) for name, keys in course.analysis.snapshot()["heard"].items()} == {
        "errors": 16, "feedback": 0, "disagreement": 16,
    }  # fmt: skip
