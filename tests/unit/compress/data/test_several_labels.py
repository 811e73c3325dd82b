"""A text may be of several classes: 0 or 1 for each, or the names or numbers of those that it has."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compress.console.wording import AssumedWarning
from compress.data.dataset import Dataset
from compress.data.reading import arrays_of
from compress.data.several_labels import SeveralLabels
from compress.errors import DatasetError
from compress.evaluate.evaluation import judged
from compress.formats.checkpoint import load
from compress.processor import Processor
from tests.hub_models import LABELS, bert_folder, with_config


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = bert_folder(tmp_path_factory.mktemp("bert"))
    return with_config(folder, problem_type="multi_label_classification")


def written(folder: Path, labels: list[Any], column: str = "labels") -> Path:
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps({"text": "word1 word2", column: each}) + "\n" for each in labels))
    return path


def labels_of(bert: Path, path: Path, labels: tuple[str, ...] = LABELS) -> list[Any]:
    processor = Processor("text", "sequence-classification", {"tokenizer.json": ""}, labels, 32, bert)
    found: list[Any] = np.load(Path(arrays_of(str(path), processor)) / "label.npy").tolist()
    return found


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ([[1, 0, 1], [0, 0, 0]], [[1, 0, 1], [0, 0, 0]]),
        ([[True, False, True]], [[1, 0, 1]]),
        ([[1.0, 0.0, 0.0]], [[1, 0, 0]]),
        ([[1, None, -1]], [[1, -1, -1]]),
        ([["good"], [], ["neither", "bad"]], [[0, 1, 0], [0, 0, 0], [1, 0, 1]]),
        ([[2], [0, 1], []], [[0, 0, 1], [1, 1, 0], [0, 0, 0]]),
        ([[0, 1, 2], [1, 0, 0]], None),
        ([[0, 1, 2], [0, 1]], [[1, 1, 1], [1, 1, 0]]),
        ([["good", 0]], [[1, 1, 0]]),
    ],
)  # fmt: skip
def test_lists_are_0_or_1_for_each_class_or_those_that_a_text_has(
    bert: Path, tmp_path: Path, given: list[Any], wanted: list[Any] | None
) -> None:
    path = written(tmp_path, given)
    if wanted is None:
        with pytest.raises(DatasetError, match="row 2 of"):
            labels_of(bert, path)
    else:
        assert labels_of(bert, path) == wanted


@pytest.mark.parametrize(
    "last", [[1, 0], [0, 1, 2, 3], ["ugly"], [3], [1, 1], [[1, 0, 1]], [{"a": 1}], [0.5, 0, 1]], ids=repr
)
@pytest.mark.parametrize("before", [[[1, 0, 0], [0, 0, 1]], [["bad"], ["good"]]], ids=["flags", "names"])
def test_what_is_neither_is_told_with_its_row_and_the_models_classes(
    bert: Path, tmp_path: Path, before: list[Any], last: list[Any]
) -> None:
    if before == [["bad"], ["good"]] and last == [1, 0]:
        return  # numbers among names
    with pytest.raises(DatasetError, match=r"row 3 of .* has the labels") as caught:
        labels_of(bert, written(tmp_path, [*before, last]))
    assert "bad, good, neither" in caught.value.why


@pytest.mark.parametrize(
    ("labels", "row"), [([[1, 0, 0], 1], 2), ([1, [1, 0, 0]], 2), ([[1, 0, 0], "good"], 2), ([[1, 0, 0], None], 2)]
)
def test_lists_and_single_labels_are_not_mixed(bert: Path, tmp_path: Path, labels: list[Any], row: int) -> None:
    with pytest.raises(DatasetError, match=f"row {row} of"):
        labels_of(bert, written(tmp_path, labels))


def test_a_row_without_labels_among_lists_is_told(bert: Path, tmp_path: Path) -> None:
    bare, labelled = '{"text": "word1"}', '{"text": "word1", "labels": [1, 0, 0]}'
    for rows in ([bare, labelled], [labelled, bare]):
        path = tmp_path / "data.jsonl"
        path.write_text("\n".join(rows))
        with pytest.raises(DatasetError, match=r"row \d of .* has no label"):
            labels_of(bert, path)


def test_where_both_ways_fit_it_is_told_which_is_taken(bert: Path, tmp_path: Path) -> None:
    path = written(tmp_path, [[0, 1], [1, 0]])
    with pytest.warns(AssumedWarning, match="taken as 0 or 1 for each class"):
        assert labels_of(bert, path, ("no", "yes")) == [[0, 1], [1, 0]]


@given(st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=1))
def test_names_and_flags_of_the_same_labels_are_the_same(tmp_path_factory: pytest.TempPathFactory, flags: Any) -> None:
    names, folder = ("a", "b", "c", "d"), tmp_path_factory.mktemp("labels")
    wanted = np.array(flags, np.int8)
    ways: dict[str, list[list[Any]]] = {
        "flags": [[int(flag) for flag in row] for row in flags],
        "names": [[name for name, flag in zip(names, row, strict=True) if flag] for row in flags],
    }
    for way, rows in ways.items():
        labels = SeveralLabels(Path("data.jsonl"), names)
        for at, row in enumerate(rows, 1):
            labels.add(row, at, None)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            labels.write(folder / f"{way}.npy")
        assert (np.load(folder / f"{way}.npy") == wanted).all()


def test_a_model_of_several_labels_is_judged_by_the_f1_of_their_sets(bert: Path, tmp_path: Path) -> None:
    model = load(bert)
    path = written(tmp_path, [["bad", "good"], [], ["neither"], ["bad"]] * 20)
    data, metric, _ = judged(Dataset.open(arrays_of(str(path), model.processor), model.signature), None, None, model)
    assert metric.name == "f1_samples"
    assert metric.threshold == 0
    assert np.asarray(data.labels[:4]).tolist() == [[1, 1, 0], [0, 0, 0], [0, 0, 1], [1, 0, 0]]  # type: ignore[index]


def test_lists_of_the_datas_own_class_names_are_mapped(bert: Path, tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    told = {"labels": {"_type": "List", "feature": {"_type": "ClassLabel", "names": ["neither", "good", "bad"]}}}
    table = arrow.table({"text": ["word1"] * 2, "labels": [[0, 2], [1]]})
    noted = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": told}})})
    parquet.write_table(noted, tmp_path / "data.parquet")
    assert labels_of(bert, tmp_path / "data.parquet") == [[1, 0, 1], [0, 1, 0]]
