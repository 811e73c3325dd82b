"""How many cores this process may use, and what says so: everything that starts threads by the machine asks here.

Four things bound it, and the tightest holds: the CPUs that it may run on (affinity and cpusets), the time that its
control groups give it (a quota, as of `docker run --cpus`), what somebody who starts several such processes gives each
(COMPRESS_CORES), and, for what computes, the physical cores: two threads of one core share its units. Source: Linux,
Documentation/scheduler/sched-bwc.rst and admin-guide/cgroup-v2.rst.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from compress.host.groups import CGROUPS, PROC, folders

__all__ = ["SHARE", "Cores", "bound_pools", "cores_here", "cpu_list"]

SYSTEM = Path("/sys/devices/system")
SHARE = "COMPRESS_CORES"
POOLS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
MOST_CPUS = 1 << 16  # no kernel has more: a list of numbers is no reason to fill memory


@dataclass(frozen=True)
class Cores:
    """What may be used.

    Attributes:
        cpus: the logical CPUs to run on, by number; empty where the system numbers none.
        machine: logical CPUs that the machine has.
        physical: cores that `cpus` are of.
        quota: CPUs' worth of time, such as 1.5; None without a bound.
        source: what bounds it: "the machine", "affinity", or a control group's file.
        nodes: of `cpus`, those of each NUMA node.
    """

    cpus: tuple[int, ...]
    machine: int
    physical: int
    quota: float | None
    source: str
    nodes: tuple[tuple[int, ...], ...] = ()

    @property
    def count(self) -> int:
        """Threads that can run at the same time, at least 1. Of a quota of 2.5, 2: a third would stop all of them."""
        return self._within(len(self.cpus) or self.machine)

    @property
    def computing(self) -> int:
        """Threads that are worth having where each computes all the time: one for each physical core, at least 1."""
        return self._within(self.physical)

    @property
    def in_node(self) -> int:
        """Of these, those that share memory at the same speed: what the smallest NUMA node has."""
        smallest = min(map(len, self.nodes), default=0)
        return max(1, min(self.computing, smallest * self.physical // max(1, len(self.cpus)) or self.computing))

    def told(self) -> str:
        """In words: how many, of how many, and why."""
        said = f"{self.count} core{'s' * (self.count != 1)}"
        if self.count != self.machine:
            said += f" of {self.machine}"
        if self.computing != self.count:
            said += f", {self.computing} physical"
        if len(self.nodes) > 1:
            said += f", {len(self.nodes)} NUMA nodes"
        return f"{said} ({self.source})"

    def _within(self, number: int) -> int:
        return max(1, number if self.quota is None else min(number, int(self.quota)))


def cores_here(
    among: Collection[int] = (), *, cgroups: Path = CGROUPS, proc: Path = PROC, system: Path = SYSTEM,
    allowed: Collection[int] | None = None,
) -> Cores:  # fmt: skip
    """What this process, or one that it keeps to some CPUs, may use. It is read anew each time: quotas change.

    Args:
        among: the CPUs that are asked for, of all that are allowed; all of them by default.
        cgroups: where control groups are mounted.
        proc: where the kernel tells of processes.
        system: where the kernel tells of CPUs and NUMA nodes.
        allowed: the CPUs to run on; the kernel is asked.
    """
    machine = os.cpu_count() or 1
    with suppress(OSError, ValueError):
        machine = len(cpu_list((system / "cpu/online").read_text("ascii"))) or machine
    if allowed is None:
        allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
    cpus, source = set(allowed), "affinity" if 0 < len(allowed) < machine else "the machine"
    for group, path in _cpusets(cgroups, proc):
        mine = cpus & group
        if mine and (mine < cpus or (mine == group and source == "affinity")):
            cpus, source = mine, str(path)
    if among and cpus - {*among} and cpus & {*among}:
        cpus, source = cpus & {*among}, "--cpus"
    quotas = [*_quotas(cgroups, proc), *_share()]
    quota, path = min(quotas, key=lambda each: each[0], default=(None, Path()))
    if quota is not None and quota < (len(cpus) or machine):
        source = f"{path}: {quota:.4g} at a time"
    else:
        quota = None
    physical = len({_siblings(system, cpu) for cpu in cpus}) or machine
    return Cores(tuple(sorted(cpus)), machine, physical, quota, source, tuple(_nodes(system, cpus)))


def bound_pools(environ: MutableMapping[str, str]) -> None:
    """Have OpenMP, OpenBLAS and MKL, whose threads these variables count, keep to a quota: they know CPUs only.

    It is for the start, before one of them is imported; what somebody has set stays.
    """
    here = cores_here()
    if here.quota is not None:
        for name in POOLS:
            environ.setdefault(name, str(here.count))


def cpu_list(text: str) -> frozenset[int]:
    """The numbers that the kernel's "0-3,8" says; none where it says none.

    Raises:
        ValueError: it is no such list.
    """
    found: set[int] = set()
    for part in text.strip().split(",") if text.strip() else ():
        match = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", part)
        if match is None or int(match[2] or match[1]) >= MOST_CPUS:
            raise ValueError(f"{part[:40]!r} is no list of CPUs")
        found.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return frozenset(found)


def _quotas(cgroups: Path, proc: Path) -> Iterator[tuple[float, Path]]:
    for version, folder in folders("cpu", cgroups=cgroups, proc=proc):
        with suppress(OSError, ValueError):  # the group has no limit ("max", -1), or is not seen from here
            path = folder / ("cpu.max" if version == 2 else "cpu.cfs_quota_us")
            words = path.read_text("ascii").split()
            if version == 1:
                words += (folder / "cpu.cfs_period_us").read_text("ascii").split()
            most, period = map(int, words)
            if most > 0 and period > 0:
                yield most / period, path


def _share() -> Iterator[tuple[float, Path]]:
    with suppress(KeyError, ValueError):  # not said, or no number
        if (most := int(os.environ[SHARE])) > 0:
            yield float(most), Path(SHARE)


def _cpusets(cgroups: Path, proc: Path) -> Iterator[tuple[frozenset[int], Path]]:
    """The kernel has put them into the affinity already, but names no group there."""
    for version, folder in folders("cpuset", cgroups=cgroups, proc=proc):
        for name in ("cpuset.cpus.effective",) if version == 2 else ("cpuset.effective_cpus", "cpuset.cpus"):
            with suppress(OSError, ValueError):
                if cpus := cpu_list((folder / name).read_text("ascii")):
                    yield cpus, folder / name


def _siblings(system: Path, cpu: int) -> frozenset[int]:
    """The logical CPUs of one core."""
    for name in ("core_cpus_list", "thread_siblings_list"):  # the second in kernels before 5.x
        with suppress(OSError, ValueError):
            return cpu_list((system / f"cpu/cpu{cpu}/topology/{name}").read_text("ascii")) or frozenset({cpu})
    return frozenset({cpu})


def _nodes(system: Path, cpus: Collection[int]) -> Iterator[tuple[int, ...]]:
    paths: list[Path] = []
    with suppress(OSError):
        paths = sorted(system.glob("node/node[0-9]*/cpulist"))
    for path in paths:
        with suppress(OSError, ValueError):
            if mine := cpu_list(path.read_text("ascii")) & set(cpus):
                yield tuple(sorted(mine))
