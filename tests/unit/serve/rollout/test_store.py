"""The state file: one rollout of a model at a time, one owner at a time, nothing lost."""

from __future__ import annotations

import multiprocessing
import os
import sqlite3
import stat
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from compress.errors import ServerError
from serve.rollout import state_file
from serve.rollout import store as module
from serve.rollout.plan import Plan, Target
from serve.rollout.store import AbortAskedError, Row, Store

NEXT = Target("m", "2")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "rollouts.db")


def save(store: Store, row: Row, owner: str = "me", state: str = "running", **values: object) -> bool:
    given = {"step": 0, "seconds": 1.5, "why": "", "baseline": Target("m", "1"), "snapshot": {"a": [1]}, "evidence": {}}
    return store.save(row.id, owner, state=state, events=[("step", "why")], **(given | values))  # type: ignore[arg-type]


def test_nothing_is_made_before_the_first_rollout(store: Store) -> None:
    assert store.current() == []
    assert not store.path.exists()
    with pytest.raises(ServerError, match="no rollouts"):
        store.wish("m", "abort")
    assert not store.path.exists()


def test_a_rollout_is_kept_as_it_was_asked_for(store: Store) -> None:
    plan = Plan(steps=(1.0,), sticky="key")
    store.start("m", NEXT, plan)
    (row,) = store.current()
    assert (row.model, row.baseline, row.candidate, row.plan, row.state) == ("m", None, NEXT, plan, "waiting")
    assert row.weight == 0
    assert stat.S_IMODE(store.path.stat().st_mode) == 0o600
    assert [event.kind for event in store.events(row.id)] == ["started"]


def test_a_model_has_one_rollout_at_a_time(store: Store) -> None:
    store.start("m", NEXT, Plan())
    store.start("other", NEXT, Plan())
    with pytest.raises(ServerError, match="is waiting"):
        store.start("m", Target("m", "3"), Plan())


def test_a_row_that_can_not_be_read_is_told_of_and_hides_no_other(store: Store) -> None:
    for model in ("a", "b"):
        store.start(model, NEXT, Plan())
    with sqlite3.connect(store.path) as file:
        file.execute("UPDATE rollouts SET candidate = '../x' WHERE model = 'a'")
    unread: dict[str, ServerError] = {}
    assert [row.model for row in store.current(unread)] == ["b"]
    assert (unread["a"].what, unread["a"].why) == (
        "can't read rollout 1 in the state file", "a value is not one of a rollout: it names no model",
    )  # fmt: skip
    with pytest.raises(ServerError, match="can't read rollout 1"):
        store.current()


@pytest.mark.parametrize(("candidate", "baseline"), [(Target("m"), None), (NEXT, NEXT)])
def test_a_rollout_that_changes_nothing_is_refused(store: Store, candidate: Target, baseline: Target | None) -> None:
    with pytest.raises(ServerError, match="change nothing"):
        store.start("m", candidate, Plan(), baseline)


@pytest.mark.parametrize(("state", "served"), [("promoted", NEXT), ("aborted", Target("m", "1"))])
def test_the_next_rollout_begins_where_the_last_one_ended(store: Store, state: str, served: Target) -> None:
    row = store.start("m", NEXT, Plan())
    store.claim(row, "me")
    save(store, row, state=state)
    later = store.start("m", Target("m", "3"), Plan())
    assert later.baseline == served
    store.claim(later, "me")
    save(store, store.current()[0], state="aborted")
    with pytest.raises(ServerError, match="served already"):
        store.start("m", store.current()[0].baseline or NEXT, Plan())


def test_a_wish_stays_until_the_gateway_has_granted_it(store: Store) -> None:
    row = store.start("m", NEXT, Plan())
    store.wish("m", "promote")
    store.claim(row, "me")
    assert save(store, row)
    assert store.current()[0].wish == "promote", "it was not the one granted"
    assert save(store, row, state="promoted", wish_done="promote")
    assert store.current()[0].wish is None
    with pytest.raises(ServerError, match="promoted already"):
        store.wish("m", "abort")


def test_an_abort_stays_whatever_else_is_asked_for_or_found(store: Store) -> None:
    row = store.start("m", NEXT, Plan())
    store.claim(row, "me")
    store.wish("m", "promote")
    store.wish("m", "abort")
    for wish in ("promote", "step"):
        with pytest.raises(ServerError, match="asked for it to be aborted"):
            store.wish("m", wish)
    store.wish("m", "abort")
    with pytest.raises(AbortAskedError):
        save(store, row, state="promoted", wish_done="promote")
    (now,) = store.current()
    assert (now.state, now.wish) == ("waiting", "abort")
    assert [event.kind for event in store.events(row.id)] == ["started"]
    assert not save(store, row, owner="other", state="promoted")
    assert save(store, row)
    assert save(store, row, state="aborted", wish_done="abort")
    assert store.current()[0].wish is None


def test_a_rollout_has_one_owner_until_that_one_is_silent(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    row = store.start("m", NEXT, Plan())
    assert store.claim(row, "first")
    assert not store.claim(row, "second")
    assert not save(store, row, "second")
    assert save(store, row, "first")
    monkeypatch.setattr(module, "SILENT_S", -1.0)
    assert store.claim(row, "second")
    assert not save(store, row, "first")
    store.take_over("third")
    assert save(store, row, "third")


@pytest.mark.parametrize("ahead_s", [3600.0, 0.0, -3600.0])
def test_an_owner_is_silent_by_the_time_that_passes_here_whatever_its_clock_says(
    store: Store, monkeypatch: pytest.MonkeyPatch, ahead_s: float
) -> None:
    passed, ahead = 0.0, 0.0
    clock = SimpleNamespace(time=lambda: 1e9 + ahead + passed, monotonic=lambda: passed)
    monkeypatch.setattr("serve.rollout.store.time", clock)
    ahead = ahead_s
    row = store.start("m", NEXT, Plan())
    assert store.claim(row, "first")
    other = Store(store.path)
    for passed in (0.0, 5.0, 9.0):
        ahead = 0.0
        assert not other.claim(row, "second"), "it has only just been heard of"
        ahead = ahead_s
        passed += 0.1
        assert save(store, row, "first")
    ahead = 0.0
    for at, claimed in ((9.5, False), (19.0, False), (19.6, True)):
        passed = at
        assert other.claim(row, "second") is claimed
    assert not save(store, row, "first")


def test_nobody_owns_a_rollout_that_the_file_does_not_have(store: Store, tmp_path: Path) -> None:
    """Another file may have taken its place since it was read."""
    row = store.start("m", NEXT, Plan())
    other = Store(tmp_path / "other.db")
    other.start("m", NEXT, Plan())
    other.path.replace(store.path)
    assert not Store(store.path).claim(replace(row, id=row.id + 1), "me")


def test_a_cleared_rollout_no_longer_decides(store: Store) -> None:
    row = store.start("m", NEXT, Plan())
    with pytest.raises(ServerError, match="under way"):
        store.clear("m")
    store.claim(row, "me")
    save(store, row, state="promoted")
    store.clear("m")
    assert store.current() == []
    assert [row.cleared for row in store.all()] == [True]
    assert store.start("m", Target("m", "3"), Plan()).baseline is None


def _start(path: Path, model: str) -> None:
    Store(path).start(model, Target(model, "2"), Plan())


def test_several_processes_may_start_at_once(store: Store) -> None:
    context = multiprocessing.get_context("spawn")
    tasks = [context.Process(target=_start, args=(store.path, f"m{number}")) for number in range(4)]
    for task in tasks:
        task.start()
    for task in tasks:
        task.join(60)
    assert [row.model for row in store.current()] == ["m0", "m1", "m2", "m3"]


@pytest.mark.parametrize("content", [b"not a database, but some text that is long enough" * 50, b"\0" * 4096])
def test_a_file_that_is_none_is_told(store: Store, content: bytes) -> None:
    store.path.write_bytes(content)
    with pytest.raises(ServerError, match="can't use the state file"):
        store.current()
    assert store.path.read_bytes() == content


def test_a_file_of_a_later_release_is_left_alone(store: Store) -> None:
    store.start("m", NEXT, Plan())
    with sqlite3.connect(store.path) as file:
        file.execute("PRAGMA user_version = 99")
    file.close()
    with pytest.raises(ServerError, match="version 99"):
        store.current()


def test_a_full_disk_is_told_and_loses_nothing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    row = store.start("m", NEXT, Plan())
    store.claim(row, "me")
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("there is no /dev/full")
    monkeypatch.setattr(state_file, "check_ours", lambda *_, **__: None)  # it is no file of anybody's
    with pytest.raises(ServerError, match="can't use the state file"):
        Store(full).start("m", NEXT, Plan())
    assert os.access(store.path, os.R_OK)
    assert store.current()[0].id == row.id
