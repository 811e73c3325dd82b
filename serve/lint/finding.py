"""What lint has to say about a model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

__all__ = ["Finding", "Findings", "error", "shown", "unreadable", "warning"]


@dataclass(frozen=True)
class Finding:
    """One thing.

    Attributes:
        model: the model's folder.
        severity: "error" when Triton would not load the model, "warning" when it would serve it badly or unsafely.
        what: what is wrong, with the field or file.
        mend: what to do.
    """

    model: str
    severity: Literal["error", "warning"]
    what: str
    mend: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


Findings = Iterator[Finding]


def error(model: str, what: str, mend: str) -> Finding:
    """Triton would not load the model."""
    return Finding(model, "error", what, mend)


def unreadable(model: str, err: OSError) -> Finding:
    """A file of the model, or one that it names, can't be looked at."""
    name = str(err.filename or "")
    named = name if len(name) <= 200 else f"{name[:200]}…"
    return error(model, f"can't look at {named!r}: {err.strerror}", "mend the name, or let this user read it")


def warning(model: str, what: str, mend: str) -> Finding:
    """Triton would load it."""
    return Finding(model, "warning", what, mend)


def shown(text: str) -> str:
    """Without what would steer a terminal, or what it can't write: names of folders and tensors may be anybody's."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)
