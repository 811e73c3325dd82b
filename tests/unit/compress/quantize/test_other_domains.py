"""Layers behind operators that ONNX does not define itself (scikit-learn's, ONNX Runtime's) are quantized like others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from compress.data.dataset import Dataset
from compress.errors import StageError
from compress.evaluate.metrics import cosine_similarity
from compress.formats.onnx.read import signature_of_onnx
from compress.model import OnnxModel
from compress.onnx_export.fold import FoldOnnx
from compress.quantize.quantize_faster import QuantizeFaster
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


@pytest.fixture(params=[("ai.onnx.ml",), ("ai.onnx.ml", "", "")], ids=["one domain", "ONNX's twice"])
def without_layers(request: pytest.FixtureRequest, tmp_path: Path) -> OnnxModel:
    """As skl2onnx writes a forest, a scaler or a linear model."""
    nodes = [node("Scaler", ["x"], ["y"], domain="ai.onnx.ml", offset=[0.5] * 16, scale=[2.0] * 16)]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 16]) for name in ("x", "y"))
    opsets = [helper.make_opsetid(domain, 1 if domain else 20) for domain in request.param]
    model = helper.make_model(helper.make_graph(nodes, "g", [x], [y]), opset_imports=opsets, ir_version=10)
    onnx.save(model, tmp_path / "model.onnx")
    return OnnxModel(tmp_path / "model.onnx", signature_of_onnx(tmp_path / "model.onnx"))


@pytest.mark.parametrize("mode", ["dynamic", "static"])
def test_a_file_without_layers_is_refused_in_words_or_left_alone(
    mode: str, without_layers: OnnxModel, tmp_path: Path
) -> None:
    x = np.random.default_rng(1).normal(size=(64, 16)).astype(np.float32)
    quantize = QuantizeOnnx(mode, Dataset("", {"x": x}, None, "data") if mode == "static" else None)  # type: ignore[arg-type]
    (tmp_path / "out").mkdir()
    with pytest.raises(StageError, match="nothing was quantized") as refused:
        quantize.run(without_layers, tmp_path / "out", lambda *_: None)
    assert "--int8" in refused.value.mend
    given = QuantizeFaster(quantize).run(without_layers, tmp_path / "out", lambda *_: None)
    assert given.did == "nothing: it has no layer for INT8"
    before, after = (open_model(model, threads=1).infer({"x": x})["y"] for model in (without_layers, given.model))
    assert np.array_equal(before, after)
