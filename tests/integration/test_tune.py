"""`serve tune` on a real Triton: it finds, reports, goes on, and writes back."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest

from compress.errors import ServerError
from serve.cli.main import main
from serve.config.pbtxt import parse, text_of
from serve.pack.write import PackOptions, pack
from serve.tune.candidate import Candidate, candidate_of, candidates, write_into
from serve.tune.final import DUEL_ROUNDS, Duel, Final, duel, final, winner
from serve.tune.options import TuneOptions
from serve.tune.report import verdict
from serve.tune.run import Tuned, _taken, apply, tune
from serve.tune.trial import Point, Stand, Subject, Trial, load_subject
from tests.gateway_models import fetch
from tests.serve_models import HOOKS, hook_file, tiny_artifact

pytestmark = pytest.mark.integration
SLEEPY = HOOKS.replace("import numpy as np\n", "import time\n\nimport numpy as np\n", 1).replace(
    "    return np.array([float(part)", "    time.sleep(0.01)\n    return np.array([float(part)"
)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A model whose preprocess sleeps far longer than all else takes: more processes give more, on any machine."""
    hooks = hook_file(tmp_path, SLEEPY)
    options = PackOptions(instances=1)
    pack(tiny_artifact(tmp_path / "tiny"), repository=tmp_path / "models", name="tiny", hooks=hooks, options=options)
    return tmp_path / "models"


def run(repository: Path, *words: str) -> int:
    flags = {"--trials": "3", "--seconds": "0.1", "--rounds": "1", "--seed": "3"}
    given = dict(zip(words[::2], words[1::2], strict=False))
    flags = {flag: value for flag, value in flags.items() if flag not in given}
    with pytest.raises(SystemExit) as ended:
        main(
            [
                "tune",
                "tiny",
                "--repository",
                str(repository),
                "--output",
                str(repository.parent / "tuned"),
                *(word for pair in flags.items() for word in pair),
                *words,
            ]
        )
    return int(ended.value.code or 0)


def test_it_finds_a_better_configuration_and_writes_it_back(
    repository: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each candidate is served by a real Triton and answers; only the stopwatch is given, as machines are busy."""
    ticks = itertools.count()

    def timed(url: str, subject: Subject, load: int, *, seconds: float, seed: int) -> Point:
        assert answers(url)
        messages = {name: parse((stand[-1] / name / "config.pbtxt").read_text()) for name in subject.texts}
        instances = candidate_of(messages, subject.network).hook_instances
        per_s = 100.0 * instances * min(load, 8) + next(ticks) % 5
        return Point(load, per_s, 5.0 * load, 6.0 * load, 7.0 * load, 0)

    stand: list[Path] = []
    enter = Stand.__enter__

    def entered(self: Stand) -> Stand:
        found = enter(self)
        stand.append(self._folder)
        return found

    monkeypatch.setattr(Stand, "__enter__", entered)
    for name in ("confirm", "once"):
        monkeypatch.setattr(f"serve.tune.run.{name}", timed)
    monkeypatch.setattr("serve.tune.trial.confirm", timed)
    monkeypatch.setattr(
        "serve.tune.run.measure",
        lambda url, subject, candidate, *, seconds, bound_ms, seed: Trial(
            candidate, seconds, tuple(timed(url, subject, load, seconds=seconds, seed=seed) for load in (4, 8))
        ),
    )
    assert run(repository, "--p99-ms", "1000", "--apply") == 0
    told = capsys.readouterr().out
    assert "Best within 1000 ms" in told, told
    assert "both with 8 in flight" in told
    assert "wrote it into" in told
    folder = repository.parent / "tuned"
    found = json.loads((folder / "tiny.json").read_text())
    assert found["best"]["hook_instances"] > 1
    assert candidate_of(load_subject(repository, "tiny").messages(), "tiny_network") == Candidate(**found["best"])
    page = (folder / "tiny.html").read_text()
    assert page.count("<svg") == 3
    assert not re.search(r"(src|href)=.http", page), "the page needs nothing from elsewhere"
    hooks = hook_file(repository.parent, SLEEPY)
    again = pack(
        repository.parent / "tiny", repository=repository, name="tiny", hooks=hooks, options=PackOptions(instances=1)
    )
    assert "tiny_preprocess.instance_group" in again.kept, "what was tuned is kept like an edit by hand"


def answers(url: str) -> bool:
    body = {"inputs": [{"name": "text", "datatype": "BYTES", "shape": [1, 1], "data": ["0,2,1,0"]}]}
    return fetch(f"{url}/v2/models/tiny/infer", json.dumps(body).encode())[0] == 200


def test_what_was_measured_is_not_measured_again(repository: Path) -> None:
    options = TuneOptions(p99_ms=1000, trials=3, seconds=0.1, rounds=1, output=repository.parent / "tuned")
    stages: list[str] = []

    def interrupt(stage: str, done: int, _total: int) -> None:
        stages.append(stage)
        if done == 2 or stage.startswith("final"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tune(repository, "tiny", options, on_progress=interrupt)
    state = repository.parent / "tuned/tiny.state.json"
    before = json.loads(state.read_text())["trials"]
    assert len(before) == 2
    with pytest.raises(KeyboardInterrupt):
        tune(repository, "tiny", options, on_progress=lambda stage, _, total: interrupt(stage, 0, total))
    after = json.loads(state.read_text())["trials"]
    assert after[:2] == before
    assert len(after) == 3


def test_a_bound_that_nothing_keeps_ends_with_exit_code_3(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (repository / "tiny_network/config.pbtxt").read_text()
    assert run(repository, "--p99-ms", "0.01", "--trials", "2", "--rounds", "1", "--apply") == 3
    assert "No configuration keeps p99 within 0.01 ms" in capsys.readouterr().out
    assert (repository / "tiny_network/config.pbtxt").read_text() == before


@pytest.mark.parametrize(
    "words", [["--p99-ms", "0"], ["--p99-ms", "5", "--trials", "0"], ["--p99-ms", "5", "--cpus", "x"]]
)
def test_what_can_t_be_asked_is_told(repository: Path, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(repository, *words) == 2
    assert "why:" in capsys.readouterr().err


def test_a_model_that_was_not_packed_can_t_be_tuned(repository: Path) -> None:
    with pytest.raises(ServerError, match="can't tune 'other'"):
        load_subject(repository, "other")


def test_a_candidate_survives_being_written(repository: Path) -> None:
    subject = load_subject(repository, "tiny")
    present = candidate_of(subject.messages(), subject.network)
    for candidate in candidates(present, 4):
        assert candidate.instances * candidate.threads <= 4
        messages = subject.messages()
        write_into(messages, subject.network, candidate)
        assert candidate_of(messages, subject.network) == candidate
        assert len({message.max_batch_size for message in messages.values()}) == 1
        largest = [warmup.batch_size for warmup in messages[subject.network].model_warmup]
        assert largest == [1, candidate.max_batch_size]


def test_what_a_candidate_does_not_speak_of_stays(repository: Path) -> None:
    subject = load_subject(repository, "tiny")
    messages = subject.messages()
    messages[subject.network].metric_tags["team"] = "vision"
    write_into(messages, subject.network, candidate_of(messages, subject.network))
    text = text_of(messages[subject.network])
    assert parse(text).metric_tags["team"] == "vision"


def point(per_s: float, p99: float | None = 5.0, p90: float | None = 4.0, errors: int = 0) -> Point:
    return Point(8, per_s, 3.0, p90, p99, errors)


NOW, OTHER = Candidate(1, 1, 8, 0), Candidate(2, 1, 8, 0)


def rounds(per_s: list[float], candidate: Candidate = NOW, p99: float = 5.0, load: int = 8) -> Final:
    return Final(candidate, tuple(Point(load, each, 3.0, 4.0, p99, 0) for each in per_s))


@pytest.mark.parametrize(
    ("present", "other", "better"),
    [
        ([100.0, 101.0, 99.0, 100.0, 100.0], [120.0, 121.0, 119.0, 120.0, 122.0], True),
        ([100.0, 101.0, 99.0, 100.0, 100.0], [101.0, 102.0, 100.0, 101.0, 101.0], True),  # small, and sure
        ([100.0, 140.0, 70.0, 100.0, 90.0], [120.0, 100.0, 130.0, 90.0, 110.0], False),  # large, and noise
        ([100.0, 101.0, 99.0, 100.0, 100.0], [100.0, 101.0, 99.0, 100.0, 100.0], False),
        ([120.0, 121.0, 119.0, 120.0, 122.0], [100.0, 101.0, 99.0, 100.0, 100.0], False),
        ([100.0], [200.0], False),  # one round says nothing
    ],
)
def test_a_gain_is_one_beyond_noise(present: list[float], other: list[float], better: bool) -> None:
    held = Duel.of(rounds(other, OTHER), rounds(present), 10.0)
    assert held.better is better
    assert held.low <= held.gain <= held.high


def test_to_keep_the_bound_alone_is_a_gain_and_to_break_it_is_none() -> None:
    same = [100.0, 101.0, 99.0, 102.0, 98.0]
    assert Duel.of(rounds(same, OTHER, p99=9.0), rounds(same, p99=20.0), 10.0).better
    assert not Duel.of(rounds([200.0] * 5, OTHER, p99=20.0), rounds(same, p99=9.0), 10.0).better


def test_all_are_compared_under_the_same_loads() -> None:
    asked: list[tuple[Candidate, int]] = []

    def measured(candidate: Candidate, load: int) -> Point:
        asked.append((candidate, load))
        return Point(load, 100.0 * load, 3.0, 4.0, 2.0 * load, 0)

    found = final([NOW, OTHER], [8, 4, 8], 3, measured)
    assert [(each.candidate, each.concurrency, len(each.points)) for each in found] == [
        (NOW, 4, 3), (OTHER, 4, 3), (NOW, 8, 3), (OTHER, 8, 3),
    ]  # fmt: skip
    assert winner(found, 10.0) in (found[0], found[1]), "8 in flight do not keep the bound"
    assert winner(found, 1.0) is None
    asked.clear()
    held = duel(found[1], NOW, 1, 10.0, measured)
    assert {load for _, load in asked} == {4}
    assert asked[:4] == [(OTHER, 4), (NOW, 4), (NOW, 4), (OTHER, 4)], "in turns"
    assert len(held.winner.points) == len(held.present.points) == DUEL_ROUNDS
    assert not held.better


def test_no_gain_is_told_as_such_and_the_present_one_stays(repository: Path) -> None:
    subject = load_subject(repository, "tiny")
    now, other = rounds([100.0] * 5), rounds([110.0, 80.0, 140.0, 100.0, 90.0], OTHER)
    held = Duel.of(other, now, 10.0)
    best = _taken((now, other), held, NOW, 10.0)
    told = verdict(Tuned(subject, NOW, (), (now, other), best, 10.0, (), held))
    assert "The present configuration is the best found" in told
    assert "No gain beyond noise" in told
    assert not apply(Tuned(subject, NOW, (), (now, other), best, 10.0, (), held))


def test_a_trial_is_judged_by_its_best_point_within_the_bound() -> None:
    trial = Trial(NOW, 1.0, (point(100.0, 5.0), point(300.0, 50.0), point(200.0, None, 9.0), point(400.0, errors=1)))
    best = trial.best(10.0)
    assert best is not None
    assert best.per_s == 200.0
    assert trial.best(1.0) is None
    assert trial.score(10.0) > trial.score(1.0)


def test_nothing_is_written_over_a_change_of_somebody_else(repository: Path) -> None:
    subject = load_subject(repository, "tiny")
    final = Final(Candidate(2, 1, 8, 0, 1), (point(1.0),))
    tuned = Tuned(subject, NOW, (), (final,), final, 10.0)
    path = repository / "tiny/config.pbtxt"
    path.write_text(path.read_text() + "\n")
    with pytest.raises(ServerError, match="can't write the configuration of tiny"):
        apply(tuned)
