"""Putting a set of model folders into a repository all at once, and finding what may be replaced there."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from compress.errors import RepositoryError
from compress.vetting.swap import move, put_back
from compress.vetting.swap import staging as beside_it
from serve.config.pbtxt import from_pbtxt, read_config

__all__ = [
    "PACKED_FILE", "PART_OF", "check_hidden", "files_of", "folders_of", "hidden_of", "parts_of", "recover",
    "replaceable", "replacing", "staging", "unwritable",
]  # fmt: skip

PACKED_BY = "packed_by"
PART_OF = "part_of"
SUFFIXES = ("_preprocess", "_network", "_postprocess")

PACKED_FILE = ".packed.pbtxt"
"""Beside config.pbtxt: what `serve pack` wrote into it, so that edits by hand can be told."""


def folders_of(repository: Path, names: Collection[str] | None = None) -> list[Path]:
    """The model folders of a repository, by name.

    Args:
        repository: holds them.
        names: those to look for, which need not be there; no other is touched: it may be a mount that hangs.

    Raises:
        RepositoryError: there is no such folder, or no model in it.
    """
    if not repository.is_dir():
        why = "it is not a folder" if repository.exists() else "there is no such folder"
        raise RepositoryError(f"{repository} is not a model repository", why=why, mend="make one with `serve pack`")
    entries = (path for path in repository.iterdir() if names is None or path.name in names)
    folders = sorted(path for path in entries if not path.name.startswith(".") and path.is_dir())
    if not folders and names is None:
        raise RepositoryError(
            f"{repository} holds no model", why="it has no model folder", mend="write one into it with `serve pack`"
        )
    return folders


def hidden_of(repository: Path) -> list[str]:
    """The folders that no rule here takes for models, and a Triton that loads all it finds does: .git, say."""
    return sorted(path.name for path in repository.iterdir() if path.name.startswith(".") and path.is_dir())


def check_hidden(repository: Path) -> None:
    """Refuse what only a Triton that is told its models by name leaves alone; those of containers are told none.

    Raises:
        RepositoryError: there is a folder with a dot in front.
    """
    for name in hidden_of(repository) if repository.is_dir() else ():
        raise RepositoryError(
            f"can't serve {str(repository)!r} in a container",
            why=f"Triton takes its folder {name!r} for a model there, and runs what is in it",
            mend="move that folder out of the repository",
        )


def files_of(folder: Path) -> list[Path]:
    """The files below a folder, by path, without what Python compiled."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)


def unwritable(repository: Path, err: OSError) -> RepositoryError:
    """The error for a disk that refuses."""
    return RepositoryError(
        f"can't write into {repository}",
        why=str(err),
        mend="free space there, or name a folder that you may write to, and whose parent you may write to",
    )


def parts_of(repository: Path, name: str) -> list[str]:
    """The model folders that a pack wrote for `name`, that one first."""
    names = (name, *(name + suffix for suffix in SUFFIXES))
    return [candidate for candidate in names if _owner(repository / candidate) == name]


def replaceable(repository: Path, name: str, new: set[str]) -> list[str]:
    """The model folders that an earlier pack wrote for `name`; they make way for the `new` ones.

    Raises:
        RepositoryError: one of the new names belongs to something else.
    """
    old = []
    for candidate in (name, *(name + suffix for suffix in SUFFIXES)):
        folder = repository / candidate
        owner = _owner(folder)
        if owner == name:
            old.append(candidate)
        elif candidate in new and (folder.exists() or folder.is_symlink()):
            why = f"it is part of the model {owner!r}" if owner else "it was not written by `serve pack`"
            raise RepositoryError(
                f"can't replace {folder}", why=why, mend="give the model another name, or move that folder away"
            )
    return old


@contextmanager
def replacing(repository: Path, old: list[str]) -> Iterator[Path]:
    """A folder to write the new model folders into; when the block ends well, they take the old ones' place.

    The folder stands beside the repository, on its file system, so that nothing is copied into place. When the block or
    a rename fails, the repository is as it was; where the process is killed, the next `pack` there puts it back.

    Raises:
        RepositoryError: the disk refuses.
    """
    with staging(repository) as folder:
        beside, aside = folder / "new", folder / "old"
        beside.mkdir()
        aside.mkdir()
        yield beside
        real = repository.resolve()
        moves = [(real / name, aside / name) for name in old]
        moves += [(path, real / path.name) for path in sorted(beside.iterdir())]
        move(folder, moves)


@contextmanager
def staging(repository: Path) -> Iterator[Path]:
    """An empty folder on the repository's file system, beside it, that goes when the block ends.

    Raises:
        RepositoryError: the disk refuses, in the block, too.
    """
    try:
        repository.mkdir(parents=True, exist_ok=True)
        with beside_it(repository.resolve()) as folder:
            yield folder
    except OSError as err:
        raise unwritable(repository, err) from err


def recover(repository: Path) -> None:
    """Put back what a killed process had half done in a repository, and remove what it has left beside it.

    Raises:
        RepositoryError: the disk refuses.
    """
    try:
        put_back(repository)
    except OSError as err:
        raise unwritable(repository, err) from err


def _owner(folder: Path) -> str | None:
    """The model that a packed folder is part of; None when it was not packed."""
    for path in (folder / "config.pbtxt", folder / PACKED_FILE):  # the first may be damaged by an edit
        try:
            parameters = from_pbtxt(read_config(path), source=str(path)).parameters
        except (OSError, ValueError, RepositoryError):
            continue
        return parameters.get(PART_OF) if PACKED_BY in parameters else None
    return None
