"""The embedded Triton's `openvino` backend computes in 8 bits as the toolkit compared it."""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import serve.triton.backends
from compress.artifact import Artifact, sha256_of
from compress.model import OnnxModel
from compress.runtime.backends import open_model
from serve.hooks.check import run_network
from tests.unit.compress.runtime.test_openvino_kernels import (
    FREE,
    LARGEST,
    PADS,
    ROWS,
    drawn,
    file_of,
    normalized,
    of,
    padded,
    pooled,
)

FILE = Path(serve.triton.backends.__path__[0]) / "openvino" / "model.py"


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module as Triton's Python loads it, whose utilities only exist there."""
    pytest.importorskip("openvino")
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", types.ModuleType("triton_python_backend_utils"))
    monkeypatch.setitem(sys.modules, "openvino_telemetry", None)
    spec = importlib.util.spec_from_file_location("openvino_backend", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compare(backend: Any, model: OnnxModel, step: float = 0.0201) -> None:
    """Its answers with those of ONNX Runtime, at several batches."""
    core = backend.openvino.Core()
    graph = backend.opened(core, model.path, {})
    assert [sorted(port.names) for port in (*graph.inputs, *graph.outputs)] == [["x"], ["y"]]
    compiled = core.compile_model(graph, "CPU", {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1})
    (spec,) = model.signature.inputs
    for rows in ROWS:
        inputs = drawn(rows) if len(spec.shape) == 3 and spec.shape[1] != 4 else of(list(spec.shape), rows)
        wanted = open_model(model, threads=1).infer(inputs)["y"]
        np.testing.assert_allclose(compiled(inputs)["y"], wanted, atol=step)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("keep", [0, 1])
@pytest.mark.parametrize(("shape", "axes"), FREE)
def test_of_three_dimensions_every_row_is_right_whichever_of_them_are_free(
    backend: Any, tmp_path: Path, shape: list[int | str], axes: list[int], keep: int, after: bool
) -> None:
    compare(backend, file_of(tmp_path / "m.onnx", shape, axes, keep, before=True, after=after))


@pytest.mark.parametrize("kind", ["ReduceMax", "ReduceMin"])
@pytest.mark.parametrize(("shape", "axes"), LARGEST)
def test_the_largest_of_floats_is_right_rounded_to_8_bits(
    backend: Any, tmp_path: Path, shape: list[int | str], axes: list[int], kind: str
) -> None:
    compare(backend, file_of(tmp_path / "m.onnx", shape, axes, 0, before=False, after=True, kind=kind))


@pytest.mark.parametrize(("at", "axes", "value"), PADS)
def test_what_is_put_around_8_bits_is_as_large_as_said(
    backend: Any, tmp_path: Path, at: int, axes: int, value: float
) -> None:
    compare(backend, padded(tmp_path / "m.onnx", at, axes, value), step=0.0501)


@pytest.mark.parametrize("shape", [["batch", 32, 6], ["batch", 32, "w"]])
def test_a_pool_of_all_positions_is_such_a_mean(backend: Any, tmp_path: Path, shape: list[int | str]) -> None:
    compare(backend, pooled(tmp_path / "m.onnx", shape))


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_normalizations_that_are_written_out_are_right(backend: Any, tmp_path: Path, kind: str, axis: int) -> None:
    compare(backend, normalized(tmp_path / "m.onnx", kind, "Pow", axis, ["batch", "seq", 6], alone=True))


@pytest.mark.parametrize(("at", "axes", "value"), PADS)
def test_hooks_are_tried_on_a_network_as_it_is_served(tmp_path: Path, at: int, axes: int, value: float) -> None:
    pytest.importorskip("openvino")
    model = padded(tmp_path / "m.onnx", at, axes, value)
    source = Artifact(tmp_path, "m.onnx", "onnx", sha256_of(model.path), model.signature, runtime="openvino")
    inputs = of(list(model.signature.inputs[0].shape), 1)
    wanted = open_model(model, threads=1).infer(inputs)["y"][0]
    np.testing.assert_allclose(run_network(source, {"x": inputs["x"][0]}).made["y"], wanted, atol=0.0501)
