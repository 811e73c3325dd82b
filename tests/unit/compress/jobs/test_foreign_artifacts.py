"""Figures and shapes in an artifact of someone else's: half of them may be missing, or none that a machine holds."""

from __future__ import annotations

import json
import re
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from compress.artifact import Artifact, Measured, Signature, StageReport, TensorSpec, sha256_of
from compress.cli import main
from compress.errors import ArtifactError, CheckpointError, SignatureError
from compress.formats.file_kind import file_kind
from compress.jobs.examine import told_of


def test_an_interval_with_one_end_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"")
    measured = Measured(metric="accuracy", value=90.0, drop=1.0, drop_low=0.5)
    artifact = Artifact(
        tmp_path, "model.onnx", "onnx", "", Signature((), ()), (StageReport("quantize", "did", measured, 1.0),)
    )
    assert told_of(artifact)["metric"] == "accuracy 90.0000; drop +1.00 points"


def test_a_dimension_fits_64_bits() -> None:
    assert TensorSpec.parse(f"x:float32[{(1 << 63) - 1}]").shape == ((1 << 63) - 1,)
    with pytest.raises(SignatureError, match="a dimension is a positive number"):
        TensorSpec.parse(f"x:float32[{1 << 63}]")


@pytest.mark.parametrize("name", ["x\x1b", "x\x07", "x\u202e", "\ud800"], ids=ascii)
def test_the_name_of_a_tensor_moves_no_cursor(name: str) -> None:
    with pytest.raises(SignatureError, match="control characters"):
        TensorSpec.parse(f"{name}:float32[batch,4]")


def _artifact(folder: Path, node: onnx.NodeProto) -> str:
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 4]) for name in "xy")
    graph = helper.make_graph([node], "g", [x], [y])
    path = folder / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    given, made = (TensorSpec.parse(f"{name}:float32[batch,4]") for name in "xy")
    signature = Signature((given,), (made,))
    Artifact(folder, path.name, "onnx", sha256_of(path), signature).save()
    return str(folder)


@pytest.mark.parametrize(
    "node",
    [
        helper.make_node("NoSuchOperator", ["x"], ["y"]),
        helper.make_node("Relu", ["nowhere"], ["y"]),
        helper.make_node("Concat", ["x", "x"], ["y"], axis=7),
    ],
    ids=["unknown", "unconnected", "impossible"],
)
def test_a_graph_that_onnx_runtime_refuses_has_no_roofline_in_three_lines(
    tmp_path: Path, node: onnx.NodeProto, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["inspect", _artifact(tmp_path, node), "--roofline"])
    assert ended.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.strip().split(":")[0] for line in lines] == ["error", "why", "mend"]


@pytest.mark.parametrize("key", ["x\x1b[2J", "target"])
def test_what_a_recipe_says_moves_no_cursor_where_it_is_refused(
    tmp_path: Path, key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "r.toml").write_text(f'checkpoint = "m.pt"\noutput = "o"\n{json.dumps(key)} = "c\\u001b[2Ju\\u202e"\n')
    with pytest.raises(SystemExit) as ended:
        main(["run", str(tmp_path / "r.toml")])
    assert ended.value.code == 2
    told = capsys.readouterr()
    assert "r.toml" in re.sub(r"[│\s]", "", told.err + told.out)  # the panel may break a long path anywhere
    assert "\x1b[2J" not in told.err + told.out
    assert "\u202e" not in told.err + told.out


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("name", ["drop", "latency_rounds_ms", "seconds"])
def test_figures_are_finite(tmp_path: Path, name: str, value: str) -> None:
    folder = Path(_artifact(tmp_path, helper.make_node("Relu", ["x"], ["y"])))
    told = json.loads((folder / "artifact.json").read_text())
    figure = '["FIGURE"]' if name == "latency_rounds_ms" else '"FIGURE"'
    row = {"stage": "s", "did": "d", "seconds": 1, "warnings": [], "measured": {}}
    (row if name == "seconds" else row["measured"])[name] = json.loads(figure)  # type: ignore[index]
    text = json.dumps(told | {"stages": [row]})
    (folder / "artifact.json").write_text(text.replace('"FIGURE"', "1.5"))
    assert Artifact.load(folder).stages[0].stage == "s"
    (folder / "artifact.json").write_text(text.replace('"FIGURE"', value))
    with pytest.raises(ArtifactError, match="can't read"):
        Artifact.load(folder)


@pytest.mark.parametrize(
    "name", ["a" * 300, "é" * 200, "a\0b", "\ud800", "..", "", "/", "a/" * 2000 + "\0"], ids=range(8)
)
def test_a_model_file_has_a_name_that_a_file_can_have(tmp_path: Path, name: str) -> None:
    folder = Path(_artifact(tmp_path, helper.make_node("Relu", ["x"], ["y"])))
    told = json.loads((folder / "artifact.json").read_text())
    (folder / "artifact.json").write_text(json.dumps(told | {"model_file": name}))
    with pytest.raises(ArtifactError, match="can't read"):
        Artifact.load(folder)


def test_a_checkpoint_with_a_name_that_no_file_can_have_is_refused() -> None:
    with pytest.raises(CheckpointError, match="can't read"):
        file_kind(Path("a" * 300))
