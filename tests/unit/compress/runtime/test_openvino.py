"""OpenVINO as a runtime: what it answers, what it refuses, and that it tells nobody."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from compress.artifact import Signature, TensorSpec
from compress.errors import MissingExtraError, RecipeError, StageError, ToolkitError
from compress.jobs.measure import measure_files
from compress.jobs.measure_report import measure_table
from compress.model import OnnxModel
from compress.options import MeasureOptions
from compress.runtime.backends import open_model
from compress.runtime.backends.openvino_cpu import OpenVinoBackend, OpenVinoOptions, library
from compress.runtime.footprint import footprint

WEIGHT = np.arange(12, dtype=np.float32).reshape(4, 3)


def file_of(path: Path, kind: str = "MatMul", domain: str = "") -> OnnxModel:
    """x:float32[batch,4] through one operator to y; MatMul has a weight [4, 3]."""
    width = 3 if kind == "MatMul" else 4
    signature = Signature((TensorSpec.parse("x:float32[batch,4]"),), (TensorSpec.parse(f"y:float32[batch,{width}]"),))
    given, made = (
        [onnx.helper.make_tensor_value_info(spec.name, onnx.TensorProto.FLOAT, spec.shape) for spec in specs]
        for specs in (signature.inputs, signature.outputs)
    )
    weights = [onnx.numpy_helper.from_array(WEIGHT, "w")] if kind == "MatMul" else []
    node = onnx.helper.make_node(kind, ["x", *(["w"] if weights else [])], ["y"], domain=domain)
    graph = onnx.helper.make_graph([node], "g", given, made, weights)
    opsets = [onnx.helper.make_opsetid("", 20), *([onnx.helper.make_opsetid(domain, 1)] if domain else [])]
    onnx.save(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10), path)
    return OnnxModel(path, signature)


def on_openvino(model: OnnxModel) -> OnnxModel:
    return dataclasses.replace(model, runtime="openvino")


@pytest.mark.usefixtures("openvino")
@pytest.mark.parametrize("batch", [1, 5, 2])
def test_it_answers_as_onnx_runtime_at_any_batch(tmp_path: Path, batch: int) -> None:
    model = file_of(tmp_path / "m.onnx")
    inputs = {"x": np.random.default_rng(0).standard_normal((batch, 4)).astype(np.float32)}
    backend = open_model(on_openvino(model), threads=1)
    assert backend.runtime == "OpenVINO"
    np.testing.assert_allclose(backend.infer(inputs)["y"], open_model(model, threads=1).infer(inputs)["y"], rtol=1e-5)


@pytest.mark.usefixtures("openvino")
def test_answers_are_the_callers_own(tmp_path: Path) -> None:
    backend = open_model(on_openvino(file_of(tmp_path / "m.onnx")), threads=1)
    first = backend.infer({"x": np.ones((1, 4), np.float32)})["y"]
    kept = first.copy()
    backend.infer({"x": np.zeros((1, 4), np.float32)})
    np.testing.assert_array_equal(first, kept)


@pytest.mark.usefixtures("openvino")
@pytest.mark.parametrize(
    ("options", "streams", "threads"),
    [(OpenVinoOptions(), 1, 1), (OpenVinoOptions(threads=2, streams=2), 2, 2), (OpenVinoOptions(threads=2), 1, 2)],
)
def test_threads_and_streams_are_those_that_are_asked_for(
    tmp_path: Path, options: OpenVinoOptions, streams: int, threads: int
) -> None:
    found = OpenVinoBackend(file_of(tmp_path / "m.onnx"), options).properties
    assert (found["NUM_STREAMS"], found["INFERENCE_NUM_THREADS"]) == (streams, threads)
    assert "float32" in str(found["INFERENCE_PRECISION_HINT"])
    assert not found["ENABLE_CPU_PINNING"]


@pytest.mark.parametrize("wrong", [{"threads": 0}, {"streams": 0}, {"streams": -1}])
def test_no_threads_or_streams_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(RecipeError):
        OpenVinoOptions(**wrong)


@pytest.mark.usefixtures("openvino")
def test_compiled_models_are_kept_only_where_a_folder_is_named(tmp_path: Path) -> None:
    model, cache = file_of(tmp_path / "m.onnx"), tmp_path / "cache"
    OpenVinoBackend(model)
    assert not cache.exists()
    OpenVinoBackend(model, OpenVinoOptions(cache=cache))
    assert any(cache.iterdir())


@pytest.mark.usefixtures("openvino")
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_precision_that_the_cpu_does_not_multiply_is_refused(
    tmp_path: Path, precision: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenVINO itself takes the hint, and computes in float32. A CPU with BF16 is taken for one without."""
    monkeypatch.setattr("compress.runtime.backends.openvino_cpu.fast_bfloat16", lambda: False)
    if precision == "fp16" and "FP16" in library().Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        pytest.skip("this CPU multiplies FP16")
    model = file_of(tmp_path / "m.onnx")
    with pytest.raises(StageError, match=f"does not multiply {precision.upper()}"):
        OpenVinoBackend(model, OpenVinoOptions(precision=precision))


@pytest.mark.usefixtures("openvino")
def test_an_operator_that_it_lacks_is_named(tmp_path: Path) -> None:
    with pytest.raises(StageError) as caught:
        open_model(on_openvino(file_of(tmp_path / "m.onnx", "Bernoulli")), threads=1)
    assert "Bernoulli" in caught.value.why
    assert "--runtime onnxruntime" in caught.value.mend


@pytest.mark.usefixtures("openvino")
def test_inputs_that_do_not_fit_are_an_error_of_the_user(tmp_path: Path) -> None:
    backend = open_model(on_openvino(file_of(tmp_path / "m.onnx")), threads=1)
    with pytest.raises(ToolkitError, match="does not run on the inputs"):
        backend.infer({"x": np.ones((1, 7), np.float32)})


def test_without_the_extra_its_name_is_told(tmp_path: Path) -> None:
    library.cache_clear()
    with pytest.raises(MissingExtraError, match=r"\[openvino\]"):
        library()


@pytest.mark.usefixtures("openvino")
def test_memory_and_loading_time_are_measured_on_it(tmp_path: Path) -> None:
    assert footprint(on_openvino(file_of(tmp_path / "m.onnx")), threads=1).load_ms > 0


@pytest.mark.usefixtures("openvino")
def test_its_import_sends_nothing_and_writes_nothing_to_the_home_folder(tmp_path: Path) -> None:
    """In a process of its own, since an import happens once; a connection there would raise."""
    home, model = tmp_path / "home", file_of(tmp_path / "m.onnx")
    home.mkdir()
    text = f"""
import socket, sys
from compress.runtime.backends.openvino_cpu import library
def refuse(*_, **__): raise AssertionError("a socket")
socket.socket.connect = socket.create_connection = refuse
core = library().Core()
core.compile_model(core.read_model({str(model.path)!r}), "CPU")
assert not [name for name in sys.modules if name.startswith("openvino_telemetry")], "telemetry is loaded"
import openvino_telemetry  # is there for who wants it
"""
    environ = os.environ | {"HOME": str(home)}
    done = subprocess.run([sys.executable, "-c", text], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not (home / "intel").exists()


@pytest.mark.usefixtures("openvino")
def test_measure_runs_a_file_on_both_and_says_which_is_which(tmp_path: Path) -> None:
    path = file_of(tmp_path / "m.onnx").path
    found = measure_files([path], MeasureOptions(rounds=2))
    assert [row.runtime for row in found.figures] == ["ONNX Runtime", "OpenVINO"]
    assert found.figures[1].cosine_similarity > 0.9999
    assert measure_table(found).row_count == 2


@pytest.mark.usefixtures("openvino")
@pytest.mark.parametrize(("runtime", "shown"), [("onnxruntime", "ONNX Runtime"), ("openvino", "OpenVINO")])
def test_measure_runs_it_on_the_one_that_is_asked_for(tmp_path: Path, runtime: Any, shown: str) -> None:
    found = measure_files([file_of(tmp_path / "m.onnx").path], MeasureOptions(rounds=2, runtime=runtime))
    assert [row.runtime for row in found.figures] == [shown]


@pytest.mark.usefixtures("openvino")
def test_measure_tells_what_openvino_does_not_run(tmp_path: Path) -> None:
    path = file_of(tmp_path / "m.onnx", "Bernoulli").path
    found = measure_files([path], MeasureOptions(rounds=2))
    assert [row.runtime for row in found.figures] == ["ONNX Runtime"]
    assert "Bernoulli" in found.not_run["m.onnx (openvino)"]
    with pytest.raises(StageError, match="Bernoulli"):
        measure_files([path], MeasureOptions(rounds=2, runtime="openvino"))
