"""What serves the result of a run: real files on both runtimes, and what the artifact and the report say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import compress
from compress.artifact import Artifact, Signature, TensorSpec
from compress.errors import ArtifactError, MissingExtraError, RecipeError, StageError
from compress.evaluate.runtime_choice import Choice, most_apart
from compress.jobs import serving_runtime
from compress.jobs import timed_on as timing
from compress.jobs.export import Silent
from compress.jobs.prove import measure
from compress.jobs.serving_runtime import beside, chosen, served
from compress.model import OnnxModel
from compress.options import ExportOptions, OptimizeOptions
from compress.prune import prune_to_budget
from compress.runtime import footprint as running
from compress.runtime.backends import Backend, open_model
from compress.runtime.latency import Ratio
from tests.families import family
from tests.serve_models import pooled_artifact, tiny_artifact


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """model.pt, and eval.npz beside it."""
    folder = tmp_path_factory.mktemp("model")
    module, inputs = family("residual")
    compress.save(module, folder / "model.pt", inputs=inputs)
    name = inputs[0].partition(":")[0]
    samples = np.random.default_rng(0).standard_normal((40, 3, 16, 16)).astype(np.float32)
    np.savez(folder / "eval.npz", **{name: samples})  # type: ignore[arg-type]
    return folder / "model.pt"


def export(model: Path, output: Path, **more: Any) -> tuple[Artifact, Any]:
    asked = {"eval": str(model.parent / "eval.npz"), "metric": "cosine"} | more
    return compress.export(model, ExportOptions(output=output, **asked))


def report_of(folder: Path) -> Any:
    return json.loads((folder / "report.json").read_text())


@pytest.mark.usefixtures("openvino")
def test_auto_measures_both_and_the_artifact_says_which_serves(model: Path, tmp_path: Path) -> None:
    artifact, report = export(model, tmp_path / "a")
    told = report_of(tmp_path / "a")["runtimes"]
    assert [row["runtime"] for row in told["figures"]] == ["onnxruntime", "openvino"]
    assert all(row["p50_ms"] > 0 and row["drop"] is not None for row in told["figures"])
    assert told["figures"][1]["difference"] < 1e-4
    assert told["batched"]["value"] > 0
    # Two rounds are too few to tell one from the other: ONNX Runtime stays.
    assert artifact.runtime == Artifact.load(tmp_path / "a").runtime == told["runtime"] == "onnxruntime"
    assert report.stages[-1].measured.runtime == "ONNX Runtime"
    page = (tmp_path / "a/report.html").read_text()
    assert "Runtimes" in page
    assert "OpenVINO" in page


@pytest.mark.usefixtures("openvino")
def test_a_runtime_that_is_asked_for_serves(model: Path, tmp_path: Path) -> None:
    artifact, report = export(model, tmp_path / "a", runtime="openvino")
    assert artifact.runtime == Artifact.load(tmp_path / "a").runtime == "openvino"
    assert report.stages[-1].measured.runtime == "OpenVINO"
    assert report.stages[-1].measured.load_ms > 0
    assert report.stages[-2].measured.runtime == "ONNX Runtime"


def test_one_that_is_asked_for_and_not_there_is_told_before_any_work(model: Path, tmp_path: Path) -> None:
    with pytest.raises(MissingExtraError, match=r"\[openvino\]"):
        export(model, tmp_path / "a", runtime="openvino")
    with pytest.raises(MissingExtraError):
        compress.optimize(model, OptimizeOptions(output=tmp_path / "a", eval="eval.npz", runtime="openvino"))
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("openvino")
def test_a_file_for_a_gpu_is_not_for_openvino(model: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="--target tensorrt"):
        export(model, tmp_path / "a", runtime="openvino", target="tensorrt")


def file_of(path: Path, *nodes: onnx.NodeProto) -> OnnxModel:
    """x:float32[batch,8] to y of the same shape."""
    signature = Signature((TensorSpec.parse("x:float32[batch,8]"),), (TensorSpec.parse("y:float32[batch,8]"),))
    given, made = (
        [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["batch", 8])] for name in ("x", "y")
    )
    graph = onnx.helper.make_graph(list(nodes), "g", given, made)
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=10), path)
    return OnnxModel(path, signature)


def rows_of(tmp_path: Path, *nodes: onnx.NodeProto) -> dict[str, Any]:
    """An original, its export, and a result of these nodes."""
    plain = file_of(tmp_path / "plain.onnx", onnx.helper.make_node("Identity", ["x"], ["y"]))
    return {"original": plain, "original_onnx": plain, "result": file_of(tmp_path / "result.onnx", *nodes)}


def choice_of(options: ExportOptions, rows: dict[str, Any]) -> Choice | None:
    others, costs, choice = beside(options, rows)
    if not others:
        return choice
    found = measure(rows, None, 1, Silent(), others, costs)
    choice = chosen(options, rows, others, found, None, None)
    models, kept = served(rows, others, found, choice)
    assert list(models) == list(kept.latency) == list(kept.runtimes) == list(rows)
    return choice


@pytest.mark.usefixtures("openvino")
def test_a_file_that_openvino_computes_differently_is_named_and_not_chosen(tmp_path: Path) -> None:
    """Each draws other noise."""
    noise = onnx.helper.make_node("RandomNormalLike", ["x"], ["n"], seed=1.0)
    rows = rows_of(tmp_path, noise, onnx.helper.make_node("Add", ["x", "n"], ["y"]))
    found = choice_of(ExportOptions(output=tmp_path / "a"), rows)
    assert found is not None
    assert (found.runtime, found.doubtful) == ("onnxruntime", True)
    assert "computes the file differently" in found.why
    with pytest.raises(StageError, match="computes the result of result differently"):
        choice_of(ExportOptions(output=tmp_path / "a", runtime="openvino"), rows)


@pytest.mark.usefixtures("openvino")
def test_an_operator_that_openvino_lacks_leaves_the_file_to_onnx_runtime(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, onnx.helper.make_node("Bernoulli", ["x"], ["y"]))
    found = choice_of(ExportOptions(output=tmp_path / "a"), rows)
    assert found is not None
    assert (found.runtime, found.doubtful) == ("onnxruntime", True)
    assert "Bernoulli" in found.why
    with pytest.raises(StageError, match="Bernoulli"):
        choice_of(ExportOptions(output=tmp_path / "a", runtime="openvino"), rows)


@pytest.mark.usefixtures("openvino")
def test_the_faster_one_serves_and_the_last_row_is_its(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is real but the clock's verdict, which is another on each machine."""
    monkeypatch.setattr(serving_runtime, "ratio", lambda *_: Ratio(2.0, 1.9, 2.1))
    options = ExportOptions(output=tmp_path / "a")
    rows = rows_of(tmp_path, onnx.helper.make_node("Relu", ["x"], ["y"]))
    others, costs, _ = beside(options, rows)
    found = measure(rows, None, 1, Silent(), others, costs)
    choice = chosen(options, rows, others, found, None, None)
    assert "2.00 times as fast as ONNX Runtime (1.90 to 2.10) at batch 1 with 1 thread: OpenVINO" in choice.why
    models, kept = served(rows, others, found, choice)
    assert models["result"].runtime == choice.runtime == "openvino"  # type: ignore[union-attr]
    assert kept.runtimes == {"original": "ONNX Runtime", "original_onnx": "ONNX Runtime", "result": "OpenVINO"}
    assert kept.latency["result"] == found.latency["result on OpenVINO"]


def test_without_openvino_auto_is_onnx_runtime_and_says_nothing(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, onnx.helper.make_node("Relu", ["x"], ["y"]))
    assert beside(ExportOptions(output=tmp_path / "a"), rows) == ({}, {}, None)


@pytest.mark.usefixtures("openvino")
def test_bf16_is_left_to_its_emulation_where_the_cpu_does_not_multiply_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("compress.jobs.serving_runtime", "compress.runtime.backends.openvino_cpu"):
        monkeypatch.setattr(f"{module}.fast_bfloat16", lambda: False)
    casts = [
        onnx.helper.make_node("Cast", [given], [made], to=kind)
        for given, made, kind in (("x", "h", onnx.TensorProto.BFLOAT16), ("h", "y", onnx.TensorProto.FLOAT))
    ]
    rows = rows_of(tmp_path, *casts)
    assert beside(ExportOptions(output=tmp_path / "a"), rows) == ({}, {}, None)
    with pytest.raises(StageError, match="does not multiply BF16"):
        beside(ExportOptions(output=tmp_path / "a", runtime="openvino"), rows)


def test_an_artifact_of_an_earlier_release_is_served_by_onnx_runtime(tmp_path: Path) -> None:
    path = tiny_artifact(tmp_path / "a") / "artifact.json"
    data = json.loads(path.read_text())
    assert data.pop("runtime") == "onnxruntime"
    path.write_text(json.dumps(data))
    assert Artifact.load(tmp_path / "a").runtime == "onnxruntime"
    path.write_text(json.dumps(data | {"runtime": "magic"}))
    with pytest.raises(ArtifactError, match="its runtime is 'magic'"):
        Artifact.load(tmp_path / "a")


@pytest.mark.usefixtures("openvino")
@pytest.mark.parametrize(("side", "runtime"), [(8, "onnxruntime"), (64, "openvino")])
def test_one_that_fails_at_sizes_that_the_other_answers_is_not_taken(tmp_path: Path, side: int, runtime: str) -> None:
    """A pooling by 8 x 8 gives nothing for fewer pixels in ONNX Runtime; OpenVINO ends the process."""
    artifact = Artifact.load(pooled_artifact(tmp_path))
    model = OnnxModel(artifact.model_path, artifact.signature.sized({"height": side, "width": side}))

    others, _, choice = beside(ExportOptions(output=tmp_path / "a"), {"float": model})

    assert (not others) is (runtime == "onnxruntime")
    if choice is not None:
        assert (choice.runtime, choice.doubtful) == ("onnxruntime", True)
        assert "fails at inputs that ONNX Runtime answers (height = 4)" in choice.why


def bent(path: Path, up: float, down: float) -> Backend:
    """Answers x times one number where x is above 0, times another one below."""
    path.mkdir()
    nodes = [
        helper.make_node("Constant", [], ["slope"], value=numpy_helper.from_array(np.float32(down / up))),
        helper.make_node("Constant", [], ["k"], value=numpy_helper.from_array(np.float32(up))),
        helper.make_node("PRelu", ["x", "slope"], ["b"]),
        helper.make_node("Mul", ["b", "k"], ["y"]),
    ]
    given, made = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 4]) for name in "xy")
    graph = helper.make_graph(nodes, "g", [given], [made])
    file = path / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), file)
    specs = (TensorSpec.parse("x:float32[batch,4]"),), (TensorSpec.parse("y:float32[batch,4]"),)
    return open_model(OnnxModel(file, Signature(*specs)), threads=1)


@pytest.mark.parametrize(
    ("others", "befores", "half", "differs"),
    [
        ((1.03, 1.6), (1.01, 1.25), True, True),
        ((1.03, 1.3), (1.01, 1.25), True, False),
        ((1.03, 1.6), (1.01, 1.25), False, True),
        ((1.015, 1.4), (1.01, 1.25), False, False),
        ((1.0015, 1.0013), (1.0004, 1.0), True, True),
        ((1.0015, 1.0005), (1.0004, 1.0), True, False),
    ],
)
def test_a_file_differs_where_any_group_of_inputs_does(
    others: tuple[float, float], befores: tuple[float, float], half: bool, differs: bool, tmp_path: Path
) -> None:
    opened = {
        "last": bent(tmp_path / "last", 1.0, 1.0),
        "other": bent(tmp_path / "other", *others),
        "before": bent(tmp_path / "before", *befores),
    }
    ones = np.ones((2, 4), np.float32)
    difference, quantized = serving_runtime.apart(opened, [[{"x": ones}], [{"x": -ones}]], half=half)
    assert (difference > most_apart(quantized, half=half)) == differs, (difference, quantized)


@pytest.mark.usefixtures("openvino")
@pytest.mark.parametrize(
    ("runtime", "precision", "native", "timed"),
    [
        ("openvino", "fp32", True, "openvino"),
        ("onnxruntime", "fp32", True, "onnxruntime"),
        ("auto", "fp32", True, "onnxruntime"),
        ("auto", "bf16", True, "openvino"),  # the other one only emulates it
        ("auto", "bf16", False, "onnxruntime"),
        ("onnxruntime", "bf16", True, "onnxruntime"),
    ],
)
def test_candidates_are_timed_on_what_will_serve_them(
    monkeypatch: pytest.MonkeyPatch, runtime: Any, precision: Any, native: bool, timed: str
) -> None:
    monkeypatch.setattr(timing, "fast_bfloat16", lambda: native)
    asked = ExportOptions(output=Path("x"), runtime=runtime, precision=precision, target_latency_ms=1.0)
    assert timing.timed_on(asked) == timed


@pytest.mark.usefixtures("openvino")
def test_a_limit_in_time_is_measured_on_the_runtime_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, model: Path, tmp_path: Path
) -> None:
    asked: list[str] = []

    def opened(file: OnnxModel, threads: int) -> Backend:
        asked.append(file.runtime)
        return open_model(file, threads=threads)

    monkeypatch.setattr(prune_to_budget, "open_model", opened)
    export(model, tmp_path / "a", runtime="openvino", target_latency_ms=1000.0)
    assert set(asked) == {"openvino"}


@pytest.mark.usefixtures("openvino")
def test_an_openvino_that_ends_its_process_is_named_and_ends_no_export(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ends = "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n"
    monkeypatch.setitem(running._OPENING, "openvino", ends)
    rows = rows_of(tmp_path, onnx.helper.make_node("Identity", ["x"], ["y"]))
    found = choice_of(ExportOptions(output=tmp_path / "a"), rows)
    assert found is not None
    assert (found.runtime, found.doubtful) == ("onnxruntime", True)
    assert "SIGSEGV" in found.why
    with pytest.raises(StageError, match="OpenVINO can't run") as refused:
        choice_of(ExportOptions(output=tmp_path / "a", runtime="openvino"), rows)
    assert "--runtime onnxruntime" in refused.value.mend


@pytest.mark.usefixtures("openvino")
def test_openvino_is_tried_at_every_batch_that_it_will_be_timed_at(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ends = "import os, signal\ndef run(inputs):\n    if len(inputs['x']) == 8:\n        os.kill(os.getpid(), signal.SIGSEGV)\n"
    monkeypatch.setitem(running._OPENING, "openvino", f"before, start = 0, time.perf_counter()\n{ends}")
    found = choice_of(
        ExportOptions(output=tmp_path / "a"), rows_of(tmp_path, onnx.helper.make_node("Identity", ["x"], ["y"]))
    )
    assert found is not None
    assert "SIGSEGV" in found.why


@pytest.mark.usefixtures("openvino")
def test_where_memory_may_run_short_openvino_is_not_tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Short of it, it says that it could not create a primitive, or ends the process."""
    monkeypatch.setattr(serving_runtime, "memory_left", lambda: 1_000_000)
    rows = rows_of(tmp_path, onnx.helper.make_node("Identity", ["x"], ["y"]))
    found = choice_of(ExportOptions(output=tmp_path / "a"), rows)
    assert found is not None
    assert (found.runtime, found.doubtful) == ("onnxruntime", False)
    assert "not tried" in found.why


@pytest.mark.usefixtures("openvino")
def test_openvino_is_not_tried_by_itself_on_what_was_a_large_model(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opening what was made of it takes three times its weights' memory, in INT8, too."""
    monkeypatch.setattr(serving_runtime, "MOST", 1000)
    _, report = export(model, tmp_path / "a")
    assert report.serving.runtime == "onnxruntime"
    assert "OpenVINO was not tried" in report.serving.why
    assert "--runtime openvino" in report.serving.why
    artifact, _ = export(model, tmp_path / "asked", runtime="openvino")
    assert artifact.runtime == "openvino"
