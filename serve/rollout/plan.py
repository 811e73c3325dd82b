"""What a rollout is asked to do: from what to what, in which steps, and how much worse the new one may be."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Annotated, Any, Self

from cyclopts import Parameter, Token

from compress.errors import ServerError
from serve.config.names import MODEL_NAME, VERSION
from serve.rollout.agree import Agree, check_agrees

__all__ = ["Plan", "Target"]


def _agrees(_: Any, tokens: Sequence[Token]) -> tuple[Agree, ...]:
    return tuple(Agree.parse(token.value) for token in tokens)


@dataclass(frozen=True)
class Target:
    """A model of Triton's, at a version or at the one that Triton takes by itself (None)."""

    model: str
    version: str | None = None

    @classmethod
    def parse(cls, text: str, model: str) -> Self:
        """Read "2" (a version of `model`), "other" or "other/2".

        Raises:
            ServerError: it is none of these.
        """
        name, slash, version = (model, "/", text) if re.fullmatch(VERSION, text) else text.partition("/")
        if not re.fullmatch(MODEL_NAME, name) or (slash and not re.fullmatch(VERSION, version)):
            raise ServerError(
                f"can't release {text!r}",
                why="it names no model",
                mend="write a version (2), a model, or model/version",
            )
        return cls(name, version or None)

    @property
    def path(self) -> str:
        """Of its infer requests."""
        return f"/v2/models/{self.within_models}/infer"

    @property
    def within_models(self) -> str:
        """Its path among the models."""
        return self.model if self.version is None else f"{self.model}/versions/{self.version}"

    def __str__(self) -> str:
        return self.model if self.version is None else f"{self.model}/{self.version}"


@dataclass(frozen=True)
class Plan:
    """How to go from one model to another.

    Raises:
        ServerError: a value that can't work.
    """

    steps: tuple[float, ...] = (5.0, 25.0, 50.0)
    """Percent of the requests that the candidate answers, one step after the other; after the last it gets them all."""

    shadow: float = 10.0
    """Percent of the requests that are copied to the candidate, whose answers are compared and thrown away; a step with
    copies alone comes first. 0 leaves comparison out."""

    step_s: float = 30.0
    """How long each step lasts at least, in seconds."""

    give_up_s: float = 86400.0
    """How long a step may go without a decision before the rollout is aborted, in seconds."""

    sticky: str = ""
    """What keeps a client with the same model: "key", or the name of a header; "" for none."""

    max_error_increase: float = 0.01
    """How many more of the candidate's requests may fail than of the baseline's, as a share of all."""

    max_latency_increase: float = 0.25
    """How much longer the candidate may take than the baseline, as a share: its typical answer. At most
    5 points more of its answers than of the baseline's may be slower by so much than nearly all of the baseline's."""

    max_disagreement: float = 0.02
    """Share of a request's items for which the candidate's answer may be another, on average over requests."""

    max_wrong_increase: float = 0.02
    """How many more of the candidate's answers may be wrong than of the baseline's, as a share of those that clients
    speak of (POST /feedback)."""

    require_feedback: bool = False
    """Whether a step is passed only with proof by feedback, too; else it can end a rollout, and is not waited for."""

    tolerance: float | None = None
    """Largest difference of a number that is not a disagreement; None compares the largest of each row (its class), and
    does not judge single numbers."""

    agree: Annotated[tuple[Agree, ...], Parameter(converter=_agrees, accepts_keys=False, n_tokens=1)] = ()
    """When two answers are the same, by output, as label:first; may be given again. OUTPUT:first (the first label),
    :overlap=0.6 (labels in any order: the share that both have), :argmax (where the largest score stands),
    :tolerance=0.05 and :rtol=0.01 (each number), :equal, :ignore, or :function=NAME (of the gateway's --agree-module).
    Others: floating-point numbers by argmax, or by --tolerance, and all else by equality."""

    expect_change: bool = False
    """The candidate is to answer otherwise, as one that was trained anew: its agreement is recorded and not judged, so
    that errors, latency and feedback decide."""

    error_rate: float = 0.01
    """Share of rollouts in which a good candidate may be rolled back, or a bad one pass a step."""

    fallback: bool = True
    """Whether a request that the candidate fails is asked of the baseline."""

    def __post_init__(self) -> None:
        if not self.steps and not self.shadow:
            raise _unusable("there are no steps", "give --step, or --shadow")
        if any(not 0 < step < 100 for step in self.steps) or list(self.steps) != sorted(set(self.steps)):
            raise _unusable(f"--steps is {list(self.steps)}", "give percentages that grow, above 0 and below 100")
        if not 0 <= self.shadow <= 100:
            raise _unusable(f"--shadow is {self.shadow}", "give a percentage, 0 to 100")
        for name in ("step_s", "give_up_s", "max_latency_increase"):
            if not getattr(self, name) >= 0:
                raise _unusable(f"{_flag(name)} is {getattr(self, name)}", "give 0 or more")
        for name in ("max_error_increase", "max_disagreement", "max_wrong_increase", "error_rate"):
            if not 0 < getattr(self, name) < 1:
                raise _unusable(f"{_flag(name)} is {getattr(self, name)}", "give a share between 0 and 1")
        if self.tolerance is not None and not self.tolerance >= 0:
            raise _unusable(f"--tolerance is {self.tolerance}", "give 0 or more")
        if self.require_feedback and not self.steps:
            raise _unusable("copies answer nobody who could speak of them", "give --steps, or no --require-feedback")
        check_agrees(self.agree)
        if self.agree and not self.shadow:
            raise _unusable("--agree is about copies, and --shadow 0 makes none", "leave one of the two out")
        if not re.fullmatch(r"[A-Za-z0-9-]{0,64}", self.sticky):
            raise _unusable(f"--sticky is {self.sticky!r}", "give key, or the name of a header")

    @property
    def weights(self) -> tuple[float, ...]:
        """The candidate's share of the requests in each step, 0 to 1; 0 first where copies are compared."""
        return ((0.0,) if self.shadow else ()) + tuple(step / 100 for step in self.steps)

    @property
    def agreement(self) -> str:
        """How answers are compared, in words; "" where nothing was said of it."""
        told = [f"answers agree by {', '.join(map(str, self.agree))}"] if self.agree else []
        if self.tolerance is not None and self.shadow:
            told.append(f"numbers agree within {self.tolerance:g}")
        if self.expect_change:
            told.append("a change is expected: agreement is not judged")
        return "; ".join(told)

    def to_dict(self) -> dict[str, Any]:
        """For the state file."""
        return asdict(self) | {"agree": list(map(str, self.agree))}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """What `to_dict` gave; names that are not known are left out."""
        known = {each.name for each in fields(cls)}
        kept = {name: value for name, value in values.items() if name in known}
        if "steps" in kept:
            kept["steps"] = tuple(kept["steps"])
        if "agree" in kept:
            kept["agree"] = tuple(map(Agree.parse, kept["agree"]))
        return cls(**kept)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _unusable(why: str, mend: str) -> ServerError:
    return ServerError("the rollout can't be started", why=why, mend=mend)
