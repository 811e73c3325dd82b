"""When a Triton that was told to end has nothing left to do.

It waits for what it has begun, and then for its models' processes, each some seconds. It never lets go of a model
whose `execute` raised while other requests waited, where nothing batches them (seen in 26.07; the model's processes are
idle), and would wait for that one until its time is up.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from compress.errors import ToolkitError
from serve.repository.ends import finishes
from serve.repository.read import read_model
from serve.triton.stubs import Relatives

__all__ = ["Ending"]

ANSWERED = b"All models are stopped, unloading models"  # Triton's words: no request is in flight, no sequence open
SENT_S = 1.0  # for the last answers to be sent


class Ending:
    """Whether a Triton may be killed: all is answered, and no process is left whose code does something at its end.

    Args:
        log: Triton's, in which it says that it has answered all; what stands there before now is not looked at.
        relatives: gives its processes.
        models: the folder of its models, as Triton was told it.
    """

    def __init__(self, log: Path, relatives: Callable[[], Relatives], models: Path) -> None:
        self._log, self._relatives, self._models = log, relatives, models
        self._at = _size(log)
        self._answered: float | None = None
        self._idle: set[str] = set()  # models whose code does nothing then
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
        if now < self._answered + SENT_S or not self._read.is_set():
            return False
        try:
            found = self._relatives()
        except OSError:  # there is no file to look with: it is waited for
            return False
        # A process that is not known for a model's may be one all the same: one whose files came with its load.
        return len(found.own) <= 1 and all(stub.model in self._idle for stub in found.stubs)

    def _says(self) -> bool:
        try:
            with self._log.open("rb") as file:
                file.seek(self._at)
                return ANSWERED in file.read()
        except OSError:
            return False

    def _read_models(self) -> None:
        try:
            names = {stub.model for stub in self._relatives().stubs}
        except OSError:  # there is no file to look with
            return
        self._idle = {name for name in names if not finishes_in(self._models / name)}
        self._read.set()


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
