"""The folder that keeps the stages of a run: a file in it says that it is one, and what no run needs is removed there.

A folder of the user's that happens to have its name is refused before any work; so is one that others may write to.
"""

from __future__ import annotations

import os
import re
import shlex
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from compress.errors import ArtifactError, ServerError
from compress.storage.files import LOCK
from compress.vetting.ours import check_ours
from compress.vetting.replace import replace_file

__all__ = ["keep_log", "marked", "refuse_foreign", "refuse_others"]

MARK = ".compress-work"
TEXT = "Stages of compress, for runs that go on: what no run needs any more is removed.\n"
LOG_FILE = "log.txt"
# What runs put there; an earlier release wrote no mark.
OURS = re.compile(
    rf"\.?((\d\d-\w+|training)-[0-9a-f]{{12}}|channels-[0-9a-f]+-[0-9a-f]+\.json)(\.\w+)*"
    rf"|original|ray|{re.escape(LOG_FILE)}|{re.escape(LOCK)}"
)


def refuse_others(work: Path, *, above: bool = True) -> None:
    """Refuse a work folder in which another user may have put stages, which this run would take for its own.

    Its default name is known beforehand, and in a folder as /tmp anybody can make one of that name. Folders and links
    on the way to it count as those to the cache's do.

    Args:
        work: need not be there.
        above: whether folders above it count; those of one that machines share are as they were made on each.

    Raises:
        ArtifactError: what is kept there may be another user's word.
    """
    why, mend = _anothers(work, above=above)
    if why:
        raise ArtifactError(
            f"won't keep stages in {work}",
            why=f"{why}; what is in it would be taken for an earlier run's",
            mend=f"{mend}, if nobody else has written there; or name a folder of yours with --work",
        )


def refuse_foreign(work: Path) -> None:
    """Refuse a folder that no run has made, and that holds something.

    Raises:
        ArtifactError: it is such a folder.
    """
    real = _real(work)
    if not real.is_dir() or _is_file(real / MARK):
        return
    if other := min((path.name for path in real.iterdir() if not OURS.fullmatch(path.name)), default=None):
        raise ArtifactError(
            f"won't keep stages in {work}",
            why=f"it holds {other!r}, which no run has put there, and what runs no longer need is removed there",
            mend="name a new folder with --work (or with -o), or move out of it what is yours",
        )


@contextmanager
def marked(work: Path) -> Iterator[None]:
    """Within it, the folder, which is held, is marked as one of runs; the mark goes where nothing came to be kept."""
    real = _real(work)
    replace_file(real / MARK, TEXT)
    try:
        yield
    finally:
        with suppress(OSError):
            if {path.name for path in real.iterdir()} <= {MARK, LOCK}:
                (real / MARK).unlink()


def keep_log(work: Path, text: str) -> None:
    """Keep what libraries have printed, in a folder that runs have made and nobody else may write to."""
    with suppress(OSError):
        real = _real(work)
        if _is_file(real / MARK) and not _anothers(work, above=True)[0]:
            replace_file(real / LOG_FILE, text.encode("utf-8", "backslashreplace"))


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))


def _is_file(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def _anothers(work: Path, *, above: bool) -> tuple[str, str]:
    """Why a folder may be another user's word, and how to mend it; "" where it is this user's, or not there yet."""
    if (real := _real(work)).is_dir():
        told, owners = real.stat(), (0, os.geteuid())
        if told.st_uid not in owners or work.lstat().st_uid not in owners:
            return "it belongs to another user", "make it yours (chown)"
        if told.st_mode & (stat.S_IWOTH if told.st_gid == os.getegid() else stat.S_IWOTH | stat.S_IWGRP):
            return "other users may write there", f"chmod go-w {shlex.quote(str(work))}"
    with suppress(OSError):  # who writes there says so
        try:
            if above:
                check_ours(work, folder=True, linked=True)
        except ServerError as err:
            return err.why, err.mend
    return "", ""
