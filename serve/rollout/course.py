"""A rollout on its way: which step it is at, and whether the evidence moves it on or ends it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from serve.rollout.analysis import Analysis
from serve.rollout.plan import Plan

__all__ = ["Course", "Event", "State"]

State = Literal["running", "promoted", "aborted"]
MEANT = "; if other answers are meant, --expect-change records them unjudged, and --agree says which are the same"
Kind = Literal["step", "promoted", "aborted", "refused", "note"]


@dataclass(frozen=True)
class Event:
    """Something that happened to a rollout; one that is refused can't begin as it was asked for, and is aborted.

    Attributes:
        why: for whoever reads the history.
    """

    kind: Kind
    why: str


class Course:
    """A plan being followed.

    Args:
        plan: its steps and bounds.
        now: seconds of a clock that never goes back; the same clock throughout.
        step: where to begin.

    Attributes:
        state: what has become of it.
        step: index of the step it is at.
        analysis: the evidence of this step.
        shared: whether several keys may ask; joined: whether several have.
    """

    def __init__(self, plan: Plan, now: float, step: int = 0) -> None:
        self.plan = plan
        self.state: State = "running"
        self.shared = self.joined = False
        self.step = min(step, len(plan.weights) - 1)
        self._enter(now)

    @property
    def weight(self) -> float:
        """The candidate's share of the requests, 0 to 1."""
        if self.state == "running":
            return self.plan.weights[self.step]
        return float(self.state == "promoted")

    @property
    def copies(self) -> float:
        """The share of the baseline's requests that is copied to the candidate, 0 to 1."""
        return self.plan.shadow / 100 if self.state == "running" else 0.0

    def seconds(self, now: float) -> float:
        """How long this step has lasted."""
        return now - self._began

    def look(self, now: float) -> Event | None:
        """Act on the evidence, if there is enough of it."""
        if self.state != "running":
            return None
        analysis = self.analysis
        analysis.expect_others(self.joined or (self.shared and self.seconds(now) < self.plan.step_s))
        if (question := analysis.worse()) is not None:
            return self.end("aborted", analysis.told([question]) + MEANT * (question == "disagreement"))
        if self.seconds(now) >= self.plan.step_s and analysis.proven():
            return self.promote(now, analysis.passed())
        if self.plan.give_up_s and self.seconds(now) > self.plan.give_up_s:
            return self.end("aborted", f"no decision within {self.plan.give_up_s:g} s")
        return None

    def promote(self, now: float, why: str) -> Event:
        """Go one step on; from the last one, the candidate takes over."""
        if self.step + 1 == len(self.plan.weights):
            return self.end("promoted", why)
        self.step += 1
        before = self.analysis
        self._enter(now)
        self.analysis.go_on(before)
        return Event("step", why)

    def end(self, state: Literal["promoted", "aborted"], why: str) -> Event:
        """The candidate takes over, or the baseline has everything again."""
        self.state = state
        return Event(state, why)

    def snapshot(self) -> dict[str, Any]:
        """What a later process needs to go on (see `restore`)."""
        return {**self.analysis.snapshot(), "joined": self.joined}

    def restore(self, seconds: float, snapshot: Mapping[str, Any]) -> None:
        """Go on within a step.

        Args:
            seconds: that it had lasted.
            snapshot: of `snapshot`.
        """
        self._began -= seconds
        self.joined = snapshot.get("joined") is True
        self.analysis.restore(snapshot)

    def _enter(self, now: float) -> None:
        self._began = now
        self.analysis = Analysis(self.plan, self.plan.weights[self.step])
