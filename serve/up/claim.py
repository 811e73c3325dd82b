"""One `serve up` of a user for each repository, at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from compress.errors import ServerError

__all__ = ["claimed"]

BOOT, PIDS = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
LONGEST = 256


@contextmanager
def claimed(repository: Path) -> Iterator[None]:
    """Be the one of this user's processes that serves this repository; it ends with the process.

    A repository may be on a disk that nobody may write to, and others may read it, so the lock is elsewhere: a file in
    a folder that is open to nobody else, named by the repository's device and inode. Another user can then neither
    hold it nor be kept out by it. Without such a folder, nobody is kept from serving twice.

    Raises:
        ServerError: another process serves it.
    """
    try:
        told = repository.stat()
        boot = BOOT.read_text().strip()  # of a home that several machines share, each has its own
    except OSError:  # whoever reads the repository says so
        yield
        return
    for folder in _candidates():
        try:
            taken = _take(repository, folder / f"{boot}-{told.st_dev:x}-{told.st_ino:x}")
        except OSError:  # read-only, not ours, or without locks
            continue
        try:
            yield
        finally:
            taken.close()
        return
    yield


def _candidates() -> Iterator[Path]:
    """Folders that may be this user's own; they are made."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path("~").expanduser() / ".cache"
    user = os.geteuid()
    for folder in (Path(cache, "compress-serve", "served"), Path(tempfile.gettempdir(), f"compress-served-{user}")):
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            told = folder.lstat()
            if stat.S_ISDIR(told.st_mode) and told.st_uid == user and not told.st_mode & 0o077:
                yield folder


class _Taken:
    """A file whose lock is held, gone at the end."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path, self._descriptor = path, descriptor

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)  # before it is let go: who opens it after that makes a new one
        os.close(self._descriptor)


def _take(repository: Path, path: Path) -> _Taken:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.stat().st_ino == os.fstat(descriptor).st_ino:
                os.ftruncate(descriptor, 0)
                os.write(descriptor, f"{os.getpid()} {PIDS.readlink()}".encode())
                return _Taken(path, descriptor)
        except BlockingIOError as err:
            holder = _holder(os.read(descriptor, LONGEST))
            os.close(descriptor)
            raise ServerError(
                f"can't serve {repository} twice",
                why=f"{holder} serves it already",
                mend="stop that one first, or serve a copy of the folder",
            ) from err
        except FileNotFoundError:  # who held it has just ended
            pass
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _holder(told: bytes) -> str:
    pid, _, namespace = told.decode("utf-8", "replace").partition(" ")
    if not pid.isdecimal():  # it is about to say so
        return "another process"
    return f"the process {pid}" if namespace == str(PIDS.readlink()) else "a process of another container"
