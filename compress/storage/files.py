"""Files written whole or not at all, and places that one run alone may write."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shlex
import stat
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from compress.errors import ResourceError
from compress.storage.shortages import cant_write
from compress.vetting.replace import replacing_file

__all__ = ["command_line", "let_run", "locked", "write_files"]

LOCK = ".lock"  # in a folder that is held
HOLDER = re.compile(rb"process \d+: ")  # how what is written into a lock begins
_HELD: set[int] = set()  # descriptors of locks


def _let_go() -> None:
    """A forked child shares the lock's open file, and would hold it beyond its parent's death."""
    for descriptor in _HELD:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _HELD.clear()


os.register_at_fork(after_in_child=_let_go)


def command_line() -> str:
    """The `compress` command that this process was started with, as a shell takes it; empty where it is another."""
    called = Path(sys.argv[0]) if sys.argv else Path()
    ours = called.name == "compress" or called.parts[-2:] == ("compress", "__main__.py")
    return shlex.join(["compress", *sys.argv[1:]]) if ours else ""


def write_files(contents: Mapping[Path, str], *, programs: bool = False) -> None:
    """Write files beside, then rename them all: none is half there, and older ones stay until all are written.

    Args:
        contents: text by path; folders are made.
        programs: whether who may read them may run them.

    Raises:
        ResourceError: one can't be written.
    """
    made: list[Path] = []
    path = next(iter(contents))
    try:
        with ExitStack() as all_written:
            for path, text in contents.items():
                made = [*make_folder(path.parent), *made]
                file = all_written.enter_context(replacing_file(path))
                if programs:
                    let_run(file.fileno())
                file.write(text.encode("utf-8", "backslashreplace"))
                file.flush()
    except OSError as err:
        raise cant_write(path, err) from err
    finally:
        remove_empty(made)


def let_run(file: Path | int) -> None:
    """Let whoever may read a file run it: nobody else, whom the umask keeps from it."""
    mode = stat.S_IMODE(os.stat(file).st_mode)  # noqa: PTH116  a descriptor has no Path
    os.chmod(file, mode | (mode & 0o444) >> 2)  # noqa: PTH101


def make_folder(folder: Path) -> list[Path]:
    """Make a folder and those above; gives those that were missing, innermost first."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    return missing


def remove_empty(folders: list[Path]) -> None:
    """Remove folders that a failed run has made, as far as there is nothing in them."""
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()


@contextmanager
def locked(place: Path, *, inside: bool = False) -> Iterator[None]:
    """Hold a place that is to be written: a file PLACE.lock beside it, locked by flock, gone at the end.

    The kernel lets go of the lock when its holder ends, however it ends; a file that was left behind blocks nobody.

    Args:
        place: file or folder, there or not; the folder that it is in is there.
        inside: a folder that is there, and whose lock is in it.

    Raises:
        ResourceError: another process holds it (which one is told), or the file can't be made.
    """
    path = place / LOCK if inside else place.with_name(place.name + ".lock")
    descriptor = _taken(path, place)
    _HELD.add(descriptor)
    try:
        yield
    finally:
        _HELD.discard(descriptor)
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)  # before it is let go: who opens it after that makes a new one
        os.close(descriptor)


def _taken(path: Path, place: Path) -> int:
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
        except OSError as err:
            raise cant_write(place, err) from err
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):  # who holds a pipe would be waited for to say who it is
            os.close(descriptor)
            why, mend = f"{path.name}, by which one run at a time writes there, is no file", f"remove {path}"
            raise ResourceError(f"can't write {place}", why=why, mend=f"{mend}, or name another place with -o")
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as err:
            holder = os.read(descriptor, 4096).decode("utf-8", "replace").strip()
            os.close(descriptor)
            raise ResourceError(
                f"can't write {place} while another run does",
                why=f"it is held by {holder or 'another process'}",
                mend="wait until that has ended, or name another folder with -o (and --work, where that is given)",
            ) from err
        except OSError as err:
            if err.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL):  # a file system without locks
                os.close(descriptor)
                raise cant_write(place, err) from err
        if _stands(path, descriptor):
            if os.fstat(descriptor).st_size and not HOLDER.match(os.pread(descriptor, 64, 0)):
                os.close(descriptor)
                why = f"{path.name}, by which one run at a time writes there, is a file of something else"
                raise ResourceError(f"can't write {place}", why=why, mend="name another place with -o")
            told = f"process {os.getpid()}: {command_line() or shlex.join(sys.argv)}\n"
            with contextlib.suppress(OSError):  # held all the same where the disk is full
                os.ftruncate(descriptor, 0)
                os.write(descriptor, told.encode("utf-8", "backslashreplace")[:4000])
            return descriptor
        os.close(descriptor)  # its last holder has removed it in between


def _stands(path: Path, descriptor: int) -> bool:
    """Whether the file is still the one of that name."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
