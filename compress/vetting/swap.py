"""Folders that take the places of others: all of them or none, also where the process is killed in between.

What is made stands in a folder beside its place. A file in that is its mark, which its process holds a lock on: the
kernel lets go of it however the process ends. Moves are written down there before the first is made. So a later run
tells what a killed one has left, undoes what that had begun, and removes the rest; a folder without the mark is the
user's, whatever it is called.

Such a folder may come with somebody else's files, in a repository that was cloned or an archive. So what is written
down names the mark by what no copy has: its inode, and the time when that was last changed, which nobody can set.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from compress.vetting.paths import stands_inside
from compress.vetting.replace import replace_file
from compress.vetting.texts import read_json

__all__ = ["move", "put_back", "replacing_folder", "staging"]

MARK = ".written-by-compress-serve"
MOVES = ".moves.json"
NEW, OLD = "new", "old"
LETTERS = 8  # of the random part of a name


@contextmanager
def replacing_folder(place: Path) -> Iterator[Path]:
    """An empty folder beside a place, to be filled; when the block ends well, it takes the place of what is there.

    If anything fails, it is gone, and what was there stays. What a killed run has left of the place is cleared first.

    Args:
        place: a folder, there or not; where it is a link, what that names is replaced.

    Raises:
        OSError: it can't be written.
    """
    place = Path(os.path.realpath(place))
    put_back(place)
    with staging(place) as staged:
        new = staged / NEW
        new.mkdir()
        yield new
        aside = [(place, staged / OLD)] if os.path.lexists(place) else []
        move(staged, [*aside, (new, place)])


@contextmanager
def staging(place: Path) -> Iterator[Path]:
    """A new folder beside a place, on its file system, which goes when the block ends.

    Args:
        place: a path without links; the folder that it is in is made.

    Raises:
        OSError: it can't be made.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    staged, mark = _marked(place)
    try:
        with mark:
            yield staged
    finally:
        if not (staged / MOVES).exists():  # else a later run undoes what this one could not
            _remove(staged)


def _marked(place: Path) -> tuple[Path, IO[bytes]]:
    """A new folder, and its mark, which is locked."""
    while True:
        staged = place.with_name(f".{place.name}.{secrets.token_hex(LETTERS // 2)}.part")
        staged.mkdir(mode=0o700)
        with suppress(FileNotFoundError):  # a run that cleared meanwhile has taken it for one that was left
            mark = (staged / MARK).open("xb")
            if _lock(mark.fileno()) is not False and (staged / MARK).exists():
                return staged, mark
            mark.close()


def move(staged: Path, moves: Sequence[tuple[Path, Path]], files: Mapping[Path, Path] | None = None) -> None:
    """Move files and folders, all of them or none; then put files in the place of others.

    Args:
        staged: of `staging`.
        moves: from where, to where nothing is, in this order; all lie in or beside the folder, on its file system.
        files: a file that stands there, or not, to the one that takes its place: whoever reads meanwhile has either.

    Raises:
        OSError: one can't be moved; all are as they were.
    """
    kept = {}
    for number, target in enumerate(files or {}):
        if os.path.lexists(target):
            kept[_kept(target, staged / f"{OLD}-file-{number}")] = target
    moves = [*moves, *((path, target) for target, path in (files or {}).items())]
    told = {"mark": _made(staged), "moves": _told(staged, moves), "files": _told(staged, kept.items())}
    replace_file(staged / MOVES, json.dumps(told))
    try:
        for source, target in moves:
            source.rename(target)
    except BaseException:
        _undo(staged)
        raise
    (staged / MOVES).unlink()


def put_back(place: Path) -> None:
    """Undo what killed runs had begun at a place, and remove what they have left beside it.

    Raises:
        OSError: what was there can't be put back.
    """
    for staged in _left(Path(os.path.realpath(place))):
        try:
            file = os.open(staged / MARK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            with suppress(OSError):  # killed before it had its mark, or after that had gone: there is nothing in it
                staged.rmdir()
            continue
        try:
            if _lock(file) and _undo(staged):
                _remove(staged)
        finally:
            os.close(file)


def _left(place: Path) -> list[Path]:
    """This user's folders beside a place that have the name of one that is made there."""
    pattern = re.compile(rf"\.{re.escape(place.name)}\.[0-9a-f]{{{LETTERS}}}\.part")
    found = []
    with suppress(OSError):  # the folder is not there, or not to be read
        for path in place.parent.iterdir():
            if pattern.fullmatch(path.name):
                told = path.lstat()
                if stat.S_ISDIR(told.st_mode) and told.st_uid == os.geteuid():
                    found.append(path)
    return found


def _lock(descriptor: int) -> bool | None:
    """Whether the lock is had; None where the file system knows no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _kept(file: Path, name: Path) -> Path:
    """A second name of a file; a copy, where a file system has none."""
    try:
        os.link(file, name, follow_symlinks=False)
    except OSError:
        shutil.copy2(file, name, follow_symlinks=False)
    return name


def _made(staged: Path) -> list[int]:
    """What tells a mark that this folder was made with from one that came with it."""
    mark = (staged / MARK).lstat()
    return [mark.st_ino, mark.st_ctime_ns]


def _told(staged: Path, moves: Any) -> list[list[str]]:
    return [[str(path.relative_to(staged.parent)) for path in pair] for pair in moves]


def _undo(staged: Path) -> bool:
    """Undo moves; whether all that was set aside is back. What is told in a copy of such a folder is not done."""
    try:
        told = read_json(staged / MOVES)
        if told["mark"] != _made(staged):
            return False
        pairs = {
            key: [(_below(staged, source), _below(staged, target)) for source, target in told[key]]
            for key in ("moves", "files")
        }
    except FileNotFoundError:  # none had begun, or all were done
        return True
    except (ValueError, TypeError, KeyError):  # none of ours
        return False
    for kept, target in pairs["files"]:
        if os.path.lexists(kept):
            kept.replace(target)
    back = [target for _, target in pairs["files"]]
    whole = True
    for source, target in reversed(pairs["moves"]):
        if target in back or not os.path.lexists(target):
            continue
        if not os.path.lexists(source):
            target.rename(source)
        elif staged in target.parents:  # somebody has put another in its place meanwhile
            whole = False
    if whole:
        (staged / MOVES).unlink()
    return whole


def _below(staged: Path, name: str) -> Path:
    if not stands_inside(name):
        raise ValueError(name)
    return staged.parent / name


def _remove(staged: Path) -> None:
    """The mark goes last: what is removed by halves is known by it."""
    with suppress(OSError):
        for path in staged.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != MARK:
                path.unlink()
    with suppress(OSError):
        if not any(path.name != MARK for path in staged.iterdir()):
            shutil.rmtree(staged, ignore_errors=True)
