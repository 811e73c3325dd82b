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
from compress.runtime.backends import open_model
from tests.unit.compress.runtime.test_openvino_means import file_of

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


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("keep", [0, 1])
@pytest.mark.parametrize("axis", [1, 2])
def test_of_three_dimensions_every_row_of_64_is_right(
    backend: Any, tmp_path: Path, axis: int, keep: int, after: bool
) -> None:
    model = file_of(tmp_path / "m.onnx", ["batch", 32, 6], [axis], keep, before=True, after=after)
    x = np.random.default_rng(0).normal(size=(64, 32, 6)).astype(np.float32) * 2
    core = backend.openvino.Core()
    graph = backend.opened(core, model.path, {})
    assert [sorted(port.names) for port in (*graph.inputs, *graph.outputs)] == [["x"], ["y"]]
    compiled = core.compile_model(graph, "CPU", {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1})
    wanted = open_model(model, threads=1).infer({"x": x})["y"]
    np.testing.assert_allclose(compiled({"x": x})["y"], wanted, atol=0.0201)
