"""One algorithm a file; each is a frozen dataclass of its options with a `run` that gives a new model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from compress.model import Model

__all__ = ["Given", "Progress", "Stage"]

# Steps done, steps in all, and a word on how it stands.
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Given:
    """What a stage gives: a new model, what was done, the stage's own figures (JSON values), and warnings."""

    model: Model
    did: str
    details: Mapping[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


class Stage(Protocol):
    """A function from model to model, with its options."""

    @property
    def name(self) -> str:
        """Of the algorithm, and of its file."""

    @property
    def takes(self) -> type:
        """TorchModel or OnnxModel."""

    @property
    def gives(self) -> type:
        """TorchModel or OnnxModel."""

    @property
    def options(self) -> Mapping[str, Any]:
        """JSON values that, with the input, decide the output; data sets by their hash."""

    def check(self, model: Model) -> None:
        """Raise a ToolkitError if it can't work on what the pipeline starts from; does no work."""

    def run(self, model: Any, folder: Path, progress: Progress) -> Given:
        """Do it; the input is left as it is. Files that belong to the output go into the folder."""
