"""Run a command with what Linux alone has taken away: python -m tests.as_on_a_mac serve doctor

It stands for a Mac as far as that goes: no affinity, no pidfd, no prctl or timerfd in the C library, no /proc, no /sys.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import platform
import socket
import sys
from typing import Any

LINUX_ALONE = ("prctl", "timerfd_create", "mallopt", "malloc_trim", "syscall")
CDLL, STAT = ctypes.CDLL, os.stat


class Library:
    """The C library, without some functions."""

    def __init__(self) -> None:
        self._real = CDLL(None)

    def __getattr__(self, name: str) -> Any:
        if name in LINUX_ALONE:
            raise AttributeError(name)
        return getattr(self._real, name)


def _check(path: object) -> None:
    if isinstance(path, str | bytes | os.PathLike) and os.fsdecode(path).startswith(("/proc", "/sys", "/dev/shm")):  # noqa: S108
        raise FileNotFoundError(2, "No such file or directory", path)


def _hidden(event: str, arguments: tuple[Any, ...]) -> None:
    if event in ("open", "os.listdir", "os.scandir"):
        _check(arguments[0])


def _stat(path: Any, **more: Any) -> os.stat_result:
    _check(path)
    return STAT(path, **more)


def main() -> None:
    if sys.argv[1] == "compress":  # its wheel is this system's, and looks for its libraries by the system's name
        importlib.import_module("torch")
    for module, names in (
        (os, ("sched_getaffinity", "sched_setaffinity", "pidfd_open", "memfd_create", "eventfd")),
        (socket, ("SO_PEERCRED", "TCP_INFO")),
    ):
        for name in names:
            if hasattr(module, name):
                delattr(module, name)
    platform.system, platform.machine = lambda: "Darwin", lambda: "arm64"
    ctypes.CDLL = lambda name, *more, **named: Library() if name is None else CDLL(name, *more, **named)  # type: ignore[assignment,misc]
    os.stat = _stat
    sys.addaudithook(_hidden)
    package = sys.argv.pop(1)
    sys.argv[0] = package
    importlib.import_module(f"{package}.__main__").main()


if __name__ == "__main__":
    main()
