"""What the server says of itself before and after: Triton's statistics, the gateway's metrics, processor and memory."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

import orjson
import psutil

from serve.gateway.upstream.upstream import model_path
from serve.http.client import ExchangeError, Pool
from serve.load.ask.target import Target, is_loopback

__all__ = ["Breakdown", "ModelTime", "Observation", "ServerUse", "breakdown", "observe", "use_between"]

PARTS = ("queue", "compute_input", "compute_infer", "compute_output")
TIMEOUT_S = 5.0
TRITON = "tritonserver"
SERVING = ("gateway", "up")  # the commands of `serve` that listen
DURATIONS = re.compile(rb'^gateway_request_duration_seconds_(sum|count)\{model="([^"]*)"\} (\S+)$', re.MULTILINE)


@dataclass(frozen=True)
class ModelTime:
    """What Triton says of one model between two moments.

    Attributes:
        model: its name, and version where there are several.
        requests: answered well.
        rows: inferences in them.
        executions: times that the model ran; rows / executions is the batch size reached.
        total_ms: mean time of a request in Triton.
        queue_ms, input_ms, infer_ms, output_ms: mean parts of it.
        batches: executions by batch size.
        batch_ms: mean time of such an execution: input, inference and output together.
    """

    model: str
    requests: int
    rows: int
    executions: int
    total_ms: float
    queue_ms: float
    input_ms: float
    infer_ms: float
    output_ms: float
    batches: Mapping[int, int] = field(default_factory=dict)
    batch_ms: Mapping[int, float] = field(default_factory=dict)

    @property
    def batch_size(self) -> float | None:
        return self.rows / self.executions if self.executions else None


@dataclass(frozen=True)
class Breakdown:
    """Where the mean request's time went, in milliseconds.

    Attributes:
        models: the model first, then those that worked for it.
        gateway_ms: mean time of a request in the gateway, Triton included; None without a gateway, or where its metrics
            can't be had.
    """

    models: tuple[ModelTime, ...]
    gateway_ms: float | None = None


@dataclass(frozen=True)
class ServerUse:
    """What the server's processes took of this machine.

    Attributes:
        cpu_share: of one core, so that 2.0 is two cores.
        memory_bytes: resident, all processes added up.
        processes: how many.
    """

    cpu_share: float
    memory_bytes: int
    processes: int


@dataclass
class Observation:
    """The server at one moment.

    Attributes:
        statistics: Triton's, by (model, version).
        gateway: sum and count of the model's seconds in the gateway.
        cpu_s: of each of the server's processes.
        untold: why there are none, where the server may be on this machine.
        at_ns: when, of `perf_counter_ns`.
    """

    at_ns: int
    statistics: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    gateway: tuple[float, float] | None = None
    cpu_s: dict[int, float] = field(default_factory=dict)
    memory_bytes: int = 0
    untold: str = ""


async def observe(target: Target, model: str, at_ns: int) -> Observation:
    """Look at the server; what it does not tell stays empty."""
    seen = Observation(at_ns)
    address = target.endpoint.address
    if await is_loopback(address.host):  # first, as a busy server may take its time to answer the rest
        processes, seen.untold = _processes(address.port)
        for process in processes:
            try:
                times = process.cpu_times()
                seen.cpu_s[process.pid] = times.user + times.system
                seen.memory_bytes += process.memory_info().rss
            except psutil.Error:
                continue
    if target.endpoint.protocol == "grpc":
        from serve.load.send.grpc_questions import ask_statistics

        told = await ask_statistics(address, "", target.metadata, TIMEOUT_S)
        told = told or await ask_statistics(address, model, target.metadata, TIMEOUT_S)
        seen.statistics = _by_model(told)
    elif model:
        pool = Pool(address, max_connections=1, timeout_s=TIMEOUT_S)
        try:
            told = await _get(pool, "/v2/models/stats", target)
            if told is None:  # for administrators alone; the model's own, and its steps', are for whoever may ask it
                for name in (model, *await _steps(pool, model, target)):
                    told = await _get(pool, f"{model_path(name)}/stats", target)
                    seen.statistics |= _by_model(told)
            seen.statistics |= _by_model(told)
            metrics = await pool.request(b"GET", b"/metrics", target.headers)
            if metrics.status == 200:
                found = {kind: float(value) for kind, name, value in DURATIONS.findall(metrics.body)
                         if name.decode() == model}  # fmt: skip
                seen.gateway = (
                    (found.get(b"sum", 0.0), found.get(b"count", 0.0)) if b"gateway_" in metrics.body else None
                )
        except (ExchangeError, orjson.JSONDecodeError):
            pass
        finally:
            await pool.close()
    return seen


async def _get(pool: Pool, path: str, target: Target) -> Any:
    answer = await pool.request(b"GET", path.encode(), target.headers)
    return orjson.loads(answer.body) if answer.status == 200 else None


async def _steps(pool: Pool, model: str, target: Target) -> list[str]:
    """The models that an ensemble asks."""
    config = await _get(pool, f"{model_path(model)}/config", target) or {}
    steps = (config.get("ensemble_scheduling") or {}).get("step", [])
    return list(dict.fromkeys(str(step.get("model_name", "")) for step in steps))


def breakdown(before: Observation, after: Observation, model: str) -> Breakdown | None:
    """Where the time went between the two; None where Triton's statistics can't be had."""
    found: list[ModelTime] = []
    for (name, version), now in after.statistics.items():
        time = _difference(name, version, before.statistics.get((name, version), {}), now)
        if time.requests > 0 or time.executions > 0:
            found.append(time)
    if not found:
        return None
    found.sort(key=lambda each: (each.model.partition(":")[0] != model, -each.total_ms))
    gateway = None
    if before.gateway is not None and after.gateway is not None and (more := after.gateway[1] - before.gateway[1]) > 0:
        gateway = 1000 * (after.gateway[0] - before.gateway[0]) / more
    return Breakdown(tuple(found), gateway)


def use_between(before: Observation, after: Observation) -> ServerUse | None:
    """What the server's processes took between the two; None where none is known to be it (`Observation.untold`)."""
    if not after.cpu_s:
        return None
    cpu_s = sum(now - before.cpu_s.get(pid, 0.0) for pid, now in after.cpu_s.items())
    seconds = max((after.at_ns - before.at_ns) / 1e9, 1e-9)
    return ServerUse(cpu_s / seconds, max(before.memory_bytes, after.memory_bytes), len(after.cpu_s))


def _processes(port: int) -> tuple[list[psutil.Process], str]:
    """The server that listens at a port and all that it started; or none, and why: what else is there may forward."""
    try:
        listening = {
            each.pid
            for each in psutil.net_connections(kind="tcp")
            if each.status == psutil.CONN_LISTEN and each.laddr.port == port
        }
        if None in listening or not listening:
            return [], f"who listens at port {port} can't be seen by this user"
        found: dict[int, psutil.Process] = {}
        for process in [psutil.Process(pid) for pid in listening]:
            if not _is_server(process):
                return [], f"{process.name()} is at that port"
            found[process.pid] = process
            found |= {child.pid: child for child in process.children(recursive=True)}
    except psutil.Error as err:
        return [], f"the processes of this machine can't be seen: {err}"
    return [process for process in found.values() if not _is_ours(process)], ""


def _is_server(process: psutil.Process) -> bool:
    """Whether it answers itself: a Triton, this project's gateway, or this very process.

    Who listens for a server in a container or on another machine may have any other name.
    """
    if process.pid == os.getpid() or process.name() == TRITON:
        return True
    python, *words = process.cmdline() or [""]
    words = list(itertools.dropwhile(lambda word: word.startswith("-"), words))  # `-m`, or flags of Python
    by_us = PurePath(words[0]).name == "serve" and words[1] in SERVING if len(words) > 1 else False
    return PurePath(python).name.startswith("python") and by_us  # not `ssh -L … serve up`


def _is_ours(process: psutil.Process) -> bool:
    """A generator, which a test may have started in the server's own process."""
    try:
        return "serve.load.send.worker" in process.cmdline()
    except psutil.Error:
        return False


def _by_model(told: Mapping[str, Any] | None) -> dict[tuple[str, str], dict[str, Any]]:
    entries = (told or {}).get("model_stats", [])
    return {(str(entry.get("name", "")), str(entry.get("version", ""))): entry for entry in entries}


def _difference(name: str, version: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> ModelTime:
    def number(entry: Mapping[str, Any], *path: str) -> int:
        value: Any = entry
        for key in path:
            value = value.get(key, {}) if isinstance(value, Mapping) else {}
        return int(value) if isinstance(value, (int, float, str)) else 0

    def more(*path: str) -> int:
        return number(after, *path) - number(before, *path)

    requests = more("inference_stats", "success", "count")
    queue, feed, compute, output = (more("inference_stats", part, "ns") / max(requests, 1) / 1e6 for part in PARTS)
    earlier = {entry.get("batch_size"): entry for entry in before.get("batch_stats", [])}
    batches: dict[int, int] = {}
    batch_ms: dict[int, float] = {}
    for entry in sorted(after.get("batch_stats", []), key=lambda each: int(each["batch_size"])):
        size, old = int(entry["batch_size"]), earlier.get(entry["batch_size"], {})
        count = number(entry, "compute_infer", "count") - number(old, "compute_infer", "count")
        if count > 0:
            batches[size] = count
            spent = sum(number(entry, part, "ns") - number(old, part, "ns") for part in PARTS[1:])
            batch_ms[size] = spent / count / 1e6
    return ModelTime(
        f"{name}:{version}" if version not in ("", "1") else name,
        requests,
        more("inference_count"),
        more("execution_count"),
        more("inference_stats", "success", "ns") / max(requests, 1) / 1e6,
        queue, feed, compute, output, batches, batch_ms,
    )  # fmt: skip
