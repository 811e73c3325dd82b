"""What a run reads stays as it is: a name means the same bytes from its first reading to the last.

Else what comes of them would be kept, and told, under the name of others. Who reads a file of the user's asks for it by
`seen` *before* opening it. The first answer holds for the run and for the processes that work for it: a later reading,
and `refuse_changed`, find the same content under that name, or the run is over. A file that is opened by its name again
(ONNX Runtime, weights beside a model, other processes) needs no more than that; its times tell whether it is the same,
and its content is compared where they differ.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compress.artifact import sha256_of
from compress.errors import ChangedError
from compress.vetting.heard import Heard, unheard

__all__ = ["known", "listed", "refuse_changed", "seen", "steady"]

TICK_NS = 20_000_000  # a file system's clock stands still for as long: two writes may have one time


@dataclass(frozen=True)
class _Seen:
    """A file as it was: its SHA-256, and its device, number, size and times; () of another
    machine's."""

    sha256: str
    told: tuple[int, ...] = ()


@dataclass
class _Reads:
    """Files and listings of folders by name, and the first that was found changed."""

    files: dict[Path, _Seen] = field(default_factory=dict)
    listings: dict[Path, tuple[str, ...]] = field(default_factory=dict)
    changed: ChangedError | None = None

    def refuse(self, what: str) -> ChangedError:
        """To be raised, now and whenever the run is asked for: who took the first for something else can't go on."""
        self.changed = ChangedError(
            f"{what} while this ran",
            why="what was computed of it is of neither what it was nor what it is, and is not kept",
            mend="leave it as it is until this has ended, or name a copy of it; then give the command again",
        )
        return self.changed

    def look(self, path: Path, most: int | None = None, tell: Heard = unheard) -> str:
        """The SHA-256 that a file had, and has."""
        name = path.absolute()
        before, told = self.files.get(name), _told(path)
        if before is not None and before.told == told:
            return before.sha256
        if before is None and 0 <= time.time_ns() - told[-1] < TICK_NS:
            time.sleep(TICK_NS / 1e9)  # what is written from now on has another time
        found = sha256_of(path, most, tell)
        if _told(path) != told or (before is not None and found != before.sha256):
            raise self.refuse(f"{path} was written to or replaced")
        self.files[name] = _Seen(found, told)
        return found


_reads: ContextVar[_Reads | None] = ContextVar("reads", default=None)


@contextmanager
def steady(known: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Within it, what is `seen` is what `refuse_changed` looks at.

    Args:
        known: of the process that this one works for: what it has read is what this one is to find.
    """
    reads = _Reads()
    if known is not None:
        reads.files = {Path(name): _Seen(sha256, tuple(told)) for name, (sha256, told) in known["files"].items()}
        reads.listings = {Path(name): tuple(names) for name, names in known["listings"].items()}
    token = _reads.set(reads)
    try:
        yield
    finally:
        _reads.reset(token)


def known() -> dict[str, Any]:
    """What has been read so far, as JSON values, for the `steady` of a process of this machine."""
    reads = _reads.get() or _Reads()
    return {
        "files": {str(name): [file.sha256, list(file.told)] for name, file in reads.files.items()},
        "listings": {str(name): list(names) for name, names in reads.listings.items()},
    }


def seen(path: Path, most: int | None = None, tell: Heard = unheard) -> str:
    """A file is to be read: gives its SHA-256, which is computed once for all that a run reads of it.

    Args:
        path: of the file, by the name that it is opened by.
        most, tell: as of `sha256_of`.

    Raises:
        ChangedError: it is another than when the run read it first.
        OSError: as of `sha256_of`.
    """
    reads = _reads.get()
    return sha256_of(path, most, tell) if reads is None else reads.look(path, most, tell)


def listed(folder: Path, files: Sequence[Path]) -> None:
    """The files that a folder was found to hold are to be read, and no others later.

    Raises:
        ChangedError: it held others when the run read it first.
    """
    if (reads := _reads.get()) is not None:
        names = tuple(str(file.relative_to(folder)) for file in files)
        if reads.listings.setdefault(folder.absolute(), names) != names:
            raise reads.refuse(f"files came to {folder}, or went,")


def refuse_changed() -> None:
    """Refuse to go on with what was computed of files that have changed meanwhile; one that is gone was read before.

    Raises:
        ChangedError: one is not what it was; or was not at an earlier time.
    """
    if (reads := _reads.get()) is None:
        return
    if reads.changed is not None:
        raise reads.changed
    for path, file in list(reads.files.items()):
        with suppress(FileNotFoundError):
            if file.told:  # this process has read it, or one of this machine
                reads.look(path)


def _told(path: Path) -> tuple[int, ...]:
    """What changes when something else is written to a name, or takes it; the change of the file itself at the end."""
    found = path.stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
