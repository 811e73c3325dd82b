"""What a load test is asked to do."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from compress.errors import ServerError

__all__ = ["LoadOptions", "Scenario"]

Scenario = Literal["single-stream", "multi-stream", "server", "offline"]
Hidden = Parameter(parse=False)
MOST = (1 << 53) - 1
"""Any whole number that JSON carries everywhere."""
Many = Parameter(consume_multiple=True, negative_iterable="")


@dataclass(frozen=True)
class LoadOptions:
    """One load: a closed loop of `concurrency` clients, or an open loop at `rate`.

    Raises:
        ServerError: a value that can't work.
    """

    model: str = ""
    """Name of the model to ask; none for an address with a path, which is sent --body."""

    url: Annotated[str, Hidden] = "http://127.0.0.1:8080"
    """The gateway, a Triton or another server: http://host:port, grpc://host:port, http://host:port/path."""

    concurrency: Annotated[int, Hidden] = 16
    """Closed loop: clients, each of which sends its next request when the last one was answered."""

    rate: Annotated[str, Hidden] = ""
    """Open loop: requests a second, whatever becomes of them; empty for a closed loop."""

    arrivals: str = "poisson"
    """Open loop: poisson, constant (evenly spaced), burst:10 (ten at once), or trace:FILE (a time on each line)."""

    duration: float = 10.0
    """How long to measure, in seconds."""

    warmup: float = 1.0
    """How long to send requests before that, in seconds; they are not measured."""

    max_requests: int | None = None
    """Stop after this many measured requests, even if time is left."""

    timeout: float = 30.0
    """How long to wait for one answer, in seconds."""

    back_off: bool = False
    """Closed loop: a client that is refused (429, 503) waits as long as Retry-After says, or up to a second."""

    connections: int = 512
    """Open loop: most connections at a time; further requests wait for one, and their latency counts the wait."""

    processes: int = 1
    """Generator processes; 0 for none of their own."""

    cpus: Annotated[tuple[int, ...], Many] = ()
    """Bind the generator processes to these CPUs, in turn."""

    worker: Annotated[tuple[str, ...], Many] = ()
    """Send from these instead, each a `serve load worker` as host:port; their token is taken from SERVE_LOAD_TOKEN."""

    worker_ca: Path | None = None
    """Speak TLS to the workers: a PEM file of their certificates, or of whoever signed these."""

    worker_plain: bool = False
    """Speak to workers on other machines without TLS, though requests and their key are sent to them."""

    worker_wait: float = 0.0
    """How long to wait for workers that are not there yet, or busy, in seconds."""

    ray: str = ""
    """Send from the nodes of a Ray cluster: HOST:PORT of its head, on a machine that belongs to it. Workers are started
    there, spoken to over TLS, and end with the load."""

    ray_workers: int = 0
    """So many of them, each with a core; one on each node by default."""

    form: Literal["binary", "json"] = "binary"
    """How tensors are written over HTTP."""

    data: Path | None = None
    """Send these, one after the other: an .npz with an array for each input (and label), a table of texts (.jsonl,
    .csv, .tsv, .txt), or a folder of files."""

    batch: Annotated[tuple[str, ...], Many] = ()
    """Rows in a request; several, such as 1@7 8@3, are drawn by the weight after @."""

    shape: Annotated[tuple[str, ...], Many] = ()
    """Shapes of synthetic inputs, such as x=1,3,224,224; several, such as 1,64@3 1,256@1, are drawn by weight."""

    distinct: int = 1
    """How many different synthetic inputs to send, in turn (a response cache answers what it has seen)."""

    body: Path | None = None
    """For an address with a path: the body, a folder of them, or a template whose ${x} is filled from --data."""

    method: str = "POST"
    """For an address with a path."""

    header: Annotated[tuple[str, ...], Many] = ()
    """Further headers, such as 'Accept: application/json'."""

    expect: str = ""
    """What answers must be: same (as the first to the same request), contains:TEXT, or an .npz with rows for --data."""

    tolerance: float = 1e-3
    """How far a number may be from the one expected."""

    label_output: str = ""
    """Which output names the label, where --data has labels; the model's first by default."""

    max_lateness_ms: float | None = None
    """Open loop: p99 of the generator's own lateness from which the run counts as invalid; by default a fifth of the
    latency bound, or of the p99 measured, and at least 1."""

    key: Annotated[str, Hidden] = field(default="", repr=False)
    """API key of the gateway; the command takes it from SERVE_API_KEY."""

    token: Annotated[str, Hidden] = field(default="", repr=False)
    """Of the workers; the command takes it from SERVE_LOAD_TOKEN."""

    seed: int = 0
    """Draws arrivals, inputs where the model has no example of its own, and which of several is sent."""

    allow_remote: bool = False
    """Send load to another machine than this one."""

    def __post_init__(self) -> None:
        for name in ("concurrency", "duration", "timeout", "connections", "distinct"):
            self._at_least(name, _finite(getattr(self, name)) and getattr(self, name) > 0, "more than 0")
        for name in ("warmup", "processes", "tolerance", "worker_wait", "ray_workers"):
            self._at_least(name, _finite(getattr(self, name)) and getattr(self, name) >= 0, "0 or more")
        self._at_least("max_requests", self.max_requests is None or self.max_requests > 0, "more than 0")
        self._at_least("seed", self.seed >= 0, "0 or more")
        for name in ("concurrency", "max_requests", "connections", "distinct", "processes", "seed"):
            self._at_least(name, (getattr(self, name) or 0) <= MOST, f"{MOST} at most")
        bound = self.max_lateness_ms
        self._at_least("max_lateness_ms", bound is None or (_finite(bound) and bound > 0), "more than 0")

    @property
    def open_loop(self) -> bool:
        return bool(self.rate) or self.arrivals.startswith("trace:")

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """Those that carry the key, and those that were asked for."""
        own = [(b"authorization", f"Bearer {self.key}".encode())] if self.key else []
        for text in self.header:
            name, colon, value = text.partition(":")
            if not colon or not name.strip():
                raise ServerError(f"can't send the header {text!r}", why="it has no colon", mend="write NAME: VALUE")
            own.append((name.strip().lower().encode(), value.strip().encode()))
        return own

    def with_(self, **changes: object) -> LoadOptions:
        """The same, but for these."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]

    def _at_least(self, name: str, holds: bool, bound: str) -> None:
        if not holds:
            raise ServerError(
                "the load test can't run",
                why=f"{name} is {getattr(self, name)}",
                mend=f"give {name.replace('_', '-')} a value of {bound}",
            )


def _finite(value: float) -> bool:
    return math.isfinite(value)
