"""The embedded Triton's `openvino` backend computes means of 8 bits as the toolkit compared them."""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import serve.triton.backends
from compress.model import OnnxModel
from compress.runtime.backends import open_model
from tests.unit.compress.runtime.test_openvino_means import FREE, ROWS, drawn, file_of, normalized, pooled

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


def compare(backend: Any, model: OnnxModel) -> None:
    """Its answers with those of ONNX Runtime, at several batches."""
    core = backend.openvino.Core()
    graph = backend.opened(core, model.path, {})
    assert [sorted(port.names) for port in (*graph.inputs, *graph.outputs)] == [["x"], ["y"]]
    compiled = core.compile_model(graph, "CPU", {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1})
    for rows in ROWS:
        wanted = open_model(model, threads=1).infer(drawn(rows))["y"]
        np.testing.assert_allclose(compiled(drawn(rows))["y"], wanted, atol=0.0201)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("keep", [0, 1])
@pytest.mark.parametrize(("shape", "axes"), FREE)
def test_of_three_dimensions_every_row_is_right_whichever_of_them_are_free(
    backend: Any, tmp_path: Path, shape: list[int | str], axes: list[int], keep: int, after: bool
) -> None:
    compare(backend, file_of(tmp_path / "m.onnx", shape, axes, keep, before=True, after=after))


@pytest.mark.parametrize("shape", [["batch", 32, 6], ["batch", 32, "w"]])
def test_a_pool_of_all_positions_is_such_a_mean(backend: Any, tmp_path: Path, shape: list[int | str]) -> None:
    compare(backend, pooled(tmp_path / "m.onnx", shape))


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_normalizations_that_are_written_out_are_right(backend: Any, tmp_path: Path, kind: str, axis: int) -> None:
    compare(backend, normalized(tmp_path / "m.onnx", kind, "Pow", axis, ["batch", "seq", 6], alone=True))
