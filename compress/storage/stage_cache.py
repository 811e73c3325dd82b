"""Outputs of stages that any run of this user finds again, whatever folder it writes to: by key, bounded in size.

Several processes share the folder. An output is copied in beside its place and renamed; one that goes is renamed away
first. Whoever reads copies it, and then looks whether it is as it was written: what others have changed, or removed in
between, is as good as not there.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from compress.errors import RecipeError, ResourceError, ServerError
from compress.host.cache_home import NO_HOME, cache_home
from compress.storage.files import locked
from compress.vetting.ours import check_ours
from compress.vetting.texts import read_json

__all__ = ["Entry", "StageCache", "code_digest"]

PACKAGE = Path(__file__).parent.parent
SETTING = "COMPRESS_CACHE_GB"
MOST_GB = 10.0
SAID = "stage.json"  # in each entry: what the stage did
NAMED = re.compile(r"\w+-[0-9a-f]{64}")  # an entry: nothing else is listed, counted or removed
LEFT_SECONDS = 86400.0  # after which what is half copied is no one's any more
ROOM = 2  # times what is kept is to be free on the disk


@dataclass(frozen=True)
class Entry:
    """One output.

    Attributes:
        stage: that gave it.
        did: in a clause; empty where that can't be read.
        size_bytes: of its files.
        used: when it was kept or taken last, in seconds since 1970.
    """

    path: Path
    stage: str
    did: str
    size_bytes: int
    used: float


@dataclass(frozen=True)
class StageCache:
    """A folder of outputs.

    Attributes:
        folder: made when something is kept.
        most_bytes: of all; what was not used for longest goes.
        whole: all is kept, what took no time, too; nobody looks for what is beyond the bound.
    """

    folder: Path
    most_bytes: int
    whole: bool = False

    @classmethod
    def of(cls, environ: Mapping[str, str] = os.environ) -> Self:
        """The user's: in XDG_CACHE_HOME, else ~/.cache; of COMPRESS_CACHE_GB gigabytes (10^9 bytes), 10 if not said.

        Raises:
            RecipeError: COMPRESS_CACHE_GB is no number of 0 or more.
            ResourceError: the user has no home folder.
        """
        said = environ.get(SETTING, "").strip()
        try:
            gigabytes = float(said) if said else MOST_GB
        except ValueError:
            gigabytes = -1.0
        if not 0 <= gigabytes < 1e9:
            why = "it says how many gigabytes of stages are kept: a number of 0 or more"
            raise RecipeError(f"{SETTING} can't be {said!r}", why=why, mend="give 10, or 0 to keep none")
        base = cache_home(environ)
        if base is None:
            mend = "name a folder of yours in XDG_CACHE_HOME, or do without by --no-cache"
            raise ResourceError("there is no place to keep stages in", why=NO_HOME, mend=mend)
        return cls(base / "compress-serve" / "stages", int(gigabytes * 1e9))

    def fetch(self, stage: str, key: str, target: Path) -> bool:
        """Copy an output, which then counts as used.

        Args:
            stage: its name.
            key: of what went in, and all that decides what comes out.
            target: a new folder; it is not there where nothing was copied. What is in it is to be looked through.
        """
        entry = self.entry(stage, key)
        if not self._ours() or not entry.is_dir():
            return False
        try:
            _copy(entry, target)
            os.utime(entry)
        except OSError:  # gone in between, or no room
            shutil.rmtree(target, ignore_errors=True)
            return False
        return True

    def keep(self, stage: str, key: str, source: Path) -> None:
        """Copy an output into the cache, and remove what is beyond its bound; what can't be kept is not.

        Args:
            stage, key: as in `fetch`.
            source: a folder with stage.json.
        """
        with suppress(OSError, ResourceError):
            size = _size(source)
            if size > self.most_bytes:
                return
            if not self.whole:
                self.check()  # before a folder is made there
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not self._ours() or shutil.disk_usage(self.folder).free < ROOM * size:
                return
            entry = self.entry(stage, key)
            if entry.is_dir():
                os.utime(entry)
                return
            beside = Path(tempfile.mkdtemp(prefix=".", suffix=".part", dir=self.folder))
            try:
                _copy(source, beside / entry.name)
                (beside / entry.name).rename(entry)  # another process may have been faster: then this fails
            finally:
                shutil.rmtree(beside, ignore_errors=True)
            if not self.whole:  # or each output kept would have all of them counted
                self._bound()

    def drop(self, stage: str, key: str) -> None:
        """Remove an output that is not as it was written."""
        if self._ours():
            _remove(self.entry(stage, key))

    def entries(self) -> list[Entry]:
        """What is there, the last used first."""
        return sorted(self._found(), key=lambda entry: -entry.used)

    def clear(self) -> tuple[int, int]:
        """Remove all of it; gives how many outputs, and how many bytes, that were."""
        found = self.entries()
        for entry in found:
            _remove(entry.path)
        self._tidy(0.0)
        return len(found), sum(entry.size_bytes for entry in found)

    def entry(self, stage: str, key: str) -> Path:
        """Where an output is, or would be."""
        whole = hashlib.sha256(f"{key} {code_digest()}".encode()).hexdigest()
        return self.folder / f"{stage}-{whole}"

    def check(self) -> None:
        """Return where nobody else has a say in what is there, or would come to be there.

        Who may write into a folder above it, or owns one, could have the path lead to any folder of the user's between
        two steps of a run: sshd looks at the folders of its keys for the same (StrictModes).

        Raises:
            ResourceError: somebody has; says who, and how to mend it.
        """
        try:
            check_ours(self.folder, folder=True)
            if not self._ours():
                raise ServerError("", why="it is not yours alone", mend=f"chmod go-w {self.folder}")
        except ServerError as err:
            mend = f"{err.mend}; or name another folder by XDG_CACHE_HOME, or do without by --no-cache"
            raise ResourceError(f"won't keep stages in {self.folder}", why=err.why, mend=mend) from err
        except OSError:  # it is not there yet, or nobody may look: who writes there says so
            return

    @property
    def can_keep(self) -> bool:
        """Whether something new may be kept: the folder, or what it would be made in, can be written."""
        there = next(place for place in (self.folder, *self.folder.absolute().parents) if place.exists())
        return there.is_dir() and os.access(there, os.W_OK | os.X_OK, effective_ids=True)

    def _ours(self) -> bool:
        """Whether the folder is there, itself and no link to one, and nobody else may write into it.

        Folders above one that machines share are as whoever set it up has made them on each.
        """
        try:
            found = self.folder.lstat()
            if not self.whole:
                check_ours(self.folder, folder=True)
        except (OSError, ServerError):
            return False
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022

    def _found(self) -> Iterator[Entry]:
        if not self._ours():
            return
        for path in self.folder.iterdir():
            with suppress(OSError):
                if not NAMED.fullmatch(path.name) or not stat.S_ISDIR((held := path.lstat()).st_mode):
                    continue
                yield Entry(path, path.name.rpartition("-")[0], _did(path), _size(path), held.st_mtime)

    def _bound(self) -> None:
        """By one process at a time: another one's bound is as good."""
        with locked(self.folder, inside=True):
            found = self.entries()
            while found and sum(entry.size_bytes for entry in found) > self.most_bytes:
                _remove(found.pop().path)
            self._tidy(LEFT_SECONDS)

    def _tidy(self, older: float) -> None:
        """Remove what killed processes have left."""
        if not self._ours():
            return
        for path in (*self.folder.glob(".*.part"), *self.folder.glob(".*.gone")):
            with suppress(OSError):
                if time.time() - path.lstat().st_mtime >= older:
                    shutil.rmtree(path, ignore_errors=True)


@functools.cache
def code_digest() -> str:
    """Of the toolkit itself: who changes it, between two releases, is not given what it was before."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(f"{path.relative_to(PACKAGE)} {path.stat().st_size}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def _copy(source: Path, target: Path) -> None:
    """The files in a folder, as old as they are: no folders in it, and nothing that only leads to a file."""
    target.mkdir()
    for path in source.iterdir():
        if stat.S_ISREG(path.lstat().st_mode):
            shutil.copyfile(path, target / path.name, follow_symlinks=False)
            os.utime(target / path.name, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))


def _size(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.iterdir() if stat.S_ISREG(path.lstat().st_mode))


def _did(folder: Path) -> str:
    with suppress(OSError, ValueError, KeyError, TypeError):
        said = read_json(folder / SAID)["did"]
        return said if isinstance(said, str) else ""
    return ""


def _remove(entry: Path) -> None:
    """Renamed first: nobody finds half of it."""
    gone = entry.with_name(f".{entry.name[:100]}.{secrets.token_hex(4)}.gone")
    with suppress(OSError):
        entry.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)
