"""What a load test is asked to do."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from compress.errors import ServerError

__all__ = ["LoadOptions"]


@dataclass(frozen=True)
class LoadOptions:
    """A closed loop: each of `concurrency` clients sends its next request when the last one was answered.

    Raises:
        ServerError: a value that can't work.
    """

    model: str
    """Name of the model to ask."""

    url: Annotated[str, Parameter(parse=False)] = "http://127.0.0.1:8080"
    """The gateway, or a Triton, as http://host:port."""

    concurrency: int = 16
    """Requests in flight at a time, each on a connection of its own."""

    duration: float = 10.0
    """How long to measure, in seconds."""

    warmup: float = 1.0
    """How long to send requests before that, in seconds; they are not measured."""

    max_requests: int | None = None
    """Stop after this many measured requests, even if time is left."""

    timeout: float = 30.0
    """How long to wait for one answer, in seconds."""

    key: Annotated[str, Parameter(parse=False)] = field(default="", repr=False)
    """API key of the gateway; the command takes it from SERVE_API_KEY."""

    seed: int = 0
    """Draws the input where the model has no example of its own."""

    allow_remote: bool = False
    """Send load to another machine than this one."""

    output: Path | None = None
    """Write the result to this JSON file."""

    def __post_init__(self) -> None:
        for name in ("concurrency", "duration", "timeout"):
            self._at_least(name, getattr(self, name) > 0, "more than 0")
        self._at_least("warmup", self.warmup >= 0, "0 or more")
        self._at_least("max_requests", self.max_requests is None or self.max_requests > 0, "more than 0")

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """Those that carry the key."""
        return [(b"authorization", f"Bearer {self.key}".encode())] if self.key else []

    def _at_least(self, name: str, holds: bool, bound: str) -> None:
        if not holds:
            raise ServerError(
                "the load test can't run",
                why=f"{name} is {getattr(self, name)}",
                mend=f"give {name.replace('_', '-')} a value of {bound}",
            )
