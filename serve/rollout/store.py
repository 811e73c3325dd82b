"""The state file of rollouts: what was asked for, how far it got, and what happened, in SQLite.

The command line writes wishes, the gateway that follows a rollout writes everything else. Of several gateways with one
file, one follows ("owner"); the others route by what it writes, and take over when it has been silent for a while.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from compress.errors import ServerError
from serve.rollout.plan import Plan, Target
from serve.rollout.state_file import StateFileError, opened

__all__ = ["ACTIVE", "AbortAskedError", "Happened", "Row", "State", "StateFileError", "Store", "Wish"]

State = Literal["waiting", "running", "promoted", "aborted"]
Wish = Literal["step", "promote", "abort"]
ACTIVE = ("waiting", "running")
STATES = (*ACTIVE, "promoted", "aborted")
# What is raised where a value is not what it should be.
BROKEN = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
SILENT_S = 10.0
COLUMNS = (
    "id, model, baseline, candidate, plan, state, step, seconds, why, wish, owner, created, updated, cleared, "
    "snapshot, evidence"
)


class AbortAskedError(Exception):
    """A rollout is not promoted: meanwhile somebody has asked for it to be aborted."""


@dataclass(frozen=True)
class Row:
    """A rollout as the file has it; times are seconds since the epoch.

    Attributes:
        baseline: None until a gateway has found what is served.
        seconds: that the present step had lasted.
        cleared: whether its outcome no longer decides what is served.
        evidence: of the present step, for show.
        snapshot: of the present step, to go on from; both empty where they can't be read: the step begins anew.
        unread: why the plan can't be read, which is the default one then; "" where it can.
    """

    id: int
    model: str
    baseline: Target | None
    candidate: Target
    plan: Plan
    state: State
    step: int
    seconds: float
    why: str
    wish: Wish | None
    owner: str | None
    created: float
    updated: float
    cleared: bool
    snapshot: Mapping[str, Any]
    evidence: Mapping[str, Any]
    unread: str = ""

    @property
    def active(self) -> bool:
        return self.state in ACTIVE

    @property
    def rollout(self) -> tuple[int, float]:
        """Which one it is, whatever file it is in: another file counts from 1 again."""
        return self.id, self.created

    @property
    def weight(self) -> float:
        """The candidate's share of the requests, 0 to 1."""
        if self.state == "running":
            return self.plan.weights[min(self.step, len(self.plan.weights) - 1)]
        return float(self.state == "promoted")

    def to_dict(self) -> dict[str, Any]:
        """For whoever shows it."""
        return {
            "id": self.id,
            "model": self.model,
            "baseline": None if self.baseline is None else str(self.baseline),
            "candidate": str(self.candidate),
            "state": self.state,
            "why": self.why,
            "step": self.step,
            "steps": [round(100 * weight, 3) for weight in self.plan.weights],
            "weight": round(100 * self.weight, 3),
            "seconds": round(self.seconds, 1),
            "created": self.created,
            "updated": self.updated,
            "cleared": self.cleared,
            "plan": self.plan.to_dict(),
            "agreement": self.plan.agreement,
            "evidence": self.evidence,
        }

    @classmethod
    def read(cls, values: tuple[Any, ...]) -> Self:
        """From the columns.

        Raises:
            StateFileError: they hold what no rollout has.
        """
        try:
            return cls._read(values)
        except (ServerError, *BROKEN) as err:
            why = err.why if isinstance(err, ServerError) else str(err)
            raise StateFileError(
                f"can't read rollout {values[0]} in the state file", why=f"a value is not one of a rollout: {why}",
                mend="name another file, or put back one that was kept",
            ) from err  # fmt: skip

    @classmethod
    def _read(cls, values: tuple[Any, ...]) -> Self:
        (
            id_, model, baseline, candidate, plan, state, step, seconds, why, wish, owner, created, updated, cleared,
            snapshot, evidence,
        ) = values  # fmt: skip
        numbers = (id_, int), (step, int), (seconds, int | float), (created, int | float), (updated, int | float)
        if state not in STATES or any(not isinstance(value, kind) for value, kind in numbers) or step < 0:
            raise ValueError("its state, its step or a time can't be")
        asked, unread = _plan(plan)
        return cls(
            id_, model, None if baseline is None else Target.parse(baseline, model), Target.parse(candidate, model),
            asked, state, step, seconds, why, wish, owner, created, updated, bool(cleared),
            _learnt(snapshot), _learnt(evidence), unread,
        )  # fmt: skip


def _plan(text: str) -> tuple[Plan, str]:
    """The plan, and why it can't be read: who answers must be known all the same."""
    try:
        return Plan.from_dict(json.loads(text)), ""
    except ServerError as err:
        return Plan(), err.why
    except BROKEN as err:
        return Plan(), str(err)


def _learnt(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except BROKEN:
        return {}
    return found if isinstance(found, dict) else {}


@dataclass(frozen=True)
class Happened:
    """Something that happened to a rollout, at a time since the epoch."""

    at: float
    kind: str
    why: str


class Store:
    """One state file; nothing is made before the first rollout starts.

    Every method raises ServerError where the file can't be used.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._heard: dict[int, tuple[tuple[str | None, float], float]] = {}  # what owners wrote last, and since when

    def start(self, model: str, candidate: Target, plan: Plan, baseline: Target | None = None) -> Row:
        """Ask for a rollout.

        Raises:
            ServerError: one of the model is under way, or the two are the same.
        """
        Target.parse(f"{model}/1", model)
        if baseline == candidate or (candidate.model == model and candidate.version is None):
            raise ServerError(
                f"can't release {candidate} for {model}", why="it would change nothing",
                mend="name a version of it, as in --candidate 2, or another model",
            )  # fmt: skip
        now = time.time()
        with self._writing() as file:
            last = self._last(file, model)
            if last is not None and last.active:
                raise ServerError(
                    f"can't start a rollout of {model}", why=f"one to {last.candidate} is {last.state}",
                    mend=f"wait for its end, or: serve rollout abort {model}",
                )  # fmt: skip
            if baseline is None and last is not None and not last.cleared:
                baseline = last.candidate if last.state == "promoted" else last.baseline
            if baseline == candidate:
                raise ServerError(
                    f"can't release {candidate} for {model}", why="it is what is served already",
                    mend="name another version or model",
                )  # fmt: skip
            id_ = file.execute(
                "INSERT INTO rollouts (model, baseline, candidate, plan, state, created, updated)"
                " VALUES (?, ?, ?, ?, 'waiting', ?, ?)",
                (model, baseline and str(baseline), str(candidate), json.dumps(plan.to_dict()), now, now),
            ).lastrowid
            self._happened(file, id_, "started", f"from {baseline or 'what is served'} to {candidate}")
            row = self._last(file, model)
        assert row is not None  # noqa: S101  just inserted
        return row

    def wish(self, model: str, wish: Wish, rollout: tuple[int, float] | None = None) -> Row:
        """Ask the gateway for something, in place of what was asked for before; but an abort stays.

        Args:
            rollout: of which it is wished; None for the model's last.

        Raises:
            StateFileError: the file can't be used, or has no rollout of the model.
            ServerError: that one is not under way, or it is to be aborted.
        """
        with self._writing(create=False) as file:
            row = self._last(file, model)
            if row is None:
                raise StateFileError(
                    f"can't {wish} the rollout of {model}", why="there is none", mend="see: serve rollout history"
                )
            if not row.active or rollout not in (None, row.rollout):
                raise ServerError(
                    f"can't {wish} the rollout of {model}",
                    why=f"it is {row.state} already" if rollout in (None, row.rollout) else "another one has begun",
                    mend="see: serve rollout history",
                )
            if row.wish == "abort" != wish:
                raise ServerError(
                    f"can't {wish} the rollout of {model}", why="somebody has asked for it to be aborted",
                    mend="start another one, once it has ended",
                )  # fmt: skip
            file.execute("UPDATE rollouts SET wish = ? WHERE id = ?", (wish, row.id))
        return row

    def clear(self, model: str) -> Row:
        """Let a rollout that ended no longer decide what is served.

        Raises:
            ServerError: there is none, or it is under way.
        """
        with self._writing(create=False) as file:
            row = self._last(file, model)
            if row is None or row.active:
                raise ServerError(
                    f"can't clear the rollout of {model}", why="there is none" if row is None else "it is under way",
                    mend="see: serve rollout status" if row is None else f"end it first: serve rollout abort {model}",
                )  # fmt: skip
            file.execute("UPDATE rollouts SET cleared = 1 WHERE id = ?", (row.id,))
            self._happened(file, row.id, "cleared", f"{model} is again whatever Triton serves under that name")
        return row

    def current(self, unread: dict[str, ServerError] | None = None) -> list[Row]:
        """The last rollout of each model, by name; those that were cleared left out.

        Args:
            unread: gets, by model, why one can't be read; None raises it.
        """
        return [row for row in self.all(latest=True, unread=unread) if not row.cleared]

    def all(
        self, model: str | None = None, *, latest: bool = False, unread: dict[str, ServerError] | None = None
    ) -> list[Row]:
        """Every rollout, or those of a model, the newest first; with `latest` the last one of each model, by name."""
        if not self.path.exists():
            return []
        which = "id IN (SELECT max(id) FROM rollouts GROUP BY model)" if latest else "model = ? OR ? IS NULL"
        order = "model" if latest else "id DESC"
        with opened(self.path) as file:
            # Only the two texts above go into the statement.
            rows = file.execute(
                f"SELECT {COLUMNS} FROM rollouts WHERE {which} ORDER BY {order}",  # noqa: S608
                () if latest else (model, model),
            ).fetchall()
        found = []
        for row in rows:
            try:
                found.append(Row.read(row))
            except ServerError as err:
                if unread is None:
                    raise
                unread[str(row[1])] = err
        return found

    def events(self, id_: int) -> list[Happened]:
        """What happened to a rollout, in order."""
        with opened(self.path) as file:
            rows = file.execute("SELECT at, kind, why FROM events WHERE rollout = ? ORDER BY rowid", (id_,)).fetchall()
        return [Happened(*row) for row in rows]

    def claim(self, row: Row, owner: str) -> bool:
        """Become a rollout's owner, where it has none, or one that has written nothing for `SILENT_S` of the time that
        passes here: its clock may be another."""
        now = time.monotonic()
        with self._writing(create=False) as file:
            said = file.execute("SELECT owner, updated FROM rollouts WHERE id = ?", (row.id,)).fetchone()
            if said is None:  # another file has taken this one's place
                return False
            before, since = self._heard.get(row.id, (None, now))
            self._heard[row.id] = said, since if said == before else now
            if said[0] not in (None, owner) and now - self._heard[row.id][1] <= SILENT_S:
                return False
            file.execute("UPDATE rollouts SET owner = ?, updated = ? WHERE id = ?", (owner, time.time(), row.id))
            return True

    def take_over(self, owner: str) -> None:
        """Become the owner of every rollout under way: a gateway that has just started follows what it sees itself."""
        with self._writing(create=False) as file:
            file.execute("UPDATE rollouts SET owner = ? WHERE state IN ('waiting', 'running')", (owner,))

    def save(
        self,
        id_: int,
        owner: str,
        *,
        state: State,
        step: int,
        seconds: float,
        why: str,
        baseline: Target | None,
        snapshot: Mapping[str, Any],
        evidence: Mapping[str, Any],
        events: list[tuple[str, str]],
        wish_done: Wish | None = None,
    ) -> bool:
        """Write how far a rollout is; False where another gateway owns it now.

        Raises:
            AbortAskedError: it would be promoted, and is to be aborted; nothing was written.
        """
        with self._writing(create=False) as file:
            if (
                state == "promoted"
                and file.execute(
                    "SELECT 1 FROM rollouts WHERE id = ? AND owner = ? AND wish = 'abort'", (id_, owner)
                ).fetchone()
            ):
                raise AbortAskedError
            done = file.execute(
                "UPDATE rollouts SET state = ?, step = ?, seconds = ?, why = ?, baseline = ?, snapshot = ?,"
                " evidence = ?, updated = ?, wish = CASE WHEN wish = ? THEN NULL ELSE wish END"
                " WHERE id = ? AND owner = ?",
                (
                    state, step, seconds, why, baseline and str(baseline), json.dumps(snapshot), json.dumps(evidence),
                    time.time(), wish_done, id_, owner,
                ),
            )  # fmt: skip
            if done.rowcount != 1:
                return False
            for kind, told in events:
                self._happened(file, id_, kind, told)
            return True

    def _last(self, file: sqlite3.Connection, model: str) -> Row | None:
        found = file.execute(
            f"SELECT {COLUMNS} FROM rollouts WHERE model = ? ORDER BY id DESC LIMIT 1",  # noqa: S608  a constant
            (model,),
        ).fetchone()
        return None if found is None else Row.read(found)

    def _happened(self, file: sqlite3.Connection, id_: int | None, kind: str, why: str) -> None:
        file.execute("INSERT INTO events VALUES (?, ?, ?, ?)", (id_, time.time(), kind, why))

    @contextmanager
    def _writing(self, *, create: bool = True) -> Iterator[sqlite3.Connection]:
        if not create and not self.path.exists():
            raise StateFileError(
                f"there are no rollouts in {self.path}", why="no such file",
                mend="start one, or name the gateway's state file with --state",
            )  # fmt: skip
        with opened(self.path) as file:
            file.execute("BEGIN IMMEDIATE")
            yield file
            file.commit()
