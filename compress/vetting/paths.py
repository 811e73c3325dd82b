"""Names of files that a file of someone else's gives: whether one can stand in a folder, before it is looked for."""

from __future__ import annotations

import os
from pathlib import PurePosixPath

__all__ = ["stands_inside"]

MAX_PART, MAX_NAME = 255, 1024
"""Bytes of a part (NAME_MAX), and of all: with the folder's own path, PATH_MAX is 4,096."""


def stands_inside(name: str) -> bool:
    """Whether a name is relative, goes nowhere upward, and is one that a file can have.

    Of the others, looking for the file raises an OSError or a ValueError rather than saying that it is not there.
    """
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        return False
    try:
        encoded = os.fsencode(name)
    except UnicodeError:
        return False
    return b"\0" not in encoded and len(encoded) <= MAX_NAME and max(map(len, encoded.split(b"/"))) <= MAX_PART
