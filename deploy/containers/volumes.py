"""A file or a folder packed for a volume, and the digest that names it."""

from __future__ import annotations

import hashlib
import os
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from serve.repository.folders import files_of

__all__ = ["digest", "packed", "readable"]


def digest(repository: Path, trusted: str = "") -> str:
    """Of names and contents, and of whose signature they need: the same files, verified, are another version."""
    found = hashlib.sha256(trusted.encode())
    for path in sorted(files_of(repository)):
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        found.update(os.fsencode(path.relative_to(repository)) + f" {content}\n".encode())
    return found.hexdigest()[:10]


@contextmanager
def packed(source: Path, entry: str, at: Path) -> Iterator[Path]:
    """An archive of a file or a folder, for anybody in a pod to read; gone at the end.

    Args:
        source: what is packed.
        entry: its name there; "." for what is in a folder.
        at: where the archive stands meanwhile, for its owner alone.
    """
    at.unlink(missing_ok=True)
    at.touch(mode=0o600)
    try:
        with tarfile.open(at, "w") as archive:
            archive.add(source, entry, filter=readable)
        yield at
    finally:
        at.unlink(missing_ok=True)


def readable(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Owned by root: Triton may read what it serves, and nobody in a pod may write it."""
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    entry.mode = 0o755 if entry.isdir() else 0o644
    return entry
