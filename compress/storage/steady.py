"""What a run reads stays as it is: else what comes of it would be kept, and told, under the name of what it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

from compress.artifact import sha256_of
from compress.errors import DatasetError

__all__ = ["refuse_changed", "seen", "steady"]


@dataclass(frozen=True)
class _Seen:
    """A file as it was: its place on the disk, size and time of change, and its SHA-256 where that is known."""

    where: tuple[int, int]
    when: tuple[int, int]
    sha256: str | None

    @classmethod
    def of(cls, path: Path, sha256: str | None = None) -> _Seen:
        found = path.stat()
        return cls((found.st_dev, found.st_ino), (found.st_size, found.st_mtime_ns), sha256)

    def changed(self, path: Path) -> bool:
        now = _Seen.of(path)
        if (now.where, now.when) == (self.where, self.when):
            return False
        if self.sha256 is None:  # another file in its place was not read: the old one is still open
            return now.where == self.where
        return sha256_of(path) != self.sha256


_files: ContextVar[dict[Path, _Seen] | None] = ContextVar("files", default=None)


@contextmanager
def steady() -> Iterator[None]:
    """Within it, files that are `seen` are those of `refuse_changed`."""
    token = _files.set({})
    try:
        yield
    finally:
        _files.reset(token)


def seen(path: Path, digest: Callable[[], str] | None = None) -> str:
    """A file is read from now on.

    Args:
        path: of the file.
        digest: gives its SHA-256, which is returned; None for one that is not known by its bytes: "".
    """
    files = _files.get()
    before = None if files is None else _Seen.of(path)
    found = "" if digest is None else digest()
    if files is not None and before is not None:
        files[path.absolute()] = _Seen(before.where, before.when, found or None)
    return found


def refuse_changed() -> None:
    """Refuse to go on with what was computed of files that have changed meanwhile; one that is gone was read before.

    Raises:
        DatasetError: somebody has written to one.
    """
    for path, file in (_files.get() or {}).items():
        with suppress(FileNotFoundError):
            if file.changed(path):
                raise DatasetError(
                    f"{path} was written to while this ran",
                    why="what was computed of it is of neither what it was nor what it is, and is not kept",
                    mend="leave it as it is until this has ended, or name a copy of it; then give the command again",
                )
