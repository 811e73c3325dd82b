"""`--profile` told: where the time of each training went, or why nobody can say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from compress.console.wording import Note, counted
from compress.pipeline import Outcome
from compress.quantize.qat.train_quantized import TrainQuantized
from compress.training.finetune import Finetune
from compress.training.machine.profile import SKIPPED

__all__ = ["profile_told", "profiles_told"]


def profiles_told(outcomes: Mapping[str, Outcome]) -> tuple[Note, ...]:
    """A sentence for each training that was to be profiled.

    Args:
        outcomes: of all stages, by the name of the row.
    """
    told = {name: profile_told(outcome) for name, outcome in outcomes.items()}
    return tuple(Note(f"{name}: {'; '.join(words)}.") for name, words in told.items() if words)


def profile_told(outcome: Outcome) -> tuple[str, ...]:
    """Clauses on where the time of a step went, or one on why there is no profile; none where none was asked for.

    Args:
        outcome: of any stage.
    """
    stage = outcome.stage
    training = stage.training if isinstance(stage, TrainQuantized) else stage
    if not isinstance(training, Finetune) or not training.training.profile or training.training.tune_training:
        return ()
    details: Mapping[str, Any] = outcome.given.details
    if words := _words(details):
        return (*words, "profiled when it was trained: it is kept from before") if outcome.reused else words
    if outcome.reused:
        return ("no profile: the training is kept from before, when none was made; add --no-cache and another --work",)
    steps = counted(max(0, int(details["steps"]) - (details["resumed_at_step"] or 0)), "steps")
    return (f"no profile: this run trained {steps}, and the first {SKIPPED} are not watched",)


def _words(details: Mapping[str, Any]) -> tuple[str, ...]:
    """Those of a kept stage may hold anything."""
    profile = details.get("profile")
    words = profile.get("words") if isinstance(profile, Mapping) else None
    return tuple(str(word) for word in words) if isinstance(words, list) else ()
