"""A folder of Parquet files is one table, and a .json a list of rows."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compress.errors import DatasetError
from compress.vetting import texts
from compress.vetting.class_features import class_names
from compress.vetting.tables import rows_of, unread_kind

arrow: Any = pytest.importorskip("pyarrow")
parquet: Any = pytest.importorskip("pyarrow.parquet")


def sharded(folder: Path, *names: str) -> Path:
    """Each file has its place among the names as its text."""
    folder.mkdir(exist_ok=True)
    for at, name in enumerate(names):
        parquet.write_table(arrow.table({"text": [str(at)] * 2}), folder / name)
    return folder


@pytest.mark.parametrize(
    "names",
    [
        ["a.parquet", "b.parquet"],
        ["train-00000-of-00002.parquet", "train-00001-of-00002.parquet"],
        ["0000.parquet", "0001.parquet", "0002.parquet"],
        ["part-00000-3f2a.c000.snappy.parquet", "part-00001-3f2a.c000.snappy.parquet"],
    ],
)
def test_files_of_a_folder_are_read_in_order_of_their_names(tmp_path: Path, names: list[str]) -> None:
    folder = sharded(tmp_path / "set", *names)
    (folder / "._0.parquet").write_bytes(b"a Mac's note")
    (folder / "_SUCCESS").touch()
    assert [row["text"] for row in rows_of(folder)] == [str(at) for at in range(len(names)) for _ in range(2)]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("test-00000-of-00001.parquet", "train-00000-of-00001.parquet"),
        ("imdb_test.parquet", "imdb_train.parquet"),
        ("default-test-00000-of-00001.parquet", "default-train-00000-of-00001.parquet"),
        ("more.parquet", "train.parquet"),
        ("0000-Dev.parquet", "0001-Test.parquet"),
    ],
)
def test_files_of_several_splits_are_no_table(tmp_path: Path, one: str, other: str) -> None:
    folder = sharded(tmp_path / "set", one, other)
    with pytest.raises(DatasetError, match="can't read the data") as caught:
        list(rows_of(folder))
    assert "several splits: " in caught.value.why
    assert one in caught.value.why
    assert other in caught.value.why
    assert str(folder) in caught.value.mend


def test_an_empty_file_of_a_folder_has_no_rows(tmp_path: Path) -> None:
    """As Spark and Dask write an empty partition."""
    folder = sharded(tmp_path / "set", "0.parquet", "2.parquet")
    parquet.write_table(arrow.table({"text": arrow.array([], arrow.string())}), folder / "1.parquet")
    assert [row["text"] for row in rows_of(folder)] == ["0", "0", "1", "1"]
    assert list(rows_of(folder / "1.parquet")) == []


def piped(path: Path) -> None:
    os.mkfifo(path)


def dangling(path: Path) -> None:
    path.symlink_to("nowhere")


@pytest.mark.parametrize(
    ("make", "why"), [(piped, "no file that could be read twice"), (dangling, "a link to nothing")]
)
def test_what_is_no_file_among_those_of_a_folder_is_named(
    tmp_path: Path, make: Callable[[Path], None], why: str
) -> None:
    folder = sharded(tmp_path / "set", "0.parquet")
    make(folder / "1.parquet")
    with pytest.raises(DatasetError, match="can't read the data") as caught:
        list(rows_of(folder))
    assert f"1.parquet in it is {why}" in caught.value.why


def test_a_damaged_file_of_a_folder_is_named(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "set", "a.parquet", "b.parquet")
    (folder / "b.parquet").write_bytes(b"PAR1")
    with pytest.raises(DatasetError, match=r"b\.parquet"):
        list(rows_of(folder))


def test_files_that_have_other_names_for_their_classes_are_refused(tmp_path: Path) -> None:
    for at, names in enumerate((["a", "b"], ["b", "a"])):
        told = {"label": {"_type": "ClassLabel", "names": names}}
        table = arrow.table({"text": ["x"], "label": [0]})
        noted = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": told}})})
        parquet.write_table(noted, tmp_path / f"{at}.parquet")
    assert class_names(tmp_path / "1.parquet") == {"label": ("b", "a")}
    with pytest.raises(DatasetError, match="other names for the numbers of their classes"):
        class_names(tmp_path)


ROWS = [{"text": "a", "label": 1}, {"text": "b ü", "label": 0}]


@pytest.mark.parametrize(
    "written",
    [
        json.dumps(ROWS),
        json.dumps(ROWS, indent=4),
        "\ufeff\n " + json.dumps(ROWS, ensure_ascii=False),
        "".join(json.dumps(row) + "\n" for row in ROWS),
    ],
    ids=["in one line", "in many lines", "with a mark before", "an object in each line"],
)
def test_a_json_is_a_list_or_has_a_row_in_each_line(tmp_path: Path, written: str) -> None:
    (tmp_path / "1.json").write_text(written)
    assert list(rows_of(tmp_path / "1.json")) == ROWS
    assert list(rows_of(tmp_path / "1.json", ["text"])) == [{"text": row["text"], "label": None} for row in ROWS]


@pytest.mark.parametrize(
    ("written", "why"),
    [("[1]", "row 1 of its list is no JSON object"), ("[", "is no JSON"), ('{"a": 1', "line 1 is no JSON")],
)
def test_a_json_of_something_else_is_refused(tmp_path: Path, written: str, why: str) -> None:
    (tmp_path / "1.json").write_text(written)
    with pytest.raises(DatasetError, match="can't read the data") as caught:
        list(rows_of(tmp_path / "1.json"))
    assert why in caught.value.why


def test_a_long_json_is_to_be_written_as_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "1.json").write_text(json.dumps([{"text": "a" * 999}] * 100))
    monkeypatch.setattr(texts.read_bytes, "__defaults__", (10_000,))
    with pytest.raises(DatasetError, match="can't read the data") as caught:
        list(rows_of(tmp_path / "1.json"))
    assert "more than 10,000 bytes" in caught.value.why
    assert ".jsonl" in caught.value.mend


def test_kinds_that_are_not_read_are_known_by_name(tmp_path: Path) -> None:
    table = arrow.table({"text": ["a"], "day": arrow.array([0], arrow.date32()), "views": [[b"a"]]})
    parquet.write_table(table, tmp_path / "1.parquet")
    kinds = [unread_kind(tmp_path / "1.parquet", name) for name in ("text", "day", "views", "other")]
    assert kinds == [None, "date32[day]", "list<element: binary>", None]


@pytest.mark.parametrize(("sign", "words"), [(";", "semicolons"), ("\t", "tabs"), ("|", "bars")])
def test_another_separator_is_told(tmp_path: Path, sign: str, words: str) -> None:
    (tmp_path / "1.csv").write_text(f"text{sign}label\na, b{sign}1\n")
    with pytest.raises(DatasetError, match="can't read the data") as caught:
        list(rows_of(tmp_path / "1.csv"))
    assert f"separated by {words}" in caught.value.why
    assert "commas" in caught.value.mend


@pytest.mark.parametrize("before", [" " * 100, "\n" * 1000, ""])
def test_a_list_may_begin_behind_any_space(tmp_path: Path, before: str) -> None:
    path = tmp_path / "rows.json"
    path.write_text(before + json.dumps(ROWS))
    assert list(rows_of(path)) == ROWS


def test_texts_of_the_kind_of_views_are_read(tmp_path: Path) -> None:
    path = tmp_path / "views.parquet"
    parquet.write_table(arrow.table({"text": arrow.array(["good", "bad", None]).cast(arrow.string_view())}), path)
    assert [row["text"] for row in rows_of(path, {"text"})] == ["good", "bad", None]
    assert unread_kind(path, "text") is None


def test_what_a_note_of_classes_lacks_is_told(tmp_path: Path) -> None:
    table = arrow.table({"text": ["x"]}).replace_schema_metadata({"huggingface": "{}"})
    parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DatasetError, match="can't read the data") as caught:
        class_names(tmp_path / "a.parquet")
    assert "it has no 'info'" in caught.value.why
