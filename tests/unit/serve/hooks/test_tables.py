"""Rows of the tables that ids are looked up in, read from a file's bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper

from compress.artifact import Artifact
from compress.errors import RepositoryError
from serve.hooks.check import run_network
from serve.hooks.tables import beyond_table, table_rows
from tests.serve_models import artifact_of, lookup_artifact, tiny_artifact

TABLE = np.zeros((10, 3), np.float32)


def rows_of(folder: Path, nodes: list[onnx.NodeProto], weights: dict[str, Any]) -> dict[str, int]:
    made = artifact_of(folder, nodes, ["ids:int64[batch,2]"], ["y:float32[batch,2,3]"], weights)
    return table_rows(made / "model.onnx")


def test_a_table_is_found_past_what_changes_no_id_and_no_row(tmp_path: Path) -> None:
    ids = helper.make_node("Cast", ["ids"], ["cast"], to=TensorProto.INT32)
    plain = [helper.make_node("Gather", ["table", "ids"], ["y"])]
    assert rows_of(tmp_path / "plain", plain, {"table": TABLE}) == {"ids": 10}
    scaled = [ids, helper.make_node("DequantizeLinear", ["table", "scale"], ["float"]),
              helper.make_node("Gather", ["float", "cast"], ["y"])]  # fmt: skip
    codes = {"table": TABLE.astype(np.int8), "scale": np.array(0.5, np.float32)}
    assert rows_of(tmp_path / "scaled", scaled, codes) == {"ids": 10}
    among = [helper.make_node("Range", ["none", "all", "one"], ["every"]),
             helper.make_node("Gather", ["every", "ids"], ["known"]),
             helper.make_node("Gather", ["table", "known"], ["y"])]  # fmt: skip
    numbers = {name: np.array(number, np.int64) for name, number in (("none", 0), ("all", 7), ("one", 1))}
    assert rows_of(tmp_path / "among", among, {"table": TABLE, **numbers}) == {"ids": 7}


def test_what_is_no_lookup_of_ids_says_nothing(tmp_path: Path) -> None:
    by_columns = [helper.make_node("Gather", ["table", "ids"], ["found"], axis=1),
                  helper.make_node("Transpose", ["found"], ["y"], perm=[1, 2, 0])]  # fmt: skip
    assert rows_of(tmp_path / "columns", by_columns, {"table": TABLE.T.copy()}) == {}
    assert table_rows(tiny_artifact(tmp_path / "tiny") / "model.onnx") == {}


@given(st.binary(max_size=200))
def test_bytes_that_are_no_model_end_nothing(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "noise.onnx"
    path.write_bytes(data)
    assert all(rows >= 0 for rows in table_rows(path).values())


def test_a_network_that_lacks_an_id_says_so_in_its_own_numbers(tmp_path: Path) -> None:
    source = Artifact.load(lookup_artifact(tmp_path / "lookup"))
    for id_ in (10, -11):
        with pytest.raises(RepositoryError, match="can't run") as told:
            run_network(source, {"ids": np.array([1, id_])})
        assert f"ids has the id {id_}, and the table that it is looked up in has 10 rows, for 0 to 9" in told.value.why
        assert "resize_token_embeddings" in told.value.mend
    assert beyond_table(source, {"0": np.array([[0, 9, -10]])}) == ""
