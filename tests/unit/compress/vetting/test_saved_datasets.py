"""A folder that `datasets` saved: read by pyarrow alone, a batch at a time; its files are anybody's."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from compress.artifact import TensorSpec
from compress.data.dataset import Dataset
from compress.data.reading import arrays_of
from compress.errors import DatasetError
from compress.processor import Processor
from compress.signature import Signature
from compress.vetting.tables import rows_of
from tests.hub_models import LABELS, bert_folder

arrow: Any = pytest.importorskip("pyarrow")


def saved(folder: Path, *parts: dict[str, Any], compression: str | None = None) -> Path:
    """As `Dataset.save_to_disk` of datasets 4 writes it, a file for each part."""
    folder.mkdir(parents=True)
    names = [f"data-{at:05}-of-{len(parts):05}.arrow" for at in range(len(parts))]
    for name, columns in zip(names, parts, strict=True):
        table = arrow.table(columns)
        options = arrow.ipc.IpcWriteOptions(compression=compression)
        with arrow.ipc.new_stream(folder / name, table.schema, options=options) as writer:
            for batch in table.to_batches(max_chunksize=2):
                writer.write_batch(batch)
    state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "0", "_split": None}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text(json.dumps({"features": {}}))
    return folder


PARTS = ({"text": ["a", "b", "c"], "label": [0, 1, 2]}, {"text": ["d"], "label": [1]})


def test_rows_of_all_files_come_in_order(tmp_path: Path) -> None:
    rows = list(rows_of(saved(tmp_path / "set", *PARTS)))
    assert [(row["text"], row["label"]) for row in rows] == [("a", 0), ("b", 1), ("c", 2), ("d", 1)]
    wanted = list(rows_of(tmp_path / "set", ["text"]))
    assert [row["label"] for row in wanted] == [None] * 4


def test_lists_are_read_where_they_are_asked_for(tmp_path: Path) -> None:
    columns = {
        "tokens": [["a", "bc"], []],
        "tags": [[1, 2], []],
        "large": arrow.array(["x", "y"], arrow.large_string()),
    }
    assert next(iter(rows_of(saved(tmp_path / "set", columns))))["tokens"] is None
    rows = list(rows_of(tmp_path / "set", None, ["tokens", "tags"]))
    assert [(row["tokens"], row["tags"], row["large"]) for row in rows] == [(["a", "bc"], [1, 2], "x"), ([], [], "y")]


def test_of_several_splits_they_are_named(tmp_path: Path) -> None:
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    with pytest.raises(DatasetError, match="train, test") as refused:
        list(rows_of(tmp_path))
    assert str(tmp_path / "train") in refused.value.mend


def test_a_compressed_file_which_may_be_of_any_size_is_refused(tmp_path: Path) -> None:
    for at, columns in enumerate([*PARTS[:1], {"text": arrow.array(["a" * 9999] * 9).dictionary_encode()}]):
        folder = saved(tmp_path / str(at), columns, compression="zstd")
        with pytest.raises(DatasetError, match="is compressed"):
            list(rows_of(folder))


@pytest.mark.parametrize(
    "state", ["{}", "[]", "no", '{"_data_files": [{"filename": "../other"}]}', '{"_data_files": 3}']
)
def test_a_damaged_state_is_told(tmp_path: Path, state: str) -> None:
    folder = saved(tmp_path / "set", *PARTS)
    (folder / "state.json").write_text(state)
    with pytest.raises(DatasetError, match=r"state\.json"):
        list(rows_of(folder))


def test_a_missing_or_damaged_file_is_told(tmp_path: Path) -> None:
    folder = saved(tmp_path / "set", *PARTS)
    file = folder / "data-00000-of-00002.arrow"
    whole, random = file.read_bytes(), Random(0)
    for _ in range(150):
        damaged = bytearray(whole)
        for _ in range(random.randint(1, 8)):
            damaged[random.randrange(len(damaged))] = random.randrange(256)
        file.write_bytes(damaged[: random.randint(1, len(damaged))])
        try:
            list(rows_of(folder))
        except DatasetError:
            continue
    file.unlink()
    with pytest.raises(DatasetError, match="can't read the data"):
        list(rows_of(folder))


def test_a_saved_dataset_is_data_of_a_model_and_known_by_its_content(tmp_path: Path) -> None:
    bert = bert_folder(tmp_path / "bert")
    processor = Processor("text", "sequence-classification", {"tokenizer.json": ""}, LABELS, 6, bert)
    ids = Signature(tuple(TensorSpec(name, "int64", ("batch", "seq")) for name in ("input_ids", "attention_mask")), ())
    found = []
    for name, last in (("one", "word1"), ("two", "word1"), ("other", "word2")):
        source = saved(tmp_path / name, {"text": ["word3 word4", last], "label": [2, 0]})
        found.append(Dataset.open(arrays_of(str(source), processor), ids))
    assert np.asarray(found[0].inputs["input_ids"])[:, :3].tolist() == [[1, 7, 8], [1, 5, 2]]
    assert np.asarray(found[0].labels).tolist() == [2, 0]
    assert found[0].sha256 == found[1].sha256 != found[2].sha256
