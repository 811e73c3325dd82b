"""What `serve tune` can be asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from compress.errors import ServerError
from serve.up.options import cpus_of

__all__ = ["TuneOptions"]


@dataclass(frozen=True)
class TuneOptions:
    """How to search.

    Attributes:
        p99_ms: the bound on latency, in milliseconds, at the 99th percentile.
        trials: how many configurations the first rung takes, the present one included.
        seconds: of each load in the first rung; each further rung takes twice as long.
        rounds: how often the last two and the present one take turns; the winner and the present one then take at
            least five more.
        seed: draws the configurations, and the input where the model has no example.
        cpus: the cores that Triton may run on, as in 0-3; all by default.
        output: the folder for the state, the results and the report.
        apply: write the best configuration back into the repository, when it beats the present one.
    """

    p99_ms: float
    trials: int = 18
    seconds: float = 1.0
    rounds: int = 3
    seed: int = 0
    cpus: str | None = None
    output: Path = Path("build/tune")
    apply: Annotated[bool, Parameter(negative="")] = False

    def __post_init__(self) -> None:
        for name in ("p99_ms", "trials", "seconds", "rounds"):
            if getattr(self, name) <= 0:
                raise ServerError(
                    f"can't tune with --{name.replace('_', '-')} {getattr(self, name)}",
                    why="it must be more than 0",
                    mend="give another number",
                )
        cpus_of(self.cpus)
