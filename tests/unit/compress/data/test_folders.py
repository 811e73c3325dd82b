"""What is no data as it is named is told by what is there, and by what to name instead."""

from __future__ import annotations

import datetime
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from compress.data.images import images_in
from compress.data.reading import arrays_of
from compress.errors import DatasetError
from compress.processor import Columns, Processor
from tests.hub_models import LABELS, bert_folder

IMAGES = Processor("image", "image-classification", {"preprocessor_config.json": ""}, ("cat", "dog"), None, Path())
TAGS = ("O", "B-PER")


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bert_folder(tmp_path_factory.mktemp("bert"))


def touched(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder


@pytest.mark.parametrize(
    ("names", "why", "mend"),
    [
        (["train/cat/1.png", "val/dog/1.jpg"], "folders of images: train, val", "val"),
        (["a.jsonl", "b.jsonl"], "it is a folder, and holds a.jsonl, b.jsonl", "a.jsonl"),
        (["data/train.parquet", "README.md"], "no arrays (.npy, .npz), no rows and no images: README.md, data", "data"),
        ([".hidden"], "it is empty", "name the file"),
        (["notes.md"], "no images: notes.md", "name the file"),
    ],
)
def test_a_folder_of_something_else_is_told_by_what_it_holds(
    tmp_path: Path, names: list[str], why: str, mend: str
) -> None:
    folder = touched(tmp_path / "root", *names)
    with pytest.raises(DatasetError, match="can't read the data") as caught:
        arrays_of(str(folder), IMAGES)
    assert why in caught.value.why
    assert mend in caught.value.mend


def test_a_macs_notes_on_images_are_none(tmp_path: Path) -> None:
    folder = touched(tmp_path / "._data", "cat/1.png", "cat/._1.png", "._3.png", "dog/2.png")
    assert images_in(folder) == [folder / "cat" / "1.png", folder / "dog" / "2.png"]


def refused(path: Path, processor: Processor) -> DatasetError:
    with pytest.raises(DatasetError, match=f"row 1 of {path}") as caught:
        arrays_of(str(path), processor)
    return caught.value


@pytest.mark.parametrize(
    ("columns", "why"),
    [
        ({"text": ["word1"], "label": [datetime.date(2020, 1, 1)]}, "its 'label' is of the kind date32[day]"),
        ({"text": ["word1"], "label": [Decimal("1.5")]}, "its 'label' is of the kind decimal128(2, 1)"),
        ({"text": ["word1", "word1"], "label": [None, 1]}, "its 'label' is null"),
        ({"text": [None, "word1"]}, "its 'text' is null"),
        ({"text": [b"word1"]}, "its 'text' is of the kind binary"),
    ],
)
def test_texts_and_labels_of_other_kinds_are_told(
    bert: Path, tmp_path: Path, columns: dict[str, Any], why: str
) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table(columns), tmp_path / "1.parquet")
    processor = Processor("text", "sequence-classification", {"tokenizer.json": ""}, LABELS, 32, bert)
    assert why in refused(tmp_path / "1.parquet", processor).why


@pytest.mark.parametrize("column", ["tokens", "words"])
def test_words_that_are_null_at_first_are_told_as_such(bert: Path, tmp_path: Path, column: str) -> None:
    rows = [{column: None, "ner_tags": [0]}, {column: ["word1"], "ner_tags": [1]}]
    (tmp_path / "1.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = Columns() if column == "tokens" else Columns("words")
    processor = Processor("text", "token-classification", {"tokenizer.json": ""}, TAGS, 32, bert, columns)
    error = refused(tmp_path / "1.jsonl", processor)
    assert error.what.endswith("has no words")
    assert error.why == f"its {column!r} is null"


def test_words_of_a_kind_that_is_not_read_are_told(bert: Path, tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    raw = arrow.array([[b"word1"]], arrow.list_(arrow.binary()))
    parquet.write_table(arrow.table({"tokens": raw, "ner_tags": [[1]]}), tmp_path / "1.parquet")
    processor = Processor("text", "token-classification", {"tokenizer.json": ""}, TAGS, 32, bert)
    assert "its 'tokens' is of the kind list<element: binary>" in refused(tmp_path / "1.parquet", processor).why


def test_a_csv_with_semicolons_is_told(bert: Path, tmp_path: Path) -> None:
    (tmp_path / "1.csv").write_text("text;label\nword1;good\n")
    processor = Processor("text", "sequence-classification", {"tokenizer.json": ""}, LABELS, 32, bert)
    error = refused(tmp_path / "1.csv", processor)
    assert "separated by semicolons" in error.why
    assert "commas" in error.mend
