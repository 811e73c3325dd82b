"""A rollout goes on with proof, ends with evidence against, and waits while there is neither."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable

import pytest

from compress.errors import ServerError
from serve.rollout.analysis import Outcome
from serve.rollout.course import Course
from serve.rollout.plan import Plan, Target

GOOD = Outcome(False, 0.01)
BAD = Outcome(True, None)
SLOW = Outcome(False, 0.02)
PLAN = Plan(steps=(10.0, 50.0), shadow=0.0, step_s=0.0)


def follow(
    course: Course, candidate: Callable[[], Outcome], baseline: Callable[[], Outcome], pairs: int = 20_000
) -> int:
    """Pairs of answers until it ends."""
    for number in range(pairs):
        course.analysis.baseline(baseline())
        course.analysis.candidate(candidate())
        course.look(now=float(number))
        if course.state != "running":
            return number + 1
    return pairs


def noisy(seconds: float, seed: int) -> Callable[[], Outcome]:
    draw = random.Random(seed)
    return lambda: Outcome(False, seconds * draw.lognormvariate(0, 0.3))


def test_a_candidate_like_the_baseline_is_promoted_step_by_step() -> None:
    course = Course(PLAN, 0.0)
    assert course.weight == 0.1
    follow(course, noisy(0.01, 1), noisy(0.01, 2))
    assert course.state == "promoted"
    assert course.weight == 1


@pytest.mark.parametrize(("going_on", "state"), [(0, "promoted"), (1, "promoted"), (300, "running")])
def test_what_has_no_answer_yet_may_fail_and_holds_it_where_it_is_too_much(going_on: int, state: str) -> None:
    course = Course(PLAN, 0.0)
    usual, baseline = noisy(0.01, 1), noisy(0.01, 2)

    def candidate() -> Outcome:
        course.analysis.going_on = going_on
        return usual()

    follow(course, candidate, baseline)
    assert course.state == state
    waits = course.analysis.evidence()["errors"].get("waits", "")
    assert ("not answered 300 requests" in waits) is (state == "running")
    if state == "running":  # a gateway that is started anew knows of them, and waits for more answers
        later = Course(PLAN, 0.0, step=course.step)
        later.restore(0.0, json.loads(json.dumps(course.snapshot())))
        follow(later, usual, baseline, pairs=1000)
        assert later.state == "running"
    course.analysis.going_on = 0
    follow(course, usual, baseline)
    assert course.state == "promoted"


@pytest.mark.parametrize(
    ("candidate", "most", "told"),
    [
        (lambda: BAD, 20, "requests fail, 0% of the baseline's"),
        (noisy(0.02, 1), 300, "its median is"),
        (noisy(0.1, 1), 60, "the baseline's"),
    ],
    ids=["fails", "twice as slow", "ten times as slow"],
)
def test_a_worse_candidate_is_taken_back(candidate: Callable[[], Outcome], most: int, told: str) -> None:
    course = Course(PLAN, 0.0)
    assert follow(course, candidate, noisy(0.01, 2)) <= most
    assert course.state == "aborted"
    assert course.weight == 0
    question = course.analysis.worse()
    assert question is not None
    assert told in course.analysis.told([question])


def test_slow_ones_among_fast_ones_are_seen_too() -> None:
    draw = random.Random(0)
    usual = noisy(0.01, 1)
    course = Course(PLAN, 0.0)
    follow(course, lambda: Outcome(False, 0.05) if draw.random() < 0.25 else usual(), noisy(0.01, 2))
    assert course.state == "aborted"


def leaving(course: Course, shares: tuple[float, float], seconds: float, pairs: int = 5000) -> None:
    """Pairs of answers of some 10 ms, of which a share of the candidate's, and of the baseline's, is waited for in vain."""
    draw = random.Random(0)
    usual = noisy(0.01, 1)
    for number in range(pairs):
        for who, share in zip(("baseline", "candidate"), reversed(shares), strict=True):
            if draw.random() < share:
                course.analysis.left(who, seconds)  # type: ignore[arg-type]
            else:
                getattr(course.analysis, who)(usual())
        course.look(float(number))


@pytest.mark.parametrize("share", [0.2, 1.0])
def test_a_candidate_for_which_clients_wait_in_vain_is_taken_back(share: float) -> None:
    course = Course(PLAN, 0.0)
    leaving(course, (share, 0.0), seconds=0.4)
    assert course.state == "aborted"
    question = course.analysis.worse()
    assert question in ("latency", "slowest")
    assert "400 ms" in course.analysis.told(["slowest"])


def test_clients_who_leave_alike_say_nothing_of_the_one() -> None:
    course = Course(PLAN, 0.0)
    leaving(course, (0.2, 0.2), seconds=0.4)
    assert course.state == "promoted"


def test_who_waits_no_longer_than_answers_take_says_nothing() -> None:
    course = Course(Plan(steps=(10.0,), shadow=0.0, step_s=1e6), 0.0)
    leaving(course, (0.5, 0.0), seconds=0.012)
    assert course.state == "running"
    assert max(course.analysis._seconds[0]) != 0.012
    before = course.analysis.measures["latency"].count
    for _ in range(100):
        course.analysis.left("candidate", 0.001)
        course.analysis.left("baseline", 0.001)
    assert course.analysis.measures["latency"].count == before


@pytest.mark.parametrize(("right", "state"), [((), "running"), (("candidate",), "running"),
                                                (("candidate", "baseline"), "promoted")])  # fmt: skip
def test_complaints_alone_prove_nothing_of_a_candidate(right: tuple[str, ...], state: str) -> None:
    """Who never says that an answer was right says of either that all were wrong."""
    course = Course(Plan(steps=(50.0,), shadow=0.0, step_s=0.0, require_feedback=True), 0.0)
    for who in right:
        course.analysis.reported(who, wrong=False)  # type: ignore[arg-type]
    for number in range(1500):
        course.analysis.candidate(GOOD)
        course.analysis.baseline(GOOD)
        course.analysis.reported("candidate", wrong=True)
        course.analysis.reported("baseline", wrong=True)
        course.look(float(number))
    assert course.state == state
    assert (course.analysis.evidence()["feedback"]["proof"] == 0) is (state == "running")


def test_how_long_a_copy_takes_is_neither_judged_nor_shown() -> None:
    course = Course(Plan(steps=(50.0,), shadow=50.0, step_s=1e6), 0.0)
    course.promote(0.0, "")
    for _ in range(20):
        course.analysis.candidate(GOOD)
        course.analysis.baseline(GOOD, paired=True)
        course.analysis.copied(Outcome(False, 5.0), GOOD)
    assert course.analysis.told(["slowest"]) == "its 95th percentile is 10 ms, the baseline's 10 ms"


def test_of_the_slowest_the_share_is_shown_that_is_judged() -> None:
    """6% take long, less than 5 points more than the baseline's 5%, though the 95th percentile is three times as long."""
    usual, base = noisy(0.01, 1), noisy(0.01, 2)
    analysis = Course(PLAN, 0.0).analysis
    for number in range(5000):
        analysis.baseline(base())
        analysis.candidate(Outcome(False, 0.05) if number % 50 < 3 else usual())
    seen = analysis.evidence()["slowest"]
    assert seen["candidate"] == pytest.approx(0.07, abs=0.01)
    assert seen["baseline"] == pytest.approx(0.05, abs=0.01)
    assert seen["candidate"] - seen["baseline"] < seen["bound"] == 0.05
    assert seen["proof"] >= 1
    assert seen["times"] == 1.25
    told = analysis.told(["slowest"])
    assert re.match(r"\S+ of its answers took over 1.25 times the baseline's 95th percentile at the time, \S+ of", told)
    assert "(95th percentiles of the last answers, 500 at most: 50 ms and 1" in told


def test_shares_over_a_bound_of_their_time_are_not_told_as_shares_over_today_s() -> None:
    """The machine becomes slow and fast again: what was slow at its time would be usual today."""
    draw = random.Random(1)
    analysis = Course(Plan(steps=(50.0,), shadow=0.0), 0.0).analysis
    taken: tuple[list[float], list[float]] = ([], [])
    for number in range(700):
        level = 0.005 + 0.1 * max(0.0, (number - 100) / 300) if number < 400 else 0.105 - 0.08 * (number - 400) / 300
        for seconds, take in zip(taken, (analysis.candidate, analysis.baseline), strict=True):
            seconds.append(max(0.001, level + draw.gauss(0, 0.002)))
            take(Outcome(False, seconds[-1]))
    told = analysis.told(["slowest"])
    assert "longer than" not in told
    assert "1.25 times the baseline's 95th percentile at the time" in told
    mine, theirs = (1000 * sorted(each[-500:])[475] for each in taken)
    assert f"{mine:.3g} ms and {theirs:.3g} ms" in told
    assert len(re.findall(r"\S+ ms", told)) == 2, "no bound of today beside shares over those of the time"


def test_what_hits_both_is_held_against_neither() -> None:
    draw = random.Random(0)
    course = Course(Plan(steps=(50.0,), shadow=0.0, step_s=0.0), 0.0)
    follow(course, lambda: BAD if draw.random() < 0.3 else GOOD, lambda: BAD if draw.random() < 0.3 else GOOD, 2000)
    assert course.state == "running", "with so many failures a difference of 1% needs more than this"


def test_a_step_lasts_its_time_whatever_the_proof() -> None:
    course = Course(Plan(steps=(50.0,), shadow=0.0, step_s=100_000.0), 0.0)
    follow(course, noisy(0.01, 1), noisy(0.01, 2), 3000)
    assert course.state == "running"
    event = course.look(now=200_000.0)
    assert event is not None
    assert event.kind == "promoted"


def test_a_step_without_a_decision_ends_in_time() -> None:
    course = Course(Plan(give_up_s=60.0), 0.0)
    assert course.look(now=59.0) is None
    event = course.look(now=61.0)
    assert event is not None
    assert (event.kind, event.why) == ("aborted", "no decision within 60 s")


@pytest.mark.parametrize(("disagreed", "state"), [(0.0, "promoted"), (0.2, "aborted")])
def test_copies_come_first_and_are_judged_by_their_answers(disagreed: float, state: str) -> None:
    draw = random.Random(0)
    course = Course(Plan(steps=(), shadow=100.0, step_s=0.0), 0.0)
    assert course.weight == 0
    for number in range(3000):
        course.analysis.copied(GOOD, GOOD)
        course.analysis.compared(1, int(draw.random() < disagreed), 0.001, 0.01)
        course.look(float(number))
    assert course.state == state
    seen = course.analysis.evidence()["disagreement"]
    assert seen["candidate"] == pytest.approx(disagreed, abs=0.2)
    assert seen["difference"] == pytest.approx(0.001)


def test_a_change_that_is_expected_is_recorded_and_not_judged() -> None:
    course = Course(Plan(steps=(50.0,), shadow=50.0, step_s=0.0, expect_change=True), 0.0)
    for number in range(2000):
        course.analysis.copied(GOOD, GOOD)
        course.analysis.compared(1, 1, 0.1, 0.2)
        event = course.look(float(number))
        if event is not None:
            break
    assert event is not None
    assert event.kind == "step", "errors alone had to be proven"
    assert "; it disagrees with the baseline on 100% of a request's items, over " in event.why
    seen = course.analysis.evidence()["disagreement"]
    assert (seen["judged"], seen["required"], seen["alarm"]) == (False, False, 0.0)
    for _ in range(50):
        course.analysis.candidate(BAD)
        course.analysis.baseline(GOOD)
        course.analysis.compared(1, 1, 0.1, 0.2)
    event = course.look(5000.0)
    assert event is not None
    assert event.kind == "aborted"
    assert re.fullmatch(r"100% of its \d+ requests fail, 0% of the baseline's \d+", event.why)


def test_a_request_disagrees_by_its_share_of_items_in_what_is_judged_and_shown() -> None:
    course = Course(Plan(steps=(), shadow=100.0, step_s=0.0), 0.0)
    for _ in range(50):  # of all items, 2 of 33 are others; of the requests, each second one is
        course.analysis.compared(1, 1, 0.0, 0.0)
        course.analysis.compared(32, 0, 0.0, 0.0)
    assert course.analysis.evidence()["disagreement"]["candidate"] == 0.5
    event = course.look(0.0)
    assert event is not None
    assert event.why.startswith("it disagrees with the baseline on 50% of a request's items, over 100 requests")
    later = Course(Plan(steps=(), shadow=100.0), 0.0)
    later.restore(0.0, json.loads(json.dumps(course.analysis.snapshot())))
    assert later.analysis.evidence() == course.analysis.evidence()


def test_what_was_held_to_no_rule_is_shown_as_not_compared_and_not_waited_for() -> None:
    course = Course(Plan(steps=(), shadow=100.0, step_s=0.0), 0.0)
    for number in range(3000):
        course.analysis.copied(GOOD, GOOD)
        course.analysis.compared(1, 0, 0.5, 2.0, judged=False)
        if (event := course.look(float(number))) is not None:
            break
    seen = course.analysis.evidence()["disagreement"]
    assert (seen["candidate"], seen["not_compared"], seen["required"]) == (None, True, False)
    assert (seen["difference"], seen["largest"]) == (0.5, 2.0)
    assert event is not None
    assert event.kind == "promoted"
    assert "are not compared: single numbers are judged with --tolerance or --agree alone" in event.why
    course.analysis.compared(1, 1, 0.0, 0.0)
    assert course.analysis.evidence()["disagreement"]["not_compared"] is False


@pytest.mark.parametrize(
    ("liars", "honest", "several", "decided"),
    [(1, 0, False, True), (1, 0, True, False), (1, 1, True, False), (1, 3, True, False), (2, 0, True, True)],
)
def test_where_several_keys_may_speak_none_ends_a_release_alone(
    liars: int, honest: int, several: bool, decided: bool
) -> None:
    course = Course(Plan(steps=(50.0,), shadow=0.0), 0.0)
    analysis = course.analysis
    analysis.speakers.several = several
    for number in range(200):
        for who in range(liars + honest):
            analysis.reported("candidate", wrong=who < liars, key=f"k{who}")
            analysis.reported("baseline", wrong=False, key=f"k{who}")
        if number == 100:  # a later process goes on with it
            kept = json.loads(json.dumps(analysis.snapshot()))
            course = Course(course.plan, 0.0)
            course.restore(0.0, kept)
            analysis = course.analysis
            analysis.speakers.several = several
    assert (analysis.worse() == "feedback") is decided
    seen = analysis.evidence()["feedback"]
    assert seen["keys"] == liars + honest
    assert ("all of it by one key" in analysis.told(["feedback"])) is (liars + honest == 1)


def test_a_bad_candidate_is_seen_by_all_keys_together_and_none_of_them_hides_it() -> None:
    course = Course(Plan(steps=(50.0,), shadow=0.0), 0.0)
    draw = random.Random(0)
    for number in range(900):
        key, liar = f"k{number % 30}", number % 30 == 0  # more keys than are told apart
        course.analysis.reported("candidate", wrong=not liar and draw.random() < 0.5, key=key)
        course.analysis.reported("baseline", wrong=liar or draw.random() < 0.1, key=key)
    assert course.analysis.worse() == "feedback"


def test_nobody_helps_a_candidate_alone() -> None:
    course = Course(Plan(steps=(50.0,), shadow=0.0, require_feedback=True), 0.0)
    course.analysis.speakers.several = True
    for _ in range(3000):
        for who in ("candidate", "baseline"):
            course.analysis.reported(who, wrong=False, key="friend")
    assert course.analysis.evidence()["feedback"]["proof"] == 0


@pytest.mark.parametrize(
    ("wrong", "base_wrong", "told"),
    [(0.5, 0.1, "worse"), (0.1, 0.5, "fine"), (0.3, 0.3, "fine"), (0.0, 0.0, "fine")],
)
def test_what_clients_say_is_weighed_as_failures_are(wrong: float, base_wrong: float, told: str) -> None:
    draw = random.Random(0)
    plan = Plan(steps=(50.0,), shadow=0.0, step_s=0.0, max_wrong_increase=0.2, require_feedback=True)
    course = Course(plan, 0.0)
    analysis = course.analysis
    assert "feedback" in analysis.required
    for _ in range(1500):
        analysis.reported("candidate", wrong=draw.random() < wrong)
        analysis.reported("baseline", wrong=draw.random() < base_wrong)
        if analysis.worse() or analysis.measures["feedback"].fine.log_wealth > 5:
            break
    assert (analysis.worse() == "feedback") is (told == "worse")
    seen = analysis.evidence()["feedback"]
    assert seen["alarm" if told == "worse" else "proof"] >= 1
    kept = json.loads(json.dumps(analysis.snapshot()))
    later = Course(plan, 0.0)
    later.restore(0.0, kept)
    assert later.analysis.evidence() == analysis.evidence()


def test_feedback_that_nobody_gives_is_not_waited_for_and_not_shown() -> None:
    course = Course(PLAN, 0.0)
    assert "feedback" not in course.analysis.evidence()
    course.analysis.reported("baseline", wrong=True)
    assert course.analysis.evidence()["feedback"]["baseline"] == 1.0
    assert course.analysis.passed().endswith("none of its answers are reported wrong, 100% of the baseline's")
    copies = Course(Plan(steps=(50.0,), shadow=50.0), 0.0).analysis
    copies.reported("baseline", wrong=True)  # while there are copies alone there is nothing to hold it against
    assert "feedback" not in copies.evidence()


def test_an_answer_is_evidence_of_failures_once() -> None:
    course = Course(Plan(steps=(50.0,), shadow=50.0), 0.0)
    course.promote(0.0, "")
    analysis = course.analysis
    for _ in range(10):
        analysis.candidate(GOOD)
        analysis.baseline(BAD, paired=True)
        analysis.copied(GOOD, BAD)
    assert analysis.measures["errors"].count == 10, "the pairs, and no baseline's answer beside them"
    assert analysis.evidence()["errors"]["baseline"] == 1.0
    analysis.baseline(GOOD, paired=True)
    assert analysis.measures["latency"].count == 1, "how long it took is told once, and by this"


def test_a_later_process_goes_on_with_the_evidence() -> None:
    course = Course(PLAN, 0.0)
    follow(course, noisy(0.01, 1), noisy(0.01, 2), 300)
    kept = json.loads(json.dumps(course.analysis.snapshot()))
    later = Course(PLAN, 1000.0, course.step)
    later.restore(course.seconds(300.0), kept)
    assert later.analysis.evidence() == course.analysis.evidence()
    assert later.seconds(1000.0) == course.seconds(300.0)
    assert follow(later, lambda: BAD, noisy(0.01, 2)) < 30


@pytest.mark.parametrize(
    ("text", "target", "path"),
    [
        ("2", Target("digits", "2"), "/v2/models/digits/versions/2/infer"),
        ("other", Target("other"), "/v2/models/other/infer"),
        ("other/3", Target("other", "3"), "/v2/models/other/versions/3/infer"),
    ],
)
def test_targets(text: str, target: Target, path: str) -> None:
    found = Target.parse(text, "digits")
    assert (found, found.path) == (target, path)
    assert Target.parse(str(found), "digits") == found


@pytest.mark.parametrize("text", ["", "stats", "stats/1", "a/b", "a/", "a b", "../x", "a/1/2", "x" * 300])
def test_what_names_no_model_is_refused(text: str) -> None:
    with pytest.raises(ServerError, match="can't release"):
        Target.parse(text, "digits")


@pytest.mark.parametrize(
    "values",
    [
        {"steps": (), "shadow": 0.0},
        {"steps": (50.0, 5.0)},
        {"steps": (0.0,)},
        {"steps": (100.0,)},
        {"shadow": 101.0},
        {"step_s": -1.0},
        {"step_s": float("nan")},
        {"max_error_increase": 0.0},
        {"max_disagreement": 1.0},
        {"error_rate": 1.5},
        {"tolerance": -1.0},
        {"sticky": "a b"},
        {"max_wrong_increase": 0.0},
        {"require_feedback": True, "steps": ()},
    ],
)
def test_a_plan_that_can_not_work_is_refused(values: dict[str, object]) -> None:
    with pytest.raises(ServerError, match="can't be started") as refused:
        Plan(**values)  # type: ignore[arg-type]
    assert "_" not in (refused.value.why or ""), "flags are named, not fields"


def test_a_plan_survives_the_state_file() -> None:
    plan = Plan(steps=(1.0, 2.0), sticky="key", tolerance=0.1)
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict())) | {"unknown": 1}) == plan
