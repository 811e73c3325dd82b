"""Successive halving over configurations (Jamieson and Talwalkar, 2016, algorithm 1), then a final and a duel."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from compress.errors import ServerError, ToolkitError
from compress.host.cores import cores_here
from compress.vetting.replace import replace_file
from serve.config.pbtxt import config_text, text_of
from serve.pack.cores import with_reason
from serve.repository.lock import locked
from serve.tune.candidate import Candidate, candidate_of, candidates, write_into
from serve.tune.final import DUEL_ROUNDS, Duel, Final, duel, final, winner
from serve.tune.options import TuneOptions
from serve.tune.state import State, key_of
from serve.tune.trial import Point, Stand, Subject, Trial, confirm, load_subject, measure, once, settle
from serve.up.options import cpus_of

__all__ = ["Final", "Tuned", "apply", "tune"]

KEEP = 3
"""One of so many goes on to the next rung."""
LEAST_DUEL_S = 1.0
"""Of each load when the winner meets the present one again."""
MARGIN = 0.9
"""The final's load is one that keeps so much of the bound once, so that the medians of the rounds keep all of it."""


@dataclass(frozen=True)
class Tuned:
    """What the search found.

    Attributes:
        subject: the model.
        present: what was there.
        trials: all of them, by rung.
        finals: of each load, the present one first.
        best: the one to take; None when none keeps the bound.
        cores: that the server could use, in words.
        duel: the winner of the final against the present one again; None where that is the winner.
        bound_ms: that was asked for.
        failures: configurations that did not run, and why.
    """

    subject: Subject
    present: Candidate
    trials: tuple[tuple[Trial, ...], ...]
    finals: tuple[Final, ...]
    best: Final | None
    bound_ms: float
    failures: tuple[tuple[Candidate, str], ...] = field(default=())
    duel: Duel | None = None
    cores: str = ""


def tune(
    repository: Path, name: str, options: TuneOptions, *, on_progress: Callable[[str, int, int], None] = lambda *_: None
) -> Tuned:
    """Search; what was measured is kept in `options.output`, and is not measured again by the same call.

    Args:
        repository: holds the packed model; nothing in it is changed.
        name: of the model.
        options: how to search.
        on_progress: told what is done: the stage, and how many of how many.

    Raises:
        ServerError: there is no such model, or the present configuration can't be served.
    """
    subject = load_subject(repository, name)
    cpus = cpus_of(options.cpus)
    present = candidate_of(subject.messages(), subject.network)
    others = candidates(present, cores_here(cpus).count)
    random.Random(options.seed).shuffle(others)  # noqa: S311 - a sample, not a secret
    key = key_of(subject, bound_ms=options.p99_ms, seed=options.seed, cpus=cpus)
    state = State(options.output / f"{name}.state.json", key)
    field_ = [present, *others[: options.trials - 1]]
    rungs: list[tuple[Trial, ...]] = []
    failures: list[tuple[Candidate, str]] = []
    seconds = options.seconds
    with Stand(subject, cpus) as stand:
        while True:
            done = _rung(len(rungs), field_, stand, options, seconds, state, failures, on_progress)
            rungs.append(done)
            ranked = sorted(done, key=lambda trial: trial.score(options.p99_ms), reverse=True)
            field_ = [trial.candidate for trial in ranked[: max(2, -(-len(ranked) // KEEP))]]
            if len(field_) <= 2:
                break
            seconds *= 2
        if not any(trial.candidate == present for trial in rungs[0]):
            raise ServerError(
                f"can't tune {name!r}",
                why=dict(failures)[present],
                mend=f"mend it first; see `serve lint {repository}`",
            )
        last = {trial.candidate: trial for rung in rungs for trial in rung}
        contenders = [last[present], *(last[each] for each in field_ if each != present)]
        finals, held = _final(contenders, stand, options, seconds, on_progress)
    best = _taken(finals, held, present, options.p99_ms)
    return Tuned(
        subject, present, tuple(rungs), finals, best, options.p99_ms, tuple(failures), held, cores_here(cpus).told()
    )


def _taken(finals: Sequence[Final], held: Duel | None, present: Candidate, bound_ms: float) -> Final | None:
    """The winner where it held its lead; else the present one where that keeps the bound."""
    if held is not None and held.better:
        return held.winner
    return winner([each for each in finals if each.candidate == present], bound_ms)


def _rung(
    number: int,
    field_: Sequence[Candidate],
    stand: Stand,
    options: TuneOptions,
    seconds: float,
    state: State,
    failures: list[tuple[Candidate, str]],
    on_progress: Callable[[str, int, int], None],
) -> tuple[Trial, ...]:
    done = []
    for index, candidate in enumerate(field_):
        on_progress(f"rung {number + 1}: {candidate.label()}", index, len(field_))
        trial = state.get(number, candidate)
        if trial is None:
            try:
                url = stand.serve(candidate)
                trial = measure(
                    url, stand.subject, candidate, seconds=seconds, bound_ms=options.p99_ms, seed=options.seed
                )
            except ToolkitError as err:  # such as too little shared memory for so many processes
                failures.append((candidate, err.why))
                continue
            state.put(number, trial)
        done.append(trial)
    return tuple(done)


def _final(
    contenders: Sequence[Trial],
    stand: Stand,
    options: TuneOptions,
    seconds: float,
    on_progress: Callable[[str, int, int], None],
) -> tuple[tuple[Final, ...], Duel | None]:
    """The contenders, the present one first, under the loads that suit the first two; then the winner once more."""
    present = contenders[0].candidate
    done, total = 0, 0

    def told(candidate: Candidate, load: int) -> str:
        nonlocal done
        on_progress(f"final: {candidate.label()}, {load} in flight", done, max(total, done + 1))
        done += 1
        return stand.serve(candidate)

    def measured(candidate: Candidate, load: int) -> Point:
        return confirm(told(candidate, load), stand.subject, load, seconds=seconds, seed=options.seed)

    def again(candidate: Candidate, load: int) -> Point:
        long = max(seconds, LEAST_DUEL_S)
        return once(told(candidate, load), stand.subject, load, seconds=long, seed=options.seed)

    loads = set()
    for trial in contenders[:2]:
        on_progress(f"final: {trial.candidate.label()}", 0, 2)
        best = trial.best(options.p99_ms)
        most = best.concurrency if best is not None else 1
        loads.add(
            settle(
                stand.serve(trial.candidate), stand.subject, most,
                seconds=seconds, bound_ms=MARGIN * options.p99_ms, seed=options.seed,
            )
        )  # fmt: skip
    total = options.rounds * len(contenders) * len(loads)
    finals = final([trial.candidate for trial in contenders], loads, options.rounds, measured)
    won = winner(finals, options.p99_ms)
    if won is None or won.candidate == present:
        return finals, None
    total += 2 * max(options.rounds, DUEL_ROUNDS)
    return finals, duel(won, present, options.rounds, options.p99_ms, again)


def apply(tuned: Tuned) -> bool:
    """Write the best configuration into the repository, unless it is the present one or there is none.

    Each part's config.pbtxt is replaced; a later pack keeps it like an edit by hand.

    Raises:
        ServerError: somebody has changed the model meanwhile.
    """
    if tuned.best is None or tuned.best.candidate == tuned.present:
        return False
    subject = tuned.subject
    messages = subject.messages()
    write_into(messages, subject.network, tuned.best.candidate)
    tried = {trial.candidate for rung in tuned.trials for trial in rung}
    chosen = (
        f"the most throughput within {tuned.bound_ms:g} ms at p99 of {len(tried)} configurations that "
        f"`serve tune` measured on {tuned.cores}"
    )
    with locked(subject.repository):
        for part, text in subject.texts.items():
            if config_text(subject.repository / part / "config.pbtxt") != text:
                raise ServerError(
                    f"can't write the configuration of {part}",
                    why="it was changed while the search ran",
                    mend="run it again; what was measured of the same model is not measured twice",
                )
        for part, message in messages.items():
            path = subject.repository / part / "config.pbtxt"
            text = with_reason(message, chosen) if part == subject.network else text_of(message)
            replace_file(path, text.encode())
    return True
