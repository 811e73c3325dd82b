"""Whoever runs the Triton whose models come and go: what it is asked, and what memory it tells of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from serve.gateway.on_demand.catalogue import Known

__all__ = ["Host", "HostDownError", "Used"]


class HostDownError(Exception):
    """Triton itself can't be reached: it says nothing of a model."""


@dataclass(frozen=True)
class Used:
    """Memory that is resident, in bytes. Files that processes share count for each: it is more than the machine gives.

    Attributes:
        own: of Triton itself, without the regions that it shares with models.
        by_model: of the processes of a model, by its name.
        peaks: the most that these have had since they began.
    """

    own: int = 0
    by_model: Mapping[str, int] = field(default_factory=dict)
    peaks: Mapping[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return self.own + sum(self.by_model.values())


class Host(Protocol):
    """Loads and unloads single models.

    Attributes:
        timeout_s: that a load may take before it is given up.
    """

    timeout_s: float

    async def load(self, model: Known) -> None:
        """Load one, which is ready then; raises ToolkitError where it can't be, HostDownError where Triton is down."""

    def give_up(self, model: str) -> None:
        """End what a load of a model under way has begun, as far as can be; blocks for some milliseconds."""

    async def unload(self, model: str, *, patient: bool = False) -> None:
        """Take one out, and return once its processes have ended; errors as of `load`.

        Args:
            model: its name.
            patient: whether somebody may wait for what it computes. Else its processes are ended soon: nobody does,
                and it would hold memory for as long as it takes.
        """

    async def used(self) -> Used:
        """What is resident now."""
