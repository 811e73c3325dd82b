"""The state file as SQLite has it: opened only where it is this user's, and holds these tables and nothing else.

What is written in it decides who answers, and SQLite runs what a file says: a view stands in for a table, a trigger
acts with each row that is written, and either need never end.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from compress.errors import ServerError
from compress.vetting.ours import check_ours

__all__ = ["StateFileError", "check_state_file", "opened"]

LOCKED_S = 5.0
LONGEST_S = 10.0  # of all that is done while it is open, the wait for its lock among it
LOOK_EACH = 20_000  # instructions of SQLite's
LONGEST_VALUE = 16 << 20
LARGEST = 1 << 30  # some ten thousand rollouts
SCHEMA_VERSION = 1
SCHEMA = """
CREATE TABLE IF NOT EXISTS rollouts (
  id INTEGER PRIMARY KEY, model TEXT NOT NULL, baseline TEXT, candidate TEXT NOT NULL, plan TEXT NOT NULL,
  state TEXT NOT NULL, step INTEGER NOT NULL DEFAULT 0, seconds REAL NOT NULL DEFAULT 0, why TEXT NOT NULL DEFAULT '',
  wish TEXT, owner TEXT, created REAL NOT NULL, updated REAL NOT NULL, cleared INTEGER NOT NULL DEFAULT 0,
  snapshot TEXT NOT NULL DEFAULT '{}', evidence TEXT NOT NULL DEFAULT '{}'
);
CREATE INDEX IF NOT EXISTS rollouts_model ON rollouts (model);
CREATE TABLE IF NOT EXISTS events (
  rollout INTEGER NOT NULL REFERENCES rollouts, at REAL NOT NULL, kind TEXT NOT NULL, why TEXT NOT NULL
);
"""


class StateFileError(ServerError):
    """The state file can't be read or written."""


def check_state_file(path: Path) -> None:
    """Return where nobody else can have a say in it; there may be none yet.

    Raises:
        StateFileError: somebody else can, also by a journal beside it.
        OSError: it can't be seen.
    """
    try:
        check_ours(path, alone=True)
    except FileNotFoundError:
        return
    except ServerError as err:
        mend = f"{err.mend}; or name another state file (--state)"
        raise StateFileError(f"can't trust the state file {path}", why=err.why, mend=mend) from err


@contextmanager
def opened(path: Path) -> Iterator[sqlite3.Connection]:
    """The file, made where there is none, without a transaction; what takes too long is ended.

    Raises:
        StateFileError: it can't be used, or is not to be trusted.
    """
    try:
        check_state_file(path)
        if not path.exists():
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600))
        if path.stat().st_size > LARGEST:
            raise ValueError(f"it has more than {LARGEST:,} bytes")
        with closing(sqlite3.connect(path, timeout=LOCKED_S, isolation_level=None)) as file:
            _bound(file)
            (version,) = file.execute("PRAGMA user_version").fetchone()
            if version == 0 and not _shape(file):
                file.executescript(f"BEGIN IMMEDIATE; {SCHEMA} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")
            elif version not in (0, SCHEMA_VERSION):
                raise StateFileError(
                    f"can't use the state file {path}", why=f"it has version {version} of its tables",
                    mend="name another file, or use the release that wrote it",
                )  # fmt: skip
            if _shape(file) != EXPECTED:
                raise StateFileError(
                    f"can't use the state file {path}", why="it holds other things than the tables of rollouts",
                    mend="name another file; `serve rollout start` makes one where there is none",
                )  # fmt: skip
            yield file
    except (OSError, sqlite3.Error, ValueError) as err:
        why = f"reading it takes too long (over {LONGEST_S:g} s)" if str(err) == "interrupted" else str(err)
        raise StateFileError(
            f"can't use the state file {path}", why=why,
            mend="name a file of `serve rollout` in a folder that can be written",
        ) from err  # fmt: skip


def _bound(file: sqlite3.Connection) -> None:
    until = time.monotonic() + LONGEST_S
    file.set_progress_handler(lambda: time.monotonic() > until, LOOK_EACH)
    file.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LONGEST_VALUE)
    file.setlimit(sqlite3.SQLITE_LIMIT_TRIGGER_DEPTH, 1)
    file.execute("PRAGMA trusted_schema = OFF")


def _shape(file: sqlite3.Connection) -> list[tuple[object, ...]]:
    """What there is, by kind and name, and each column: name, type, what it must be and is by default, and whether it
    is computed."""
    found = file.execute("SELECT type, name, tbl_name FROM sqlite_master ORDER BY name LIMIT 9").fetchall()
    columns = [
        row
        for _, name, table in found
        if name == table and name in ("rollouts", "events")
        for row in file.execute(f"PRAGMA table_xinfo({name})").fetchall()
    ]
    indexed = file.execute("PRAGMA index_xinfo(rollouts_model)").fetchall()
    return [*found, *columns, *indexed]


def _expected() -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(":memory:")) as file:
        file.executescript(SCHEMA)
        return _shape(file)


EXPECTED = _expected()
