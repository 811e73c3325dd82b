"""Whole numbers that float32 does not hold are divided as torch divides them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from compress.artifact import TensorSpec
from compress.formats.onnx.load import load_onnx
from compress.model import OnnxModel, TorchModel
from compress.model.infer import infer_signature
from compress.onnx_export.from_torch import OnnxFromTorch
from compress.onnx_export.torch_from_onnx import TorchFromOnnx
from compress.runtime.backends import OnnxBackend


def quiet(*_: object) -> None:
    pass


Two = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
NOW = {"int64": 1_790_000_000_123, "int32": 1_790_000_123}
DIVIDED: dict[str, Two] = {
    "trunc": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "floor": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    "by a number, trunc": lambda x, _: torch.div(x, -86_400, rounding_mode="trunc"),
    "by a number, floor": lambda x, _: torch.div(x, -86_400, rounding_mode="floor"),
}


class Dividing(nn.Module):
    def __init__(self, how: Two) -> None:
        super().__init__()
        self.how, self.linear = how, nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.how(x, torch.where(y == 0, 7, y)), self.linear(y.float())


@pytest.mark.parametrize("how", DIVIDED)
@pytest.mark.parametrize("kind", ["int64", "int32"])
def test_what_is_divided_is_exact(how: str, kind: Literal["int64", "int32"], tmp_path: Path) -> None:
    module = Dividing(DIVIDED[how]).eval()
    x = (np.arange(-6, 6).reshape(3, 4) + NOW[kind] * np.array([[1], [-1], [1]])).astype(kind)
    y = np.array([[3, -7, 5, 11]] * 3).astype(kind)
    specs = tuple(TensorSpec.parse(f"{name}:{kind}[batch,4]") for name in ("x", "y"))
    found = OnnxFromTorch().run(TorchModel(module, infer_signature(module, specs)), tmp_path, quiet).model
    assert isinstance(found, OnnxModel)
    got, _ = OnnxBackend(found, 1).infer({"x": x, "y": y}).values()
    np.testing.assert_array_equal(got, module(torch.from_numpy(x), torch.from_numpy(y))[0].numpy(), strict=True)


def test_so_is_what_an_onnx_file_divides_when_it_is_taken_back(tmp_path: Path) -> None:
    """The rest of a day, by which a network looks at the time."""
    node = helper.make_node
    nodes = [
        node("Div", ["x", "day"], ["days"]), node("Mul", ["days", "day"], ["whole"]), node("Sub", ["x", "whole"], ["rest"]),
        node("Cast", ["rest"], ["float"], to=TensorProto.FLOAT), node("MatMul", ["float", "w"], ["y"]),
    ]  # fmt: skip
    ends = [
        helper.make_tensor_value_info("x", TensorProto.INT64, ["batch", 4]),
        helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 2]),
    ]
    weights = {"day": np.int64(86_400), "w": np.full((4, 2), 1e-6, np.float32)}
    stored = [numpy_helper.from_array(np.asarray(values), name) for name, values in weights.items()]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], stored)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9), tmp_path / "m.onnx")
    file = load_onnx(tmp_path / "m.onnx")
    network = TorchFromOnnx().run(file, tmp_path, quiet).model
    assert isinstance(network, TorchModel)
    (tmp_path / "out").mkdir()
    found = OnnxFromTorch().run(network, tmp_path / "out", quiet).model
    assert isinstance(found, OnnxModel)
    x = np.arange(8).reshape(2, 4) * 12_345_678 + NOW["int64"]
    before, after = (OnnxBackend(each, 1).infer({"x": x})["y"] for each in (file, found))
    np.testing.assert_allclose(after, before, rtol=1e-5)
