"""The places that a run writes: nothing of value is in the way, one run at a time holds them, what it reads stays."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from compress.artifact import PROCESSOR
from compress.errors import ArtifactError, RecipeError, ResourceError
from compress.formats.files import files_of, read_of, size_of
from compress.jobs.source import DAMAGED
from compress.processor import FILES
from compress.storage.files import LOCK, locked, make_folder, remove_empty
from compress.storage.shortages import cant_write, shortages
from compress.storage.steady import seen, steady
from compress.storage.work_folder import marked, refuse_foreign, refuse_others
from compress.vetting.swap import put_back

__all__ = ["ARTIFACT", "TRAINING", "Kind", "check_output", "claimed", "held", "refuse_overwriting"]

# Bytes that a run needs to write, at the least, besides so many times the model.
ROOM, ROOM_TIMES = 1_000_000, 3
LONGEST = ".missed.01234567.part"  # what is put around the name of an output, at most
HELD = ("artifact.json", "model.onnx", "model.plan", "engine.json")  # what is read of an artifact


@dataclass(frozen=True)
class Kind:
    """Of a folder that runs write.

    Attributes:
        name: what it is called.
        marker: a file that each has.
        files: the others that one may have.
        folders: folders in it, by name, and the files that these may have.
    """

    name: str
    marker: str
    files: frozenset[str]
    folders: Mapping[str, frozenset[str]] = field(default_factory=dict)

    def foreign(self, folder: Path) -> list[str]:
        """What no run has put into such a folder, by name; empty folders hold nothing to lose."""
        found = []
        for path in folder.iterdir():
            if not path.is_dir() or path.is_symlink():
                found += [] if path.name in {self.marker, *self.files} else [path.name]
                continue
            own = self.folders.get(path.name, frozenset())
            found += [str(each.relative_to(folder)) for each in path.rglob("*")
                      if not each.is_dir() and str(each.relative_to(path)) not in own]  # fmt: skip
        return sorted(found)


ARTIFACT = Kind(
    "an artifact",
    "artifact.json",
    frozenset((
        "model.onnx", "model.plan", "model.plan.stripped", "engine.json", "report.json", "report.html", "recipe.toml",
        "reproduce.sh",
    )),
    {PROCESSOR: frozenset(FILES)},
)  # fmt: skip
TRAINING = Kind("a training", "training.json", frozenset(("training.html", "model.pt", "weights.pt", "trace.json")))


@contextmanager
def claimed(
    output: Path, work: Path | None = None, inputs: Sequence[Path] = (), also: Sequence[Path] = ()
) -> Iterator[None]:
    """Hold the places of a run: nothing of value is in the way, nobody else writes them, and what fails leaves nothing.

    A work folder keeps the stages that are through, so that the same command goes on; it goes when there are none.

    Args:
        output: a file or a folder.
        work: the folder that keeps stages.
        inputs: files and folders that the run reads, the model first.
        also: other files and folders that it may replace.

    The model's files, of which some are read from the disk when they are needed, are `seen` from then on.

    Raises:
        ArtifactError: the run would remove what it reads, or the folder that it runs in; or what is kept in the work
            folder may be another user's word, or is no run's.
        ResourceError: a place can't be written, or another run holds it.
    """
    places = [output] if work is None else [output, work]
    _safe(output, work, inputs, also)
    need = ROOM + ROOM_TIMES * sum(map(_bytes_of, inputs[:1]))
    with shortages(*places, need=need), ExitStack() as stack:
        stack.callback(remove_empty, _reachable(_real(output)))
        stack.enter_context(locked(_real(output)))
        if work is not None:  # its own folder may be all that can be written
            stack.callback(remove_empty, _reachable(_real(work) / "stage"))
            refuse_others(work)
            refuse_foreign(work)
            stack.enter_context(locked(_real(work), inside=True))
            stack.enter_context(marked(work))
        stack.enter_context(steady())
        for path in inputs[:1]:
            held(path)
        try:
            yield
        except Exception as err:
            if work is None or (_real(work) / LOCK).exists():
                raise
            raise ResourceError(
                f"{work} is gone",
                why="something has removed it, and what this run kept in it, while the run was on",
                mend="give the same command again, with --work where nothing cleans up",
            ) from err


def held(model: Path) -> None:
    """The files of a model are `seen`: those that are read, of a folder that may have logs beside them."""
    with suppress(*DAMAGED):  # a damaged file: who reads it says so
        for file in read_of(model):
            seen(file)


def _bytes_of(model: Path) -> int:
    with suppress(*DAMAGED):  # a damaged file: who reads it says so
        return size_of(model)
    return 0


def _real(path: Path) -> Path:
    """The path without links, so that what a link names is replaced, not the link."""
    return Path(os.path.realpath(path))


def _reachable(place: Path) -> list[Path]:
    """Make the folder that a place is in; gives what was missing of it."""
    try:
        with suppress(FileNotFoundError):  # a name that is too long is another error
            place.with_name(f".{place.name}{LONGEST}").lstat()
        return make_folder(place.parent)
    except OSError as err:
        raise cant_write(place, err) from err


def _safe(output: Path, work: Path | None, inputs: Sequence[Path], also: Sequence[Path]) -> None:
    mend = "name a new folder with -o"
    for path in (output,) if work is None else (output, work):
        try:
            os.fsencode(_real(path)).decode("utf-8")
        except ValueError as err:  # in a name that is no text, or has a NUL
            why = "its name is not UTF-8, which is all that ONNX Runtime takes"
            raise ArtifactError(f"can't write {path!r}", why=why, mend="name another folder with -o") from err
    real, here = _real(output), _real(Path())
    if real == here or real in here.parents:
        why = "it is the folder that this runs in, or one above it"
        raise ArtifactError(f"won't replace {output}", why=why, mend=mend)
    for place in (output, *also):
        if read := next((path for path in inputs if _is_in(path, place)), None):
            raise ArtifactError(f"won't replace {place}", why=f"{read}, which this run reads, is in it", mend=mend)
    if work is None:
        return
    if read := next((path for path in inputs if _is_in(path, work)), None):
        why = f"{read}, which this run reads, is in it, and what a run needs no more is removed from such a folder"
        mend = f"copy {read} to another folder, or name a new one with --work (or with -o)"
        raise ArtifactError(f"won't keep stages in {work}", why=why, mend=mend)
    if _real(work) == real or real in _real(work).parents or _real(work) in real.parents:
        raise ArtifactError(
            f"can't write {output} and keep stages in {work}",
            why="one is inside the other",
            mend="name folders apart with -o and --work",
        )


def _is_in(path: Path, place: Path) -> bool:
    """Whether a path is a place or lies in it: where it leads to, or a link on the way there."""
    absolute, place = Path(os.path.abspath(path)), _real(place)  # noqa: PTH100  `..` of a link is told by _real
    steps = {_real(path), *(_real(each.parent) / each.name for each in (absolute, *absolute.parents))}
    return any(step == place or place in step.parents for step in steps)


def check_output(output: Path, kind: Kind = ARTIFACT) -> None:
    """Refuse to replace what is no such folder, or holds more; one that an earlier run had set aside is put back.

    Args:
        output: the folder.
        kind: of what is to take its place.

    Raises:
        ArtifactError: there is something else.
    """
    real, mend = _real(output), "name a new folder with -o"
    try:
        put_back(real)
        if not os.path.lexists(real):
            return
        if os.path.ismount(real):
            why = "it is where a file system is mounted, and can't be swapped for another folder"
        elif not real.is_dir():
            why = "it is a file"
        elif any(real.iterdir()) and not (real / kind.marker).exists():
            why = f"it is a folder that holds something other than {kind.name}"
        elif others := kind.foreign(real):
            shown = ", ".join(map(repr, others[:3])) + (f" and {len(others) - 3} more" if len(others) > 3 else "")
            why = f"it holds what no run has put there, and what would go with it: {shown}"
            mend = f"move that to another folder, or {mend}"
        else:
            return
    except OSError as err:
        raise cant_write(output, err) from err
    raise ArtifactError(f"won't replace {output}", why=why, mend=mend)


def refuse_overwriting(file: Path, inputs: Sequence[Path], flag: str, gone: Path | None = None) -> None:
    """Refuse a single file to write that is none, is one of those which the command reads, or would go with a folder.

    Args:
        file: to be written.
        inputs: models and data.
        flag: that names the file.
        gone: a folder that the command replaces.

    Raises:
        RecipeError: it is.
    """
    if gone is not None and _is_in(file, gone):
        why = f"it is in {gone}, which the run replaces as a whole"
        raise RecipeError(f"won't write {file}", why=why, mend=f"name a file elsewhere with {flag}")
    if file.exists() and not file.is_file() and not file.is_dir():
        why = "it is a device, a pipe or a socket, and what is written takes the place of a file"
        raise RecipeError(f"won't write {file}", why=why, mend=f"name a file with {flag}")
    for path in inputs:
        if any(_real(each) == _real(file) for each in _read_of(path, file)):
            why = "the command reads it" if _real(path) == _real(file) else f"it is part of {path}, which is read"
            raise RecipeError(f"won't write {file}", why=why, mend=f"name another file with {flag}")


def _read_of(path: Path, file: Path) -> list[Path]:
    """What a command reads of an input, as far as a file may be one of it: a folder may hold millions."""
    if (path / "artifact.json").is_file() and not _is_in(file, path / PROCESSOR):
        return [path / name for name in HELD]
    if path.is_dir():
        return [file] if file.exists() and _is_in(file, path) else []
    with suppress(*DAMAGED):  # a damaged file: who reads it says so
        return files_of(path)
    return [path]
