"""`serve up --memory`: what is checked before the start, and how the models' coming and going is tied together."""

from __future__ import annotations

import asyncio
from pathlib import Path

from compress.errors import ServerError
from serve.gateway.on_demand.catalogue import Known, catalogue_of
from serve.gateway.on_demand.estimates import Estimates
from serve.gateway.on_demand.host import HostDownError, Used
from serve.gateway.on_demand.residency import Residency
from serve.triton.memory import MIB

__all__ = ["ChangedOnDemand", "pinned_of", "started_of"]

SHOWN = 5


def pinned_of(repository: Path, memory: int, pin: tuple[str, ...]) -> tuple[dict[str, Known], frozenset[str]]:
    """The models that there are, and those that are loaded at the start, with all that they need.

    Raises:
        ServerError: a pin names none, or they take more than there may be.
        RepositoryError: there are none.
    """
    known = catalogue_of(repository)
    for name in pin:
        if name not in known:
            raise ServerError(
                f"can't pin {name}", why=f"{repository} has no such model", mend=f"name one of {_some(sorted(known))}"
            )
    first = frozenset(part for name in pin for part in known[name].parts)
    estimates = Estimates()
    size = sum(estimates.bytes(known[name]) for name in first)
    if size > memory:
        raise ServerError(
            f"can't keep models within --memory {memory // MIB}MiB",
            why=f"those that are pinned take about {size // MIB} MiB",
            mend="give more, or pin fewer",
        )
    return known, first


def started_of(residency: Residency, now: Used) -> list[str]:
    """What is said at the start: models that will not fit.

    Args:
        residency: of the models.
        now: what Triton and what is pinned have resident.

    Raises:
        ServerError: Triton and what is pinned leave no room at all.
    """
    used, limit = now.total, residency.budget
    if used >= limit:
        raise ServerError(
            f"can't keep models within --memory {limit // MIB}MiB",
            why=f"Triton and what is pinned take {used // MIB} MiB already",
            mend="give more, or pin fewer",
        )
    large = [name for name in residency.known if name not in residency.pins and residency.bytes_of(name) > limit - used]
    if not large:
        return []
    return [f"{_some(sorted(large))} may be too large for the {(limit - used) // MIB} MiB that are left for models"]


def _some(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


class ChangedOnDemand:
    """What `--watch` does with what has changed: only what is loaded is loaded anew.

    Args:
        residency: of the models; lives in an event loop.
        repository: that is followed, from another thread.
    """

    def __init__(self, residency: Residency, repository: Path) -> None:
        self._residency = residency
        self._repository = repository
        self._loop = asyncio.get_running_loop()

    def load(self, model: str) -> str:
        """A model is new or has changed; in words, what became of it."""
        known = catalogue_of(self._repository)
        loaded = self._wait(model, known)
        return "is loaded" if loaded else "has changed, and is loaded when it is asked for"

    def unload(self, model: str) -> str:
        """A model is gone."""
        known = catalogue_of(self._repository)
        self._wait(model, known)
        return "is no longer served"

    def stop(self) -> None:
        """What is waited for ends with the event loop."""

    def _wait(self, model: str, known: dict[str, Known]) -> bool:
        try:
            return asyncio.run_coroutine_threadsafe(self._residency.changed(model, known), self._loop).result()
        except HostDownError:
            raise ServerError("can't reach Triton", why="it is down", mend="wait") from ConnectionError()
