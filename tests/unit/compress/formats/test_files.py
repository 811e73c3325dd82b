"""Weights beside an ONNX file are part of the model, wherever in the file they are named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import FunctionProto, ModelProto, TensorProto, helper, numpy_helper

from compress.artifact import Artifact
from compress.errors import ArtifactError
from compress.formats.files import files_of, size_of
from compress.formats.onnx.load import fingerprint_of_file
from compress.formats.onnx.outline import take_in
from tests.hostile.onnx_files import artifact, model

WEIGHTS = "in/weights.bin"
BYTES = 64


def tensor(kind: int = TensorProto.FLOAT) -> TensorProto:
    """Of 16 floats or 8 integers in a file beside the model's."""
    made = TensorProto(name="c", data_type=kind, dims=[BYTES // (4 if kind == TensorProto.FLOAT else 8)])
    made.data_location = TensorProto.EXTERNAL
    made.external_data.add(key="location", value=WEIGHTS)
    return made


def constant() -> onnx.NodeProto:
    return helper.make_node("Constant", [], ["c"], value=tensor())


def initializer(made: ModelProto) -> None:
    made.graph.initializer.append(tensor())


def sparse_values(made: ModelProto) -> None:
    sparse = made.graph.sparse_initializer.add(dims=[20])
    sparse.values.CopyFrom(tensor())
    sparse.indices.CopyFrom(numpy_helper.from_array(np.arange(16, dtype=np.int64)))


def sparse_indices(made: ModelProto) -> None:
    sparse = made.graph.sparse_initializer.add(dims=[20])
    sparse.values.CopyFrom(numpy_helper.from_array(np.ones(8, np.float32), "s"))
    sparse.indices.CopyFrom(tensor(TensorProto.INT64))


def sparse_attribute(made: ModelProto) -> None:
    sparse = onnx.SparseTensorProto(dims=[20])
    sparse.values.CopyFrom(tensor())
    sparse.indices.CopyFrom(numpy_helper.from_array(np.arange(16, dtype=np.int64)))
    made.graph.node.append(helper.make_node("Constant", [], ["c"], sparse_value=sparse))


def in_a_function(made: ModelProto) -> None:
    made.functions.append(function([constant()]))


def by_default(made: ModelProto) -> None:
    made.functions.append(function([helper.make_node("Identity", ["a"], ["c"])]))
    made.functions[0].attribute_proto.append(helper.make_attribute("value", tensor()))


def in_a_body_of_a_function(made: ModelProto) -> None:
    branch = helper.make_graph([constant()], "b", [], [helper.make_tensor_value_info("c", TensorProto.FLOAT, [16])])
    node = helper.make_node("If", ["a"], ["c"], then_branch=branch, else_branch=branch)
    made.functions.append(function([node]))


def in_a_list(made: ModelProto) -> None:
    node = helper.make_node("Many", [], ["c"], domain="com.microsoft")
    node.attribute.append(helper.make_attribute("tensors", [tensor()]))
    made.graph.node.append(node)


def for_training(made: ModelProto) -> None:
    made.training_info.add().initialization.CopyFrom(helper.make_graph([], "t", [], [], [tensor()]))


def function(nodes: list[onnx.NodeProto]) -> FunctionProto:
    return helper.make_function("own", "F", ["a"], ["c"], nodes, [helper.make_opsetid("", 20)])


Change = Callable[[ModelProto], None]
PLACES: list[Change] = [
    initializer, sparse_values, sparse_indices, sparse_attribute, in_a_function, by_default, in_a_body_of_a_function,
    in_a_list, for_training,
]  # fmt: skip


def write(folder: Path, change: Change) -> Path:
    made = model()
    change(made)
    (folder / "in").mkdir()
    (folder / WEIGHTS).write_bytes(bytes(range(BYTES)))
    (folder / "m.onnx").write_bytes(made.SerializeToString())
    return folder / "m.onnx"


@pytest.mark.parametrize("change", PLACES)
def test_they_are_hashed_and_counted_with_the_file(tmp_path: Path, change: Change) -> None:
    path = write(tmp_path, change)
    assert files_of(path) == [path, tmp_path / WEIGHTS]
    assert size_of(path) == path.stat().st_size + BYTES
    before = fingerprint_of_file(path)
    assert fingerprint_of_file(path) == before
    (tmp_path / WEIGHTS).write_bytes(bytes(BYTES))
    assert fingerprint_of_file(path) != before


@pytest.mark.parametrize("change", PLACES)
def test_they_are_taken_into_the_file(tmp_path: Path, change: Change) -> None:
    path = write(tmp_path, change)
    made = onnx.load(path, load_external_data=False)
    take_in(made, tmp_path)
    path.write_bytes(made.SerializeToString())
    assert files_of(path) == [path]
    assert bytes(range(BYTES)) in path.read_bytes()


@pytest.mark.parametrize("change", PLACES)
def test_an_artifact_whose_weights_no_checksum_covers_is_refused(tmp_path: Path, change: Change) -> None:
    content = write(tmp_path, change).read_bytes()
    artifact(tmp_path, content)
    with pytest.raises(ArtifactError, match=r"weights of model\.onnx lie in in/weights\.bin"):
        Artifact.load(tmp_path)
