"""Of a Parquet file few rows are in memory where they are long, and none where a row may have any size."""

from __future__ import annotations

import itertools
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compress.errors import DatasetError
from compress.vetting import arrow_rows, parquet_batches
from compress.vetting.parquet_batches import planned
from compress.vetting.tables import rows_of

arrow: Any = pytest.importorskip("pyarrow")
parquet: Any = pytest.importorskip("pyarrow.parquet")

PEAK = """
import resource, sys
from pathlib import Path
import numpy, pyarrow.parquet
from compress.errors import DatasetError
from compress.vetting.tables import rows_of
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    print(sum(1 for _ in rows_of(Path(sys.argv[1]), ["text", "tokens"], ["tokens"])))
except DatasetError as err:
    print(err.why)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def peak(path: Path) -> tuple[str, int]:
    """What is said of a file, and the memory that reading it took, in kilobytes."""
    done = subprocess.run([sys.executable, "-c", PEAK, str(path)], capture_output=True, text=True, check=True)
    said, grown = done.stdout.splitlines()
    return said, int(grown)


def one_text(rows: int, each: int, text: str) -> Any:
    """Lists of one text, many times over, which the file has once."""
    inner = arrow.DictionaryArray.from_arrays(arrow.array([0] * rows * each, arrow.int32()), arrow.array([text]))
    return arrow.ListArray.from_arrays(arrow.array([at * each for at in range(rows + 1)], arrow.int32()), inner)


def test_lists_that_say_one_long_text_over_and_over_are_read_a_few_rows_at_a_time(tmp_path: Path) -> None:
    table = arrow.table({"tokens": one_text(512, 20, "word " * 12_000)})
    parquet.write_table(table, tmp_path / "1.parquet", compression="zstd", store_schema=False)
    assert (tmp_path / "1.parquet").stat().st_size < 4000
    said, grown = peak(tmp_path / "1.parquet")
    assert "it unpacks to over" in said
    assert grown < 100_000, "kilobytes: all of them are 600 MB"


def test_texts_that_no_dictionary_has_are_read_a_few_rows_at_a_time(tmp_path: Path) -> None:
    schema = arrow.schema([("text", arrow.string())])
    options: dict[str, Any] = {"compression": "zstd", "use_dictionary": False, "store_schema": False}
    with parquet.ParquetWriter(tmp_path / "1.parquet", schema, **options) as writer:
        for group in range(10):
            texts = [f"{group} {row} " + "word " * 200_000 for row in range(50)]
            writer.write_table(arrow.table({"text": texts}, schema=schema))
    said, grown = peak(tmp_path / "1.parquet")
    assert said == "500"
    assert grown < 250_000, "kilobytes: all of them are 500 MB, those of a page 50 MB"


@given(
    lengths=st.lists(st.integers(0, 300), min_size=1, max_size=60),
    page=st.integers(60, 900),
    group=st.integers(1, 60),
    version=st.sampled_from(["1.0", "2.0"]),
    dictionary=st.booleans(),
)
def test_no_batch_of_several_rows_has_more_letters_than_are_held(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], page: int, group: int, version: str, dictionary: bool
) -> None:
    path = tmp_path_factory.mktemp("batches") / "1.parquet"
    texts = [chr(97 + at % 26) * length for at, length in enumerate(lengths)]
    parquet.write_table(
        arrow.table({"text": texts, "tokens": [[text] for text in texts]}), path, data_page_size=page,
        write_batch_size=3, row_group_size=group, data_page_version=version, use_dictionary=dictionary,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as changed, path.open("rb") as file:
        changed.setattr(parquet_batches, "HELD", 1000)
        plan = planned(file, parquet.ParquetFile(path).metadata, ["text"], 10**6, 10**6)
        assert [row["text"] for row in rows_of(path, ["text"])] == texts
    for rows, start in zip(plan.rows, range(0, len(texts), group), strict=True):
        of = lengths[start : start + group]
        most = max(sum(of[at : at + rows]) for at in range(len(of)))
        assert rows == 1 or dictionary or most <= 1000
    assert [(row["text"], row["tokens"]) for row in rows_of(path, None, ["tokens"])] == [(t, [t]) for t in texts]


def test_texts_that_together_unpack_to_too_much_are_refused_before_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tokenizer may take minutes for what the first rows say."""
    texts = [f"{at} " + "word " * 1000 for at in range(100)]
    parquet.write_table(arrow.table({"text": texts}), tmp_path / "1.parquet", compression="zstd", use_dictionary=False)
    assert next(iter(rows_of(tmp_path / "1.parquet")))["text"] == texts[0]
    monkeypatch.setattr(arrow_rows, "UNPACKED", (1000, 10))
    with pytest.raises(DatasetError, match="can't read the data") as caught:
        next(iter(rows_of(tmp_path / "1.parquet")))
    assert "it unpacks to over" in caught.value.why


def test_rows_that_are_missing_are_told(tmp_path: Path) -> None:
    """pyarrow 26 writes such a file where a page is to have a single byte."""
    parquet.write_table(arrow.table({"tokens": [["a"], ["b"]]}), tmp_path / "1.parquet", data_page_size=1)
    if not parquet.read_table(tmp_path / "1.parquet").num_rows:
        with pytest.raises(DatasetError, match="can't read the data") as caught:
            list(rows_of(tmp_path / "1.parquet", None, ["tokens"]))
        assert "its row group 0 has 0 rows, and 2 by the file's metadata" in caught.value.why


def test_lists_whose_dictionary_ends_half_way_are_read(tmp_path: Path) -> None:
    """As writers leave off where it grows too large."""
    rows = [[f"{row} {word % 3}" * 20 for word in range(5)] for row in range(3000)]
    options: dict[str, Any] = {"dictionary_pagesize_limit": 20_000, "row_group_size": 700, "data_page_size": 5000}
    parquet.write_table(arrow.table({"tokens": rows}), tmp_path / "1.parquet", **options)
    assert {"PLAIN", "RLE_DICTIONARY"} <= {
        *parquet.ParquetFile(tmp_path / "1.parquet").metadata.row_group(0).column(0).encodings
    }
    assert [row["tokens"] for row in rows_of(tmp_path / "1.parquet", None, ["tokens"])] == rows


@pytest.mark.parametrize(
    ("columns", "bound", "why"),
    [
        ({"text": ["x" * 50_000] * 3}, "LARGEST_PAGES", "its row group 0 has pages that have"),
        ({"tokens": [[f"{at}" * 6000] for at in range(8)]}, "LARGEST_PAGES", "its row group 0 has lists of texts"),
        ({"tokens": [[1] * 50_000]}, "MOST_LISTED", "its row group 0 has lists of 50,000 values"),
    ],
    ids=["a page", "lists of texts", "lists of numbers"],
)
def test_what_is_in_memory_together_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns: dict[str, Any], bound: str, why: str
) -> None:
    options: dict[str, Any] = {"data_page_size": 6000, "write_batch_size": 1}
    parquet.write_table(arrow.table(columns), tmp_path / "1.parquet", **options, use_dictionary=False)
    assert list(rows_of(tmp_path / "1.parquet", None, ["tokens"]))
    monkeypatch.setattr(parquet_batches, bound, 40_000)
    with pytest.raises(DatasetError, match="can't read the data") as caught:
        list(rows_of(tmp_path / "1.parquet", None, ["tokens"]))
    assert why in caught.value.why
    assert "row_group_size" in caught.value.mend


@pytest.mark.parametrize("encoding", ["PLAIN", "DELTA_LENGTH_BYTE_ARRAY"])
@pytest.mark.parametrize("column", ["text", "tokens"])
def test_texts_are_read_in_every_encoding_that_says_how_long_they_are(
    tmp_path: Path, encoding: str, column: str
) -> None:
    texts = [f"text {at}" for at in range(50)]
    values = {"text": texts, "tokens": [list(pair) for pair in itertools.pairwise(texts)]}[column]
    leaf = {"text": "text", "tokens": "tokens.list.element"}[column]
    options: dict[str, Any] = {"use_dictionary": False, "column_encoding": {leaf: encoding}}
    parquet.write_table(arrow.table({column: values}), tmp_path / "1.parquet", **options)
    assert [row[column] for row in rows_of(tmp_path / "1.parquet", None, ["tokens"])] == values


def test_texts_that_each_go_on_from_the_one_before_are_refused(tmp_path: Path) -> None:
    """A few bytes are then a text of any length."""
    texts = ["x" * 1_000_000 + str(at) for at in range(100)]
    options: dict[str, Any] = {"use_dictionary": False, "column_encoding": {"text": "DELTA_BYTE_ARRAY"}}
    parquet.write_table(arrow.table({"text": texts}), tmp_path / "1.parquet", **options, compression="zstd")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DatasetError, match="can't read the data") as caught:
        list(rows_of(tmp_path / "1.parquet"))
    assert "DELTA_BYTE_ARRAY" in caught.value.why
    assert "PLAIN" in caught.value.mend
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000
