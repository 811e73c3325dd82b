"""INT8 files that ONNX Runtime's own quantizer made, as others use it: what is measured is what a plain script finds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_dynamic, quantize_static

from compress.formats.onnx.read import signature_of_onnx
from compress.jobs.measure import measure_files
from compress.options import MeasureOptions
from compress.quantize.precision import precisions
from compress.runtime.measure import onnx_layer_bytes, onnx_macs, onnx_params

SHAPES = {"w1": (8, 3, 3, 3), "b1": (8,), "w2": (16, 8, 3, 3), "b2": (16,), "w3": (1024, 10), "b3": (10,)}
MACS = 64 * 8 * 3 * 9 + 64 * 16 * 8 * 9 + 1024 * 10
PARAMS = sum(int(np.prod(shape)) for shape in SHAPES.values())
SAMPLES = 40
STATIC: dict[str, dict[str, Any]] = {
    "qdq": {"quant_format": QuantFormat.QDQ},
    "qdq_asymmetric": {
        "quant_format": QuantFormat.QDQ, "activation_type": QuantType.QUInt8, "weight_type": QuantType.QUInt8,
    },
    "qdq_per_channel": {"quant_format": QuantFormat.QDQ, "per_channel": True},
    "operators": {"quant_format": QuantFormat.QOperator},
    "operators_of_uint8": {"quant_format": QuantFormat.QOperator, "activation_type": QuantType.QUInt8},
}  # fmt: skip


class Reader(CalibrationDataReader):  # type: ignore[misc]
    def __init__(self, x: np.ndarray[Any, Any]) -> None:
        self._left: Iterator[dict[str, Any]] = iter([{"x": x}])

    def get_next(self) -> dict[str, Any] | None:
        return next(self._left, None)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """float.onnx and its quantized forms, and the data."""
    folder = tmp_path_factory.mktemp("others")
    rng = np.random.default_rng(0)
    weights = [numpy_helper.from_array((0.2 * rng.standard_normal(s)).astype(np.float32), n) for n, s in SHAPES.items()]
    node = helper.make_node
    nodes = [
        node("Conv", ["x", "w1", "b1"], ["c1"], "c1", pads=[1] * 4, kernel_shape=[3, 3]), node("Relu", ["c1"], ["r1"]),
        node("Conv", ["r1", "w2", "b2"], ["c2"], "c2", pads=[1] * 4, kernel_shape=[3, 3]), node("Relu", ["c2"], ["r2"]),
        node("Flatten", ["r2"], ["f"]), node("Gemm", ["f", "w3", "b3"], ["logits"], "fc"),
    ]  # fmt: skip
    x, y = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", *shape])
        for name, shape in (("x", (3, 8, 8)), ("logits", (10,)))
    )
    graph = helper.make_graph(nodes, "g", [x], [y], weights)
    source = folder / "float.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), source)
    images = rng.standard_normal((SAMPLES, 3, 8, 8)).astype(np.float32)
    for name, asked in STATIC.items():
        quantize_static(str(source), str(folder / f"{name}.onnx"), Reader(images), **asked)
    quantize_dynamic(str(source), str(folder / "dynamic.onnx"), weight_type=QuantType.QUInt8)
    np.savez(folder / "data.npz", x=images)
    return folder


@pytest.mark.parametrize("name", ["float", *STATIC, "dynamic"])
def test_work_weights_and_layers_are_those_of_the_float_model(name: str, made: Path) -> None:
    path = made / f"{name}.onnx"
    assert onnx_macs(path, signature_of_onnx(path)) == MACS
    assert onnx_params(path) == PARAMS
    found = precisions(path)
    assert (found.int8, len(found.floats)) == ((0, 3) if name == "float" else (3, 0))
    size = 4 if name == "float" else 1
    assert sorted(onnx_layer_bytes(path).values()) == [8 * 27 * size, 16 * 72 * size, 10240 * size]


def plain(path: Path, x: np.ndarray[Any, Any], batch: int) -> np.ndarray[Any, Any]:
    """What ONNX Runtime gives, with so many samples at a time: a dynamic range is a batch's own."""
    session = ort.InferenceSession(str(path))
    found = [session.run(None, {"x": x[at : at + batch]})[0] for at in range(0, len(x), batch)]
    return np.concatenate(found).astype(float)


@pytest.mark.usefixtures("own_products")
def test_differences_from_the_float_model_are_those_of_a_plain_run(made: Path) -> None:
    names = ["float", *STATIC, "dynamic"]
    options = MeasureOptions(rounds=1, batches=(1,), data=str(made / "data.npz"))
    figures = measure_files([made / f"{name}.onnx" for name in names], options).figures
    x = np.load(made / "data.npz")["x"]
    answers = [plain(made / f"{name}.onnx", x, 1 if name == "dynamic" else SAMPLES) for name in names]
    for name, figure, answer in zip(names, figures, answers, strict=True):
        norms = np.linalg.norm(answer, axis=1) * np.linalg.norm(answers[0], axis=1)
        assert figure.compared == SAMPLES, name
        assert figure.cosine_similarity == pytest.approx(((answer * answers[0]).sum(1) / norms).min(), abs=1e-6), name
        assert figure.max_abs_error == pytest.approx(np.abs(answer - answers[0]).max(), abs=1e-5), name
        assert name == "float" or 0.9 < figure.cosine_similarity < 1, name
