"""What stands in the folders of packed models and was not packed: it would be lost with them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from compress.errors import RepositoryError
from serve.repository.entries import CACHE, is_byte_code
from serve.repository.folders import PACKED_FILE
from serve.repository.provenance import KEPT, PROVENANCE_FILE, read_provenance

__all__ = ["refuse_losing"]

PACKED = ("config.pbtxt", PACKED_FILE, "labels.txt")


def refuse_losing(models: Sequence[Path], versions: Sequence[Path] = ()) -> None:
    """Refuse to remove folders of models, or of versions alone, that hold more than what was packed.

    Raises:
        RepositoryError: one does.
    """
    held = [(folder, _of_model(folder)) for folder in models] + [(folder, _of_version(folder)) for folder in versions]
    for folder, found in held:
        if others := sorted(found):
            shown = ", ".join(map(repr, others[:3])) + (f" and {len(others) - 3} more" if len(others) > 3 else "")
            raise RepositoryError(
                f"can't replace {folder}",
                why=f"it holds what no pack has put there, and what would go with it: {shown}",
                mend="move that to another folder, then pack again",
            )


def _of_model(folder: Path) -> Iterator[str]:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            inside = _of_version(path) if path.name.isdecimal() else _files(path)
            yield from (f"{path.name}/{name}" for name in inside)
        elif path.name not in PACKED and not is_byte_code(path.name):
            yield path.name


def _of_version(folder: Path) -> Iterator[str]:
    """Of one without a list of its files, nothing is known: an ensemble's, an earlier release's, an edit's."""
    try:
        told = read_provenance(folder)
    except RepositoryError:
        return
    if told is not None:
        yield from (name for name in _files(folder) if name not in told.files and name not in (PROVENANCE_FILE, KEPT))


def _files(folder: Path) -> Iterator[str]:
    for path in folder.rglob("*"):
        compiled = path.parent.name == CACHE and is_byte_code(path.name)
        if not compiled and (path.is_symlink() or not path.is_dir()):
            yield str(path.relative_to(folder))
