"""The folder that every node has under one path: inputs by their content, stages by their keys, and a probe.

Tasks work in folders of their own node, and copy what is whole into this one. So a task that is begun again elsewhere,
while a node that was given up still writes, can't spoil what the other does.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import secrets
import shutil
import stat
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compress.artifact import sha256_of
from compress.errors import RecipeError, ResourceError
from compress.storage.files import make_folder
from compress.storage.shortages import shortages
from compress.storage.stage_cache import StageCache
from compress.storage.steady import known, seen
from compress.storage.work_folder import refuse_others
from compress.vetting.replace import replace_file

__all__ = ["FOLDER", "LAYERS", "Shared"]

FOLDER, LAYERS = "ray", "ray-layers"  # of a search, of a sensitivity
PARTS = ("stages", "inputs", "known")
CHANNELS = "channels-*.json"  # what was found out of a model's channels


@dataclass(frozen=True)
class Shared:
    """Where a search keeps what goes between machines.

    Attributes:
        root: of this user alone.
        given: the folder that the user names; what lies in it is read where it is.
        made: of it and those above, what was not there before.
    """

    root: Path
    given: Path
    made: tuple[Path, ...] = ()

    @classmethod
    def at(cls, named: str | Path, folder: str = FOLDER) -> Shared:
        """In a folder that the user names.

        Args:
            named: it.
            folder: in it, of one kind of work.

        Raises:
            RecipeError: it is no path.
            ArtifactError, ResourceError: others may write there, or this process may not.
        """
        text = str(named)
        if "://" in text or ":/" in text:  # a Path has lost one of the slashes
            raise RecipeError(
                f"--shared can't be {text}",
                why="models and data are read as files, so it has to be a folder of each machine's file system",
                mend="mount the bucket or the share under one path on each machine, and name that",
            )
        given = Path(named).absolute()  # as it is named: where a link leads on this machine, another need not have
        root = given / folder
        with shortages(root):
            made = make_folder(given)
            refuse_others(given, above=False)
            root.mkdir(mode=0o700, exist_ok=True)
            refuse_others(root, above=False)
            for name in PARTS:
                (root / name).mkdir(mode=0o700, exist_ok=True)
        return cls(root, given, tuple(made))

    @property
    def stages(self) -> StageCache:
        """What is through, whoever made it; without a bound, as a work folder is."""
        return StageCache(self.root / "stages", sys.maxsize, whole=True)

    def place(self, path: Path, files: Sequence[Path] = ()) -> Path:
        """Where each node finds a file or a folder of this machine; copied there, unless it is there already.

        Args:
            path: to read.
            files: what belongs to it, and lies in its folder; by default itself, or all in it.

        Raises:
            ResourceError: it can't be copied, or changes meanwhile.
        """
        real = Path(os.path.realpath(path))
        if (here := Path(os.path.realpath(self.given))) in real.parents:
            return self.given / real.relative_to(here)
        named = path.absolute()  # by the links by which its files are named, too
        base = named if named.is_dir() else named.parent
        listed = {Path(os.path.relpath(each.absolute(), base)): each for each in files or _in(named)}
        if any(".." in name.parts for name in listed):  # what belongs to it lies elsewhere
            listed = {Path(each.name): each for each in files}
            if len(listed) < len(files):
                raise ResourceError(
                    f"can't bring {path} to the nodes",
                    why="files of one name that belong to it lie in several folders",
                    mend="copy it, with all that belongs to it, into one folder",
                )  # fmt: skip
        target = self.root / "inputs" / _content(listed, seen)
        placed = "it" if real.is_dir() else named.name
        if self.check(target / placed):
            damaged = target.exists()
            once = f".{target.name}.{secrets.token_hex(4)}"
            beside, gone = target.with_name(f"{once}.part"), target.with_name(f"{once}.old")
            try:
                with shortages(beside):
                    for name, each in listed.items():
                        copy = (beside / placed if real.is_dir() else beside) / name
                        copy.parent.mkdir(parents=True, exist_ok=True)
                        shutil.copyfile(each, copy)
                    if content_at(beside / placed) != target.name:
                        why = "it changed while it was copied, or the copy is not what was written"
                        mend = "give the same command again when nothing writes it; else look at that folder's disk"
                        raise ResourceError(f"can't bring {path} to the nodes", why=why, mend=mend)
                    if damaged:
                        target.rename(gone)
                    with contextlib.suppress(FileExistsError, OSError):  # another run was faster
                        beside.rename(target)
            finally:
                for folder in (beside, gone):
                    shutil.rmtree(folder, ignore_errors=True)
        return target / placed

    def known(self) -> dict[str, Any]:
        """What the run has read of this folder, for the `steady` of a node: by the names there, and content alone."""
        here, read = Path(os.path.realpath(self.given)), known()

        def there(kind: str) -> dict[str, Any]:
            found = {Path(os.path.realpath(name)): told for name, told in read[kind].items()}
            return {
                str(self.given / name.relative_to(here)): told for name, told in found.items() if here in name.parents
            }

        files = {name: [sha256, []] for name, (sha256, _) in there("files").items()}
        return {"files": files, "listings": there("listings")}

    def check(self, path: Path) -> str:
        """Whether an input that was placed is what it is named by; gives what is wrong, or nothing."""
        inputs = self.root / "inputs"
        if inputs not in path.parents:
            return ""  # it lies in the folder as the user keeps it
        wanted = path.relative_to(inputs).parts[0]
        try:
            return "" if content_at(path) == wanted else f"the content of {path} is not what was put there"
        except OSError as err:
            return f"{path} can't be read: {err.strerror or err}"

    def lend(self, work: Path) -> None:
        """What earlier tasks found out about channels, for a work folder: it takes long, and hangs on no candidate."""
        for path in (self.root / "known").glob(CHANNELS):
            with contextlib.suppress(OSError):
                shutil.copyfile(path, work / path.name)

    def keep(self, work: Path) -> None:
        """The same from a work folder, for later tasks."""
        for path in work.glob(CHANNELS):
            if not (self.root / "known" / path.name).exists():
                with contextlib.suppress(OSError):
                    replace_file(self.root / "known" / path.name, path.read_bytes())

    def remove_empty(self) -> None:
        """What nothing came to be kept in."""
        for folder in (*(self.root / name for name in PARTS), self.root, *self.made):
            with contextlib.suppress(OSError):
                folder.rmdir()

    def clear(self) -> None:
        """Remove what is kept in it, where nobody is to go on with it; not what others have put beside that."""
        for name in PARTS:
            shutil.rmtree(self.root / name, ignore_errors=True)
        self.remove_empty()

    def write_probe(self) -> str:
        """A word in a file, for each node to read; gives the word."""
        word = secrets.token_hex(16)
        try:
            replace_file(self.root / f"probe-{word}", word, mode=0o600)
        except OSError as err:
            why = err.strerror or str(err)
            raise ResourceError(f"can't write {self.root}", why=why, mend="name another folder with --shared") from err
        return word

    def see_probe(self, word: str) -> str:
        """On a node: read it and write an answer; gives what is wrong, or nothing."""
        if not self.root.is_dir():
            return "it has no such folder"
        if not (self.root / f"probe-{word}").is_file():
            return "a file that was written into it here is not in the folder of that name there"
        told = self.root.lstat()
        if told.st_uid != os.geteuid() or not stat.S_ISDIR(told.st_mode):
            return f"it belongs to user {told.st_uid} there, and Ray runs as user {os.geteuid()}"
        try:
            replace_file(self.root / f"probe-{word}-{secrets.token_hex(4)}", word, mode=0o600)
        except OSError as err:
            return f"it can't write there: {err.strerror or err}"
        return ""

    def remove_probe(self, word: str) -> int:
        """Remove it and its answers; gives how many of these there are, as seen from here."""
        answers = 0
        for path in self.root.glob(f"probe-{word}*"):
            answers += path.name != f"probe-{word}"
            path.unlink(missing_ok=True)
        return answers


def content_at(placed: Path) -> str:
    """What an input that was placed has to lie under: by the names and the bytes that are there.

    Read again only where size, time or number of a file is another: a process has one task after the other.
    """
    base = placed if placed.is_dir() else placed.parent
    found = ((each.relative_to(base), each, each.stat()) for each in _in(base))
    return _content_of(tuple((name, each, told.st_size, told.st_mtime_ns, told.st_ino) for name, each, told in found))


@functools.lru_cache(64)
def _content_of(files: tuple[tuple[Path, Path, int, int, int], ...]) -> str:
    return _content({name: path for name, path, *_ in files})


def _content(files: Mapping[Path, Path], known_by: Callable[[Path], str] = sha256_of) -> str:
    digest = hashlib.sha256()
    for name, each in sorted(files.items()):
        digest.update(f"{name}\n{known_by(each)}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:32]


def _in(path: Path) -> list[Path]:
    """The file itself, or all files of a folder."""
    if not path.is_dir():
        return [path]
    found = [Path(folder) / name for folder, _, names in os.walk(path, followlinks=True) for name in names]
    return sorted(each for each in found if each.is_file())
