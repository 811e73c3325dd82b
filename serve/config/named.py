"""Text of a file that the user names on the command line: it may be a pipe, and it has an end."""

from __future__ import annotations

import stat
from pathlib import Path

from compress.vetting.texts import read_text

__all__ = ["LARGEST_DATA", "named_text"]

LARGEST_DATA = 256 << 20
"""Of what is sent or followed, in bytes."""
_LARGEST = 16 << 20
_pipes: dict[tuple[int, int], str] = {}


def named_text(path: Path, limit: int = _LARGEST) -> str:
    """What a file says, in UTF-8.

    A pipe gives what it has once: it is kept, because a command reads its file of settings for its flags and then for
    its tables.

    Raises:
        OSError: it can't be read.
        ValueError: it is no text, or longer than `limit` bytes.
    """
    seen = path.stat()
    pipe = (seen.st_dev, seen.st_ino) if stat.S_ISFIFO(seen.st_mode) else None
    if pipe in _pipes:
        return _pipes[pipe]
    text = read_text(path, limit, named=True)
    if pipe is not None:
        _pipes[pipe] = text
    return text
