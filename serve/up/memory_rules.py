"""Whether the models of a repository can be served within a memory, as far as their files tell."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from serve.gateway.on_demand.catalogue import Known, catalogue_of
from serve.gateway.on_demand.estimates import MIB, Estimates
from serve.lint.finding import Finding, error, warning

__all__ = ["OWN_BYTES", "memory_findings"]

OWN_BYTES = 40 * MIB  # of a Triton without a model


def memory_findings(repository: Path, memory: int, pins: tuple[str, ...]) -> list[Finding]:
    """Pins that are not there, or are too much together, and models that no unloading of others makes room for.

    Args:
        repository: a model repository; folders that can't be read are `lint`'s to tell.
        memory: bytes that Triton and its models may have resident.
        pins: models that are to stay.

    Raises:
        RepositoryError: there is no such folder, or no model in it.
    """
    known, estimates = catalogue_of(repository), Estimates()

    def size_of(parts: set[str]) -> int:
        return sum(estimates.bytes(known[part]) for part in parts)

    found = [
        error(pin, "it is to be pinned, and there is no such model", f"pin one of {', '.join(sorted(known)[:5])}")
        for pin in pins
        if pin not in known
    ]
    kept = {part for pin in pins if pin in known for part in known[pin].parts}
    left = memory - OWN_BYTES - size_of(kept)
    if kept and left < 0:
        told = f"what is pinned takes about {size_of(kept) // MIB} MiB, and Triton {OWN_BYTES // MIB}"
        return [*found, error(pins[0], f"{told}, of {memory // MIB} MiB", "give more memory, or pin fewer")]
    return found + [each for name in sorted(known) if (each := _fits(known, name, kept, left, size_of)) is not None]


def _fits(
    known: dict[str, Known], name: str, kept: set[str], left: int, size_of: Callable[[set[str]], int]
) -> Finding | None:
    parts = set(known[name].parts) - kept
    if known[name].part_of or (size := size_of(parts)) <= left:
        return None
    mend = "give more memory, pin fewer models, or pack it with fewer instances"
    beside = f"{max(0, left) // MIB} MiB are left for models"
    if sum(known[part].file_bytes for part in parts) > left:
        return error(name, f"its files alone are larger than the memory: {beside}", mend)
    return warning(name, f"it takes about {size // MIB} MiB, and {beside}: it may not load", mend)
