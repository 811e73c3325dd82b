"""A folder that is no data as it is: what it seems to be, and what to name instead."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from compress.data.images import SUFFIXES as IMAGES
from compress.errors import DatasetError
from compress.vetting.tables import SUFFIXES as TABLES

__all__ = ["refuse_folder"]

_SHOWN = 5


def refuse_folder(path: Path) -> None:
    """Refuse a folder that holds neither arrays nor rows nor images where they are read.

    Raises:
        DatasetError: it is one; says what to name.
    """
    if not path.is_dir() or any(path.glob("*.np[yz]")):
        return
    held = sorted(each for each in path.glob("*") if not each.name.startswith("."))
    what = f"can't read the data {path}"
    pictured = [each for each in held if each.is_dir() and any(_has(each.glob("*/*"), IMAGES))]
    if pictured:
        why = f"its folders hold folders of images: {_named(pictured)}; a folder for each class is read"
        raise DatasetError(what, why=why, mend=f"name one of its folders: {pictured[-1]}")
    tables = [*_has(iter(held), TABLES)]
    if tables:
        why = f"it is a folder, and holds {_named(tables)}"
        raise DatasetError(what, why=why, mend=f"name one of its files: {tables[0]}")
    deeper = [each for each in held if each.is_dir() and any(_has(each.glob("*"), (*TABLES, ".npy", ".npz", ".arrow")))]
    why = f"it holds no arrays (.npy, .npz), no rows and no images: {_named(held) or 'it is empty'}"
    mend = f"name one of its folders: {deeper[0]}" if deeper else "name the file or the folder that has them"
    raise DatasetError(what, why=why, mend=mend)


def _has(files: Iterable[Path], suffixes: Sequence[str]) -> Iterator[Path]:
    return (file for file in files if file.suffix.lower() in suffixes and not file.name.startswith("."))


def _named(files: list[Path]) -> str:
    more = f" and {len(files) - _SHOWN:,} more" if len(files) > _SHOWN else ""
    return ", ".join(file.name for file in files[:_SHOWN])[:200] + more
