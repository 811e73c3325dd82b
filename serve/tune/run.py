"""Successive halving over configurations (Jamieson and Talwalkar, 2016, algorithm 1), then a final in turns."""

from __future__ import annotations

import os
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from compress.errors import ServerError, ToolkitError
from serve.lock import locked
from serve.pbtxt import text_of
from serve.tune.candidate import Candidate, candidate_of, candidates, write_into
from serve.tune.options import TuneOptions
from serve.tune.state import State, key_of
from serve.tune.trial import Point, Stand, Subject, Trial, confirm, load_subject, measure, settle
from serve.up_options import cpus_of
from serve.versions import replace_file

__all__ = ["Final", "Tuned", "apply", "tune"]

KEEP = 3
"""One of so many goes on to the next rung."""
MARGIN = 0.9
"""The final's load is one that keeps so much of the bound once, so that the medians of the rounds keep all of it."""


@dataclass(frozen=True)
class Final:
    """A configuration in the final.

    Attributes:
        candidate: it.
        points: one of each round, at the concurrency that served it best.
    """

    candidate: Candidate
    points: tuple[Point, ...]

    def per_s(self) -> float:
        """The median of the rounds."""
        return statistics.median(point.per_s for point in self.points)

    def p99_ms(self) -> float | None:
        """The median of the rounds; None where one had too few answers."""
        known = [point.p99_ms for point in self.points if point.p99_ms is not None]
        return statistics.median(known) if len(known) == len(self.points) else None

    def within(self, bound_ms: float) -> bool:
        """Whether the bound holds in the median."""
        p99 = self.p99_ms()
        errors = any(point.errors for point in self.points)
        return not errors and (p99 <= bound_ms if p99 is not None else all(p.within(bound_ms) for p in self.points))


@dataclass(frozen=True)
class Tuned:
    """What the search found.

    Attributes:
        subject: the model.
        present: what was there.
        trials: all of them, by rung.
        finals: the present one first.
        best: the one to take; None when none keeps the bound.
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
    others = candidates(present, len(cpus) or len(os.sched_getaffinity(0)))
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
        finals = _final(contenders, stand, options, seconds, on_progress)
    best = _winner(finals, options.p99_ms)
    return Tuned(subject, present, tuple(rungs), finals, best, options.p99_ms, tuple(failures))


def _winner(finals: Sequence[Final], bound_ms: float) -> Final | None:
    """The most throughput within the bound; the present one unless another beats it in every round."""
    present = finals[0]
    kept = [final for final in finals if final.within(bound_ms)]
    best = max(kept, key=Final.per_s, default=None)
    if best is None or best is present or not present.within(bound_ms):
        return best
    always = all(ours.per_s > theirs.per_s for ours, theirs in zip(best.points, present.points, strict=True))
    return best if always else present


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
) -> tuple[Final, ...]:
    """The contenders in turns, so that the machine's moods hit all of them; each with the load that suits it."""
    points: dict[Candidate, list[Point]] = {trial.candidate: [] for trial in contenders}
    total = options.rounds * len(contenders)
    loads = {}
    for trial in contenders:
        on_progress(f"final: {trial.candidate.label()}", 0, total)
        best = trial.best(options.p99_ms)
        most = best.concurrency if best is not None else 1
        url = stand.serve(trial.candidate)
        loads[trial.candidate] = settle(
            url, stand.subject, most, seconds=seconds, bound_ms=MARGIN * options.p99_ms, seed=options.seed
        )
    for number in range(options.rounds):
        for trial in contenders if number % 2 == 0 else reversed(contenders):
            on_progress(f"final: {trial.candidate.label()}", sum(map(len, points.values())), total)
            url = stand.serve(trial.candidate)
            found = confirm(url, stand.subject, loads[trial.candidate], seconds=seconds, seed=options.seed)
            points[trial.candidate].append(found)
    return tuple(Final(candidate, tuple(found)) for candidate, found in points.items())


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
    with locked(subject.repository):
        for part, text in subject.texts.items():
            if (subject.repository / part / "config.pbtxt").read_text(encoding="utf-8") != text:
                raise ServerError(
                    f"can't write the configuration of {part}",
                    why="it was changed while the search ran",
                    mend="run it again; what was measured of the same model is not measured twice",
                )
        for part, message in messages.items():
            path = subject.repository / part / "config.pbtxt"
            replace_file(path, text_of(message).encode())
    return True
