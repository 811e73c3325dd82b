"""`serve` in a process of its own that starts at once: it is forked from one that has imported what it imports.

Python takes seconds of a core for that, each time: longer than most of what is tried. What is forked has one thread,
runs `serve` as `python -m serve` would, and is a child of a process that waits for it: who started it asks that.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import io
import json
import os
import resource
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

ROOT = Path(__file__).parents[1]
IMPORTS = ("serve.cli.main", "serve.gateway.server", "serve.gateway.settings_file", "grpc.aio")
"""What `serve gateway` imports, and most of what `serve up` does: what it holds is no more than it would be."""
LONGEST = 1 << 17  # of what is told: words and environment
NUMBER = struct.Struct("i")


class Serve:
    """A running `serve`, which can be asked as a `subprocess.Popen`.

    Args:
        words: of its command line, without "serve".
        out: takes what it writes to both outputs; None for a pipe, which is `stdout`.

    Attributes:
        pid: its process.
        returncode: None while it runs; negative for a signal.
        stdout: what it has written, where that is a pipe.
    """

    def __init__(self, *words: str, out: IO[bytes] | None = None) -> None:
        status, told = os.pipe()
        self._status = open(status, "rb", buffering=0)  # noqa: SIM115, PTH123 - a number, until its end was told
        self.stdout: IO[str] = io.StringIO()
        written = -1
        if out is None:
            read, written = os.pipe()
            self.stdout = open(read, encoding="utf-8")  # noqa: SIM115, PTH123 - a number; the caller's
        files = [told, written, 2] if out is None else [told, out.fileno(), out.fileno()]
        what = {"words": words, "environ": dict(os.environ) | {"PYTHONUNBUFFERED": "1"}, "folder": str(Path.cwd())}
        try:
            socket.send_fds(_source(), [json.dumps(what).encode()], files)
        finally:
            os.close(told)
            if written >= 0:
                os.close(written)
        self.returncode: int | None = None
        self.pid = self._number()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, err: BaseException | None, at: TracebackType | None) -> None:
        self.stdout.close()
        self.wait()

    def poll(self) -> int | None:
        """Its exit code, or None while it runs."""
        if self.returncode is None and select.select([self._status], [], [], 0)[0]:
            self._ended()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, once it has ended.

        Args:
            timeout: in seconds.

        Raises:
            subprocess.TimeoutExpired: it runs still.
        """
        if self.returncode is not None:
            return self.returncode
        if not select.select([self._status], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("serve", timeout or 0.0)
        return self._ended()

    def send_signal(self, number: int) -> None:
        """Send it a signal, where it has not ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send it SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def _ended(self) -> int:
        self.returncode = self._number()
        self._status.close()
        return self.returncode

    def _number(self) -> int:
        told = self._status.read(NUMBER.size)
        if len(told) < NUMBER.size:
            raise RuntimeError("the process that `serve` is forked from has ended: see what it wrote to the errors")
        return int(NUMBER.unpack(told)[0])


@functools.cache
def _source() -> socket.socket:
    """To the process that others are forked from; it ends with this one."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * LONGEST)
    command = [sys.executable, "-m", "tests.warm", str(theirs.fileno())]
    # As `serve` itself does before it imports anything; the second is what its gateway tells gRPC.
    environ = os.environ | {"OPENBLAS_NUM_THREADS": "1", "GRPC_VERBOSITY": "NONE", "PYTHONUNBUFFERED": "1"}
    environ.pop("PYTHONSAFEPATH", None)
    with theirs:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )  # fmt: skip

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


def _forked(channel: socket.socket) -> bool:
    """Fork a process for each request; True in such a process, False where there is nobody left who asks."""
    while True:
        told, files, _, _ = socket.recv_fds(channel, LONGEST, 3)
        if not told:
            return False
        if os.fork() == 0:
            channel.close()
            return _begun(json.loads(told), *files)
        for file in files:
            os.close(file)
        while _reaped():
            pass


def _reaped() -> bool:
    try:
        return os.waitpid(-1, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return False


def _begun(what: Any, status: int, out: int, errors: int) -> bool:
    """Fork once more and wait for that one, to tell how it ends; in that one, be as what was asked for."""
    if pid := os.fork():
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        os.close(out)
        os.close(errors)
        os.write(status, NUMBER.pack(pid))
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.write(status, NUMBER.pack(code))
        os._exit(0)
    os.dup2(out, 1)
    os.dup2(errors, 2)
    for file in (status, out, errors):
        os.close(file)
    sys.stdout = sys.__stdout__ = _text(1, "strict")  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _text(2, "backslashreplace")  # type: ignore[misc]
    os.chdir(what["folder"])
    os.environ.clear()
    os.environ.update(what["environ"])
    tempfile.tempdir = None
    sys.argv = ["serve", *what["words"]]
    return True


def _text(file: int, errors: str) -> io.TextIOWrapper:
    """As Python opens it where it is to keep nothing back."""
    raw = open(file, "wb", buffering=0, closefd=False)  # noqa: SIM115 - a number, for as long as this lives
    return io.TextIOWrapper(raw, encoding="utf-8", errors=errors, write_through=True)


if __name__ == "__main__":
    for module in IMPORTS:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))  # who started this may have bounded itself for a while
    with socket.socket(fileno=int(sys.argv[1])) as asked:
        forked = _forked(asked)
    if forked:
        runpy.run_module("serve", run_name="__main__", alter_sys=True)
