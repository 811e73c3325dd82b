"""A folder that holds a copy of what was verified, and nothing else: what an earlier run left there goes first.

A pod that starts again finds the volume as it was left: whole, or as a killed run left it. So a copy is made anew each
time, out of sight, and takes its place once it is verified. A mark tells such a folder from one with things of its own.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from compress.errors import RepositoryError
from serve.repository.lock import locked

__all__ = ["MARK", "copying"]

MARK = ".copied-by-serve"
ROOM = "free space there, and let this user write there"


@contextmanager
def copying(repository: Path, into: Path) -> Iterator[Path]:
    """An empty folder to copy into. What it holds when the block ends well is what `into` holds; else that is empty.

    A process that is killed leaves parts of one copy at most, which the next run removes.

    Args:
        repository: what is copied.
        into: a folder that is empty or of an earlier run; it is made where it is not there.

    Raises:
        RepositoryError: it is neither, it is the repository or inside of it (or around it), another run writes there,
            or the disk refuses.
    """
    source, target = repository.resolve(), into.resolve()
    if source == target or source in target.parents or target in source.parents:
        raise _refused(into, f"{repository} is there", "name a folder that is apart from it")
    with locked(into):
        if source.samefile(target):
            raise _refused(into, f"it is {repository}", "name a folder that is apart from it")
        if not (into / MARK).is_file() and any(into.iterdir()):
            raise _refused(into, "it is not empty, and no copy of an earlier run", "give an empty folder")
        try:
            try:
                _mark(into)
                _clear(into)
                with tempfile.TemporaryDirectory(prefix=".copy-", dir=into) as beside:
                    yield Path(beside)
                    for path in sorted(Path(beside).iterdir()):
                        path.rename(into / path.name)
            except BaseException:
                _clear(into)
                (into / MARK).unlink(missing_ok=True)
                raise
        except OSError as err:
            raise RepositoryError(f"can't copy {repository} to {into}", why=str(err), mend=ROOM) from err


def _mark(into: Path) -> None:
    """On the disk before anything else is: a machine that loses its power may keep what came later."""
    with (into / MARK).open("w", encoding="utf-8") as file:
        file.write("`serve check --into` replaces all that is here.\n")
        file.flush()
        os.fsync(file.fileno())
    folder = os.open(into, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _clear(into: Path) -> None:
    for path in into.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != MARK:
            path.unlink()


def _refused(into: Path, why: str, mend: str) -> RepositoryError:
    return RepositoryError(f"can't copy to {into}", why=why, mend=mend)
