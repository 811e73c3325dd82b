"""What `serve hooks check` does with a file of hooks, as its steps."""

from __future__ import annotations

from pathlib import Path

from compress.artifact import Artifact
from serve.hooks.bad_input import Tried, try_bad_input
from serve.hooks.check import Step, check_hooks, sample_of
from serve.hooks.load import load_hooks

__all__ = ["steps_of", "tried_of"]


def steps_of(path: Path, source: Artifact, given: Path | None) -> list[Step]:
    """One request, all the way through."""
    hooks = load_hooks(path, source.signature)
    return check_hooks(hooks, source, sample_of(hooks, source, given))


def tried_of(path: Path, source: Artifact, given: Path | None) -> list[Tried]:
    """Bad input, given to preprocess."""
    hooks = load_hooks(path, source.signature)
    return try_bad_input(hooks, source, sample_of(hooks, source, given))
