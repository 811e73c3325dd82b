"""What one generator process is told to do: plain data, so that it can go to another machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

from serve.load.ask.check import Check
from serve.load.send.arrivals import Arrivals, Leg

__all__ = ["Job", "Protocol", "Request"]

Protocol = Literal["http", "grpc"]


@dataclass(frozen=True)
class Request:
    """The bytes of one request.

    Attributes:
        wire: all of it over HTTP, head and body; the message over gRPC.
        rows: inferences that it asks for (its batch).
    """

    wire: bytes
    rows: int = 1


@dataclass(frozen=True)
class Job:
    """A load, open or closed.

    Attributes:
        protocol, host, port: whom to ask.
        requests: sent in turn, or drawn by `weights`.
        weights: how often each is sent, relative to the others; empty for in turn.
        arrivals: an open loop's schedule, the warm-up at its beginning; None for a closed loop.
        concurrency: a closed loop's requests in flight, of all processes together.
        connections: an open loop's bound on them.
        warmup_s: requests that are due (or begun) so early are not measured.
        duration_s: how long the measured part lasts.
        max_requests: bound on measured requests; None for none.
        timeout_s: for each answer, from when it was sent.
        back_off: whether a closed loop's client that is told to come later (429, 503) does.
        seed: draws which request is sent.
        metadata: of gRPC calls.
        check: how answers are judged; None where only their status counts.
    """

    protocol: Protocol
    host: str
    port: int
    requests: tuple[Request, ...]
    weights: tuple[float, ...] = ()
    arrivals: Arrivals | None = None
    concurrency: int = 1
    connections: int = 512
    warmup_s: float = 0.0
    duration_s: float = 10.0
    max_requests: int | None = None
    timeout_s: float = 30.0
    back_off: bool = False
    seed: int = 0
    metadata: tuple[tuple[str, str], ...] = ()
    check: Check | None = None

    def to_wire(self) -> tuple[dict[str, Any], bytes]:
        """As JSON values, and the requests' bytes one after the other."""
        data = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        data["requests"] = [(len(request.wire), request.rows) for request in self.requests]
        data["arrivals"] = None if self.arrivals is None else dataclasses.asdict(self.arrivals)
        data["check"] = None if self.check is None else self.check.to_dict()
        return data, b"".join(request.wire for request in self.requests)

    @classmethod
    def from_wire(cls, data: Mapping[str, Any], blob: bytes) -> Self:
        """What `to_wire` gave.

        Raises:
            ValueError, KeyError, TypeError: it is something else.
        """
        values = dict(data)
        requests: list[Request] = []
        at = 0
        for size, rows in values["requests"]:
            requests.append(Request(blob[at : at + size], rows))
            at += size
        if at != len(blob) or not requests:
            raise ValueError("the requests' lengths do not fit their bytes")
        values["requests"] = tuple(requests)
        values["weights"] = tuple(values["weights"])
        values["metadata"] = tuple((str(name), str(value)) for name, value in values["metadata"])
        if (schedule := values["arrivals"]) is not None:
            legs = tuple(Leg(**leg) for leg in schedule["legs"])
            values["arrivals"] = Arrivals(**schedule | {"legs": legs, "times_s": tuple(schedule["times_s"])})
        if (check := values["check"]) is not None:
            values["check"] = Check.from_dict(check)
        return cls(**values)
