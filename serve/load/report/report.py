"""What a load test found, whole: its runs, the machine, the objective; as JSON, and back."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Self

from compress.errors import ServerError
from compress.vetting.replace import mend_of, replace_file
from compress.vetting.texts import parse_json, read_bytes
from serve.config.named import LARGEST_DATA
from serve.load.figures.result import SCHEMA_VERSION, LoadResult

__all__ = ["NOT_ALL", "Found", "LoadReport", "Trial", "describe_machine", "read_report", "write_text"]

KIND = "serve load"
NOT_ALL = "not all that was asked for was sent"
Machine = Mapping[str, Any]


@dataclass(frozen=True)
class Trial:
    """A rate that a search tried.

    Attributes:
        rate: requests a second.
        kept: whether the objective held. why: what did not; empty where it did.
        stage: "peak", "bracket", "bisect" or "confirm".
        seconds: how long it was measured (less than asked where it was lost before).
        throughput: answers a second. latency_ms: at the objective's percentile, None where there were too few.
    """

    rate: float
    kept: bool
    why: tuple[str, ...]
    stage: str
    seconds: float
    throughput: float
    latency_ms: float | None


@dataclass(frozen=True)
class Found:
    """The result of a search.

    Attributes:
        rate: the highest that kept the objective in each confirmation; None where none did.
        above: the lowest rate that did not keep it; None where none was found.
        peak: answers a second of a closed loop, where it began.
        confirmations: runs with fresh arrivals at that rate.
        slow_share, slow_bound: of them together, the share that is slower than the latency bound, and its upper 95%
            bound; None without a bound on a percentile.
        allowed: the share that the objective allows.
        words: all that in a sentence.
        trials: in order.
    """

    rate: float | None
    above: float | None
    peak: float
    confirmations: int
    slow_share: float | None
    slow_bound: float | None
    allowed: float | None
    words: str
    trials: tuple[Trial, ...]


@dataclass(frozen=True)
class LoadReport:
    """One or several runs.

    Attributes:
        runs: in order; of a search, the confirmations.
        title: what was asked of whom.
        scenario: MLPerf's, or "".
        objective: as it was given, or "".
        broken: for each run, what of the objective it does not keep.
        found: of a search; None without one.
        verdict: a sentence.
        hourly_cost: of what serves; None where nothing was said.
        machine: what this was measured on and with.
        ended: why not all that was asked for was sent; "" where it was, and after Ctrl-C.
    """

    runs: tuple[LoadResult, ...]
    title: str
    scenario: str = ""
    objective: str = ""
    broken: tuple[tuple[str, ...], ...] = ()
    found: Found | None = None
    verdict: str = ""
    hourly_cost: float | None = None
    machine: Machine = field(default_factory=dict)
    ended: str = ""

    def cost_of_a_million(self, result: LoadResult) -> float | None:
        """What a million inferences cost at a run's throughput."""
        if self.hourly_cost is None or not result.inferences:
            return None
        return self.hourly_cost / 3600 / result.inferences * 1e6

    @property
    def kept(self) -> bool:
        """Whether the objective was kept (by the rate found, or by each run); true without one."""
        if self.found is not None:
            return self.found.rate is not None
        return not any(self.broken)

    @property
    def answered(self) -> bool:
        """Whether any request was answered as it should be."""
        return any(run.count for run in self.runs)

    @property
    def invalid(self) -> bool:
        """Whether figures say more about the generator than about the server, or some are missing; a search's verdict
        allows for the former.
        """
        return bool(self.ended) or (self.found is None and any(run.invalid for run in self.runs))

    def to_dict(self) -> dict[str, Any]:
        """JSON values by stable names."""
        return {
            "kind": KIND,
            "schema_version": SCHEMA_VERSION,
            "title": self.title,
            "scenario": self.scenario,
            "objective": self.objective,
            "broken": [list(words) for words in self.broken],
            "found": None if self.found is None else asdict(self.found),
            "verdict": self.verdict,
            "hourly_cost": self.hourly_cost,
            "cost_of_a_million": [self.cost_of_a_million(run) for run in self.runs],
            "machine": dict(self.machine),
            "ended": self.ended,
            "runs": [run.to_dict() for run in self.runs],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """What `to_dict` gave.

        Raises:
            KeyError, TypeError, ValueError: it is something else.
        """
        if data["kind"] != KIND or data["schema_version"] != SCHEMA_VERSION:
            raise ValueError("it is no result of this version of serve load")
        found = data["found"]
        if found is not None:
            trials = tuple(Trial(**trial | {"why": tuple(trial["why"])}) for trial in found["trials"])
            found = Found(**found | {"trials": trials})
        return cls(
            tuple(LoadResult.from_dict(run) for run in data["runs"]),
            data["title"],
            data["scenario"],
            data["objective"],
            tuple(tuple(words) for words in data["broken"]),
            found,
            data["verdict"],
            data["hourly_cost"],
            data["machine"],
            data.get("ended", ""),
        )


def read_report(path: Path) -> LoadReport:
    """Read what `serve load --output` wrote.

    Raises:
        ServerError: it is something else.
    """
    try:
        return LoadReport.from_dict(parse_json(read_bytes(path, LARGEST_DATA, named=True)))
    except OSError as err:
        raise ServerError(f"can't read {path}", why=err.strerror or str(err), mend="name a file that is there") from err
    except (KeyError, TypeError, ValueError, AttributeError) as err:
        raise ServerError(
            f"can't read {path}", why=str(err), mend="name a .json that `serve load --output` wrote"
        ) from err


def write_text(path: Path, text: str) -> None:
    """Write a whole file, in place of an older one.

    Raises:
        ServerError: the file can't be written.
    """
    try:
        replace_file(path, text)
    except OSError as err:
        mend = mend_of(err, "name a file in a folder that you can write to")
        raise ServerError(f"can't write {path}", why=err.strerror or str(err), mend=mend) from err


def describe_machine() -> dict[str, Any]:
    """What the load was sent from and with."""
    versions = {}
    for name in ("compress-serve", "uvloop", "httptools", "tritonclient", "grpcio", "numpy"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count() or 0,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": versions,
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
