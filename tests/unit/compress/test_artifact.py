"""What an artifact promises: a signature that survives text, a folder that proves itself."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compress.artifact import Artifact, Measured, Signature, StageReport, TensorSpec, sha256_of
from compress.errors import ArtifactError, SignatureError
from compress.signature import DTYPES

names = st.text("abcxyz_./", min_size=1, max_size=8)
dims = st.one_of(st.integers(1, 10_000), st.sampled_from(["batch", "seq", "h2"]))
specs = st.builds(TensorSpec, names, st.sampled_from(DTYPES), st.lists(dims, max_size=5).map(tuple))


@given(specs)
def test_a_spec_survives_being_written_as_text(spec: TensorSpec) -> None:
    assert TensorSpec.parse(str(spec)) == spec


@given(st.lists(specs, max_size=3).map(tuple), st.lists(specs, max_size=3).map(tuple))
def test_a_signature_survives_json(inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...]) -> None:
    signature = Signature(inputs, outputs)
    assert Signature.from_dict(json.loads(json.dumps(signature.to_dict()))) == signature


@pytest.mark.parametrize(
    ("word", "dtype"),
    [
        ("str", "string"), ("bytes", "string"), ("object", "string"), ("BYTES", "string"), ("TYPE_STRING", "string"),
        ("int", "int64"), ("float", "float32"), ("double", "float64"), ("half", "float16"), ("FP16", "float16"),
        ("FP32", "float32"), ("TYPE_FP32", "float32"), ("UINT8", "uint8"), ("TYPE_INT64", "int64"), ("BOOL", "bool"),
    ],
)  # fmt: skip
def test_dtypes_may_be_written_in_other_words(word: str, dtype: str) -> None:
    assert TensorSpec.parse(f"x:{word}[batch,3]") == TensorSpec("x", dtype, ("batch", 3))


@pytest.mark.parametrize("text", ["", "x", "x:float32", "x:float32[3", "float32[3]", "x:f32[3]", "x:float32[0]",
                                  "x:float32[-1,3]", "x:float32[a b]", "x:float32[1.5]"])  # fmt: skip
def test_text_that_is_no_spec_is_refused_with_the_form_to_write(text: str) -> None:
    with pytest.raises(SignatureError) as caught:
        TensorSpec.parse(text)
    assert "x:float32[batch,3,224,224]" in caught.value.mend


@pytest.mark.parametrize(
    ("array", "fits"),
    [
        (np.zeros((5, 3), np.float32), True),
        (np.zeros((0, 3), np.float32), True),
        (np.zeros((5, 4), np.float32), False),
        (np.zeros((5, 3, 1), np.float32), False),
        (np.zeros((5, 3), np.float64), False),
    ],
)
def test_a_spec_checks_arrays(array: np.ndarray[tuple[int, ...], np.dtype[np.float32]], fits: bool) -> None:
    spec = TensorSpec.parse("x:float32[batch,3]")
    if fits:
        spec.check(array, source="data")
    else:
        with pytest.raises(SignatureError, match="does not fit the model's input 'x'"):
            spec.check(array, source="data")


@pytest.fixture
def artifact(tmp_path: Path) -> Artifact:
    (tmp_path / "model.onnx").write_bytes(b"a model")
    row = StageReport("original", "as given", Measured(macs=7, accuracy=0.5), 0.1, ("mind",), {"a": 1}, {"b": [2]})
    signature = Signature((TensorSpec.parse("x:float32[batch,3]"),), (TensorSpec.parse("y:float32[batch,2]"),))
    made = Artifact(tmp_path, "model.onnx", "onnx", sha256_of(tmp_path / "model.onnx"), signature, (row,), "0.1.0")
    made.save()
    return made


def test_an_artifact_reads_back_as_it_was_written(artifact: Artifact) -> None:
    assert Artifact.load(artifact.folder) == artifact


def edited(text: str, **changes: object) -> str:
    return json.dumps(json.loads(text) | changes)


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda f: (f / "artifact.json").unlink(), "no artifact.json"),
        (lambda f: (f / "artifact.json").write_text("{"), "damaged"),
        (lambda f: (f / "artifact.json").write_text("[]"), "damaged"),
        (lambda f: (f / "artifact.json").write_text(edited((f / "artifact.json").read_text(), schema_version=99)), "99"),
        (lambda f: (f / "artifact.json").write_text(edited((f / "artifact.json").read_text(), stages=[{}])), "damaged"),
        (lambda f: (f / "model.onnx").unlink(), "model.onnx is missing"),
        (lambda f: (f / "model.onnx").write_bytes(b"another model"), "sha256 differs"),
    ],
)  # fmt: skip
def test_a_damaged_artifact_is_refused_with_the_reason(artifact: Artifact, damage: object, why: str) -> None:
    damage(artifact.folder)  # type: ignore[operator]
    with pytest.raises(ArtifactError) as caught:
        Artifact.load(artifact.folder)
    assert why in str(caught.value)


@pytest.mark.parametrize("given", ["ONNX", "tensorrt", "", "onnx ", None, 1, ["onnx"]])
def test_a_format_that_nothing_checks_is_refused(artifact: Artifact, given: object) -> None:
    path = artifact.folder / "artifact.json"
    path.write_text(edited(path.read_text(), format=given))
    with pytest.raises(ArtifactError, match="its format is"):
        Artifact.load(artifact.folder)


@pytest.mark.parametrize("given", [True, 0, -1, 1.0, "1", None])
def test_a_schema_version_is_a_whole_number_from_1(artifact: Artifact, given: object) -> None:
    path = artifact.folder / "artifact.json"
    path.write_text(edited(path.read_text(), schema_version=given))
    with pytest.raises(ArtifactError, match="its schema_version is"):
        Artifact.load(artifact.folder)


@pytest.mark.parametrize("encoding", ["utf-16", "latin-1"])
def test_what_is_no_utf8_is_told_without_the_file(artifact: Artifact, encoding: str) -> None:
    path = artifact.folder / "artifact.json"
    path.write_bytes(path.read_text().replace("mind", "ö" * 5_000).encode(encoding))
    with pytest.raises(ArtifactError, match="is no UTF-8") as caught:
        Artifact.load(artifact.folder)
    assert len(caught.value.why) < 300


def test_a_model_file_cannot_lead_out_of_the_folder(artifact: Artifact) -> None:
    path = artifact.folder / "artifact.json"
    path.write_text(edited(path.read_text(), model_file="../../etc/model.onnx"))
    assert Artifact.load(artifact.folder).model_path.parent == artifact.folder


def test_figures_that_are_no_numbers_become_null(artifact: Artifact) -> None:
    row = StageReport("s", "did", Measured(max_abs_error=float("inf")), 0.0)
    Artifact(artifact.folder, "model.onnx", "onnx", artifact.sha256, artifact.signature, (row,), "").save()
    assert Artifact.load(artifact.folder).stages[0].measured.max_abs_error is None


@pytest.mark.parametrize("between", [" ", ",", ", ", "; "])
def test_several_inputs_in_one_string_are_asked_for_one_by_one(between: str) -> None:
    with pytest.raises(SignatureError, match="can't read the tensor") as caught:
        TensorSpec.parse(between.join(("ids:int64[batch,seq]", "mask:bool[batch,seq]")))
    assert "inputs=[" in caught.value.mend
