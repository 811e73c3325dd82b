"""Names of classes that data brings: `datasets` has them as ClassLabel, in a folder that it saved and in Parquet.

Source: datasets, `Features.to_dict` and `Features.arrow_schema`: ClassLabel has `names` by number; lists of them are a
Sequence or a List of a `feature`, or a list of one.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compress.errors import DatasetError, first_line
from compress.vetting.arrow_rows import INFO, is_saved, parquet_schema, saved_schema
from compress.vetting.shards import is_sharded, shards_of
from compress.vetting.texts import parse_json, read_json

__all__ = ["class_names", "schema_of"]

KEY = b"huggingface"  # of a schema's metadata
DEEPEST = 8
_LISTS = ("Sequence", "List", "LargeList")


def class_names(path: Path) -> dict[str, tuple[str, ...]]:
    """The names of classes by number, by column, where a file or a folder of rows has them.

    Args:
        path: of `compress.vetting.tables.rows_of`.

    Raises:
        DatasetError: it can't be read, or what it says of its columns is damaged.
    """
    saved = is_saved(path)
    if not saved and is_sharded(path):
        return _alike(path, [(file.name, class_names(file)) for file in shards_of(path)])
    if not saved and path.suffix != ".parquet":
        return {}
    try:
        info: Any = read_json(path / INFO) if saved and (path / INFO).is_file() else {}
        features = info.get("features") or _in_schema(path) or {}
        found = {str(name): _names(feature) for name, feature in dict(features).items()}
    except (AttributeError, KeyError, TypeError, ValueError, OSError) as err:
        raise DatasetError(
            f"can't read the data {path}",
            why=f"what it says of its columns is not as `datasets` writes it: {_told(err)}",
            mend="save it again, or write it as .jsonl with the names of the classes",
        ) from err
    return {name: names for name, names in found.items() if names is not None}


def _told(err: Exception) -> str:
    """A KeyError says no more than the key."""
    return f"it has no {first_line(err)[:200]}" if isinstance(err, KeyError) else first_line(err)[:200]


def _alike(path: Path, found: list[tuple[str, dict[str, tuple[str, ...]]]]) -> dict[str, tuple[str, ...]]:
    """The names that all files of a folder have.

    Raises:
        DatasetError: one has others.
    """
    first, names = found[0]
    other = next((file for file, others in found if others != names), None)
    if other is not None:
        why = f"{first} and {other} have other names for the numbers of their classes"
        raise DatasetError(f"can't read the data {path}", why=why, mend="name one file, or write them again alike")
    return names


def schema_of(path: Path) -> Any:
    """The schema of a Parquet file, of the first of a folder, or of a saved folder, of pyarrow's kind; else None.

    Raises:
        DatasetError: pyarrow is not installed.
        OSError, ValueError: it can't be read.
    """
    if is_saved(path):
        return saved_schema(path)
    file = next(iter(shards_of(path)), path) if is_sharded(path) else path
    return parquet_schema(file) if file.suffix == ".parquet" else None


def _in_schema(path: Path) -> Any:
    """The features that stand in the schema's metadata; None where there are none."""
    try:
        schema = schema_of(path)
    except (OSError, ValueError) as err:
        mend = "write it again, a row for each sample"
        raise DatasetError(f"can't read the data {path}", why=first_line(err)[:300], mend=mend) from err
    told = getattr(schema, "metadata", None) or {}
    return parse_json(told[KEY])["info"]["features"] if KEY in told else None


def _names(feature: Any, depth: int = 0) -> tuple[str, ...] | None:
    if isinstance(feature, list) and len(feature) == 1 and depth < DEEPEST:
        return _names(feature[0], depth + 1)
    if not isinstance(feature, Mapping):
        return None
    kind = feature.get("_type")
    if kind in _LISTS and depth < DEEPEST:
        return _names(feature.get("feature"), depth + 1)
    if kind != "ClassLabel" or feature.get("names") is None:
        return None
    names = feature["names"]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError("the names of a ClassLabel are no list of texts")
    return tuple(names)
