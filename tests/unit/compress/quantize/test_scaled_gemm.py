"""A Gemm's factors, alpha of the product and beta of the bias, survive each way to INT8."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from compress.data.dataset import Dataset
from compress.formats.onnx.read import signature_of_onnx
from compress.model import OnnxModel
from compress.onnx_export.fold import FoldOnnx
from compress.quantize.quantize_onnx import QuantizeOnnx
from compress.runtime.backends import open_model

FACTORS = st.sampled_from([1.0, 0.0, 0.5, 3.0, -2.0])


def scaled(folder: Path, alpha: float, beta: float, shape: tuple[int, ...], *, shared: bool, turned: bool) -> OnnxModel:
    """Two layers, the second plain; they share a bias or not."""
    rng = np.random.default_rng(0)
    sizes: dict[str, tuple[int, ...]] = {"v": (16, 16), "b": shape, "w": (16, 16), "c": (16,)}
    kept = [numpy_helper.from_array(rng.normal(size=size).astype(np.float32), n) for n, size in sizes.items()]
    nodes = [
        helper.make_node("Gemm", ["x", "v", "b"], ["h"], "one", alpha=alpha, beta=beta, transB=int(turned)),
        helper.make_node("Relu", ["h"], ["r"]),
        helper.make_node("Gemm", ["r", "w", "b" if shared else "c"], ["y"], "two"),
    ]
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, ["batch", 16]) for n in "xy")
    graph = helper.make_graph(nodes, "g", [x], [y], [each for each in kept if each.name != "c" or not shared])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.save(model, folder / "model.onnx")
    (folder / "folded").mkdir()
    source = OnnxModel(folder / "model.onnx", signature_of_onnx(folder / "model.onnx"))
    made = FoldOnnx().run(source, folder / "folded", lambda *_: None).model
    assert isinstance(made, OnnxModel)
    return made


@pytest.mark.parametrize("mode", ["dynamic", "static"])
@settings(max_examples=12, deadline=None)
@given(
    alpha=FACTORS,
    beta=FACTORS,
    shape=st.sampled_from([(16,), (1,), (1, 16)]),
    shared=st.booleans(),
    turned=st.booleans(),
)
def test_a_layer_with_factors_answers_in_int8_as_it_did(mode: Any, alpha: float, beta: float, **how: Any) -> None:
    x = np.random.default_rng(1).normal(size=(64, 16)).astype(np.float32)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        before = scaled(folder, alpha, beta, **how)
        data = Dataset("", {"x": x}, None, "data") if mode == "static" else None
        after = QuantizeOnnx(mode, data).run(before, folder, lambda *_: None).model
        assert isinstance(after, OnnxModel)
        expected, got = (open_model(model, threads=1).infer({"x": x})["y"] for model in (before, after))
    assert np.abs(got - expected).max() < 0.1 * np.abs(expected).max() + 1e-6
