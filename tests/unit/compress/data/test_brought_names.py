"""Numbers of classes mean what the data's own names say, which a model may number otherwise."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compress.console.wording import AssumedWarning
from compress.data.reading import arrays_of
from compress.errors import DatasetError
from compress.processor import Columns, Processor
from compress.vetting.class_features import class_names
from tests.hub_models import LABELS, bert_folder

arrow: Any = pytest.importorskip("pyarrow")
parquet: Any = pytest.importorskip("pyarrow.parquet")

TAGS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")
OTHER_TAGS = ("O", "B-LOC", "I-LOC", "B-PER", "I-PER")
WAYS = ("a saved folder", "a saved folder's schema", "parquet")


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bert_folder(tmp_path_factory.mktemp("bert"))


def features(column: str, names: Sequence[str], kind: str = "") -> dict[str, Any]:
    """As `datasets` 2 (Sequence), 4 (List) and earlier ones (a list of one) write them."""
    label: Any = {"names": list(names), "_type": "ClassLabel"}
    told = {"": label, "a list of one": [label]} | {
        each: {"feature": label, "_type": each} for each in ("Sequence", "List")
    }
    return {"text": {"dtype": "string", "_type": "Value"}, column: told[kind]}


def source(folder: Path, way: str, columns: dict[str, Any], told: dict[str, Any]) -> Path:
    """Data whose columns are `told`, written in one of the `WAYS`."""
    table = arrow.table(columns)
    noted = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": told}})})
    if way == "parquet":
        parquet.write_table(noted, folder / "data.parquet")
        return folder / "data.parquet"
    inside = way == "a saved folder's schema"
    saved = folder / "saved"
    saved.mkdir()
    with arrow.ipc.new_stream(saved / "data.arrow", (noted if inside else table).schema) as writer:
        writer.write_table(noted if inside else table)
    (saved / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data.arrow"}]}))
    (saved / "dataset_info.json").write_text(json.dumps({"features": None if inside else told}))
    return saved


def labels_of(path: Path, processor: Processor) -> list[Any]:
    found: list[Any] = np.load(Path(arrays_of(str(path), processor)) / "label.npy").tolist()
    return found


def texts(bert: Path, labels: Sequence[str] = LABELS, **columns: Any) -> Processor:
    files = {"tokenizer.json": ""}
    return Processor("text", "sequence-classification", files, tuple(labels), 32, bert, Columns(**columns))


@pytest.mark.parametrize("way", WAYS)
def test_numbers_of_texts_are_classes_by_the_datas_names(bert: Path, tmp_path: Path, way: str) -> None:
    names = ["neither", "good", "bad"]
    path = source(tmp_path, way, {"text": ["word1"] * 4, "label": [0, 1, 2, 1]}, features("label", names))
    assert labels_of(path, texts(bert)) == [LABELS.index(names[at]) for at in (0, 1, 2, 1)]


@pytest.mark.parametrize("kind", ["Sequence", "List", "a list of one"])
@pytest.mark.parametrize("way", WAYS)
def test_numbers_of_tags_are_classes_by_the_datas_names(bert: Path, tmp_path: Path, way: str, kind: str) -> None:
    columns = {"tokens": [["word1", "word2", "word3"]] * 2, "ner_tags": [[0, 3, 4], [1, -100, 0]]}
    path = source(tmp_path, way, columns, features("ner_tags", OTHER_TAGS, kind))
    processor = Processor("text", "token-classification", {"tokenizer.json": ""}, TAGS, 32, bert)
    assert [row[1:4] for row in labels_of(path, processor)] == [[0, 1, 2], [3, -100, 0]]


def test_the_column_that_is_named_is_the_one_whose_names_count(bert: Path, tmp_path: Path) -> None:
    told = features("label", ["good", "bad", "neither"]) | features("mood", ["neither", "good", "bad"])
    path = source(tmp_path, "parquet", {"text": ["word1"] * 2, "label": [0, 1], "mood": [0, 1]}, told)
    assert labels_of(path, texts(bert)) == [1, 0]
    assert labels_of(path, texts(bert, label="mood")) == [2, 1]


@pytest.mark.parametrize(
    ("names", "model", "numbers", "wanted", "told"),
    [
        (["neg", "pos"], ["LABEL_0", "LABEL_1"], [0, 1], [0, 1], "the model has no names for its classes"),
        (["Good", "BAD"], LABELS, [0, 1], [1, 0], "their case differs: Good is good, BAD is bad"),
        (["0", "1"], ["no", "yes"], [0, 1], [0, 1], None),
        (["LABEL_0", "LABEL_1"], ["no", "yes"], [1, 0], [1, 0], None),
        (["ugly", "bad", "good"], LABELS, [1, 2], [0, 1], None),
    ],
    ids=["a model without names", "another case", "names that are numbers", "no names", "a name that no row has"],
)
def test_where_names_differ_it_is_told_how_numbers_are_taken(
    bert: Path, tmp_path: Path, names: list[str], model: Sequence[str], numbers: list[int], wanted: list[int],
    told: str | None,
) -> None:  # fmt: skip
    columns = {"text": ["word1"] * len(numbers), "label": numbers}
    path = source(tmp_path, "parquet", columns, features("label", names))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert labels_of(path, texts(bert, model)) == wanted
    said = [str(each.message) for each in caught if each.category is AssumedWarning and "class" in str(each.message)]
    assert [told in each for each in said] == [True] if told else not said


@pytest.mark.parametrize("number", [0, 3, -1])
def test_a_class_that_the_model_or_the_data_has_no_name_for_is_refused(bert: Path, tmp_path: Path, number: int) -> None:
    columns = {"text": ["word1"] * 2, "label": [1, number]}
    path = source(tmp_path, "parquet", columns, features("label", ["ugly", "bad", "good"]))
    with pytest.raises(DatasetError, match=r"row 2 of .* has the label") as caught:
        arrays_of(str(path), texts(bert))
    assert "ugly, bad, good; the model's are bad, good, neither" in caught.value.why
    assert "cast_column('label', datasets.Value('int64'))" in caught.value.mend


def test_names_of_a_tags_column_that_are_none_of_the_models_are_refused(bert: Path, tmp_path: Path) -> None:
    columns = {"tokens": [["word1", "word2"]], "ner_tags": [[0, 1]]}
    path = source(tmp_path, "parquet", columns, features("ner_tags", ["O", "B-ORG"], "List"))
    processor = Processor("text", "token-classification", {"tokenizer.json": ""}, TAGS, 32, bert)
    with pytest.raises(DatasetError, match=r"row 1 of .* has the label 'B-ORG'"):
        arrays_of(str(path), processor)


@pytest.mark.parametrize(
    "damaged", ["[]", "3", "{", '{"features": 3}', '{"features": {"label": {"_type": "ClassLabel", "names": [3]}}}']
)
def test_damaged_features_are_told(tmp_path: Path, damaged: str) -> None:
    path = source(tmp_path, WAYS[0], {"text": ["a"]}, {})
    (path / "dataset_info.json").write_text(damaged)
    with pytest.raises(DatasetError, match="can't read the data"):
        class_names(path)


def test_names_that_change_are_not_those_of_before(bert: Path, tmp_path: Path) -> None:
    """What was made of data once in a process is used again."""
    path = source(tmp_path, WAYS[0], {"text": ["word1"] * 2, "label": [0, 1]}, features("label", ["bad", "good"]))
    assert labels_of(path, texts(bert)) == [0, 1]
    (path / "dataset_info.json").write_text(json.dumps({"features": features("label", ["good", "bad"])}))
    assert labels_of(path, texts(bert)) == [1, 0]
