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
    """A file as it was: its place on the disk, size and time of change.

    Attributes:
        sha256: of it; "" where that is not known.
        opened: whether it stays open: another in its place is not read.
    """

    where: tuple[int, int]
    when: tuple[int, int]
    sha256: str = ""
    opened: bool = True

    @classmethod
    def of(cls, path: Path) -> _Seen:
        found = path.stat()
        return cls((found.st_dev, found.st_ino), (found.st_size, found.st_mtime_ns))

    def changed(self, path: Path) -> bool:
        now = _Seen.of(path)
        if (now.where, now.when) == (self.where, self.when) or (self.opened and now.where != self.where):
            return False
        return not self.sha256 or sha256_of(path) != self.sha256


_files: ContextVar[dict[Path, _Seen] | None] = ContextVar("files", default=None)


@contextmanager
def steady() -> Iterator[None]:
    """Within it, files that are `seen` are those of `refuse_changed`."""
    token = _files.set({})
    try:
        yield
    finally:
        _files.reset(token)


def seen(path: Path, digest: Callable[[], str] | None = None, *, opened: bool = True) -> str:
    """A file is read from now on.

    Args:
        path: of the file.
        digest: gives its SHA-256, which is returned; None for one that is not known by its bytes: "".
        opened: whether it stays open, and is not opened again by its name.
    """
    files = _files.get()
    before = None if files is None else _Seen.of(path)
    found = "" if digest is None else digest()
    if files is not None and before is not None:
        files[path.absolute()] = _Seen(before.where, before.when, found, opened)
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
