"""The control groups that a process is in, of both versions, as folders to read.

Source: Linux, Documentation/admin-guide/cgroup-v2.rst, and cgroups(7) for /proc/PID/cgroup.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

__all__ = ["CGROUPS", "PROC", "folders"]

CGROUPS = Path("/sys/fs/cgroup")
PROC = Path("/proc")


def folders(controller: str, *, cgroups: Path = CGROUPS, proc: Path = PROC) -> Iterator[tuple[int, Path]]:
    """Each group that this process is in, and each above it: a limit holds for all that is below it.

    Args:
        controller: such as "cpu" or "memory".
        cgroups: where control groups are mounted.
        proc: where the kernel tells of processes.

    Yields:
        The version, 1 or 2, and the folder, the innermost first; a folder may be missing.
    """
    lines: list[str] = []
    with suppress(OSError, ValueError):
        lines = (proc / "self/cgroup").read_text(encoding="utf-8").splitlines()
    for line in lines:
        _, _, told = line.partition(":")
        controllers, _, path = told.partition(":")
        if not controllers:
            for root in (cgroups, cgroups / "unified"):  # beside the first version, it is mounted below
                for folder in _upward(root, path):
                    yield 2, folder
        elif controller in controllers.split(","):
            for name in dict.fromkeys((controller, controllers)):  # cpu, a link to it, or cpu,cpuacct alone
                for folder in _upward(cgroups / name, path):
                    yield 1, folder


def _upward(root: Path, path: str) -> Iterator[Path]:
    """The group's folder and those above it; in a container, the root alone may be there: it is the container's own."""
    parts = PurePosixPath(path).parts[1:]
    if ".." not in parts:  # a group beside the container's: it can't be seen from here
        for count in range(len(parts), 0, -1):
            yield root.joinpath(*parts[:count])
    yield root
