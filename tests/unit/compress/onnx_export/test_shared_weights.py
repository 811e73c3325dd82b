"""What two layers share is stored once, in float, half and INT8; recurrent layers store theirs in 8 bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper
from torch import nn

from compress.data.dataset import Dataset
from compress.model import OnnxModel
from compress.onnx_export.tied import apart, share
from compress.quantize.half.half_onnx import HalfOnnx
from compress.quantize.quantize_onnx import QuantizeOnnx
from compress.quantize.smooth_onnx import SmoothOnnx
from compress.runtime.machine import int8_saturates
from compress.runtime.measure import onnx_layer_bytes, onnx_macs, onnx_params
from compress.stage import Stage
from tests.unit.compress.onnx_graphs import data_for, normal, written
from tests.unit.compress.prune.test_prune_channels import quiet
from tests.unit.compress.quantize.test_half_onnx import exported
from tests.unit.compress.quantize.test_targets import cosine

WORDS, SIZE = 500, 64


class Tied(nn.Module):
    """An embedding that is the output head, too; with `attends`, attention between them."""

    def __init__(self, *, attends: bool) -> None:
        super().__init__()
        self.embed, self.mix, self.norm = nn.Embedding(WORDS, SIZE), nn.Linear(SIZE, SIZE), nn.LayerNorm(SIZE)
        self.attends = nn.Identity() if attends else None
        self.head = nn.Linear(SIZE, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        if self.attends is not None:
            x = x + torch.softmax(x @ x.transpose(1, 2) / 8, -1) @ self.mix(x)
        else:
            x = torch.relu(self.mix(x))
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def tied(folder: Path, *, attends: bool) -> tuple[OnnxModel, Dataset]:
    torch.manual_seed(0)
    model = exported(Tied(attends=attends).eval(), ("tokens:int64[batch,6]",), folder)
    tokens = np.random.default_rng(0).integers(0, WORDS, (16, 6))
    return model, Dataset("", {"tokens": tokens}, None, "data")


def test_an_embedding_and_its_head_are_one_initializer(tmp_path: Path) -> None:
    model, _ = tied(tmp_path, attends=True)
    sizes = [int(np.prod(t.dims)) for t in onnx.load(model.path).graph.initializer]
    assert sizes.count(WORDS * SIZE) == 1
    assert WORDS * SIZE + SIZE * SIZE <= onnx_params(model.path) < WORDS * SIZE + SIZE * SIZE + 400
    assert onnx_macs(model.path, model.signature) >= 6 * (WORDS * SIZE + SIZE * SIZE)


@pytest.mark.parametrize("attends", [True, False])
@pytest.mark.parametrize(
    ("name", "smaller"), [("dynamic", 3.2), ("weights", 3.2), ("static", 3.1), ("fp16", 1.9), ("bf16", 1.9)]
)
def test_so_they_are_in_every_precision(name: str, smaller: float, attends: bool, tmp_path: Path) -> None:
    model, data = tied(tmp_path, attends=attends)
    stages: dict[str, Stage] = {
        "dynamic": QuantizeOnnx("dynamic"),
        "weights": QuantizeOnnx("weights"),
        "static": QuantizeOnnx("static", data),
        "fp16": HalfOnnx("fp16", data),
        "bf16": HalfOnnx("bf16", data, "tensorrt"),
    }
    given = stages[name].run(model, tmp_path / "next", quiet)
    assert isinstance(given.model, OnnxModel)
    assert model.path.stat().st_size > smaller * given.model.path.stat().st_size
    # A CPU without VNNI has 7 bits for weights that are multiplied in INT8.
    seven_bits = int8_saturates() and name in ("dynamic", "static")
    assert cosine(model, given.model, data) > (0.98 if seven_bits else 0.999)


def test_smoothing_keeps_what_it_does_not_change_tied(tmp_path: Path) -> None:
    model, data = tied(tmp_path, attends=False)
    given = SmoothOnnx(data).run(model, tmp_path / "next", quiet)
    assert cosine(model, given.model, data) > 0.99999  # type: ignore[arg-type]


def pair(first: np.ndarray[Any, Any], second: np.ndarray[Any, Any], folder: Path) -> onnx.ModelProto:
    nodes = [
        helper.make_node("MatMul", ["x", "first"], ["h"], name="one"),
        helper.make_node("MatMul", ["h", "second"], ["y"], name="two"),
    ]
    size = first.shape[0], second.shape[1]
    spec = {"inputs": (f"x:float32[batch,{size[0]}]",), "outputs": (f"y:float32[batch,{size[1]}]",)}
    return onnx.load(written(nodes, {"first": first, "second": second}, folder, **spec).path)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["same", "transposed", "other", "small"])
def test_equal_weights_are_shared_and_come_apart_again(kind: str, tmp_path: Path) -> None:
    first = normal(8, 8) if kind == "small" else normal(32, 48)[:, :32] if kind == "same" else normal(32, 48)
    second = {"same": first, "transposed": first.T, "other": normal(48, 32, seed=1), "small": first}[kind]
    model = pair(first, np.ascontiguousarray(second), tmp_path)
    assert share(model) == (kind in ("same", "transposed"))
    assert len(model.graph.initializer) == (1 if kind in ("same", "transposed") else 2)
    onnx.checker.check_model(model)
    apart(model)
    reads = [node.input[1] for node in model.graph.node]
    weights = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    np.testing.assert_array_equal(weights[reads[0]], first)
    np.testing.assert_array_equal(weights[reads[1]], second)
    assert not share(pair(first, np.ascontiguousarray(second), tmp_path)) or kind in ("same", "transposed")


class Recurrent(nn.Module):
    """A recurrent layer and a linear one."""

    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU], *, both_ways: bool) -> None:
        super().__init__()
        self.layers = kind(40, 160, bidirectional=both_ways, batch_first=True)
        self.head = nn.Linear(160 * (1 + both_ways), 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x)[0])  # type: ignore[no-any-return]


def recurrent(folder: Path, kind: type[nn.LSTM] | type[nn.GRU], *, both_ways: bool) -> OnnxModel:
    torch.manual_seed(0)
    return exported(Recurrent(kind, both_ways=both_ways).eval(), ("x:float32[batch,12,40]",), folder)


@pytest.mark.usefixtures("own_products")
@pytest.mark.parametrize("mode", ["dynamic", "weights", "static"])
@pytest.mark.parametrize(("kind", "both_ways"), [(nn.LSTM, True), (nn.GRU, False)])
def test_a_recurrent_layers_matrices_take_a_quarter(
    kind: type[nn.LSTM] | type[nn.GRU],
    both_ways: bool,
    mode: str,
    tmp_path: Path,
) -> None:
    model = recurrent(tmp_path, kind, both_ways=both_ways)
    data = data_for(model, 16)
    given = QuantizeOnnx(mode, data if mode == "static" else None).run(model, tmp_path / "next", quiet)  # type: ignore[arg-type]
    assert isinstance(given.model, OnnxModel)
    assert model.path.stat().st_size > 3.4 * given.model.path.stat().st_size
    assert cosine(model, given.model, data) > (0.98 if int8_saturates() and mode != "weights" else 0.999)
    recurring = set(given.details["operators"]) & {"LSTM", "GRU", "DynamicQuantizeLSTM"}
    assert recurring == ({"DynamicQuantizeLSTM"} if (kind, mode) == (nn.LSTM, "dynamic") else {kind.__name__})
    alone = 0 if mode == "weights" or recurring == {"DynamicQuantizeLSTM"} else 1
    assert len(given.details["layers_weights_only"]) == alone
    assert not any("recurrent" in reason for reason in given.details["layers_float"].values())
    assert onnx_macs(given.model.path, model.signature) == onnx_macs(model.path, model.signature)


def test_a_recurrent_layer_that_is_excluded_stays_in_float(tmp_path: Path) -> None:
    model = recurrent(tmp_path, nn.LSTM, both_ways=True)
    name = next(node.name for node in onnx.load(model.path).graph.node if node.op_type == "LSTM")
    given = QuantizeOnnx("dynamic", exclude=(name,)).run(model, tmp_path / "next", quiet)
    assert given.details["layers_float"][name] == "left in float on purpose"


def test_for_tensorrt_recurrent_layers_stay_in_float_and_are_named(tmp_path: Path) -> None:
    model = recurrent(tmp_path, nn.GRU, both_ways=False)
    given = QuantizeOnnx("static", data_for(model), target="tensorrt").run(model, tmp_path / "next", quiet)
    assert "recurrent layers stay in float" in given.details["layers_float"].values()


def test_the_bytes_of_a_layer_that_shares_its_weight_are_told(tmp_path: Path) -> None:
    model, _ = tied(tmp_path, attends=True)
    assert list(onnx_layer_bytes(model.path).values()).count(4 * WORDS * SIZE) == 2
