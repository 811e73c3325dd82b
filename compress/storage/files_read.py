"""Which files code reads, as Python itself reports it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compress.artifact import sha256_of
from compress.storage.hashing import INSTALLED, OWN

__all__ = ["FilesRead", "files_read"]

_BEYOND = ("socket.connect", "subprocess.Popen", "os.system", "sqlite3.connect")
_CODE = (".py", ".pyc", ".pyi", ".so")
_VIRTUAL = ("/proc", "/sys", "/dev")


@dataclass
class FilesRead:
    """What was seen.

    Attributes:
        paths: of files that were opened to be read; code, Python's own files and those of packages left out.
        beyond: what no file tells: a connection, another program.
    """

    paths: set[Path] = field(default_factory=set)
    beyond: set[str] = field(default_factory=set)

    def digests(self) -> list[str]:
        """SHA-256 of what is in each, by path."""
        return [f"{path.name} {sha256_of(path)}" for path in sorted(self.paths) if path.is_file()]


_listening: FilesRead | None = None
_hooked = False


@contextmanager
def files_read() -> Iterator[FilesRead]:
    """What is read while the block runs, by any thread; by one block at a time."""
    global _listening, _hooked
    if not _hooked:
        sys.addaudithook(_heard)
        _hooked = True
    before, _listening = _listening, FilesRead()
    try:
        yield _listening
    finally:
        _listening = before


def _heard(event: str, args: tuple[Any, ...]) -> None:
    found = _listening
    if found is None:
        return
    if event in _BEYOND:
        found.beyond.add(event)
    elif event == "open" and isinstance(args[0], (str, bytes)) and not _writes(args[1], args[2]):
        path = Path(os.path.abspath(os.fsdecode(args[0])))  # noqa: PTH100  what resolves links opens files, too
        library = INSTALLED.intersection(path.parts) or OWN.intersection(path.parents)
        if path.suffix not in _CODE and not library and not str(path).startswith(_VIRTUAL):
            found.paths.add(path)


def _writes(mode: Any, flags: Any) -> bool:
    if isinstance(mode, str):
        return any(letter in mode for letter in "wax")
    return isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_CREAT))
