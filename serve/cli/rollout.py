"""`serve rollout`: release a model step by step, judged by the gateway on live traffic."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from compress.errors import ServerError
from serve.rollout.plan import Plan, Target
from serve.rollout.time_left import time_left

if TYPE_CHECKING:
    from serve.rollout.store import Row, Store, Wish

__all__ = ["rollout"]

rollout = App(name="rollout", help="Release a model step by step; the gateway judges it on live traffic.")
out = Console(highlight=False, soft_wrap=True)

State = Annotated[Path, Parameter(name=["--state", "-s"])]
Flat = Parameter(name="*")
DEFAULT = Path("rollouts.db")
LOOK_S = 0.25
TAKEN_UP_S = 3.0
FEEDBACK_NEEDS = (
    "each step waits for feedback on some 300 answers of each model where none is wrong, 3,000 where 5% are "
    "(by the default bounds); `serve rollout status` shows how far the proof is"
)


@rollout.command
def start(
    model: str,
    *,
    candidate: str,
    baseline: str | None = None,
    state: State = DEFAULT,
    wait: bool = False,
    plan: Annotated[Plan | None, Flat] = None,
) -> None:
    """Begin to release a candidate for a model; until it is proven, the baseline keeps answering.

    Start it before the candidate is loaded, and no request meets the new one unproven: the gateway keeps what is
    served, and begins when the candidate is ready.

    Parameters
    ----------
    model
        The name that clients ask for.
    candidate
        A version of it (2), another model (digits-int8), or both (digits-int8/2).
    baseline
        The same for what answers now; by default what the last rollout ended with, or what Triton serves.
    state
        The gateway's state file.
    wait
        Follow it to its end; exit code 1 where the candidate was rolled back.
    """
    store = _store(state)
    old = None if baseline is None else Target.parse(baseline, model)
    row = store.start(model, Target.parse(candidate, model), plan or Plan(), old)
    out.print(f"rollout {row.id} of {model} to {row.candidate} is asked for", markup=False)
    _taken_up(store, row)
    if row.plan.require_feedback:
        out.print(FEEDBACK_NEEDS, markup=False)
    if wait:
        sys.exit(_followed(store, row))
    out.print(f"see how it goes: serve rollout status {model}{_flag(state)}", markup=False)


@rollout.command
def status(
    model: str | None = None,
    *,
    state: State = DEFAULT,
    wait: bool = False,
    json_: Annotated[bool, Parameter(name="--json")] = False,
) -> None:
    """Show how far rollouts are, and the evidence so far.

    Parameters
    ----------
    model
        Only this one.
    state
        The gateway's state file.
    wait
        Follow the model's rollout to its end; exit code 1 where the candidate was rolled back.
    json_
        Print a list of what is known.
    """
    store = _store(state)
    unread: dict[str, ServerError] = {}
    rows = [row for row in store.current(unread) if model in (None, row.model)]
    if wait and model is not None and rows:
        sys.exit(_followed(store, rows[0]))
    broken = next((err for of, err in unread.items() if model in (None, of)), None)
    if json_:
        print(json.dumps([row.to_dict() for row in rows], indent=2))
    elif not rows and broken is None:
        out.print("no rollout decides what is served")
    else:
        for row in rows:
            _show(row)
    if broken is not None:
        raise broken


@rollout.command
def promote(model: str, *, step: bool = False, state: State = DEFAULT) -> None:
    """Let the candidate take over now, whatever the evidence.

    Parameters
    ----------
    model
        The name that clients ask for.
    step
        Only go on to the next step.
    state
        The gateway's state file.
    """
    _wish(state, model, "step" if step else "promote")


@rollout.command
def abort(model: str, *, state: State = DEFAULT) -> None:
    """Give everything back to the baseline now.

    Parameters
    ----------
    model
        The name that clients ask for.
    state
        The gateway's state file.
    """
    _wish(state, model, "abort")


@rollout.command
def clear(model: str, *, state: State = DEFAULT) -> None:
    """Forget the outcome of a rollout that has ended: the name is again whatever Triton serves under it.

    Parameters
    ----------
    model
        The name that clients ask for.
    state
        The gateway's state file.
    """
    row = _store(state).clear(model)
    served = row.candidate if row.state == "promoted" else row.baseline
    out.print(f"{model} is no longer kept at {served}", markup=False)


@rollout.command
def history(
    model: str | None = None, *, state: State = DEFAULT, json_: Annotated[bool, Parameter(name="--json")] = False
) -> None:
    """Show every rollout there was, and what happened to it.

    Parameters
    ----------
    model
        Only this one's.
    state
        The gateway's state file.
    json_
        Print a list, the newest first, each with its events.
    """
    store = _store(state)
    rows = store.all(model)
    if json_:
        told = [{**row.to_dict(), "events": [vars(event) for event in store.events(row.id)]} for row in rows]
        print(json.dumps(told, indent=2))
        return
    if not rows:
        out.print("there was no rollout")
    for row in rows:
        out.print(f"[bold]rollout {row.id}[/] of {escape(row.model)}: {_path(row)} · {row.state}")
        for event in store.events(row.id):
            out.print(f"  {_time(event.at)}  {event.kind:<9} {event.why}", markup=False)


def _store(path: Path) -> Store:
    from serve.rollout.store import Store

    return Store(path)


def _wish(path: Path, model: str, wish: Wish) -> None:
    from serve.rollout.store import StateFileError

    store = _store(path)
    try:
        before = store.wish(model, wish)
    except StateFileError as err:
        if wish != "abort":
            raise
        mend = f"{err.mend}; a gateway that runs aborts without it: POST /rollouts/{model}/abort, with a key with admin"
        raise StateFileError(err.what, why=err.why, mend=mend) from err
    until = time.monotonic() + TAKEN_UP_S
    while time.monotonic() < until:
        row = _again(store, before)
        if row.wish is None:
            told = f" ({row.why})" if row.why else ""
            out.print(f"{model}: {row.state}{told}, {_share_now(row)}", markup=False)
            return
        time.sleep(LOOK_S)
    out.print(f"[yellow]![/] {escape(_not_done(row, wish, path))}")


def _not_done(row: Row, wish: Wish, path: Path) -> str:
    """What to say of a wish that no gateway has carried out yet."""
    starts = f"starts with --state {path}"
    if row.owner is None:
        return f"no gateway has taken the rollout up yet; one that {starts} will, and this with it"
    silent_s = time.time() - row.updated
    silent = f"has been silent for {silent_s:.0f} s"
    if silent_s < 0:
        silent = f"has not answered (its clock is {-silent_s:.0f} s ahead of this one)"
    told = (
        f"it is written down and not carried out: the gateway that judges the rollout {silent}. "
        f"If it is stopped, it is carried out as that one, or another, {starts}"
    )
    if wish == "abort":
        told += f"; if it runs, and can't write (a full disk?): POST /rollouts/{row.model}/abort, with a key with admin"
    return told


def _taken_up(store: Store, row: Row) -> None:
    """Wait until a gateway says what it makes of it."""
    until = time.monotonic() + TAKEN_UP_S
    while time.monotonic() < until:
        now = _again(store, row)
        if now.baseline is not None and now.owner is not None:
            if not now.active and (last := store.events(row.id)[-1]).kind == "refused":
                why, _, mend = last.why.rpartition("; ")
                raise ServerError(f"the rollout of {row.model} can't begin", why=why, mend=mend)
            told = f"{now.state}: {now.why}" if now.why else now.state
            out.print(f"{now.baseline} goes on answering; {told}", markup=False)
            return
        time.sleep(LOOK_S)
    out.print(f"[yellow]![/] no gateway has taken it up yet: is one running with --state {escape(str(store.path))}?")


def _again(store: Store, row: Row) -> Row:
    return next(each for each in store.all(row.model) if each.id == row.id)


def _followed(store: Store, row: Row) -> int:
    """Print each thing that happens until it ends; the exit code."""
    told = 0
    while True:
        row = _again(store, row)
        events = store.events(row.id)
        for event in events[told:]:
            out.print(f"{_time(event.at)}  {event.kind:<9} {event.why}", markup=False)
        told = len(events)
        if not row.active:
            _show(row)
            return 0 if row.state == "promoted" else 1
        if sys.stdout.isatty():
            print(f"\r{_line(row)}\x1b[K", end="", flush=True)
        time.sleep(LOOK_S)
        if sys.stdout.isatty():
            print("\r\x1b[K", end="")


def _line(row: Row) -> str:
    """Where it is, in a line."""
    proofs = [seen["proof"] for seen in row.evidence.values() if seen["required"]]
    least = f", proof {min(1.0, *proofs, 1.0):.0%}" if proofs else ""
    return f"{row.state}: step {row.step + 1} of {len(row.plan.weights)}, {row.weight:.0%}, {row.seconds:.0f} s{least}"


def _show(row: Row) -> None:
    running = row.state == "running"  # what is written down then is of the step before, and no figure of this one
    why = f": {escape(row.why)}" if row.why and not running else ""
    out.print(f"[bold]{escape(row.model)}[/]  {_path(row)} · {row.state}{why}")
    marks = [
        f"[reverse]{_share(weight)}[/]" if running and index == row.step else _share(weight)
        for index, weight in enumerate(row.plan.weights)
    ]
    took = "promoted" if row.state != "promoted" else "[reverse]promoted[/]"
    out.print(f"  steps {' → '.join([*marks, took])}; {escape(_share_now(row))}")
    if running and row.why:
        out.print(f"  came to this step because {row.why}", markup=False)
    if told := row.plan.agreement:
        out.print(f"  {told}", markup=False)
    if not row.evidence:
        return
    table = Table("question", "observed", "candidate", "baseline", "allowed", "it is fine", "it is worse")
    for name, seen in row.evidence.items():
        table.add_row(
            _question(name, seen),
            str(seen["count"]),
            "not compared" if seen.get("not_compared") else _value(name, seen["candidate"]),
            _value(name, seen["baseline"]),
            _allowed(name, seen["bound"]),
            _bar(seen["proof"]) if seen["required"] else "not asked",
            _bar(seen["alarm"]) if seen.get("judged", True) else "not judged",
        )
    Console(highlight=False, width=None if sys.stdout.isatty() else 140).print(table)
    if running and (left := time_left(row)):
        out.print(f"  {left}", markup=False)
    decisive = row.snapshot.get("decisive", {})
    for name, seen in row.evidence.items():
        if running and (waits := seen.get("waits")):
            whose = f" (key {decisive[name]})" if name in decisive else ""
            out.print(f"  {name}: {waits}{whose}", markup=False)


def _share_now(row: Row) -> str:
    """What goes to the candidate: of few clients that stay where they are, another share of the requests than meant."""
    sticky = row.plan.sticky
    if not sticky or not 0 < row.weight < 1:
        return f"{row.weight:.0%} of the requests now go to the candidate"
    told = f"{row.weight:.0%} of the {'keys' if sticky == 'key' else f'clients by {sticky}'} are to meet the candidate"
    try:
        (mine, _), (theirs, _) = row.snapshot["counts"]
    except (KeyError, TypeError, ValueError):
        return told
    if not (total := mine + theirs):
        return f"{told}; none has asked in this step"
    told += f"; in this step it answered {mine / total:.0%} of the requests ({mine:,} of {total:,})"
    if not mine or not theirs:
        told += (
            ", as with few clients: leave --sticky out, or take larger --steps" if not mine else ", the baseline none"
        )
    return told


def _path(row: Row) -> str:
    return f"{row.baseline or 'what is served'} → {row.candidate}"


def _share(weight: float) -> str:
    return f"{weight:.0%}" if weight else "copies"


def _question(name: str, seen: Mapping[str, Any]) -> str:
    if name == "slowest" and "times" in seen:
        return f"slowest: over {seen['times']:g} x p95"
    return f"{name}: of one key" if seen.get("keys") == 1 else name


def _value(name: str, value: Any) -> str:
    if value is None:
        return ""
    return f"{1000 * value:.3g} ms" if name == "latency" else f"{value:.3%}"


def _allowed(name: str, bound: float) -> str:
    if name in ("errors", "slowest", "feedback"):
        return f"{100 * bound:.3g}% more"
    return f"{bound:.0%} {'' if name == 'disagreement' else 'more'}"


def _bar(share: float) -> str:
    filled = round(10 * min(1.0, share))
    return f"{'█' * filled}{'░' * (10 - filled)} {min(1.0, share):.0%}"


def _time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _flag(state: Path) -> str:
    return "" if state == DEFAULT else f" --state {state}"
