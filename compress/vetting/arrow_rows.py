"""Rows of Arrow's files: Parquet, and the folders that `datasets` saves. A row is bounded, a file is not."""

from __future__ import annotations

import os
import struct
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from compress.errors import DatasetError, first_line
from compress.vetting.csv_rows import MOST_OTHERS
from compress.vetting.files import NoFileError, open_file
from compress.vetting.parquet_batches import TooLargeError, planned
from compress.vetting.paths import stands_inside
from compress.vetting.texts import read_json

__all__ = [
    "INFO",
    "Row",
    "is_saved",
    "kind_not_read",
    "parquet_rows",
    "parquet_schema",
    "saved_files",
    "saved_rows",
    "saved_schema",
]

LONGEST_ROW = 16 << 20  # letters
MOST_COLUMNS, LARGEST_FOOTER = 20_000, 32 << 20  # of a file; a Parquet file's metadata
MOST_CELLS = 1 << 20  # that are read at a time
UNPACKED = 1 << 26, 10_000  # letters of one: so many, and so many times its size; usual are under 100 times
ROW = 64  # letters that a row counts for, whatever it holds: a page of a few bytes may have any number
STATE, SPLITS = "state.json", "dataset_dict.json"  # of a saved dataset; of several
INFO = "dataset_info.json"  # what its columns are
AGAIN = "save it again: dataset.save_to_disk(folder)"
DICTIONARY, BATCH = 2, 3  # kinds of messages

Row = Mapping[str, Any]


def parquet_rows(path: Path, wanted: Collection[str] | None, lists: Collection[str]) -> Iterator[Row]:
    """See `compress.vetting.tables.rows_of`."""
    with _opened(path) as (parquet, file):
        whole = parquet.ParquetFile(file)
        read, others = _chosen(whole.schema_arrow, wanted, lists)
        size = path.stat().st_size
        plan = planned(file, whole.metadata, read, _room(size) // ROW, _room(size))
        table = parquet.ParquetFile(file, read_dictionary=sorted(plan.packed))
        yield from _bounded(_in_groups(table, plan.rows, read), others, size)


def parquet_schema(path: Path) -> Any:
    """The schema of a Parquet file, of pyarrow's kind.

    Raises:
        DatasetError: pyarrow is not installed.
        OSError, ValueError: it can't be read.
    """
    with _opened(path) as (parquet, file):
        return parquet.ParquetFile(file).schema_arrow


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Any, BinaryIO]]:
    """pyarrow's module for Parquet, and a file of which it may read the footer; what it raises becomes a ValueError."""
    try:
        import pyarrow.parquet as parquet
    except ImportError as err:
        raise _missing(path) from err
    try:
        with open_file(path) as file:
            _refuse_footer(file)
            yield parquet, file
    except (MemoryError, TooLargeError):
        raise
    except Exception as err:  # of all kinds, for what it does not know
        raise ValueError(first_line(err)) from err


def is_saved(path: Path) -> bool:
    """Whether it is a folder that `datasets` saved (`save_to_disk`), of one split or of several."""
    return any((path / name).is_file() for name in (STATE, SPLITS))


def saved_files(path: Path) -> list[Path]:
    """Its files: what they are, what its columns are where that is told, and those of rows in their order.

    Raises:
        DatasetError: it holds several splits, or is damaged.
    """
    try:
        if not (path / STATE).is_file():
            splits = read_json(path / SPLITS)["splits"]
            first, *_ = map(str, splits)
            raise DatasetError(
                f"can't read the data {path}",
                why=f"it holds splits, each a folder of it: {', '.join(map(str, splits))[:200]}",
                mend=f"name one of them: {path / first}",
            )
        names = [each["filename"] for each in read_json(path / STATE)["_data_files"]]
        if not all(type(name) is str and "/" not in name and stands_inside(name) for name in names):
            raise ValueError("it names files that are not in it")
    except (KeyError, TypeError, ValueError, OSError) as err:
        why = f"{STATE} or {SPLITS} is not as `datasets` writes it: {first_line(err)[:200]}"
        raise DatasetError(f"can't read the data {path}", why=why, mend=f"{AGAIN}; or write a .parquet") from err
    told = [path / INFO] if (path / INFO).is_file() else []
    return [path / STATE, *told, *(path / name for name in names)]


def _parts(path: Path) -> list[Path]:
    """Its files of rows."""
    return [file for file in saved_files(path) if file.name not in (STATE, INFO)]


def saved_schema(path: Path) -> Any:
    """As `parquet_schema`, of a folder that `datasets` saved: of its first file; None where it has none."""
    try:
        from pyarrow import ipc
    except ImportError as err:
        raise _missing(path) from err
    try:
        for each in _parts(path):
            with open_file(each) as file, ipc.open_stream(file) as table:
                return table.schema
    except (MemoryError, NoFileError, DatasetError):
        raise
    except Exception as err:  # of all kinds, for what it does not know
        raise ValueError(first_line(err)) from err
    return None


def saved_rows(path: Path, wanted: Collection[str] | None, lists: Collection[str]) -> Iterator[Row]:
    """See `compress.vetting.tables.rows_of`: of a folder that `datasets` saved."""
    try:
        from pyarrow import ipc
    except ImportError as err:
        raise _missing(path) from err
    for each in _parts(path):
        try:
            with open_file(each) as file:
                for message in ipc.MessageReader.open_stream(file):
                    if _packed(message.metadata.to_pybytes()):
                        raise ValueError(f"{each.name} is compressed: nothing tells how large it is then")
            with open_file(each) as file, ipc.open_stream(file) as table:
                read, others = _chosen(table.schema, wanted, lists)
                yield from _bounded(_validated(table, read), others, each.stat().st_size)
        except (MemoryError, NoFileError):
            raise
        except Exception as err:  # of all kinds, for what it does not know
            raise ValueError(first_line(err)) from err


def _validated(table: Any, read: list[str]) -> Iterator[Any]:
    """Batches of these columns, whose places in each other are what they say."""
    few = max(1, min(1024, MOST_CELLS // (len(read) or 1)))
    for batch in table:
        chosen = batch.select(read)
        chosen.validate(full=True)
        yield from (chosen.slice(start, few) for start in range(0, chosen.num_rows, few))


def _packed(metadata: bytes) -> bool:
    """Whether a message's batch is compressed, by the field of that name.

    Source: Apache Arrow, format/Message.fbs: `header` is the third field of a Message, `compression` the fourth of a
    RecordBatch, which a DictionaryBatch has as its second; FlatBuffers, "Internals", for where fields lie.
    """

    def field(table: int, number: int) -> int | None:
        named = table - struct.unpack_from("<i", metadata, table)[0]
        at = 4 + 2 * number
        there = at < struct.unpack_from("<H", metadata, named)[0]
        offset = struct.unpack_from("<H", metadata, named + at)[0] if there else 0
        return table + offset if offset else None

    def follow(at: int) -> int:
        return at + int(struct.unpack_from("<I", metadata, at)[0])

    root = follow(0)
    kind, header = field(root, 1), field(root, 2)
    if kind is None or header is None or metadata[kind] not in (DICTIONARY, BATCH):
        return False
    table = follow(header)
    if metadata[kind] == DICTIONARY:
        inner = field(table, 1)
        if inner is None:
            return False
        table = follow(inner)
    return field(table, 3) is not None


def _missing(path: Path) -> DatasetError:
    return DatasetError(
        f"can't read the data {path}",
        why="the Python package 'pyarrow' is not installed",
        mend="pip install pyarrow; or write it as .jsonl or .csv",
    )


def _chosen(schema: Any, wanted: Collection[str] | None, lists: Collection[str]) -> tuple[list[str], dict[str, None]]:
    """Columns whose values are read, and the first of the others, by name."""
    if len(schema.names) > MOST_COLUMNS:
        raise ValueError(f"it has more columns than the {MOST_COLUMNS:,} that are taken: {len(schema.names):,}")
    if twice := next((name for name, times in Counter(schema.names).items() if times > 1), None):
        raise ValueError(f"it has the column {twice[:60]!r} twice")
    plain = [each.name for each in schema if _is_plain(each.type) or (each.name in lists and _is_list(each.type))]
    read = [name for name in plain if wanted is None or name in wanted]
    held = frozenset(read)
    return read, dict.fromkeys([name for name in schema.names if name not in held][:MOST_OTHERS])


def kind_not_read(schema: Any, column: str) -> str | None:
    """The kind of a column, in words, if it holds neither texts nor numbers nor lists of them."""
    kinds = [each.type for each in schema if each.name == column]
    return None if not kinds or _is_plain(kinds[0]) or _is_list(kinds[0]) else str(kinds[0])[:60]


def _bounded(batches: Iterable[Any], others: Mapping[str, None], size: int) -> Iterator[Row]:
    """The rows of batches, of a file of that size."""
    room = _room(size)
    for batch in batches:
        for few, letters in _few(batch):
            room -= letters + ROW * few.num_rows
            if room < 0:
                raise ValueError(f"it unpacks to over {UNPACKED[1]:,} times of its size")
            yield from (row | others for row in few.to_pylist())


def _room(size: int) -> int:
    return UNPACKED[0] + UNPACKED[1] * size


def _in_groups(table: Any, rows: list[int], read: list[str]) -> Iterator[Any]:
    """Batches, none of two row groups, of whose dictionaries Arrow can't make lists of one kind."""
    most = max(1, MOST_CELLS // (len(read) or 1))
    for group, few in enumerate(rows):
        left = told = table.metadata.row_group(group).num_rows
        if not told:
            continue
        for batch in table.iter_batches(min(few, most), row_groups=[group], columns=read):
            left -= batch.num_rows
            yield batch
        if left:  # Arrow ends where the pages of a list do
            raise ValueError(f"its row group {group} has {told - left:,} rows, and {told:,} by the file's metadata")


def _refuse_footer(file: BinaryIO) -> None:
    """Refuse metadata that would take more memory than any file's: Arrow makes objects of all of it.

    Source: Apache Parquet, "File Format": at the end stand the metadata, their length in 4 bytes, and PAR1.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - 8))
    length = int.from_bytes(file.read(4), "little")
    file.seek(0)
    if LARGEST_FOOTER < length <= size:
        raise ValueError(f"its metadata have {length:,} bytes, and {LARGEST_FOOTER:,} are taken")


def _is_text(kind: Any) -> bool:
    from pyarrow import types

    kind = kind.value_type if types.is_dictionary(kind) else kind
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def _is_plain(kind: Any) -> bool:
    """Whether a column holds what a text or a label may be."""
    from pyarrow import types

    return _is_text(kind) or any(is_kind(kind) for is_kind in (types.is_integer, types.is_floating, types.is_boolean))


def _is_list(kind: Any) -> bool:
    """Whether a column holds lists of what a text or a label may be."""
    from pyarrow import types

    lists = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    return bool(lists) and _is_plain(kind.value_type)


def _few(batch: Any) -> Iterator[tuple[Any, int]]:
    """A batch in parts of not too many letters, and how many these are, in bytes.

    Raises:
        ValueError: a row alone has too many.
    """
    letters = np.zeros(batch.num_rows, np.int64)
    for column in (each for each in batch.columns if _is_text(each.type) or _is_list(each.type)):
        letters += _letters(column)
    begun = held = 0
    for at, count in enumerate(letters.tolist()):
        if count >= LONGEST_ROW:
            raise ValueError(f"a row of it has over {LONGEST_ROW:,} letters")
        if held + count >= LONGEST_ROW:
            yield batch.slice(begun, at - begun), held
            begun, held = at, 0
        held += count
    yield batch.slice(begun), held


def _letters(column: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Of each row of a column of texts, or of lists, of which each value counts."""
    import pyarrow.compute as compute

    if _is_list(column.type):
        inner, counts = column.flatten(), _numbers(compute.list_value_length(column))
        found: np.ndarray[Any, np.dtype[np.int64]] = counts * ROW
        if not _is_text(inner.type):
            return found
        sums = np.concatenate([[0], np.cumsum(_letters(inner))])
        ends = np.cumsum(counts)
        found += sums[ends] - sums[ends - counts]
        return found
    if hasattr(column, "dictionary"):
        held = np.append(_numbers(compute.binary_length(column.dictionary)), 0)
        at: np.ndarray[Any, np.dtype[np.int64]] = column.indices.cast("int64").fill_null(len(held) - 1).to_numpy()
        return np.take(held, at)
    return _numbers(compute.binary_length(column))


def _numbers(values: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Of an array of Arrow's, 0 for what is null."""
    found: np.ndarray[Any, np.dtype[np.int64]] = values.cast("int64").fill_null(0).to_numpy()
    return found
