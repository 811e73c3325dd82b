"""Open files in someone else's folder: a pipe there would be waited for without end, and a device never ends."""

from __future__ import annotations

import os
import stat
from io import BufferedReader
from pathlib import Path

__all__ = ["NoFileError", "files_in", "is_there", "open_file", "refuse_no_file"]

KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


class NoFileError(OSError):
    """What has a file's name is none; says what it is."""


def refuse_no_file(path: Path) -> None:
    """Refuse what is no regular file; a link is what it leads to.

    Raises:
        NoFileError: it is a pipe, a socket, a device or a folder.
        OSError: it is not there.
    """
    _refuse(path, path.stat().st_mode)


def is_there(path: Path) -> bool:
    """Whether a file that may be missing is there: False where nothing has its name, not even a link.

    Raises:
        NoFileError: something has its name, and is no file.
        OSError: that can't be told, or it is a link that leads to nothing.
    """
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    refuse_no_file(path)
    return True


def open_file(path: Path) -> BufferedReader:
    """A regular file, opened for reading; whatever takes its place meanwhile is not waited for.

    Raises:
        NoFileError, OSError: as for `refuse_no_file`.
    """
    refuse_no_file(path)  # opening a socket says less, and opening some devices does something
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _refuse(path, os.fstat(descriptor).st_mode)
    except NoFileError:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def files_in(folder: Path, pattern: str) -> list[Path]:
    """The files of a folder whose names fit a pattern, sorted.

    Args:
        folder: to look in.
        pattern: as `Path.glob` has it.

    Raises:
        NoFileError, OSError: a name fits, and what it names is no file.
    """
    found = sorted(folder.glob(pattern))
    for path in found:
        refuse_no_file(path)
    return found


def _refuse(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise NoFileError(f"{path.name} is {KINDS.get(stat.S_IFMT(mode), 'something else')}, and no file")
