"""A Parquet file of anybody's: a kilobyte of it may stand for any number of letters, and it holds values of all kinds."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import resource
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compress.errors import DatasetError
from compress.vetting import arrow_rows
from compress.vetting.tables import rows_of

arrow: Any = pytest.importorskip("pyarrow")
parquet: Any = pytest.importorskip("pyarrow.parquet")


def written(path: Path, columns: dict[str, Any], *, packed: bool = True) -> Path:
    """`packed`: whether Arrow is told to leave packed what Parquet has packed."""
    parquet.write_table(arrow.table(columns), path, compression="zstd", store_schema=packed)
    return path


def same(text: str, times: int) -> Any:
    """A column of one text, many times over, which the file has once."""
    return arrow.DictionaryArray.from_arrays(arrow.array([0] * times, arrow.int32()), arrow.array([text]))


def test_texts_and_numbers_are_read_and_others_are_known_by_name(tmp_path: Path) -> None:
    columns = {
        "text": ["a", "b"],
        "label": arrow.array(["no", "yes"]).dictionary_encode(),
        "number": [1, None],
        "share": [0.5, float("inf")],
        "true": [True, False],
        "when": arrow.array([2**62, 0], arrow.timestamp("us")),  # beyond what Python has dates for
        "day": [datetime.date(2020, 1, 1)] * 2,
        "list": [[1], []],
        "table": [{"a": {"b": 1}}, None],
        "bytes": [b"\xff", b""],
    }
    rows = list(rows_of(written(tmp_path / "1.parquet", columns)))
    plain: list[dict[str, Any]] = [{"text": "a", "label": "no", "number": 1, "share": 0.5, "true": True},
             {"text": "b", "label": "yes", "number": None, "share": float("inf"), "true": False}]  # fmt: skip
    others: dict[str, Any] = dict.fromkeys(("when", "day", "list", "table", "bytes"))
    assert rows == [row | others for row in plain]
    asked = list(rows_of(tmp_path / "1.parquet", ["text"]))
    assert [(row["text"], row["label"], row["number"]) for row in asked] == [("a", None, None), ("b", None, None)]
    assert set(asked[0]) == set(rows[0])


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    ("letters", "rows", "why"), [(17 << 20, 3000, "a row of it has over"), (1 << 20, 3000, "it unpacks to over")]
)
def test_a_small_file_does_not_unpack_to_any_size(
    tmp_path: Path, letters: int, rows: int, why: str, packed: bool
) -> None:
    path = written(tmp_path / "1.parquet", {"text": same("x" * letters, rows)}, packed=packed)
    assert path.stat().st_size < 4000
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DatasetError, match="can't read the data") as caught:
        for _ in rows_of(path):
            pass
    assert why in caught.value.why
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 600_000, "kilobytes: all of it has 3 GB"


def lists(path: Path, values: Any, *, footer: int | None = None) -> Path:
    """One row whose list has all of the values.

    Args:
        path: of the file.
        values: an array.
        footer: how many there are, as the footer says; None for the truth.
    """
    column = arrow.ListArray.from_arrays(arrow.array([0, len(values)], arrow.int32()), values)
    parquet.write_table(arrow.table({"tags": column}), path, compression="zstd")
    if footer is not None:
        data = path.read_bytes()
        start = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
        path.write_bytes(data[:start] + data[start:].replace(varint(len(values)), varint(footer)))
    return path


def varint(number: int, length: int = 4) -> bytes:
    """As Thrift writes a whole number, in four bytes."""
    return bytes((2 * number >> 7 * at) & 127 | 128 * (at < length - 1) for at in range(length))


VALUES: dict[str, Callable[[int], Any]] = {
    "numbers": lambda n: arrow.array(np.zeros(n, np.int64)),
    "texts": lambda n: arrow.DictionaryArray.from_arrays(arrow.array(np.zeros(n, np.int32)), arrow.array([""])),
}


@pytest.mark.parametrize("footer", [None, 2])
@pytest.mark.parametrize("kind", VALUES)
def test_a_small_files_lists_do_not_unpack_to_any_length(tmp_path: Path, kind: str, footer: int | None) -> None:
    path = lists(tmp_path / "1.parquet", VALUES[kind](20_000_000), footer=footer)
    assert path.stat().st_size < 4000
    assert parquet.ParquetFile(path).metadata.row_group(0).column(0).num_values == (footer or 20_000_000)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DatasetError, match="can't read the data") as caught:
        list(rows_of(path, ["tags"], ["tags"]))
    assert "it unpacks to over" in caught.value.why
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000, "kilobytes: the values take 160 MB"


def test_a_row_of_very_many_values_is_refused(tmp_path: Path) -> None:
    for kind, values in VALUES.items():
        path = lists(tmp_path / f"{kind}.parquet", values(300_000))
        with pytest.raises(DatasetError, match="can't read the data") as caught:
            list(rows_of(path, ["tags"], ["tags"]))
        assert "a row of it has over" in caught.value.why


@given(
    rows=st.lists(st.none() | st.lists(st.none() | st.text("ab", max_size=3), max_size=4), min_size=1, max_size=20),
    kind=st.sampled_from(["list", "large", "dictionary", "large text"]),
)
def test_lists_of_texts_are_read_however_they_are_stored(
    tmp_path_factory: pytest.TempPathFactory, rows: list[list[str | None] | None], kind: str
) -> None:
    kinds = {
        "list": arrow.list_(arrow.string()), "large": arrow.large_list(arrow.string()),
        "dictionary": arrow.list_(arrow.dictionary(arrow.int32(), arrow.string())), "large text": arrow.list_(arrow.large_string()),
    }  # fmt: skip
    path = tmp_path_factory.mktemp("lists") / "1.parquet"
    written(path, {"tokens": arrow.array(rows, kinds[kind]), "text": ["x"] * len(rows)})
    assert [row["tokens"] for row in rows_of(path, None, ["tokens"])] == rows


def test_pages_that_are_damaged_are_told(tmp_path: Path) -> None:
    """Not those of columns without lists, which Arrow reads in pieces."""
    path = written(tmp_path / "1.parquet", {"tags": [[1, 2]] * 9})
    whole = path.read_bytes()
    for at in range(4, 60):
        path.write_bytes(whole[:at] + bytes([255 - whole[at]]) + whole[at + 1 :])
        with contextlib.suppress(DatasetError):
            list(rows_of(path, ["tags"], ["tags"]))


def test_columns_that_nobody_asks_for_are_not_unpacked(tmp_path: Path) -> None:
    columns = {"text": ["a"] * 3000, "other": same("x" * (17 << 20), 3000)}
    assert len(list(rows_of(written(tmp_path / "1.parquet", columns), ["text"]))) == 3000


def test_rows_of_many_letters_come_a_few_at_a_time(tmp_path: Path) -> None:
    texts = [letter * (6 << 20) for letter in "abcdefg"]
    assert [row["text"] for row in rows_of(written(tmp_path / "1.parquet", {"text": texts}))] == texts


def test_a_column_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    table = arrow.Table.from_arrays([arrow.array(["a"])] * 2, names=["text", "text"])
    parquet.write_table(table, tmp_path / "1.parquet")
    with pytest.raises(DatasetError, match="can't read the data") as caught:
        list(rows_of(tmp_path / "1.parquet"))
    assert "the column 'text' twice" in caught.value.why


def test_a_damaged_file_is_told_in_three_lines(tmp_path: Path) -> None:
    whole = written(tmp_path / "0.parquet", {"text": ["word"] * 500, "label": list(range(500))}).read_bytes()
    random = Random(0)
    cut = [whole[:at] for at in (0, 4, 12, len(whole) // 2, len(whole) - 1)]
    for number, data in enumerate(itertools.chain(cut, (_changed(whole, random) for _ in range(150))), 1):
        path = tmp_path / f"{number}.parquet"
        path.write_bytes(data)
        try:
            list(rows_of(path))
        except DatasetError as err:
            assert err.why  # noqa: PT017  it may be read, too


def _changed(whole: bytes, random: Random) -> bytes:
    data = bytearray(whole)
    for _ in range(random.randint(1, 4)):
        data[random.randrange(len(data))] = random.randrange(256)
    return bytes(data)


def test_a_file_of_very_many_columns_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row would have a name for each."""
    columns = {"text": ["a"] * 50} | {f"c{at}": [0] * 50 for at in range(500)}
    path = written(tmp_path / "1.parquet", columns)
    assert [len(row) for row in rows_of(path, ["text"])] == [65] * 50
    assert len(next(iter(rows_of(path)))) == 501
    monkeypatch.setattr(arrow_rows, "MOST_COLUMNS", 100)
    with pytest.raises(DatasetError, match="can't read the data") as caught:
        list(rows_of(path))
    assert "it has more columns than the 100 that are taken: 501" in caught.value.why
    monkeypatch.setattr(arrow_rows, "LARGEST_FOOTER", 1000)
    with pytest.raises(DatasetError, match="can't read the data") as caught:
        list(rows_of(path))
    assert "its metadata have" in caught.value.why
