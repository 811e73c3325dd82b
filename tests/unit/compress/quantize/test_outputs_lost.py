"""What 8 bits make of the outputs is told by the data that the ranges come from, without evaluation data."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from compress.artifact import Signature, TensorSpec
from compress.data.dataset import Dataset
from compress.model import OnnxModel
from compress.quantize.outputs_lost import outputs_lost
from compress.quantize.quantize_onnx import QuantizeOnnx
from tests.unit.compress.prune.test_prune_channels import quiet
from tests.unit.compress.quantize.test_half_onnx import exported

SAMPLES = 64
X = np.random.default_rng(0).normal(size=(SAMPLES, 4)).astype(np.float32)


class Decay(nn.Module):
    """An exponential of times up to 5,000: no rule keeps it from 8 bits."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rates = nn.Buffer(torch.exp(torch.linspace(0, -6, 16)))
        self.a, self.b = nn.Linear(16, 48), nn.Linear(48, 5)

    def forward(self, times: torch.Tensor) -> torch.Tensor:
        return self.b(torch.relu(self.a(torch.exp(-(times * self.rates)))))  # type: ignore[no-any-return]


@pytest.mark.parametrize("target", ["cpu", "tensorrt"])
def test_a_file_that_keeps_less_than_half_is_warned_of(target: str, tmp_path: Path) -> None:
    times = (np.random.default_rng(0).random((SAMPLES, 1)) ** 3 * 5_000).astype(np.float32)
    model = exported(Decay().eval(), ("times:float32[batch,1]",), tmp_path)
    data = Dataset("", {"times": times}, None, "data")
    given = QuantizeOnnx("static", data, target=target).run(model, tmp_path / "next", quiet)  # type: ignore[arg-type]
    lost = given.details["outputs_lost"]
    assert lost["samples"] == 32
    assert any("--keep-float" in warning for warning in given.warnings) == (lost["share"] > 0.5) == (target == "cpu")


def scaled(by: object, to: object, folder: Path) -> OnnxModel:
    """y = x times one constant, plus another."""
    folder.mkdir()
    stored = [
        numpy_helper.from_array(np.asarray(value, np.float32), name) for name, value in {"by": by, "to": to}.items()
    ]
    nodes = [helper.make_node("Mul", ["x", "by"], ["m"]), helper.make_node("Add", ["m", "to"], ["y"])]
    specs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 4]) for name in "xy"]
    graph = helper.make_graph(nodes, "g", specs[:1], specs[1:], stored)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.save(made, folder / "model.onnx")
    signature = Signature((TensorSpec.parse("x:float32[batch,4]"),), (TensorSpec.parse("y:float32[batch,4]"),))
    return OnnxModel(folder / "model.onnx", signature)


@pytest.mark.parametrize("offset", [0.0, 1e3])
@pytest.mark.parametrize(("by", "share"), [(1.0, 0.0), (0.5, 0.25), (0.0, 1.0), (-1.0, 4.0)])
def test_the_share_is_the_error_beside_the_variance_wherever_the_mean_is(
    by: float, share: float, offset: float, tmp_path: Path
) -> None:
    data = Dataset("", {"x": X - X[::2].mean(0)}, None, "data")
    models = scaled(1.0, offset, tmp_path / "float"), scaled(by, offset, tmp_path / "other")
    found = outputs_lost(*models, data)
    assert found is not None
    assert found.share == pytest.approx(share, rel=0.1, abs=1e-3)
    assert (found.warning is not None) == (share > 0.5)


def test_outputs_that_do_not_vary_tell_nothing(tmp_path: Path) -> None:
    models = scaled(0.0, 1.0, tmp_path / "float"), scaled(1.0, 1.0, tmp_path / "other")
    assert outputs_lost(*models, Dataset("", {"x": X}, None, "data")) is None


def test_values_that_are_no_numbers_lose_all(tmp_path: Path) -> None:
    models = scaled(1.0, 0.0, tmp_path / "float"), scaled(np.nan, 0.0, tmp_path / "other")
    found = outputs_lost(*models, Dataset("", {"x": X}, None, "data"))
    assert found is not None
    assert "no numbers" in (found.warning or "")
    assert found.to_dict()["share"] is None
