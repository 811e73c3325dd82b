"""A child process with its whole family: started so that it dies with us, and ended to the last member."""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from serve.triton.kin import FAMILY, STUB, members_of, processes

__all__ = ["Family"]

CHILD = Path(__file__).with_name("child.py")
LOOK_S = 0.1


class Family:
    """A process in a session of its own, with all that it starts.

    It ends when this process ends, however that comes about. The kernel ties it to the thread that started it, so a
    thread of its own starts it and waits for it: it doesn't matter which thread makes a Family, or how long that lives.
    """

    def __init__(
        self, command: list[str], *, environ: Mapping[str, str], log: Path, folder: Path, cpus: Sequence[int] = ()
    ) -> None:
        """Start the command, an absolute path first; stdout and stderr go to the log file.

        Args:
            command: and its arguments.
            environ: its environment.
            log: the file.
            folder: that it runs in: Python takes modules from there.
            cpus: the cores that it may run on; empty for all.

        Raises:
            OSError: the log can't be written.
        """
        started: queue.Queue[subprocess.Popen[bytes] | OSError] = queue.Queue()
        self._ended = threading.Event()
        self._word = secrets.token_hex(8)
        marked = {name: value for name, value in environ.items() if name != STUB} | {FAMILY: self._word}
        arguments = (command, marked, log.absolute(), folder, ",".join(map(str, cpus)), started)
        threading.Thread(target=self._live, args=arguments, name="triton-parent", daemon=True).start()
        process = started.get()
        if isinstance(process, OSError):
            raise process
        self._process = process
        first = processes().get(process.pid)
        self._began = 0 if first is None else first.began
        self._known: dict[int, int] = {}  # members that were found, and when each began
        self._looking = threading.Lock()

    @property
    def pid(self) -> int:
        """Of the first process, which is the id of the whole group, too."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """The first process's exit status, negative for a signal; None while it runs."""
        return self._process.returncode if self._ended.is_set() else None

    def members(self) -> list[int]:
        """The processes that are alive, those that have left the group among them.

        Raises:
            OSError: there is no file to look with.
        """
        with self._looking:
            found = processes()
            known = [pid for pid, began in self._known.items() if pid in found and found[pid].began == began]
            members = members_of(self.pid, self._began, self._word, found, known)
            self._known = {pid: found[pid].began for pid in members}
        return members

    def end(self, timeout_s: float, enough: Callable[[], bool] = lambda: False) -> bool:
        """End the first process by SIGTERM, and what is then left by SIGKILL.

        Args:
            timeout_s: how long the first process, which has its own to end, may take.
            enough: asked again and again whether what it has left to do is worth no wait.

        Returns:
            Whether it ended by itself and left nothing.

        Raises:
            KeyboardInterrupt: it came meanwhile; all is ended.
        """
        if not self._ended.is_set():
            self._process.send_signal(signal.SIGTERM)
        interrupted: KeyboardInterrupt | None = None
        try:
            deadline = time.monotonic() + timeout_s
            while not (graceful := self._ended.wait(min(LOOK_S, max(0.0, deadline - time.monotonic())))):
                if time.monotonic() >= deadline or enough():
                    break
        except KeyboardInterrupt as err:  # whoever says it again does not want to wait
            graceful, interrupted = False, err
        settled = time.monotonic() + 1.0
        while (left := self._left()) and graceful and time.monotonic() < settled:
            time.sleep(0.02)
        deadline = time.monotonic() + 5.0
        graceful = graceful and not left
        while (left := self._left()) and time.monotonic() < deadline:
            for pid in left:
                _kill(pid)
            time.sleep(0.02)
        self._ended.wait(1.0)
        if interrupted is not None:
            raise interrupted
        return graceful

    def _left(self) -> list[int]:
        """What is left of the group; where there is no file to look with, it is ended unseen."""
        try:
            return self.members()
        except OSError:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            return []

    def _live(
        self,
        command: list[str],
        environ: dict[str, str],
        log: Path,
        folder: Path,
        cpus: str,
        started: queue.Queue[subprocess.Popen[bytes] | OSError],
    ) -> None:
        wrapped = [sys.executable, "-I", "-S", str(CHILD), str(os.getpid()), cpus, *command]
        try:
            with log.open("ab") as file:
                process = subprocess.Popen(
                    wrapped,
                    env=environ,
                    cwd=folder,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        except OSError as err:
            started.put(err)
            return
        started.put(process)
        process.wait()
        self._ended.set()


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
