"""Every entry below a folder, without following a link: what is hashed is what was looked at.

What no listing can vouch for is refused: a link (it may point elsewhere tomorrow), a device or pipe, byte code (Python
runs it in place of the source that is beside it), an empty folder (no list of files names it, and Triton may take it
for a model or version), a name that a line of text can't hold.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Collection, Iterator
from pathlib import Path

from compress.errors import RepositoryError

__all__ = ["CACHE", "digests", "irregular", "is_byte_code"]

CACHE = "__pycache__"
BYTE_CODE = (".pyc", ".pyo")
DEEPEST = 32
BLOCK = 1 << 20
KINDS = {
    stat.S_IFLNK: "it is a link", stat.S_IFIFO: "it is a pipe", stat.S_IFSOCK: "it is a socket",
    stat.S_IFCHR: "it is a device", stat.S_IFBLK: "it is a device",
}  # fmt: skip


def digests(folder: Path, *, skip: Collection[str] = (), into: Path | None = None) -> dict[str, str]:
    """SHA-256 of each file by its path below the folder (POSIX form), sorted.

    Args:
        folder: may itself be reached through a link; nothing below it may.
        skip: files directly in it that are looked at, but not read.
        into: a folder that the files are copied to as they are read; the digests are of the copies, too.

    Raises:
        RepositoryError: an entry is none that a list of files can vouch for, or can't be read.
    """
    try:
        root = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            return dict(sorted(_files(root, folder, "", frozenset(skip), 0, into)))
        finally:
            os.close(root)
    except OSError as err:
        what = f"can't read {folder}" if into is None else f"can't copy {folder} to {into}"
        raise RepositoryError(what, why=str(err), mend="let this user read all of it, and write there") from err


def irregular(path: Path) -> str:
    """Why a path is neither a plain file nor a folder; "" where it is one."""
    return KINDS.get(stat.S_IFMT(path.lstat().st_mode), "")


def is_byte_code(name: str) -> bool:
    """Whether an entry of this name is byte code of Python's, or the folder for it."""
    return name == CACHE or name.endswith(BYTE_CODE)


def _files(
    folder: int, root: Path, inside: str, skip: frozenset[str], depth: int, into: Path | None
) -> Iterator[tuple[str, str]]:
    names = sorted(os.listdir(folder))
    if not names and depth:
        raise _refused(root, inside.rstrip("/"), "it is an empty folder", "remove it, or put a file into it")
    for name in names:
        path = inside + name
        if not name.isprintable() or "\\" in name:
            raise _refused(root, path, "its name has letters that are not printable", "rename it")
        if is_byte_code(name):
            raise _refused(root, path, "it is byte code, which runs in place of its source", "remove it")
        mode = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
        if stat.S_ISDIR(mode):
            if depth == DEEPEST:
                raise _refused(root, path, f"it is more than {DEEPEST} folders deep", "move it up")
            inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            try:
                yield from _files(inner, root, f"{path}/", frozenset(), depth + 1, into)
            finally:
                os.close(inner)
        elif not stat.S_ISREG(mode):
            why = KINDS.get(stat.S_IFMT(mode), "it is no file")
            raise _refused(root, path, why, "put the file itself there, or remove it")
        elif name not in skip:
            yield path, _digest(name, folder, None if into is None else into / path)


def _digest(name: str, folder: int, copy: Path | None) -> str:
    # A pipe that took the file's place meanwhile must not hold us up, and a link not lead us away.
    opened = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    with os.fdopen(opened, "rb") as file:
        if not stat.S_ISREG(os.fstat(opened).st_mode):
            raise OSError(f"{name} is no file any more")
        if copy is None:
            return hashlib.file_digest(file, "sha256").hexdigest()
        found = hashlib.sha256()
        copy.parent.mkdir(parents=True, exist_ok=True)
        with copy.open("xb") as target:
            while block := file.read(BLOCK):
                found.update(block)
                target.write(block)
        return found.hexdigest()


def _refused(root: Path, path: str, why: str, mend: str) -> RepositoryError:
    shown = path.encode(errors="backslashreplace").decode()
    shown = shown if shown.isprintable() else repr(shown)
    return RepositoryError(f"can't vouch for {root / shown}", why=why, mend=mend)
