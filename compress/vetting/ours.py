"""Whether a file says what this user wants, or may be another's word: who could have written it, or put it there.

Every folder on the way counts, and every link: whoever may write to a folder can put something else in its place. In a
sticky folder (as /tmp) nobody can take away what is another's, so a file there is as good as its owner.
"""

from __future__ import annotations

import grp
import os
import pwd
import re
import stat
from pathlib import Path

from compress.errors import ServerError

__all__ = ["check_ours"]

MOST_STEPS = 400  # folders and links on the way
MOUNTS = Path("/proc/self/mountinfo")
IN_CONTAINER = (Path("/.dockerenv"), Path("/run/.containerenv"))
OTHERS = "it could have been put there by another user"
# What /proc/…/fd holds is no link to a path: the kernel goes straight to what is open.
OPEN = re.compile(r"/proc/(\d+|\d+/task/\d+)/fd")


def check_ours(path: Path, *, alone: bool = False, folder: bool = False, linked: bool = False) -> None:
    """Return where only this user and root can have a say in what a file holds.

    It belongs to one of them, is writable by nobody else, and is in no folder where others could exchange it. A group
    of this user's alone is no other: where users have one each, files are made writable for it. In a container, what
    is mounted was chosen by whoever runs that: the owner of a mount counts as this user, and its topmost folder may be
    writable by all (a volume of Kubernetes is), unless it is sticky, and so meant for many.

    Args:
        path: a file, or a pipe that the shell has opened.
        alone: whether what lies beside it counts, too (a database's journal, compiled Python): others may add nothing
            to the folder then, not even to a sticky one.
        folder: it is a folder itself, and no link to one, into which nobody else may put anything.
        linked: it may be a link to such a folder, too, that nobody else has made or could exchange.

    Raises:
        ServerError: it is another's word; says whose, and what to do.
        FileNotFoundError: there is none; the folder is as it should be.
        OSError: it can't be seen.
    """
    _Way(path, alone=alone, folder=folder, linked=linked).go()


class _Way:
    """From the topmost folder to a file, link by link."""

    def __init__(self, path: Path, *, alone: bool, folder: bool = False, linked: bool = False) -> None:
        self._path, self._alone, self._folder, self._linked = path, alone, folder, linked
        self._contained = "KUBERNETES_SERVICE_HOST" in os.environ or any(each.exists() for each in IN_CONTAINER)
        self._mounts = _mounts() if self._contained else frozenset()
        self._trusted = {0, os.geteuid()}

    def go(self) -> None:
        whole = self._path if self._path.is_absolute() else Path.cwd() / self._path
        left = [*reversed(whole.parts)]
        at, folder = Path("/"), Path("/").lstat()
        steps = 0
        while left:
            if (steps := steps + 1) > MOST_STEPS:
                raise self._error("there are too many links on the way", "name the file itself")
            step = left.pop()
            if step in ("/", ".."):  # `at` has no link in it
                at = Path("/") if step == "/" else at.parent
                folder = at.lstat()
                self._check_folder(at, folder)
                continue
            if not left and self._alone and self._others(folder) and not self._vouched(at, folder):
                self._refuse_folder(at)
            here = at / step
            told = here.lstat()
            self._check_owner(here, told, folder)
            if self._folder and not left and not (self._linked and stat.S_ISLNK(told.st_mode)):
                self._check_end(here, told)
                return
            if stat.S_ISLNK(told.st_mode) and not OPEN.fullmatch(str(at)):
                left += reversed(here.readlink().parts)
            elif left:
                self._check_folder(here, told)
                at, folder = here, told
            else:
                self._check_file(here, here.stat(), folder)
                return
        raise self._error("it is no file", "name a file")

    def _check_folder(self, at: Path, told: os.stat_result) -> None:
        open_to_others = stat.S_ISDIR(told.st_mode) and self._others(told) and not told.st_mode & stat.S_ISVTX
        if open_to_others and not self._vouched(at, told):
            self._refuse_folder(at)

    def _check_owner(self, here: Path, told: os.stat_result, folder: os.stat_result) -> None:
        if str(here) in self._mounts and not told.st_mode & stat.S_ISVTX:
            self._trusted.add(told.st_uid)
        if told.st_uid not in self._trusted:
            whose = _name(told.st_uid)
            raise self._error(f"{here} belongs to {whose}", "make it yours (chown), or name a file of yours")
        if folder.st_mode & stat.S_ISVTX and self._others(folder) and stat.S_ISREG(told.st_mode) and told.st_nlink > 1:
            raise self._error(f"{here} is another name of a file elsewhere", "name a file in a folder of yours")

    def _check_end(self, here: Path, told: os.stat_result) -> None:
        if not stat.S_ISDIR(told.st_mode):
            raise self._error("it is a link" if stat.S_ISLNK(told.st_mode) else "it is no folder", "take it away")
        if self._others(told) and not self._vouched(here, told):
            raise self._error("other users may write into it", f"chmod go-w {here}")

    def _check_file(self, here: Path, told: os.stat_result, folder: os.stat_result) -> None:
        if not (stat.S_ISREG(told.st_mode) or (stat.S_ISFIFO(told.st_mode) and not self._alone)):
            raise self._error("it is a directory" if stat.S_ISDIR(told.st_mode) else "it is no file", "name a file")
        self._check_owner(here, told, folder)
        if self._others(told):
            raise self._error("other users may write the file", f"chmod go-w {self._path}")

    def _others(self, told: os.stat_result) -> bool:
        """Whether others may write there."""
        mode = told.st_mode
        return bool(mode & stat.S_IWOTH) or (bool(mode & stat.S_IWGRP) and not self._is_private(told.st_gid))

    def _vouched(self, at: Path, told: os.stat_result) -> bool:
        return str(at) in self._mounts and not told.st_mode & stat.S_ISVTX

    def _is_private(self, gid: int) -> bool:
        """Whether nobody else is in a group, as far as the tables of users say."""
        try:
            user = pwd.getpwuid(os.geteuid())
            own, me = user.pw_gid, user.pw_name
        except KeyError:
            own, me = -1, ""
        mine = gid in {os.getegid(), *os.getgroups()}
        try:
            group = grp.getgrgid(gid)
        except KeyError:
            return mine or self._contained
        if set(group.gr_mem) - {me, "root"}:
            return False
        return gid == 0 or (gid == own and group.gr_name == me) or (mine and self._contained)

    def _refuse_folder(self, at: Path) -> None:
        mend = f"put it in a folder of yours, or: chmod go-w {at}"
        raise self._error(f"other users may write to the folder {at}: {OTHERS}", mend)

    def _error(self, why: str, mend: str) -> ServerError:
        return ServerError(f"can't trust {self._path}", why=why, mend=mend)


def _mounts() -> frozenset[str]:
    """Where something is mounted, the topmost left out."""
    try:
        lines = MOUNTS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return frozenset()
    named = (line.split(" ")[4] for line in lines if line.count(" ") > 4)
    found = (re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), name) for name in named)
    return frozenset(found) - {"/"}


def _name(uid: int) -> str:
    try:
        return f"the user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"the user {uid}"
