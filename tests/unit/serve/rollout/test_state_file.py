"""A state file is this user's alone, and holds tables: what SQLite would run instead is refused, and ends in time."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from compress.errors import ServerError
from serve.gateway.server import check_settings
from serve.gateway.settings import Settings
from serve.rollout import state_file
from serve.rollout.plan import Plan, Target
from serve.rollout.state_file import StateFileError, opened
from serve.rollout.store import COLUMNS, Store

ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n)"
ROWS = ", ".join("i AS id" if name == "id" else f"'x' AS {name}" for name in COLUMNS.split(", "))
EVENTS = "CREATE TABLE events (rollout INTEGER NOT NULL REFERENCES rollouts, at REAL NOT NULL, kind TEXT NOT NULL, why TEXT NOT NULL);"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(tmp_path / "rollouts.db")
    store.start("m", Target("m", "2"), Plan(), Target("m", "1"))
    return store


@pytest.mark.parametrize(
    "script",
    [
        f"DROP TABLE rollouts; CREATE VIEW rollouts AS {ENDLESS} SELECT {ROWS} FROM n;",  # noqa: S608
        f"PRAGMA user_version = 0; DROP TABLE rollouts; CREATE VIEW rollouts AS {ENDLESS} SELECT {ROWS} FROM n;",  # noqa: S608
        "CREATE TRIGGER t AFTER UPDATE ON rollouts BEGIN UPDATE rollouts SET candidate = 'm/3'; END;",
        "CREATE VIEW other AS SELECT * FROM events;",
        "CREATE TABLE other (a);",
        "ALTER TABLE events ADD COLUMN also TEXT;",
        f"DROP TABLE events; {EVENTS.replace('why TEXT NOT NULL', 'why TEXT NOT NULL AS (kind)')}",
        f"DROP TABLE events; {EVENTS.replace('at REAL NOT NULL', 'at TEXT NOT NULL')}",
        "DROP TABLE events;",
        "DROP INDEX rollouts_model;",
        "DROP INDEX rollouts_model; CREATE INDEX rollouts_model ON rollouts (lower(model));",
    ],
    ids=lambda script: script[:60],
)
def test_what_is_no_table_of_rollouts_is_not_read(store: Store, script: str) -> None:
    with closing(sqlite3.connect(store.path)) as file:
        file.executescript(script)
    for use in (store.current, store.all, lambda: store.take_over("me"), lambda: store.wish("m", "abort")):
        with pytest.raises(StateFileError, match="other things than the tables"):
            use()


def test_a_file_whose_tables_were_made_anew_word_by_word_is_as_good(store: Store) -> None:
    with closing(sqlite3.connect(store.path)) as file:
        file.executescript(f"DROP TABLE events; {EVENTS}; VACUUM;")
    assert [row.model for row in store.current()] == ["m"]


def test_what_takes_too_long_is_ended(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_file, "LONGEST_S", 0.1)
    with pytest.raises(StateFileError, match="takes too long"), opened(store.path) as file:
        file.execute(f"{ENDLESS} SELECT count(*) FROM n").fetchone()  # noqa: S608


def test_what_is_too_large_is_not_read(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_file, "LONGEST_VALUE", 1000)
    with closing(sqlite3.connect(store.path)) as file:
        file.execute("UPDATE rollouts SET why = ?", ("x" * 2000,))
        file.commit()
    with pytest.raises(StateFileError, match="too big"):
        store.current()
    os.truncate(store.path, state_file.LARGEST + 1)
    with pytest.raises(StateFileError, match="more than 1,073,741,824 bytes"):
        store.current()


def shared(store: Store) -> None:
    store.path.parent.chmod(0o1777)


def writable(store: Store) -> None:
    store.path.chmod(0o666)


def a_strangers(store: Store) -> None:
    if os.geteuid():
        pytest.skip("gives a file to another user")
    os.chown(store.path, 65533, 65533)


@pytest.mark.parametrize("change", [shared, writable, a_strangers], ids=lambda each: each.__name__)
def test_what_another_user_can_have_a_say_in_is_neither_read_nor_followed(
    store: Store, change: Callable[[Store], None]
) -> None:
    """Nor does a gateway start with it: whoever planted it would decide who answers."""
    change(store)
    for use in (store.current, lambda: store.take_over("me"), lambda: store.start("n", Target("n", "2"), Plan())):
        with pytest.raises(StateFileError, match="can't trust the state file"):
            use()
    with pytest.raises(ServerError, match="can't trust the state file") as caught:
        check_settings(Settings(state=store.path))
    assert "--state" in caught.value.mend


def test_in_a_folder_of_all_users_none_is_made_and_a_gateway_starts_without(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    store = Store(tmp_path / "rollouts.db")
    check_settings(Settings(state=store.path))
    assert store.current() == []
    with pytest.raises(StateFileError, match="can't trust the state file"):
        store.start("m", Target("m", "2"), Plan())
    assert not store.path.exists()
