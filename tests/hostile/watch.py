"""Run a command line in this process, and tell what it did beyond what it may.

Python's audit events tell of code that is compiled, of processes, sockets, libraries and files; inotify of files that a
library of C++ opens or makes, past Python.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import io
import os
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

__all__ = ["MARK", "Watch"]

NOBODY = "'127.0.0.1', 9"

MARK = "canary"
"""Stands in every path, module and expression of an attacker's."""
SECONDS = 200  # a command without an end; a slow machine takes its time
GROWTH = 400 << 20  # what libraries take for themselves is in it
TIMES = 10  # so many bytes of memory for each of the file
_OPEN, _CREATE = 0x20, 0x100
_CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "os.link", "os.truncate", "os.chmod")
_OUTWARD = (
    "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.startfile", "pty.spawn", "socket.connect", "socket.bind",
    "socket.getaddrinfo", "webbrowser.open", "ctypes.dlopen", "urllib.Request",
)  # fmt: skip
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class _TooLong(BaseException):
    """It took longer than anything here may."""


class Watch:
    """Of one process; its folder is all that commands may write to.

    Args:
        folder: holds `outside`, where a secret lies and canaries would come to be, and all else.
    """

    def __init__(self, folder: Path) -> None:
        self._may = (str(folder.resolve()), tempfile.gettempdir(), "/dev/", str(Path.home() / ".cache"))
        self.outside = folder / "outside"
        self.outside.mkdir(exist_ok=True)
        self.secret = self.outside / f"{MARK}_secret"
        self.secret.write_bytes(b"\1" * 4096)
        self._seen: list[str] | None = None
        self._inotify = _inotify(self.outside)
        sys.addaudithook(self._audit)
        signal.signal(signal.SIGALRM, _alarm)

    def run(self, main: Callable[[list[str]], Any], arguments: list[str], size: int) -> dict[str, Any]:
        """What came of a command: its exit code, seconds of CPU, bytes that it took, and in `bad` what must not be.

        Args:
            main: of a command line, or any function of the arguments.
            arguments: of it.
            size: bytes of the files that it reads.
        """
        told, code = io.StringIO(), 0
        _reset_peak()
        before, started = _status("VmRSS"), _cpu()
        self._seen = []
        signal.alarm(SECONDS)
        faulthandler.dump_traceback_later(SECONDS + 60, exit=True, file=2)  # in C++ no signal is heard
        try:
            with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
                main(arguments)
        except SystemExit as err:
            code = err.code if isinstance(err.code, int) else 1
        except _TooLong:
            code = -1
        except BaseException:
            code = -2
            told.write(traceback.format_exc())
        finally:
            signal.alarm(0)
            faulthandler.cancel_dump_traceback_later()
            seen, self._seen = self._seen, None
        seconds, grown = _cpu() - started, _status("VmHWM") - before
        bad = [*seen, *self._files(), *_wrong(code, told.getvalue())]
        if grown > max(GROWTH, TIMES * size):
            bad.append(f"it took {grown >> 20} MiB over files of {size:,} bytes")
        return {"code": code, "seconds": round(seconds, 2), "grown": grown, "bad": bad, "told": told.getvalue()[-3000:]}

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._seen is None:
            return
        if event in _OUTWARD:
            # Libraries open their own at first use; the server that is asked is one that nobody runs.
            if (event != "ctypes.dlopen" or MARK in str(arguments)) and NOBODY not in str(arguments):
                self._seen.append(f"{event} {arguments!r}"[:300])
        elif event == "subprocess.Popen":
            if arguments[0] not in (sys.executable, "/bin/sh", "uname", "ldconfig") or arguments[0] == "/bin/sh":
                self._seen.append(f"{event} {arguments!r}"[:300])
        elif event == "import":
            if MARK in str(arguments[0]):
                self._seen.append(f"it imports {arguments[0]}")
        elif event == "open":
            path, _, flags = arguments
            if isinstance(path, str | bytes | os.PathLike) and flags and flags & _WRITING:
                self._written(event, os.fsdecode(path))
        elif event in _CHANGES:
            two = event in ("os.rename", "os.link")
            for path, within in zip(arguments[: 1 + two], arguments[-1 - two :], strict=True):
                if isinstance(path, str | bytes | os.PathLike):
                    at = Path(f"/proc/self/fd/{within}") if type(within) is int and within >= 0 else Path()
                    self._written(event, str(at.resolve() / os.fsdecode(path)))

    def _written(self, event: str, path: str) -> None:
        real = str(Path(path).parent.resolve() / Path(path).name)
        if not real.startswith(self._may) or real.startswith(str(self.outside)):
            assert self._seen is not None
            self._seen.append(f"{event} {path}")

    def _files(self) -> Iterator[str]:
        """Of the outside: what was opened or made there, by whatever code."""
        found = {path for path in self.outside.iterdir() if path != self.secret}
        for path in found:
            yield f"it made {path.name}"
            path.unlink()
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._inotify, 1 << 16):
                if b"_secret" in data:
                    yield "it opened the secret"


def _wrong(code: int, told: str) -> Iterator[str]:
    if code == -1:
        yield f"it took longer than {SECONDS} s"
    elif code == -2 or "Traceback (most recent call last)" in told:
        last = [line for line in told.splitlines() if line.strip()][-1]
        yield f"it ends in a traceback: {last[:200]}"
    elif code == 2:
        lines = [line for line in told.splitlines() if line.strip()]
        starts = [line.strip().split(":")[0] for line in lines[-3:]]
        if starts != ["error", "why", "mend"] and "╭─ Error" not in told:
            yield f"its error is not of three lines: {lines[-3:]}"[:300]
    elif code not in (0, 1, 3):
        yield f"its exit code is {code}"
    if found := _CONTROLS.search(told):
        yield f"it prints the control character {found[0]!r}"


def _inotify(folder: Path) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    handle: int = libc.inotify_init1(os.O_NONBLOCK)
    libc.inotify_add_watch(handle, os.fsencode(folder), _OPEN | _CREATE)
    return handle


def _cpu() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def _reset_peak() -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0


def _alarm(*_: object) -> None:
    raise _TooLong
