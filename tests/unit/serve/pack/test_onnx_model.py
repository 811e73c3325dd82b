"""ONNX files from elsewhere are packed as artifacts are."""

from __future__ import annotations

import shutil
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from compress.artifact import Artifact
from compress.errors import RepositoryError
from serve.lint.run import lint
from serve.pack.onnx_model import artifact_of_onnx
from serve.pack.write import PackOptions, pack
from tests.serve_models import hook_file, sum_artifact, text_artifact, tiny_artifact, unbatched_artifact
from tests.unit.serve.repository.test_repository import tree

MADE = (tiny_artifact, sum_artifact, text_artifact, unbatched_artifact)


@pytest.mark.parametrize("make", MADE, ids=lambda make: make.__name__)
def test_a_file_is_packed_as_the_artifact_that_holds_it(make: object, tmp_path: Path) -> None:
    artifact = make(tmp_path / "artifact")  # type: ignore[operator]
    shutil.copyfile(artifact / "model.onnx", tmp_path / "theirs.onnx")
    pack(artifact, repository=tmp_path / "one", name="m")
    pack(tmp_path / "theirs.onnx", repository=tmp_path / "other", name="m")
    assert tree(tmp_path / "one") == tree(tmp_path / "other")
    assert [finding for finding in lint(tmp_path / "other") if finding.severity == "error"] == []


def test_hooks_go_with_it(tmp_path: Path) -> None:
    path = tiny_artifact(tmp_path / "artifact") / "model.onnx"
    packed = pack(path, repository=tmp_path / "models", name="m", hooks=hook_file(tmp_path), options=PackOptions(1))
    assert packed.models == ("m", "m_preprocess", "m_network", "m_postprocess")
    assert lint(tmp_path / "models") == []


def damaged(path: Path) -> None:
    path.write_bytes(b"no model")


def outside(path: Path) -> None:
    model = onnx.load(path)
    onnx.save(model, path, save_as_external_data=True, location="weights", size_threshold=0)


def sequence(path: Path) -> None:
    given = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n"])
    made = helper.make_tensor_sequence_value_info("s", TensorProto.FLOAT, None)
    graph = helper.make_graph([helper.make_node("SequenceConstruct", ["x"], ["s"])], "g", [given], [made])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)


@pytest.mark.parametrize(
    ("change", "why"),
    [(damaged, "Protobuf"), (outside, "weights"), (sequence, "seq(tensor(float))"), (Path.unlink, "no such file")],
)
def test_what_can_t_be_served_is_refused_and_nothing_written(change: object, why: str, tmp_path: Path) -> None:
    path = tiny_artifact(tmp_path / "artifact") / "model.onnx"
    change(path)  # type: ignore[operator]
    with pytest.raises(RepositoryError, match="can't serve") as caught:
        pack(path, repository=tmp_path / "models", name="m")
    assert why in caught.value.why
    assert not (tmp_path / "models").exists()


def test_the_signature_is_the_files(tmp_path: Path) -> None:
    folder = sum_artifact(tmp_path / "artifact")
    found, known = artifact_of_onnx(folder / "model.onnx"), Artifact.load(folder)
    assert found.sha256 == known.sha256
    assert [str(spec) for spec in found.signature.inputs] == ["a:float32[batch,dim1]", "b:float32[batch,dim1]"]
    assert found.signature.batched
