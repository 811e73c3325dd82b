"""What came of a search: trials, the Pareto front, the winner."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from compress.artifact import RUNTIME_NAMES, Runtime
from compress.console.wording import counted
from compress.evaluate.candidates import Candidate
from compress.evaluate.gains import drop_told
from compress.evaluate.judge import Budget
from compress.runtime.latency import ratio

__all__ = ["THROUGHPUT_BATCH", "Goal", "Proof", "SearchResult", "Trial"]

SCHEMA_VERSION = 2
THROUGHPUT_BATCH = 8

Goal = Literal["latency", "size", "throughput"]


@dataclass(frozen=True)
class Trial:
    """What came of a candidate; None is "not measured".

    Attributes:
        candidate: what was tried.
        status: "measured", "eliminated" (it lost too much on a part of the data) or "failed".
        why: for the two last.
        value: the metric over all samples that choose.
        drop: against the original, in points; `drop_low` and `drop_high` bound its confidence interval.
        size_bytes: of the ONNX file.
        runtime: that it was judged and timed on: of several, the one that serves it.
        latency_p50_ms: at `SearchResult.batch("latency")`; of one that was trained after all were timed, what its
            layers took there before.
        throughput: samples a second at `SearchResult.batch("throughput")`, likewise.
        path: the ONNX file, in the work folder.
        rounds_ms: the p50 of each round that all trials took together, by which the latency is.
        batched_rounds_ms: the same for the throughput.
    """

    candidate: Candidate
    status: Literal["measured", "eliminated", "failed"]
    why: str = ""
    value: float | None = None
    drop: float | None = None
    drop_low: float | None = None
    drop_high: float | None = None
    size_bytes: int | None = None
    runtime: Runtime | None = None
    latency_p50_ms: float | None = None
    throughput: float | None = None
    path: Path | None = None
    rounds_ms: tuple[float, ...] = ()
    batched_rounds_ms: tuple[float, ...] = ()

    def rounds(self, goal: Goal) -> tuple[float, ...]:
        """What the goal is measured by, in the order of the rounds; nothing for a size, which is exact."""
        return {"latency": self.rounds_ms, "throughput": self.batched_rounds_ms}.get(goal, ())

    def cost(self, goal: Goal) -> float:
        """What the goal makes small; infinite where it was not measured."""
        if goal == "size":
            return float("inf") if self.size_bytes is None else float(self.size_bytes)
        if goal == "latency":
            return float("inf") if self.latency_p50_ms is None else self.latency_p50_ms
        return float("inf") if self.throughput is None else -self.throughput


@dataclass(frozen=True)
class Proof:
    """What the winner's artifact has: judged once on samples that had no part in the choice, and measured again.

    Attributes:
        samples: so many.
        value, drop, drop_low, drop_high, latency_p50_ms: as of `Trial`.
        runtime: that serves it; None of an engine.
    """

    samples: int
    value: float | None
    drop: float | None
    drop_low: float | None
    drop_high: float | None
    runtime: Runtime | None = None
    latency_p50_ms: float | None = None


@dataclass(frozen=True)
class SearchResult:
    """All trials of a search.

    Attributes:
        goal: what the winner is best at.
        max_drop: points that it may lose.
        metric: the metric's name.
        original: the metric of the original model.
        samples: that chose.
        trials: one for each candidate.
        confidence: of the interval whose upper end has to keep the largest drop; None for the estimate itself.
        proof: of the winner, once it is exported.
        runtimes: that each candidate was asked on, where it can run there.
        constant: points that the best answer that is always the same loses: what loses as many is not inside.
        allowance: points more that a candidate may have lost to be trained for the rest; None where none was to wait.
        trained: those that were then trained, in the order in which they were.
        call: samples that each call takes, no more and no fewer; None where their number varies.
    """

    goal: Goal
    max_drop: float
    metric: str
    original: float
    samples: int
    trials: tuple[Trial, ...]
    confidence: float | None = None
    proof: Proof | None = field(default=None, compare=False)
    runtimes: tuple[Runtime, ...] = ("onnxruntime",)
    constant: float | None = None
    allowance: float | None = None
    trained: tuple[Candidate, ...] = ()
    call: int | None = None

    def batch(self, goal: Goal) -> int:
        """Samples in a call, as it is timed for a goal."""
        return self.call or (THROUGHPUT_BATCH if goal == "throughput" else 1)

    @property
    def budget(self) -> Budget:
        """What a candidate may lose."""
        return Budget(self.max_drop, self.confidence).beside(self.constant)

    @property
    def measured(self) -> tuple[Trial, ...]:
        return tuple(trial for trial in self.trials if trial.status == "measured")

    def inside(self, trial: Trial) -> bool:
        """Whether a trial keeps the largest drop."""
        return self.budget.keeps(trial.drop, trial.drop_high)

    def can_train(self, trial: Trial) -> bool:
        """Whether it is pruned, and has not been trained."""
        trained = dataclasses.replace(trial.candidate, trained=True)
        return bool(trial.candidate.prune) and all(other.candidate != trained for other in self.trials)

    @property
    def tied(self) -> tuple[Trial, ...]:
        """Those inside the largest drop that no other of them beats by the goal beyond doubt, in the search's order.

        Not those like the cheapest: which one that is of some that are alike, and so whom it is like, is chance.
        """
        return self._tied([trial for trial in self.measured if self.inside(trial)])

    def _tied(self, inside: Sequence[Trial]) -> tuple[Trial, ...]:
        if any(trial.candidate.trained for trial in inside):  # the best of many that are not trained has had luck, too
            inside = [trial for trial in inside if trial.candidate.trained or not trial.candidate.prune]
        tied = [trial for trial in inside if not any(self._beats(other, trial) for other in inside)]
        # Medians of ratios can go round in a circle, where each is beaten by one.
        return tuple(tied or sorted(inside, key=lambda trial: trial.cost(self.goal))[:1])

    @property
    def best(self) -> Trial | None:
        """Of those that are tied: the one that loses least, then the smallest, then the first of the search."""
        return self._first(self.tied)

    def _first(self, tied: Sequence[Trial]) -> Trial | None:
        return min(
            tied,
            key=lambda trial: (math.inf if trial.drop is None else trial.drop, trial.size_bytes or 0),
            default=None,
        )

    @property
    def to_train(self) -> Trial | None:
        """The best of what is not pruned and what a training may bring inside the largest drop, if it is of these."""
        ready = [trial for trial in self.measured if not trial.candidate.prune or self.can_train(trial)]
        best = self._first(self._tied([trial for trial in ready if self._may_come_inside(trial)]))
        return best if best is not None and self.can_train(best) else None

    def _may_come_inside(self, trial: Trial) -> bool:
        """A training brings back the allowance at most, and no more than it brought one that had lost as much or more.

        What it brought one that had lost less says nothing: there was less to bring back.
        """
        brought = [
            before.drop - after.drop
            for before, after in self.trainings
            if trial.drop is not None and before.drop is not None and after.drop is not None
            if before.drop >= trial.drop
        ]
        budget = trial.candidate.budget(self.budget, max(0.0, min([self.allowance or 0.0, *brought])))
        return budget.keeps(trial.drop, trial.drop_high)

    @property
    def trainings(self) -> tuple[tuple[Trial, Trial], ...]:
        """Each that was trained last, before and after, in the order in which they were."""
        found = {trial.candidate: trial for trial in self.trials}
        return tuple((found[dataclasses.replace(each, trained=False)], found[each]) for each in self.trained)

    def with_trained(self, before: Trial, after: Trial) -> SearchResult:
        """The same, with a trial that was trained behind itself as it was."""
        behind = self.trials.index(before) + 1
        trials = (*self.trials[:behind], after, *self.trials[behind:])
        return dataclasses.replace(self, trials=trials, trained=(*self.trained, after.candidate))

    def _beats(self, one: Trial, other: Trial) -> bool:
        found = ratio(other.rounds(self.goal), one.rounds(self.goal))
        if found is None or found.low is None:  # a size, or too few rounds
            return one.cost(self.goal) < other.cost(self.goal)
        return found.faster

    @property
    def how(self) -> str:
        """One clause: how the best was told from those that are as good by the goal; empty where none is."""
        if len(self.tied) < 2:
            return ""
        alike = "are of one size" if self.goal == "size" else "can't be told apart by the clock"
        return (
            f"{counted(len(self.tied), 'candidates')} {alike}: of these it loses least; where these are equal, too, "
            "it is the smallest, then the first that was tried"
        )

    @property
    def served(self) -> str:
        """What serves the winner's artifact and what it takes, in a sentence; empty before its export, or of an engine.

        The export measures again, beside other models: of runtimes that are close it may take the other one.
        """
        proof, best = self.proof, self.best
        if proof is None or best is None or proof.runtime is None:
            return ""
        at = f"at batch {self.batch('latency')} in its own report"
        took = "" if proof.latency_p50_ms is None else f", {proof.latency_p50_ms:.3f} ms {at}"
        told = f"The winner's artifact is served by {RUNTIME_NAMES[proof.runtime]}{took}"
        if best.runtime not in (None, proof.runtime):
            told += f"; the search had taken {RUNTIME_NAMES[best.runtime]}, by samples and turns of its own"
        return f"{told}."

    @property
    def unpaid(self) -> tuple[str, ...]:
        """A sentence for each pruned candidate in fewer bits that is not faster beyond doubt than the same unpruned."""
        goal: Goal = "throughput" if self.goal == "throughput" else "latency"
        batch = self.batch(goal)
        whole = {t.candidate: t for t in self.measured if not t.candidate.prune}
        told: dict[Candidate, str] = {}  # those with and without training have the same layers
        for trial in self.measured:
            alone = whole.get(trial.candidate.whole)
            if alone is None or not trial.candidate.prune or trial.candidate.in_float32:
                continue
            found = ratio(alone.rounds(goal), trial.rounds(goal))
            if found is None or found.low is None or found.faster:
                continue
            told.setdefault(
                dataclasses.replace(trial.candidate, trained=False),
                f"{trial.candidate.name} can't be said to be faster than {alone.candidate.name}, "
                f"{alone.candidate.kind.split()[0]} alone: "
                f"{found.value:.2f} times as fast ({found.low:.2f} to {found.high:.2f}, batch {batch}). "
                "Here pruning it does not pay in time.",
            )
        return tuple(told.values())

    @property
    def training(self) -> str:
        """What was trained, and what that brought, in a sentence; empty where no candidate waited for it."""
        if self.allowance is None:
            return ""
        told = []
        for before, after in self.trainings:
            lost, left = (
                "failed" if each.drop is None else drop_told(each.drop, metric=self.metric) for each in (before, after)
            )
            told.append(f"{before.candidate.name} ({lost} before, {left} after)")
        order = ", in this order" if told[1:] else ""
        trained = f"then trained{order}: {', '.join(told)}" if told else "none of them was then trained"
        return f"Candidates were compared as the repair had left them; {trained}."

    @property
    def nearest(self) -> Trial | None:
        """The one whose drop, as the budget counts it, is least, for when none is inside."""
        budget = self.budget
        known = [trial for trial in self.trials if trial.drop is not None]
        return min(known, key=lambda trial: (budget.counted(trial.drop, trial.drop_high), trial.drop), default=None)

    @property
    def missed(self) -> str:
        """Why none is inside, in one sentence without its end: no more than is known of each."""
        budget, limit = self.budget, counted(self.max_drop, "points")
        beyond = [t for t in self.trials if t.drop is not None and t.drop > self.max_drop]
        inside = [t for t in self.measured if t.drop is not None and t.drop <= self.max_drop]
        nothing = [t for t in inside if budget.lost_all(t.drop)]
        unsure = [t for t in inside if t not in nothing]
        failed = [t for t in self.trials if t.status == "failed"]
        untried = len(self.trials) - len(beyond) - len(inside) - len(failed)
        told = [
            f"{count:,} {words}"
            for count, words in (
                (len(beyond), f"lost more than {limit} of {self.metric}"),
                (len(nothing), "no better than an answer that looks at nothing"),
                (len(unsure), f"may have lost more than {limit} of {self.metric}, by the interval"),
                (len(failed), "failed"),
                (untried, "not tried"),
            )
            if count
        ]
        near = self.nearest
        told_of_it = "" if near is None else f"; the nearest is {near.candidate.name}, its drop is "
        told_of_it += "" if near is None else budget.words(near.drop, near.drop_high)
        return f"of {counted(len(self.trials), 'candidates')}, {', '.join(told)}{told_of_it}"

    @property
    def line(self) -> tuple[Trial, ...]:
        """The Pareto front by the estimates, cheapest first: no other loses less and costs no more."""
        front: list[Trial] = []
        for trial in sorted(self.measured, key=lambda trial: (trial.cost(self.goal), trial.drop)):
            if not front or (trial.drop or 0.0) < (front[-1].drop or 0.0):
                front.append(trial)
        return tuple(front)

    @property
    def front(self) -> tuple[Trial, ...]:
        """Trials of the line, and those that can't be told from it, cheapest first.

        One is off where another is as good by both estimates and better by drop or goal beyond doubt.
        """
        left = [t for t in self.measured if not any(self._dominates(other, t) for other in self.measured)]
        return tuple(sorted(left, key=lambda trial: (trial.cost(self.goal), trial.drop)))

    def _dominates(self, one: Trial, other: Trial) -> bool:
        lost, of_other = one.drop or 0.0, other.drop or 0.0
        if one.cost(self.goal) > other.cost(self.goal) or lost > of_other:
            return False
        unsure = one.drop_high is None or other.drop_low is None
        return self._beats(one, other) or (lost < of_other if unsure else one.drop_high < other.drop_low)  # type: ignore[operator]

    def to_dict(self) -> dict[str, Any]:
        front, tied, best = self.front, self.tied, self.best

        def row(trial: Trial) -> dict[str, Any]:
            fields = dataclasses.asdict(trial) | {"candidate": dataclasses.asdict(trial.candidate)}
            fields.pop("path")
            told = {"on_front": trial in front, "tied": trial in tied, "best": trial is best}
            return fields | {"name": trial.candidate.name} | told

        return {
            "schema_version": SCHEMA_VERSION,
            "goal": self.goal,
            "max_drop": self.max_drop,
            "metric": self.metric,
            "original": self.original,
            "samples": self.samples,
            "confidence": self.confidence,
            "runtimes": list(self.runtimes),
            "batches": {"latency": self.batch("latency"), "throughput": self.batch("throughput")},
            "constant": self.constant,
            "allowance": self.allowance,
            "training": self.training,
            "proof": None if self.proof is None else dataclasses.asdict(self.proof),
            "unpaid": list(self.unpaid),
            "trials": [row(trial) for trial in self.trials],
        }
