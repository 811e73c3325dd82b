"""One configuration under load: a Triton of its own on a copy of the model, and what the bound allows."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from compress.errors import ServerError
from serve.config.pbtxt import config_text, from_pbtxt, parse, text_of
from serve.load.figures.result import LoadResult
from serve.load.options import LoadOptions
from serve.load.run import run_load
from serve.repository.folders import parts_of
from serve.triton.control import load_alone, unload_model
from serve.triton.launch import Ports, TritonOptions, TritonServer
from serve.tune.candidate import Candidate, write_into

__all__ = ["Point", "Stand", "Subject", "Trial", "confirm", "load_subject", "measure", "once", "settle"]

WARMUP_S = 0.3
CONCURRENCIES = (1, 2, 4, 8, 16, 32, 64, 128)
FIRST = CONCURRENCIES.index(8)
GAIN = 1.03
"""More in flight is tried as long as it gives so much more."""
ENOUGH = 1_100
"""Answers for a p99, which wants ten beyond it."""


@dataclass(frozen=True)
class Subject:
    """The model that is tuned.

    Attributes:
        name: that clients ask.
        repository: where it stands.
        network: the part that runs the network.
        texts: config.pbtxt of each part.
    """

    name: str
    repository: Path
    network: str
    texts: Mapping[str, str]

    def messages(self) -> dict[str, Any]:
        """Fresh protobuf messages of all parts."""
        return {name: parse(text) for name, text in self.texts.items()}


@dataclass(frozen=True)
class Point:
    """A closed loop with so many in flight; p99 is None where there were too few answers."""

    concurrency: int
    per_s: float
    p50_ms: float | None
    p90_ms: float | None
    p99_ms: float | None
    errors: int

    @property
    def latency_ms(self) -> float | None:
        """p99, or the highest percentile that the answers are enough for; None when they are too few for a median."""
        return next((each for each in (self.p99_ms, self.p90_ms, self.p50_ms) if each is not None), None)

    def within(self, bound_ms: float) -> bool:
        """Whether the bound holds, as far as the answers tell: a lower percentile beyond it breaks it, too."""
        return not self.errors and self.latency_ms is not None and self.latency_ms <= bound_ms


@dataclass(frozen=True)
class Trial:
    """What a configuration did.

    Attributes:
        candidate: it.
        seconds: of each load.
        points: by concurrency, ascending.
    """

    candidate: Candidate
    seconds: float
    points: tuple[Point, ...]

    def best(self, bound_ms: float) -> Point | None:
        """The most throughput within the bound."""
        return max((point for point in self.points if point.within(bound_ms)), key=lambda p: p.per_s, default=None)

    def score(self, bound_ms: float) -> tuple[float, float]:
        """Greater is better: throughput within the bound; where none holds, the least latency."""
        best = self.best(bound_ms)
        if best is not None:
            return (best.per_s, 0.0)
        latencies = [point.latency_ms for point in self.points if point.latency_ms is not None]
        return (0.0, -min(latencies, default=float("inf")))


def load_subject(repository: Path, name: str) -> Subject:
    """The packed model `name` of a repository.

    Raises:
        RepositoryError: a configuration of it can't be read.
        ServerError: it was not packed, or it has not exactly one ONNX network.
    """
    parts = parts_of(repository, name)
    paths = {part: repository / part / "config.pbtxt" for part in parts}
    texts = {part: config_text(path) for part, path in paths.items()}
    runtimes = ("onnxruntime", "openvino")
    networks = [part for part in parts if from_pbtxt(texts[part], source=str(paths[part])).backend in runtimes]
    if len(networks) != 1:
        raise ServerError(
            f"can't tune {name!r}",
            why=f"`serve pack` wrote no such model with an ONNX network into {repository}",
            mend="name a model that it wrote",
        )
    return Subject(name, repository, networks[0], texts)


class Stand:
    """A Triton of its own that serves a copy of the subject, as one candidate after the other has it."""

    def __init__(self, subject: Subject, cpus: tuple[int, ...] = ()) -> None:
        """Nothing is started yet; use it as a context manager."""
        self.subject = subject
        self._stack = ExitStack()
        self._cpus = cpus
        self._triton: TritonServer | None = None
        self._folder = Path()
        self._serves: Candidate | None = None

    def __enter__(self) -> Self:
        self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="serve-tune-")))
        for part in self.subject.texts:
            source = self.subject.repository / part
            try:
                shutil.copytree(
                    source, self._folder / part, ignore=shutil.ignore_patterns("__pycache__"), copy_function=_copy
                )
            except OSError as err:  # a pipe or device, too
                self._stack.close()
                raise ServerError(f"can't copy {source}", why=str(err), mend="let it hold files only") from err
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if self._triton is not None:
                self._triton.stop()
        finally:
            self._stack.close()

    def serve(self, candidate: Candidate) -> str:
        """Serve the candidate in place of the one before; the URL.

        Raises:
            ServerError: it does not load.
        """
        if self._triton is not None and not self._triton.running:
            self._triton.stop()
            self._triton, self._serves = None, None
        if self._triton is not None and self._serves == candidate:
            return self._url()
        if self._triton is not None and self._serves is not None:
            for part in self._parts():
                unload_model(self._url(), part, self._triton.control)
        self._serves = None
        messages = self.subject.messages()
        write_into(messages, self.subject.network, candidate)
        for part, message in messages.items():
            (self._folder / part / "config.pbtxt").write_text(text_of(message), encoding="utf-8")
        if self._triton is None:
            options = TritonOptions(cpus=self._cpus, heal=True, stop_timeout_s=2.0)
            triton = TritonServer(self._folder, ports=Ports(0, 0, 0), options=options)
            triton.start()
            self._triton = triton
        else:
            for part in reversed(self._parts()):
                load_alone(self._url(), part, self._triton.control)
        self._serves = candidate
        return self._url()

    def _parts(self) -> list[str]:
        """The model that clients ask first."""
        return [self.subject.name, *(part for part in self.subject.texts if part != self.subject.name)]

    def _url(self) -> str:
        assert self._triton is not None  # noqa: S101
        return f"http://{self._triton.http_address}"


def _copy(source: str, target: str) -> None:
    """Copy a file; what a link leads to may be something that never ends."""
    if not Path(source).is_file():
        raise OSError(f"{source} is no file")
    shutil.copy2(source, target)


def measure(url: str, subject: Subject, candidate: Candidate, *, seconds: float, bound_ms: float, seed: int) -> Trial:
    """Look for the number in flight that gives most within the bound: up as long as it pays, else down.

    Args:
        url: of the Triton that serves it.
        subject, candidate: what runs there.
        seconds: of each load.
        bound_ms: on the p99 of latency.
        seed: draws the input where the model has no example.
    """
    points: dict[int, Point] = {}

    def at(index: int) -> Point:
        count = CONCURRENCIES[index]
        if count not in points:
            points[count] = _point(run_load(_options(subject, url, count, seconds, seed)))
        return points[count]

    index = FIRST
    if at(index).within(bound_ms):
        while index + 1 < len(CONCURRENCIES):
            here, more = at(index), at(index + 1)
            if not more.within(bound_ms) or more.per_s < here.per_s * GAIN:
                break
            index += 1
    else:
        while index > 0 and not at(index).within(bound_ms):
            index -= 1
            at(index)
    return Trial(candidate, seconds, tuple(points[count] for count in sorted(points)))


def settle(url: str, subject: Subject, most: int, *, seconds: float, bound_ms: float, seed: int) -> int:
    """The largest number in flight, `most` or fewer, whose p99 keeps the bound; 1 when none does."""
    for count in reversed(CONCURRENCIES[: CONCURRENCIES.index(most) + 1]):
        if count == 1 or confirm(url, subject, count, seconds=seconds, seed=seed).within(bound_ms):
            return count
    return 1


def confirm(url: str, subject: Subject, concurrency: int, *, seconds: float, seed: int) -> Point:
    """One long enough load for a p99."""
    short = run_load(_options(subject, url, concurrency, seconds, seed))
    if short.p99_ms is None and short.throughput > 0:
        longer = min(ENOUGH / short.throughput, 12 * seconds)
        short = run_load(_options(subject, url, concurrency, max(longer, seconds), seed))
    return _point(short)


def once(url: str, subject: Subject, concurrency: int, *, seconds: float, seed: int) -> Point:
    """One load, however few answers it gives."""
    return _point(run_load(_options(subject, url, concurrency, seconds, seed)))


def _options(subject: Subject, url: str, concurrency: int, seconds: float, seed: int) -> LoadOptions:
    return LoadOptions(
        subject.name, url, concurrency=concurrency, duration=seconds, warmup=WARMUP_S, seed=seed, processes=0
    )


def _point(result: LoadResult) -> Point:
    errors = sum(result.errors.values())
    return Point(result.concurrency, result.throughput, result.p50_ms, result.p90_ms, result.p99_ms, errors)
