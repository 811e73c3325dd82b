"""When a Triton that was told to end has nothing left to do but what it can't.

It waits for what it has begun, then unloads its models, and waits for each, whatever that takes. Two never go (26.07):
the load of a Python model of which a process died, with its other processes, and one whose `execute` raised while other
requests waited, where nothing batches them. It would wait for those until its time is up. What raised is told by its
log; all others are left their time, for nobody knows from outside what a model's code does at its end.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path

from compress.errors import ToolkitError
from serve.repository.ends import finishes
from serve.repository.read import read_model
from serve.triton.stubs import Relatives

__all__ = ["Ending"]

ANSWERED = b"All models are stopped, unloading models"  # Triton's words: no request is in flight, no sequence open
RAISED = re.compile(rb"Failed to process the request\(s\) for model '([^']{1,300})', message")
GOES_S = 5.0  # that such a model takes for its end at most, where it goes all the same: 1.2 s where it was measured
GONE_S = 2.0  # after the last process, for what Triton itself does then
CHUNK, LONGEST = 1 << 20, 400  # bytes of the log at a time, and those of words in it


class Ending:
    """Whether a Triton may be killed: all is answered, and what is left never goes.

    Args:
        log: Triton's, in which it says what raised, and that it has answered all.
        relatives: gives its processes.
        models: the folder of its models, as Triton was told it.
        wedged: models that were loaded again after a process of theirs had died.
    """

    def __init__(
        self, log: Path, relatives: Callable[[], Relatives], models: Path, *, wedged: Collection[str] = ()
    ) -> None:
        self._log, self._relatives, self._models, self._wedged = log, relatives, models, frozenset(wedged)
        self._at = _size(log)
        self._answered: float | None = None
        self._gone: float | None = None  # since when no model's process is left
        self._stay: set[str] = set()  # instances that may not go, and whose code does nothing at its end
        self._read = threading.Event()
        self._reader: threading.Thread | None = None

    def __call__(self) -> bool:
        now = time.monotonic()
        if self._answered is None:
            if not self._says():
                return False
            self._answered = now
        if self._reader is None:  # the folder may be on a disk that hangs: nobody waits for it
            self._reader = threading.Thread(target=self._read_models, name="triton-ends", daemon=True)
            self._reader.start()
        try:
            found = self._relatives()
        except OSError:  # there is no file to look with: it is waited for
            return False
        # A process that is not known for a model's may be one all the same: one whose files came with its load.
        if len(found.own) > 1:
            return False
        if not found.stubs:
            self._gone = now if self._gone is None else self._gone
            return bool(self._wedged) and now >= self._gone + GONE_S
        stay = self._read.is_set() and all(stub.instance in self._stay for stub in found.stubs)
        return stay and now >= self._answered + GOES_S

    def _says(self) -> bool:
        try:
            with self._log.open("rb") as file:
                file.seek(self._at)
                return ANSWERED in file.read()
        except OSError:
            return False

    def _read_models(self) -> None:
        try:
            raised = _raised(self._log)
            found = self._relatives().stubs if raised or self._wedged else []
            stubs = [stub for stub in found if stub.instance in raised or stub.model in self._wedged]
        except OSError:  # there is no file to look with
            return
        idle = {name for name in {stub.model for stub in stubs} if not finishes_in(self._models / name)}
        self._stay = {stub.instance for stub in stubs if stub.model in idle}
        self._read.set()


def _raised(log: Path) -> set[str]:
    """Instances of which Triton says that their code raised."""
    found: set[str] = set()
    before = b""
    with log.open("rb") as file:
        while chunk := file.read(CHUNK):
            found |= {name.decode("utf-8", "replace") for name in RAISED.findall(before + chunk)}
            before = chunk[-LONGEST:]
    return found


def finishes_in(folder: Path) -> bool:
    """Whether the code in a model's folder does something at its end, as far as it can be read; else it may."""
    try:
        return finishes(folder, read_model(folder).config.backend)
    except ToolkitError:
        return True


def _size(log: Path) -> int:
    try:
        return log.stat().st_size
    except OSError:
        return 0
