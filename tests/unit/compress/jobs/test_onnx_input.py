"""An ONNX file goes through the whole job: held against itself, resumed, repeated; what needs torch is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from onnx import helper

import compress
from compress import Artifact, ExportOptions
from compress.cli import main
from compress.errors import CheckpointError, RecipeError, ToolkitError
from compress.formats.checkpoint import load
from compress.formats.onnx.load import load_onnx
from compress.jobs.export import Silent
from compress.jobs.plan import estimates
from compress.jobs.recovery import finetune
from compress.jobs.sensitivity import sensitivity
from compress.options import FinetuneOptions, OptimizeOptions, SensitivityOptions
from tests.unit.compress.onnx_export.test_from_file import images, outside, stored
from tests.unit.compress.onnx_graphs import normal, written


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A file that takes one image at a time, and data of many."""
    stored(images(1, 11, declared=1), tmp_path)
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "c.npz", x=rng.standard_normal((24, 3, 8, 8)).astype(np.float32))
    np.savez(tmp_path / "e.npz", x=rng.standard_normal((80, 3, 8, 8)).astype(np.float32))
    return tmp_path


def deep(folder: Path) -> None:
    """Two convolutions and a classifier, of which the channels between can go."""
    nodes = [
        helper.make_node("Conv", ["x", "w1"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c"], ["r"]),
        helper.make_node("Conv", ["r", "w2", "b2"], ["d"]),
        helper.make_node("Relu", ["d"], ["e"]),
        helper.make_node("GlobalAveragePool", ["e"], ["p"]),
        helper.make_node("Flatten", ["p"], ["f"]),
        helper.make_node("Gemm", ["f", "w3"], ["y"]),
    ]
    weights = {"w1": normal(16, 3, 3, 3), "w2": normal(16, 16, 3, 3), "b2": normal(16), "w3": normal(16, 5)}
    written(nodes, weights, folder, inputs=("x:float32[batch,3,8,8]",), outputs=("y:float32[batch,5]",))
    (folder / "model.onnx").rename(folder / "m.onnx")


def test_dynamic_int8_needs_nothing_but_the_file(tmp_path: Path) -> None:
    artifact, report = compress.export(outside(tmp_path), ExportOptions(output=tmp_path / "out", int8="dynamic"))
    assert [row.stage for row in report.stages] == ["original", "onnx_from_file", "fold_onnx", "quantize_onnx"]
    assert report.stages[0].measured.size_bytes == sum(each.stat().st_size for each in tmp_path.glob("m.*"))
    assert "latency_over_onnx" in report.gains
    assert "latency_over_torch" not in report.gains
    assert list(report.rooflines) == ["original", "result"]
    assert str(Artifact.load(artifact.folder).signature.inputs[0]) == "x:float32[batch,16]"


def test_an_output_that_is_a_number_for_all_samples_stands_beside_one_for_each(tmp_path: Path) -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"]), helper.make_node("ReduceMean", ["y"], ["m"], keepdims=0)]
    written(
        nodes,
        {"w": normal(8, 5)},
        tmp_path,
        inputs=("x:float32[batch,8]",),
        outputs=("y:float32[batch,5]", "m:float32[]"),
    )
    np.savez(tmp_path / "e.npz", x=np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32))
    options = ExportOptions(output=tmp_path / "out", int8="dynamic", eval=str(tmp_path / "e.npz"), metric="cosine")
    _, report = compress.export(tmp_path / "model.onnx", options)
    assert report.stages[-1].measured.value == pytest.approx(1, abs=0.01)


def test_a_file_of_one_sample_a_call_is_calibrated_and_judged_on_many(folder: Path) -> None:
    options = ExportOptions(
        output=folder / "out", int8="static", calibration="c.npz", eval="e.npz", metric="cosine", max_drop=50,
        budget_by="point",
    )  # fmt: skip
    artifact, report = compress.export(folder / "m.onnx", options)
    assert "24 samples" in report.stages[-1].did
    assert report.data["samples"] == 40
    assert str(artifact.signature.inputs[0]) == "x:float32[1,3,8,8]"
    assert (report.stages[-1].measured.value or 0) > 0.9
    again = estimates(folder / "m.onnx", options, Silent())[0]
    assert [row.name for row in again if row.kept] == ["onnx_from_file", "fold_onnx", "quantize_within"]
    said = json.loads((folder / "out" / "report.json").read_text())
    assert said["source"] == str(folder / "m.onnx")
    assert 'int8 = "static"' in (folder / "out" / "recipe.toml").read_text()


def test_a_search_goes_on_where_no_channel_can_go(folder: Path) -> None:
    options = OptimizeOptions(
        output=folder / "best", eval="e.npz", metric="cosine", int8=("dynamic",), max_drop=50, budget_by="point"
    )
    found = compress.optimize(folder / "m.onnx", options)
    measured = [trial.candidate.name for trial in found.trials if trial.status == "measured"]
    assert measured == ["whole · float", "whole · INT8 dynamic"]
    assert Artifact.load(folder / "best").stages[0].stage == "original"


ASKED = {
    "--model": ExportOptions(output=Path("out"), model="a:b"),
    "--input": ExportOptions(output=Path("out"), input=("x:float32[1,3,8,8]",)),
}


@pytest.mark.parametrize("flag", ASKED)
def test_what_says_how_torch_loads_a_model_is_refused_before_any_work(
    flag: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(RecipeError, match=flag):
        compress.export("m.onnx", ASKED[flag])
    assert not (folder / "out").exists()
    assert not (folder / "out.work").exists()


def test_a_file_is_pruned_repaired_and_trained_by_its_own_answers(folder: Path) -> None:
    deep(folder)
    options = ExportOptions(
        output=folder / "out", prune=0.4, finetune="c.npz", epochs=1, calibration="c.npz", eval="e.npz", metric="cosine",
        work=folder / "kept",
    )  # fmt: skip
    artifact, report = compress.export(folder / "m.onnx", options)
    assert [row.stage for row in report.stages] == [
        "original", "torch_from_onnx", "prune_channels", "repair_channels", "finetune", "onnx_from_torch", "fold_onnx"
    ]  # fmt: skip
    first, last = report.stages[0].measured, report.stages[-1].measured
    assert first.macs is not None
    assert last.macs is not None
    assert last.macs < 0.65 * first.macs
    declared = load_onnx(folder / "m.onnx").signature
    assert [str(spec) for spec in artifact.signature.inputs] == [str(spec) for spec in declared.inputs]
    assert [spec.name for spec in artifact.signature.outputs] == [spec.name for spec in declared.outputs]


def test_what_pruning_costs_and_a_training_take_a_file(folder: Path) -> None:
    deep(folder)
    curves = sensitivity(
        folder / "m.onnx", SensitivityOptions(output=folder / "s", eval=str(folder / "e.npz"), metric="cosine")
    )
    assert curves.curves
    asked = FinetuneOptions(
        output=folder / "t", data="c.npz", teacher=folder / "m.onnx", epochs=1, eval="e.npz", metric="cosine"
    )
    assert finetune(folder / "m.onnx", asked, watcher=Silent()) is not None


def test_a_file_that_is_not_there_is_named(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="take ONNX files"):
        load(folder / "m.onnx")
    with pytest.raises(ToolkitError, match="there is no such file"):
        compress.export(folder / "missing.onnx", ExportOptions(output=folder / "out"))


def test_a_file_is_inspected(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["inspect", str(folder / "m.onnx")])
    told = capsys.readouterr().out
    assert "kind     ONNX file of opset 11" in told
    assert "inputs   x:float32[1,3,8,8]" in told
    assert "MACs     13,824" in told
