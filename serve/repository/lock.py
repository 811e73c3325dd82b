"""One writer at a time in a model repository."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from compress.errors import RepositoryError
from serve.repository.folders import unwritable

__all__ = ["locked"]

WAIT_S = 60.0


@contextmanager
def locked(repository: Path, *, wait_s: float = WAIT_S) -> Iterator[None]:
    """Hold the lock of the repository's folder, which leaves no file, and which ends with the process.

    Args:
        repository: is made when it isn't there.
        wait_s: how long to wait for another writer.

    Raises:
        RepositoryError: another process still writes, or the lock can't be made.
    """
    try:
        repository.mkdir(parents=True, exist_ok=True)
        folder = os.open(repository, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as err:
        raise unwritable(repository, err) from err
    deadline = time.monotonic() + wait_s
    try:
        while True:
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise RepositoryError(
                        f"can't write into {repository}",
                        why=f"another process has been writing into it for {wait_s:g} s",
                        mend="wait until it has ended, then try again",
                    ) from None
                time.sleep(0.05)
        yield
    finally:
        os.close(folder)
