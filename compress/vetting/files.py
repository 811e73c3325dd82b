"""Open files in someone else's folder: a pipe there would be waited for without end, and a device never ends.

Nor does a file of holes, for whoever reads all of it: a few bytes on a disk can claim any size.

Source: Linux, lseek(2), SEEK_DATA and SEEK_HOLE.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from io import BufferedReader
from pathlib import Path

__all__ = [
    "HollowError", "NoFileError", "files_in", "is_there", "open_file", "refuse_hollow", "refuse_larger",
    "refuse_no_file",
]  # fmt: skip

# Bytes of holes that are taken for some, whatever is beside them, and as a multiple of what is there: an array that
# was made for more than was written has as much, and who sends a file has to send what is there.
HOLES, TIMES = 1 << 30, 8
BLOCK = 512  # of st_blocks, whatever the file system has

KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


class NoFileError(OSError):
    """What has a file's name is none; says what it is."""


class HollowError(OSError):
    """A file is hardly there: says how much of it is."""


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
        HollowError: most of it is holes.
    """
    refuse_no_file(path)  # opening a socket says less, and opening some devices does something
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        told = os.fstat(descriptor)
        _refuse(path, told.st_mode)
        _refuse_holes(path.name, [told], lambda: _written(descriptor, told.st_size))
    except OSError:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def refuse_larger(path: Path, file: BufferedReader, most: int) -> None:
    """Refuse an open file that has more bytes than its kind ever has, before any are read.

    Raises:
        OSError: it has.
    """
    size = os.fstat(file.fileno()).st_size
    if size > most:
        raise OSError(f"{path.name} has {size:,} bytes, and such a file has at most {most:,}")


def refuse_hollow(folder: Path, paths: Sequence[Path]) -> None:
    """Refuse files that are to be read together, and that all together are mostly holes: each may have some.

    Raises:
        HollowError: they are.
        OSError: one can't be read.
    """

    def written() -> int:
        found = 0
        for path in paths:
            with closing(open_file(path)) as file:
                found += _written(file.fileno(), os.fstat(file.fileno()).st_size)
        return found

    _refuse_holes(folder.name, [path.stat() for path in paths], written)


def files_in(folder: Path, pattern: str) -> list[Path]:
    """The files of a folder whose names fit a pattern, sorted.

    Args:
        folder: to look in.
        pattern: as `Path.glob` has it.

    Raises:
        NoFileError, OSError: a name fits, and what it names is no file; or they are mostly holes; or the folder can't
            be read.
    """
    if folder.is_dir():
        os.scandir(folder).close()  # a glob finds nothing in what may not be read, and says nothing
    found = sorted(folder.glob(pattern))
    for path in found:
        refuse_no_file(path)
    refuse_hollow(folder, found)
    return found


def _refuse(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise NoFileError(f"{path.name} is {KINDS.get(stat.S_IFMT(mode), 'something else')}, and no file")


def _refuse_holes(name: str, told: Iterable[os.stat_result], written: Callable[[], int]) -> None:
    """Refuse what is larger than its blocks by far, where the file system says that there are holes.

    One that compresses has fewer blocks than bytes, and some that are far away tell of none.
    """
    size = held = 0
    for each in told:
        size, held = size + each.st_size, held + min(each.st_size, each.st_blocks * BLOCK)
    if size - held > max(HOLES, TIMES * held):
        held = written()
        if size - held > max(HOLES, TIMES * held):
            raise HollowError(
                f"{name} has {size:,} bytes, of which {held:,} are on the disk: the others are holes, which read as "
                "zeros; copy what is meant, and not more"
            )


def _written(descriptor: int, size: int) -> int:
    """Bytes of a file that are no holes; all of them where its file system does not tell."""
    at = held = 0
    try:
        while at < size:
            at = os.lseek(descriptor, at, os.SEEK_DATA)
            end = os.lseek(descriptor, at, os.SEEK_HOLE)
            held, at = held + end - at, end
    except OSError as err:
        if err.errno != errno.ENXIO:  # which says that there are holes alone from here on
            return size
    finally:
        os.lseek(descriptor, 0, os.SEEK_SET)
    return held
