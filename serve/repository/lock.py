"""One writer at a time in a folder: a model repository, or the one that holds a file of keys.

The lock is the folder's own: it leaves no file, and ends with the process. (`compress` has another, of a file beside
what is written: that may be a file, or not be there yet, and whoever waits is told who holds it.)
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from compress.errors import RepositoryError
from serve.repository.folders import unwritable

__all__ = ["hold", "locked"]

WAIT_S = 60.0
AGAIN_S = 0.05


def hold(folder: Path, *, wait_s: float = WAIT_S, shared: bool = False) -> int:
    """The lock of a folder: a descriptor, held until it is closed.

    Args:
        folder: that is there.
        wait_s: how long to wait for another holder.
        shared: with others who only read.

    Raises:
        BlockingIOError: another process still holds it.
        OSError: it can't be opened, or locked.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    deadline = time.monotonic() + wait_s
    try:
        while True:
            try:
                fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    why = f"another process has been writing there for {wait_s:g} s"
                    raise BlockingIOError(errno.EWOULDBLOCK, why, str(folder)) from None
                time.sleep(AGAIN_S)
            else:
                return descriptor
    except BaseException:
        os.close(descriptor)
        raise


@contextmanager
def locked(repository: Path, *, wait_s: float = WAIT_S) -> Iterator[None]:
    """Hold the lock of the repository's folder.

    Args:
        repository: is made when it isn't there.
        wait_s: how long to wait for another writer.

    Raises:
        RepositoryError: another process still writes, or the lock can't be made.
    """
    try:
        repository.mkdir(parents=True, exist_ok=True)
        descriptor = hold(repository, wait_s=wait_s)
    except BlockingIOError as err:
        raise RepositoryError(
            f"can't write into {repository}",
            why=err.strerror or str(err),
            mend="wait until it has ended, then try again",
        ) from None
    except OSError as err:
        raise unwritable(repository, err) from err
    try:
        yield
    finally:
        os.close(descriptor)
