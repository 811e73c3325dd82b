"""How much memory can still be had: of the machine, of the process's own limit, and of the container that it is in.

Source: Linux, Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst; what a group can have again is what
Kubernetes takes for it: its limit without its working set.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from compress.host.groups import CGROUPS, PROC, folders

__all__ = ["bound_memory", "memory_left", "peak_memory"]


def memory_left(*, cgroups: Path = CGROUPS, proc: Path = PROC) -> int:
    """Bytes that can still be had.

    Args:
        cgroups: where control groups are mounted.
        proc: where the kernel tells of processes.
    """
    try:
        left = int(_fields(proc / "meminfo", ":")["MemAvailable"].split()[0]) * 1024
        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        if limit != resource.RLIM_INFINITY:
            used = int((proc / "self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
            left = min(left, limit - used)
    except (OSError, KeyError, ValueError, IndexError):  # another system than Linux
        left = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(0, min([left, *_of_groups(cgroups, proc)]))


def peak_memory() -> int:
    """Bytes that this process has held at most; macOS counts bytes where the others count KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def bound_memory() -> None:
    """Give this process, and each that it starts, no more memory than the machine and its container have left now.

    What takes more then fails with an error that can be told, in whatever library, where the kernel would end some
    process or other: a file of a few hundred bytes can ask for any amount.
    """
    with suppress(OSError, KeyError, ValueError):  # another system than Linux
        taken = int(_fields(PROC / "self/status", ":")["VmData"].split()[0]) * 1024
        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        wanted = taken + memory_left()
        if soft == resource.RLIM_INFINITY or wanted < soft:
            resource.setrlimit(resource.RLIMIT_DATA, (wanted, hard))


def _of_groups(cgroups: Path, proc: Path) -> Iterator[int]:
    """What each group that the process is in, and each above it, leaves under its limit."""
    for version, folder in folders("memory", cgroups=cgroups, proc=proc):
        if version == 2:
            yield from _left(folder, "memory.max", "memory.current", "inactive_file")
        else:
            yield from _left(folder, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def _left(folder: Path, limit: str, used: str, reclaimable: str) -> Iterator[int]:
    with suppress(OSError, ValueError):  # the group has no limit ("max"), or is not seen from here
        most = int((folder / limit).read_text(encoding="ascii"))
        now = int((folder / used).read_text(encoding="ascii"))
        with suppress(OSError, ValueError, KeyError):  # pages of files that the kernel drops when memory is short
            now -= min(now, int(_fields(folder / "memory.stat", " ")[reclaimable]))
        yield most - now


def _fields(path: Path, separator: str) -> Mapping[str, str]:
    return dict(line.split(separator, 1) for line in path.read_text(encoding="ascii").splitlines())
