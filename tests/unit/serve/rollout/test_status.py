"""What `serve rollout` tells of a rollout: figures of now as such, and what to do next."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from serve.cli import rollout as command
from serve.cli.main import main
from serve.rollout.analysis import Analysis, Outcome
from serve.rollout.course import Course
from serve.rollout.plan import Plan, Target
from serve.rollout.store import State, Store
from tests.full_disk import full_disk

BEFORE = "it disagrees with the baseline on 12% of 618 items"


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["rollout", *arguments])
    assert not ended.value.code
    return capsys.readouterr().out


def kept(state: Path, of: State, analysis: Analysis, sticky: str = "") -> None:
    store = Store(state)
    row = store.start("m", Target("m", "2"), Plan(shadow=0.0, sticky=sticky), Target("m", "1"))
    store.claim(row, "me")
    store.save(
        row.id, "me", state=of, step=1, seconds=3.0, why=BEFORE, baseline=Target("m", "1"),
        snapshot=analysis.snapshot(), evidence=analysis.evidence(), events=[("step", BEFORE)],
    )  # fmt: skip


@pytest.mark.parametrize(("of", "first"), [("running", "· running\n"), ("aborted", f"· aborted: {BEFORE}\n")])
def test_what_the_step_before_showed_is_not_told_of_this_one(
    of: State, first: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept(tmp_path / "s.db", of, Analysis(Plan(), 0.1))
    found = told(capsys, "status", "--state", str(tmp_path / "s.db"))
    assert first in found
    assert (f"came to this step because {BEFORE}" in found) == (of == "running")


def test_the_table_shows_the_share_of_slow_answers_that_is_allowed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    analysis = Analysis(Plan(), 0.1)
    for number in range(400):
        analysis.baseline(Outcome(False, 0.01))
        analysis.candidate(Outcome(False, 0.05 if number % 25 == 0 else 0.01))
    kept(tmp_path / "s.db", "running", analysis)
    found = told(capsys, "status", "--state", str(tmp_path / "s.db"))
    row = next(line for line in found.splitlines() if "slowest" in line)
    assert [cell.strip() for cell in row.split("│")[1:6]] == [
        "slowest: over 1.25 x p95",
        "375",
        "4.000%",
        "0.000%",
        "5% more",
    ]


def test_a_step_without_traffic_says_what_it_needs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept(tmp_path / "s.db", "running", Analysis(Plan(), 0.1))
    found = told(capsys, "status", "--state", str(tmp_path / "s.db"))
    assert "no traffic: this step takes some 600 requests that both models answered, and 1 more step after it" in found


def test_a_step_with_traffic_says_how_long_it_takes_yet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    analysis = Analysis(Plan(), 0.1)
    for _ in range(200):
        analysis.baseline(Outcome(False, 0.01))
        analysis.candidate(Outcome(False, 0.01))
    kept(tmp_path / "s.db", "running", analysis)  # 3 s of at least 30
    found = told(capsys, "status", "--state", str(tmp_path / "s.db"))
    assert "at the rate so far this step takes some 27 s more, and 1 more step after it" in found


def test_a_rollback_for_other_answers_says_what_to_do_where_they_are_meant() -> None:
    course = Course(Plan(), 0.0)
    for number in range(500):
        course.analysis.compared(1, 1, 0.0, 0.0)
        if (event := course.look(float(number))) is not None:
            break
    assert event is not None
    assert "it disagrees" in event.why
    assert "--expect-change" in event.why
    assert "--agree" in event.why


def test_who_requires_feedback_is_told_how_much_it_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "TAKEN_UP_S", 0.0)  # no gateway is there to take it up
    common = ["start", "m", "--candidate", "2", "--baseline", "m/1", "--state"]
    assert "waits for" not in told(capsys, *common, str(tmp_path / "a.db"))
    found = told(capsys, *common, str(tmp_path / "b.db"), "--require-feedback")
    assert "waits for feedback on some 300 answers of each model" in found


def disagreeing(analysis: Analysis, copies: int, every: float, key: str = "") -> None:
    for number in range(copies):
        analysis.compared(1, int(number % every == every - 1), 0.0, 0.0, key=key)


@pytest.mark.parametrize(
    ("copies", "every", "more"),
    [(4000, 48, "some 500,000 more"), (3000, 50, "over 10,000,000 more"), (3180, 53, "some 200,000 more"),
     (400, 48, ""), (1000, 200, ""), (4000, 1000, ""), (4000, math.inf, "")],
)  # fmt: skip
def test_what_is_too_near_its_bound_to_be_decided_says_so_and_what_to_do(
    copies: int, every: float, more: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    analysis = Analysis(Plan(steps=()), 0.0)
    disagreeing(analysis, copies, every)
    assert analysis.worse() is None
    state = tmp_path / "s.db"
    kept(state, "running", analysis)
    lines = [line for line in told(capsys, "status", "--state", str(state)).splitlines() if "too near" in line]
    assert len(lines) == bool(more)
    for line in lines:
        assert line.startswith(
            f"  disagreement: {copies // every / copies:.2%} is too near the 2% allowed to decide soon"
        )
        assert f"(that takes {more} copies)" in line
        assert "--expect-change if it was trained anew" in line
        assert "--tolerance" in line


def test_a_change_that_is_expected_waits_for_no_agreement() -> None:
    analysis = Analysis(Plan(steps=(), expect_change=True), 0.0)
    disagreeing(analysis, 4000, 48)
    assert "waits" not in analysis.evidence()["disagreement"]


@pytest.mark.parametrize("of", ["running", "aborted"])
def test_the_operator_learns_whose_requests_alone_speak_against_a_candidate(
    of: State, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    analysis = Analysis(Plan(steps=()), 0.0)
    disagreeing(analysis, 50, math.inf, "honest")
    disagreeing(analysis, 50, 1, "liar")
    state = tmp_path / "s.db"
    kept(state, of, analysis)
    found = told(capsys, "status", "--state", str(state))
    assert ("worse by the requests of one key alone" in found) == (of == "running")
    assert found.count("(key liar)") == (of == "running")
    assert "liar" not in str(analysis.evidence()), "who looks at /rollouts learns of no other key"


@pytest.mark.parametrize(("every", "some"), [(math.inf, 300), (20, 3000)])
def test_so_much_feedback_is_a_proof(every: float, some: int) -> None:
    plan = Plan(require_feedback=True)
    analysis = Analysis(plan, 0.1)
    count = 0
    while analysis.evidence().get("feedback", {"proof": 0.0})["proof"] < 1:
        count += 1
        analysis.reported("candidate", wrong=count % every == 1)
        analysis.reported("baseline", wrong=count % every == 10)
    assert 0.6 * some < count < 1.4 * some


@pytest.mark.parametrize("wish", ["promote", "abort"])
def test_a_wish_that_nobody_carries_out_is_told_as_what_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, wish: str
) -> None:
    monkeypatch.setattr(command, "TAKEN_UP_S", 0.01)
    path = tmp_path / "s.db"
    Store(path).start("m", Target("m", "2"), Plan(), Target("m", "1"))
    found = told(capsys, wish, "m", "--state", str(path))
    assert f"no gateway has taken the rollout up yet; one that starts with --state {path} will" in found
    kept(tmp_path / "t.db", "running", Analysis(Plan(), 0.1))
    found = told(capsys, wish, "m", "--state", str(tmp_path / "t.db"))
    assert "no gateway has taken" not in found
    assert "the gateway that judges the rollout has been silent for" in found
    assert "carried out as that one, or another, starts with --state" in found
    assert ("POST /rollouts/m/abort" in found) == (wish == "abort")


def test_who_can_not_write_down_an_abort_is_told_how_to_abort_without(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "s.db"
    kept(path, "running", Analysis(Plan(), 0.1))
    with full_disk(), pytest.raises(SystemExit) as ended:
        main(["rollout", "abort", "m", "--state", str(path)])
    assert ended.value.code == 2
    assert "POST /rollouts/m/abort, with a key with admin" in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.parametrize(
    ("mine", "theirs", "share"),
    [
        (130, 130, "; in this step it answered 50% of the requests (130 of 260)"),
        (0, 260, "answered 0% of the requests (0 of 260), as with few clients: leave --sticky out"),
        (260, 0, "answered 100% of the requests (260 of 260), the baseline none"),
        (0, 0, "; none has asked in this step"),
    ],
)
def test_with_few_clients_that_stay_the_share_is_what_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], mine: int, theirs: int, share: str
) -> None:
    analysis = Analysis(Plan(), 0.25)
    for _ in range(mine):
        analysis.candidate(Outcome(False, 0.01))
    for _ in range(theirs):
        analysis.baseline(Outcome(False, 0.01))
    kept(tmp_path / "s.db", "running", analysis, "key")
    found = told(capsys, "status", "--state", str(tmp_path / "s.db"))
    assert "25% of the keys are to meet the candidate" in found
    assert share in found
    assert "of the requests now go" not in found
