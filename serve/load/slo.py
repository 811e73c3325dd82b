"""A service level objective: what it says, and whether a run keeps it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from compress.errors import ServerError
from serve.load.figures.recorder import Recorder
from serve.load.figures.result import LoadResult

__all__ = ["Objective", "Term", "parse_objective"]

_TERM = re.compile(r"(p\d+(?:\.\d+)?|mean|max|errors|accuracy|throughput)\s*(<=?|>=?)\s*([\d.]+)\s*(us|ms|s|%|/s)?")
_MS = {"us": 0.001, "ms": 1.0, "s": 1000.0}
_MEND = "write terms such as p99<20ms,errors<0.1% (p50 to p99.99, mean, max; accuracy>90%; throughput>500/s)"
ERRORS = 0.001


@dataclass(frozen=True)
class Term:
    """One bound.

    Attributes:
        name: "p99" and its like, "mean", "max", "errors", "accuracy", "throughput".
        bound: milliseconds for latencies, a share for errors and accuracy, answers a second for throughput.
    """

    name: str
    bound: float

    @property
    def percent(self) -> float | None:
        """Of a percentile: 99 for "p99"."""
        return float(self.name[1:]) if self.name.startswith("p") else None

    @property
    def latency(self) -> bool:
        return self.percent is not None or self.name in ("mean", "max")

    def value(self, result: LoadResult) -> float | None:
        """What a run has of it; None where it has too few samples to tell."""
        match self.name:
            case "errors":
                return result.error_share
            case "accuracy":
                return result.accuracy
            case "throughput":
                return result.throughput
        return result.latency.at(self.name)

    def holds(self, result: LoadResult) -> bool:
        """Whether the run keeps it; not, where it has too few samples to tell."""
        value = self.value(result)
        if value is None:
            return False
        return value >= self.bound if self.name in ("accuracy", "throughput") else value <= self.bound

    def __str__(self) -> str:
        if self.latency:
            return f"{self.name}<{self.bound:g}ms"
        if self.name == "throughput":
            return f"throughput>{self.bound:g}/s"
        return f"{self.name}{'>' if self.name == 'accuracy' else '<'}{100 * self.bound:g}%"


@dataclass(frozen=True)
class Objective:
    """All of its terms must hold."""

    terms: tuple[Term, ...]

    def broken(self, result: LoadResult) -> list[str]:
        """What a run does not keep, in words; empty where it keeps all."""
        found: list[str] = []
        for term in self.terms:
            if term.holds(result):
                continue
            value = term.value(result)
            if value is None:
                found.append(f"{term}: too few samples")
            elif term.latency:
                found.append(f"{term}: {value:.3g} ms")
            else:
                found.append(f"{term}: {value:,.4g}" if term.name == "throughput" else f"{term}: {100 * value:.3g}%")
        return found

    @property
    def latency_ms(self) -> float | None:
        """The bound on the highest percentile; None without any."""
        bounds = [(term.percent, term.bound) for term in self.terms if term.percent is not None]
        return max(bounds)[1] if bounds else None

    @property
    def samples(self) -> int:
        """Requests that a run must have, so that each percentile has ten beyond it."""
        return max((round(10 / (1 - term.percent / 100)) for term in self.terms if term.percent), default=1)

    def lost(self, recorder: Recorder, expected: float) -> bool:
        """Whether a run can't keep it any more, even if all that is still to come goes well.

        Args:
            recorder: what was measured so far.
            expected: requests of the whole run.
        """
        errors = recorder.errors.total()
        for term in self.terms:
            if term.name == "errors" and errors > term.bound * expected:
                return True
            if term.percent is not None:
                slow = sum(tally.latency.above(int(term.bound * 1e6)) for tally in recorder.seconds.values())
                if slow > max((1 - term.percent / 100) * expected, 10):
                    return True
        return False

    def __str__(self) -> str:
        return ",".join(map(str, self.terms))


def parse_objective(text: str) -> Objective:
    """Read 'p99<20ms,errors<0.1%'; where nothing is said of errors, 0.1% are allowed.

    Raises:
        ServerError: it is none.
    """
    terms: list[Term] = []
    for part in text.split(","):
        found = _TERM.fullmatch(part.strip())
        if found is None:
            raise ServerError(f"can't read {part.strip()!r} of the objective", why="it is no bound", mend=_MEND)
        name, sign, number, unit = found.groups()
        if (sign[0] == ">") != (name in ("accuracy", "throughput")):
            raise ServerError(f"can't mean {part.strip()!r}", why="that way round it asks for worse", mend=_MEND)
        terms.append(Term(name, _bound(part, name, number, unit)))
    if not any(term.name == "errors" for term in terms):
        terms.append(Term("errors", ERRORS))
    return Objective(tuple(terms))


def _bound(part: str, name: str, number: str, unit: str | None) -> float:
    try:
        value = float(number)
    except ValueError:
        value = -1.0
    share = name in ("errors", "accuracy")
    wanted = ("%",) if share else ("/s", None) if name == "throughput" else tuple(_MS)
    percent = float(name[1:]) if name[0] == "p" else 50.0
    fits = unit in wanted or (share and unit is None and value <= 1)
    if value < 0 or not fits or not 0 < percent < 100:
        raise ServerError(f"can't read {part.strip()!r} of the objective", why="its number or unit is odd", mend=_MEND)
    if unit == "%":
        return value / 100
    return value * _MS.get(unit or "", 1.0)
