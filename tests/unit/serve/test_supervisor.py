"""When a dead server is started again, and what a watcher makes of a changed repository."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from serve.gateway.suspects import Suspect
from serve.supervisor import SERVER, START, Backoff, cause_of
from serve.up_options import cpus_of
from serve.watch import fingerprints, plan


def test_the_wait_doubles_up_to_a_longest_one_and_then_it_is_enough() -> None:
    backoff = Backoff(5, first_s=1.0, longest_s=5.0)
    assert [backoff.after(0.1) for _ in range(6)] == [1.0, 2.0, 4.0, 5.0, 5.0, None]


def test_a_server_that_lived_long_begins_a_new_row() -> None:
    backoff = Backoff(1)
    assert [backoff.after(lived) for lived in (1.0, 100.0, 100.0, 1.0)] == [0.5, 0.5, 0.5, None]


def test_never_means_never() -> None:
    assert Backoff(0).after(1000.0) is None


def test_deaths_are_counted_by_their_cause() -> None:
    backoff = Backoff(2)
    assert [backoff.after(1.0, SERVER), backoff.after(1.0, START)] == [0.5, 0.5]
    assert [backoff.after(1.0, SERVER), backoff.after(0.0, START)] == [1.0, 1.0]
    assert [backoff.after(1.0, SERVER), backoff.after(0.0, START)] == [None, None]


def test_one_client_never_ends_it() -> None:
    one, other = Suspect("a", "m", "1"), Suspect("b", "m", "2")
    assert cause_of([]) == cause_of([one, other]) == SERVER
    cause = cause_of([one, Suspect("a", "m", "3")])
    backoff = Backoff(1)
    assert [backoff.after(1.0, cause) for _ in range(50)][-1] == 30.0
    assert Backoff(0).after(1.0, cause) is None


@pytest.mark.parametrize(("text", "cores"), [(None, ()), ("0", (0,)), ("0-2,5, 1", (0, 1, 2, 5))])
def test_cores_are_lists_of_numbers_and_ranges(text: str | None, cores: tuple[int, ...]) -> None:
    assert cpus_of(text) == cores


def test_parts_are_loaded_before_their_ensemble_and_unloaded_after_it() -> None:
    file = frozenset({("config.pbtxt", 1, 1)})
    before = {"a": file, "gone": file, "gone_network": file}
    now = {"a": frozenset({("config.pbtxt", 1, 2)}), "a_network": file, "empty": frozenset()}
    assert plan(before, now, {"a", "gone"}) == (["a_network", "a"], ["gone", "gone_network"])


def test_a_fingerprint_sees_files_but_not_what_python_and_pack_leave_behind(tmp_path: Path) -> None:
    (tmp_path / "a/1/__pycache__").mkdir(parents=True)
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "a/config.pbtxt").write_text("x")
    before = fingerprints(tmp_path)
    assert before is not None
    assert [name for name, _, _ in before["a"]] == ["config.pbtxt"]
    (tmp_path / "a/1/__pycache__/model.pyc").write_text("y")
    (tmp_path / "a/.packed.pbtxt").write_text("y")
    assert fingerprints(tmp_path) == before
    (tmp_path / "a/1/model.onnx").write_text("y")
    assert fingerprints(tmp_path) != before


def test_nothing_is_seen_while_somebody_writes(tmp_path: Path) -> None:
    folder = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        assert fingerprints(tmp_path) is None
    finally:
        os.close(folder)
    assert fingerprints(tmp_path) == {}
