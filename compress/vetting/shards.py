"""A folder of Parquet files that are one table: as Spark, polars and data hubs write large ones."""

from __future__ import annotations

import re
from pathlib import Path

from compress.errors import DatasetError

__all__ = ["SUFFIX", "is_sharded", "shards_of"]

SUFFIX = ".parquet"
_SPLITS = ("train", "training", "test", "testing", "val", "valid", "validation", "dev", "eval", "evaluation")
_WORD = re.compile(r"[a-z]+")


def is_sharded(path: Path) -> bool:
    """Whether a folder holds Parquet files, and no arrays."""
    return path.is_dir() and bool(_files(path)) and not any(path.glob("*.np[yz]"))


def shards_of(path: Path) -> list[Path]:
    """The files of such a folder in the order of their names.

    Raises:
        DatasetError: by their names they are several splits, which are not one table.
    """
    files = _files(path)
    words = [found[0] if (found := _WORD.match(file.stem.lower())) else "" for file in files]
    splits = {word: file for word, file in zip(words, files, strict=True) if word in _SPLITS}
    if splits and len({*words}) > 1:
        first = next(iter(splits.values()))
        raise DatasetError(
            f"can't read the data {path}",
            why=f"by their names its files are several splits: {', '.join(dict.fromkeys(words))[:200]}",
            mend=f"name one file, as {first}; or put those of one split into a folder of their own",
        )
    return files


def _files(path: Path) -> list[Path]:
    """Not those that are hidden, as Spark's checksums and a Mac's notes are."""
    return sorted(
        file for file in path.glob(f"*{SUFFIX}") if not file.is_dir() and not file.name.startswith((".", "_"))
    )
