"""Folders for as long as a process runs, which a later one removes where that one was killed.

Whoever has one holds a lock on a file in it. The kernel gives the lock back however its process ends, so a folder whose
lock can be had is nobody's: that holds among containers that share the folder for temporary files, too, where process
ids say nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

__all__ = ["is_held", "scratch", "sweep"]

OWNER = "owner"
LONGEST = 256
BEGINS = 3600.0  # seconds after which one that was never locked is of a process that was killed on its way there


@contextlib.contextmanager
def scratch(prefix: str, about: str = "-") -> Iterator[Path]:
    """A new folder among those for temporary files, gone when the block ends.

    Args:
        prefix: of its name.
        about: a word for whoever has to sweep it.

    Raises:
        OSError: it can't be made.
    """
    with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        with (folder / OWNER).open("x", encoding="utf-8") as owner:
            fcntl.flock(owner, fcntl.LOCK_EX)
            owner.write(about)  # it may be swept from here on, where nobody has the lock
            owner.flush()
            yield folder


def sweep(prefix: str, end: Callable[[Path, str], None] = lambda _folder, _about: None) -> list[Path]:
    """Remove this user's folders whose processes were killed; what can't be removed stays.

    Args:
        prefix: of their names.
        end: is called with each, and what it is about, before it goes.

    Returns:
        What was removed.
    """
    found = []
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            if _is_ours(folder) and _sweep(folder, end):
                found.append(folder)
    return found


def is_held(folder: Path, prefix: str) -> bool:
    """Whether a folder is one of `scratch`, of this user's, whose process lives: none that a stranger has brought is.

    Args:
        folder: any.
        prefix: of its name.
    """
    if folder.parent != Path(tempfile.gettempdir()) or not folder.name.startswith(prefix):
        return False
    with contextlib.suppress(OSError):
        if not _is_ours(folder):
            return False
        with open(os.open(folder / OWNER, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)) as owner:  # noqa: PTH123
            try:
                fcntl.flock(owner, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
    return False


def _is_ours(folder: Path) -> bool:
    """Whether it is this user's, and nobody else can have put something there."""
    told = folder.lstat()
    return stat.S_ISDIR(told.st_mode) and told.st_uid == os.geteuid() and not told.st_mode & 0o022


def _sweep(folder: Path, end: Callable[[Path, str], None]) -> bool:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    with open(os.open(folder / OWNER, flags), encoding="utf-8", errors="replace") as owner:  # noqa: PTH123
        fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError: somebody has it
        about = owner.read(LONGEST)
        young = time.time() - os.fstat(owner.fileno()).st_mtime < BEGINS
        if not about and (young or list(folder.iterdir()) != [folder / OWNER]):  # its process is about to lock it
            return False
        if about:
            end(folder, about)
        shutil.rmtree(folder, ignore_errors=True)
    return not folder.exists()
