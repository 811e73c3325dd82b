"""What is to be served, as a cluster has to know it: processors, memory, shared memory, GPUs, Triton's command."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from compress.errors import ServerError
from serve.config.threads import threads_of
from serve.gateway.access.footprint import GATEWAY_HOLDS
from serve.load.report.report import read_report
from serve.repository.fingerprint import fingerprint
from serve.repository.folders import PART_OF, check_hidden, files_of
from serve.repository.needs import used_by
from serve.repository.read import ModelInfo, instance_count, read_models
from serve.triton.flags import flags_for
from serve.triton.memory import MIB, region_bytes, takes_any_size
from serve.up.container import SPARE_BYTES, requirements_of

__all__ = ["Workload", "workload_of"]

TRITON_BYTES = 512 * MIB
REGION_TIMES = 3.25
"""Of what a gateway lets be in flight: regions of shared memory grow to 1.6 times that (measured), do not shrink, and
there are two gateways. Where there is no room for a request, those that are computed in one batch with it fail, too."""
HEADROOM = 1.5  # of memory, over the most that was measured


@dataclass(frozen=True)
class Workload:
    """One Triton.

    Attributes:
        digest: of the repository's files: SHA-256, 64 digits.
        asked: names of the models that clients ask for: those that are no step of another.
        models: names of those that `serve pack` was asked for, or that stand there by themselves, steps or not.
        flags: of tritonserver, for what the models' configurations say.
        cpu_millis: thousandths of a processor that it is given.
        memory_mib: that it is given, shared memory included; it may not have more.
        shared_mib: of /dev/shm; where inputs may be of any size, for as much as a gateway lets be in flight.
        gpu: whether it has an instance on one.
        requirements: of the hooks, which the image must hold.
        measured: whether processors and memory are from a load test.
    """

    digest: str
    asked: tuple[str, ...]
    models: tuple[str, ...]
    flags: tuple[str, ...]
    cpu_millis: int
    memory_mib: int
    shared_mib: int
    gpu: bool
    requirements: tuple[str, ...]
    measured: bool


def workload_of(repository: Path, load: Path | None = None) -> Workload:
    """Read a repository, and what a load test saw its server take.

    Raises:
        RepositoryError: there is nothing to serve.
        ServerError: the load test saw no server on its machine.
    """
    check_hidden(repository)
    models = read_models(repository)
    # Of every instance: in the image for CPUs, networks run in the Python backend's processes, too.
    shared = (instance_count(models) * region_bytes(models) + SPARE_BYTES) // MIB
    shared += math.ceil(REGION_TIMES * GATEWAY_HOLDS / MIB) if any(map(takes_any_size, models)) else 0
    if load is None:
        cores = max(sum(map(_threads, models)), 1)
        files = sum(path.stat().st_size for path in files_of(repository))
        processes = max(instance_count(models), 1)
        memory = TRITON_BYTES // MIB + math.ceil(3 * files * processes / MIB) + shared
        cpu = 1000 * cores
    else:
        uses = [run.server for run in read_report(load).runs if run.server is not None]
        if not uses:
            raise ServerError(
                f"can't size pods by {load}",
                why="it saw no server: that ran on another machine",
                mend="measure on the server's machine, against Triton itself",
            )
        cpu = math.ceil(10 * max(use.cpu_share for use in uses)) * 100
        memory = math.ceil(HEADROOM * max(use.memory_bytes for use in uses) / MIB) + shared
    whole = [model.name for model in models if model.config.parameters.get(PART_OF, model.name) == model.name]
    users = used_by(models)
    return Workload(
        fingerprint(repository),
        # Where each is a step of another, nothing tells: Triton will not start, and no query is to be one of nothing.
        tuple(name for name in whole if users[name] == {name}) or tuple(whole),
        tuple(whole),
        tuple(flags_for(models)),
        max(cpu, 100),
        memory,
        shared,
        any(group.kind == "KIND_GPU" for model in models for group in model.config.instance_group),
        tuple(requirements_of(models)),
        load is not None,
    )


def _threads(model: ModelInfo) -> int:
    """Threads that compute: those of the network's instances; hooks are short."""
    threads = threads_of(model.config)
    return 0 if threads is None else max(threads.total, threads.instances)
