"""A file takes the place of an older one all at once: written beside it, then renamed.

Others may write into the folder, too: what is written is always a new file, so that no link that waits under its name
leads elsewhere. Whoever reads meanwhile has the older file or the new one, never half of one.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

__all__ = ["mend_of", "replace_file", "replacing_file"]

ROOM = {
    errno.ENOSPC: "free some space there, or name another place",
    errno.EDQUOT: "free some of your quota there, or name another place",
    errno.EFBIG: "raise the limit on the size of files (`ulimit -f`)",
}
LONGEST = 200  # of a name's bytes, so that what is added to it fits, too


@contextmanager
def replacing_file(path: Path, *, mode: int | None = None) -> Iterator[IO[bytes]]:
    """A new file to write to (and read from); it takes the path's place when the block ends well, else it is removed.

    Args:
        path: what it becomes; a link there is replaced, not followed. The folder is there.
        mode: permissions; None for those of the file that is replaced, or what the process gives to new ones.

    Raises:
        OSError: it can't be written, or what is there is no file.
    """
    found = _mode_of(path)  # looked at in any case: what is there may be no file
    mode = found if mode is None else mode
    name = os.fsdecode(os.fsencode(path.name)[:LONGEST])
    beside = path.with_name(f".{name}.{secrets.token_hex(4)}.part")
    first = 0o666 if mode is None else 0o600

    def new(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW, first)

    with open(beside, "x+b", opener=new) as file:
        try:
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            yield file
            file.flush()
            os.fsync(file.fileno())
            beside.replace(path)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise


def replace_file(path: Path, content: bytes | str, *, mode: int | None = None) -> None:
    """Write a whole file, text in UTF-8; otherwise as `replacing_file`.

    Raises:
        OSError, UnicodeEncodeError: it can't be written.
    """
    data = content.encode() if isinstance(content, str) else content
    with replacing_file(path, mode=mode) as file:
        file.write(data)


def mend_of(error: BaseException | None, otherwise: str) -> str:
    """What to do about a file that can't be written: `otherwise`, but where there is no room for it."""
    return ROOM.get(error.errno or 0, otherwise) if isinstance(error, OSError) else otherwise


def _mode_of(path: Path) -> int | None:
    """Permissions of the file that is there; None where there is none, or a link."""
    try:
        found = path.lstat().st_mode
    except FileNotFoundError:
        return None
    if stat.S_ISLNK(found):
        return None
    if not stat.S_ISREG(found):  # root could replace a device
        if stat.S_ISDIR(found):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        raise FileExistsError(errno.EEXIST, "it is a device, a pipe or a socket, not a file", str(path))
    return found & 0o777
