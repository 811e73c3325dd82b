"""Layers behind operators that ONNX does not define itself (scikit-learn's, ONNX Runtime's) are quantized like others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from compress.data.dataset import Dataset
from compress.evaluate.metrics import cosine_similarity
from compress.formats.onnx.read import signature_of_onnx
from compress.model import OnnxModel
from compress.onnx_export.fold import FoldOnnx
from compress.quantize.quantize_onnx import QuantizeOnnx
from compress.runtime.backends import open_model

node = helper.make_node
FOREIGN: dict[str, tuple[str, dict[str, Any]]] = {
    "Scaler": ("ai.onnx.ml", {"offset": [0.5] * 16, "scale": [2.0] * 16}),
    "Gelu": ("com.microsoft", {}),
}


@pytest.fixture(params=FOREIGN)
def folded(request: pytest.FixtureRequest, tmp_path: Path) -> OnnxModel:
    domain, attributes = FOREIGN[request.param]
    rng = np.random.default_rng(0)
    weights = {"v": (16, 16), "w": (16, 4)}
    kept = [numpy_helper.from_array(rng.normal(size=shape).astype(np.float32), n) for n, shape in weights.items()]
    nodes = [
        node(request.param, ["x"], ["scaled"], domain=domain, **attributes), node("MatMul", ["scaled", "v"], ["a"]),
        node("Relu", ["a"], ["r"]), node("MatMul", ["r", "w"], ["y"]),
    ]  # fmt: skip
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, ["batch", s]) for n, s in (("x", 16), ("y", 4)))
    opsets = [
        helper.make_opsetid("", 20),
        helper.make_opsetid("ai.onnx.ml", 1),
        helper.make_opsetid("com.microsoft", 1),
    ]
    model = helper.make_model(helper.make_graph(nodes, "g", [x], [y], kept), opset_imports=opsets, ir_version=10)
    onnx.save(model, tmp_path / "model.onnx")
    (tmp_path / "folded").mkdir()
    source = OnnxModel(tmp_path / "model.onnx", signature_of_onnx(tmp_path / "model.onnx"))
    made = FoldOnnx().run(source, tmp_path / "folded", lambda *_: None).model
    assert isinstance(made, OnnxModel)
    return made


@pytest.mark.parametrize("mode", ["dynamic", "static"])
def test_all_layers_are_in_int8(mode: str, folded: OnnxModel, tmp_path: Path) -> None:
    x = np.random.default_rng(1).normal(size=(64, 16)).astype(np.float32)
    data = Dataset("", {"x": x}, None, "data") if mode == "static" else None
    given = QuantizeOnnx(mode, data).run(folded, tmp_path, lambda *_: None)  # type: ignore[arg-type]
    assert given.details["layers"] == {"int8": 2, "float": 0}
    before, after = (open_model(model, threads=1).infer({"x": x})["y"] for model in (folded, given.model))
    assert cosine_similarity(before, after).min() > 0.98
