"""One `serve up` of a user for each repository, at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pwd
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from compress.errors import ServerError

__all__ = ["claimed", "served_by"]

BOOT, PIDS = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
LONGEST = 256


@contextmanager
def claimed(repository: Path, at: str = "") -> Iterator[None]:
    """Be the one of this user's processes that serves this repository; it ends with the process.

    A repository may be on a disk that nobody may write to, and others may read it, so the lock is elsewhere: a file in
    a folder that is open to nobody else, named by the repository's device and inode. Another user can then neither
    hold it nor be kept out by it. It is held in each such folder that there is, and the environment has no say in which
    they are: two processes that can write to different ones, or to one that is full by now, still meet in another.
    Without any, nobody is kept from serving twice.

    Args:
        repository: the folder.
        at: the URL that it is served at, told whoever comes second; "" where it is not known yet.

    Raises:
        ServerError: another process serves it.
    """
    try:
        name = _name(repository)
    except OSError:  # whoever reads the repository says so
        yield
        return
    with contextlib.ExitStack() as held:
        for folder in _usable():  # in one order, and nobody waits: of two that begin together, one goes on
            with contextlib.suppress(OSError):  # full, or without locks
                held.callback(_take(repository, folder / name, at).close)
        yield


def served_by(repository: Path) -> str:
    """Which process of this user's serves a repository, in words; "" where none does, or that can't be told."""
    try:
        name = _name(repository)
        for folder in filter(Path.is_dir, _candidates()):
            with contextlib.suppress(FileNotFoundError):
                descriptor = os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    return _holder(os.read(descriptor, LONGEST))
                finally:
                    os.close(descriptor)
    except OSError:
        pass
    return ""


def _name(repository: Path) -> str:
    told = repository.stat()
    boot = BOOT.read_text().strip()  # of a home that several machines share, each has its own
    return f"{boot}-{told.st_dev:x}-{told.st_ino:x}"


def _candidates() -> list[Path]:
    """Folders that may be this user's own, however the process was started."""
    user = os.geteuid()
    found = [Path(f"/run/user/{user}/compress-served"), Path(f"/tmp/compress-served-{user}")]  # noqa: S108  owner checked
    try:
        home = Path(pwd.getpwuid(user).pw_dir)
    except KeyError:
        return found
    return [home / ".cache/compress-serve/served", *found] if home.is_dir() else found


def _usable() -> Iterator[Path]:
    """Those that nobody else may enter; they are made."""
    for folder in _candidates():
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            told = folder.lstat()
            if stat.S_ISDIR(told.st_mode) and told.st_uid == os.geteuid() and not told.st_mode & 0o077:
                yield folder


class _Taken:
    """A file whose lock is held, gone at the end."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path, self._descriptor = path, descriptor

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)  # before it is let go: who opens it after that makes a new one
        os.close(self._descriptor)


def _take(repository: Path, path: Path, at: str) -> _Taken:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.stat().st_ino == os.fstat(descriptor).st_ino:
                with contextlib.suppress(OSError):  # it holds without a word of whose it is, as on a full disk
                    os.ftruncate(descriptor, 0)
                    os.write(descriptor, f"{os.getpid()} {PIDS.readlink()} {at}".strip().encode()[:LONGEST])
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
    pid, namespace, at = (*told.decode("utf-8", "replace").split(maxsplit=2), "", "", "")[:3]
    if not pid.isdecimal():  # it is about to say so
        return "another process"
    if namespace != str(PIDS.readlink()):
        return "a process of another container"
    return f"the process {pid}" + (f" (at {at})" if at.isprintable() and at else "")
