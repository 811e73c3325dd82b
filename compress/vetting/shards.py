"""A folder of Parquet files that are one table: as Spark, polars and data hubs write large ones."""

from __future__ import annotations

import re
from pathlib import Path

from compress.errors import DatasetError

__all__ = ["SUFFIX", "is_sharded", "shards_of"]

SUFFIX = ".parquet"
_SPLITS = {"train", "training", "test", "testing", "val", "valid", "validation", "dev", "eval", "evaluation"}
_WORD = re.compile(r"[a-z]+")


def is_sharded(path: Path) -> bool:
    """Whether a folder holds Parquet files, and no arrays."""
    return path.is_dir() and bool(_files(path)) and not any(path.glob("*.np[yz]"))


def shards_of(path: Path) -> list[Path]:
    """The files of such a folder in the order of their names.

    Raises:
        DatasetError: by their names they are several splits, which are not one table; or one is a pipe, or a link to
            nothing.
    """
    files = _files(path)
    odd = next((file for file in files if not file.is_file()), None)
    if odd is not None:
        why = f"{odd.name} in it is {'no file that could be read twice' if odd.exists() else 'a link to nothing'}"
        raise DatasetError(
            f"can't read the data {path}", why=why, mend="leave the table's own files alone in the folder"
        )
    first: dict[str, Path] = {}
    for file in files:
        first.setdefault(" and ".join(sorted({*_WORD.findall(file.stem.lower())} & _SPLITS)), file)
    if len(first) > 1:
        told = ", ".join(f"{file.name}{f' ({split})' if split else ''}" for split, file in list(first.items())[:3])
        one = next(file for split, file in first.items() if split)
        raise DatasetError(
            f"can't read the data {path}",
            why=f"by their names its files are several splits: {told[:300]}",
            mend=f"name one file, as {one}; or put those of one split into a folder of their own",
        )
    return files


def _files(path: Path) -> list[Path]:
    """Not those that are hidden, as Spark's checksums and a Mac's notes are."""
    return sorted(
        file for file in path.glob(f"*{SUFFIX}") if not file.is_dir() and not file.name.startswith((".", "_"))
    )
