"""Half precision is judged by values: positions stay whole, what rounds too much stays in FP32, INT8 still runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from compress.artifact import Signature, TensorSpec
from compress.data.dataset import Dataset
from compress.model import OnnxModel
from compress.quantize.half.half_onnx import HalfOnnx
from compress.quantize.half.index_arithmetic import index_arithmetic
from compress.quantize.half.parity import error_of, repaired
from compress.quantize.quantize_onnx import QuantizeOnnx
from compress.runtime.backends import OnnxBackend
from tests.models import conv
from tests.unit.compress.prune.test_prune_channels import quiet
from tests.unit.compress.quantize.test_half_onnx import exported, random_data

LONG = 400  # beyond the 256 whole numbers of BF16


class Rotary(nn.Module):
    """Rotary position embeddings of positions that are given (Su et al., 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(10, 16), nn.Linear(16, 4)
        self.frequencies = nn.Buffer(100.0 ** -(torch.arange(8) / 8))

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        angles = positions[..., None].float() * self.frequencies
        a, b = x.chunk(2, -1)
        x = torch.cat((a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()), -1)
        return self.head(x)  # type: ignore[no-any-return]


class Outer(Rotary):
    """The same as a product of a column with a row."""

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        angles = positions[..., None].float() @ self.frequencies[None]
        return self.head(self.embed(tokens) * torch.cat((angles.cos(), angles.sin()), -1))  # type: ignore[no-any-return]


class Looked(nn.Module):
    """Positions reckoned in float, then looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(LONG, 16), nn.Linear(16, 4)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        at = (positions.float() * 0.5 + tokens.float() * 0.0).floor().long()
        return self.head(self.table(at))  # type: ignore[no-any-return]


class Grid(nn.Module):
    """A stored grid of whole numbers, from which a distance is taken."""

    def __init__(self) -> None:
        super().__init__()
        self.grid = nn.Buffer(torch.arange(LONG, dtype=torch.float32))

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return torch.cos((self.grid[: positions.shape[1]] - positions.float()) * 0.5) + tokens.float() * 0.1


TOKENS = (f"tokens:int64[batch,{LONG}]", f"positions:int64[batch,{LONG}]")


def places(count: int = 2) -> Dataset:
    rng = np.random.default_rng(0)
    positions = np.tile(np.arange(LONG), (count, 1))
    return Dataset("", {"tokens": rng.integers(0, 10, (count, LONG)), "positions": positions}, None, "data")


def off_by(before: OnnxModel, after: OnnxModel, data: Dataset) -> float:
    return error_of(OnnxBackend(before, 1).infer(data.inputs), OnnxBackend(after, 1).infer(data.inputs))


@pytest.mark.parametrize("target", ["cuda", "tensorrt"])
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("network", [Rotary, Outer, Looked, Grid])
def test_positions_are_not_rounded(
    network: Callable[[], nn.Module], precision: str, target: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = exported(network().eval(), TOKENS, tmp_path)
    given = HalfOnnx(precision, places(), target=target).run(model, tmp_path / "next", quiet)  # type: ignore[arg-type]
    assert isinstance(given.model, OnnxModel)
    assert off_by(model, given.model, places()) < (0.004 if precision == "fp16" else 0.015)
    assert given.details["error"] == pytest.approx(off_by(model, given.model, places()))
    assert any("positions" in reason for reason in given.details["kept_float32"].values())


def test_weights_of_a_network_that_reads_positions_are_still_halved(tmp_path: Path) -> None:
    model = exported(Rotary().eval(), TOKENS, tmp_path)
    given = HalfOnnx("bf16", places()).run(model, tmp_path / "next", quiet)
    kinds = {tuple(t.dims): t.data_type for t in onnx.load(given.model.path).graph.initializer}  # type: ignore[union-attr]
    assert kinds[10, 16] == TensorProto.BFLOAT16


def graph_of(nodes: list[onnx.NodeProto], weights: Mapping[str, Any], kind: int = TensorProto.INT64) -> onnx.ModelProto:
    inputs = [helper.make_tensor_value_info("ids", kind, ["batch", 6])]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    stored = [numpy_helper.from_array(np.asarray(values), name) for name, values in weights.items()]
    graph = helper.make_graph(nodes, "g", inputs, outputs, stored)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def cast(given: str, made: str, to: int = TensorProto.FLOAT) -> onnx.NodeProto:
    return helper.make_node("Cast", [given], [made], name=f"cast_{made}", to=to)


@pytest.mark.parametrize(
    ("kind", "found"), [(TensorProto.INT64, {"cast_x", "scale"}), (TensorProto.UINT8, set()), (TensorProto.BOOL, set())]
)
def test_a_chain_of_positions_ends_at_the_first_layer_and_pixels_are_none(kind: int, found: set[str]) -> None:
    nodes = [
        cast("ids", "x"),
        helper.make_node("Mul", ["x", "tenth"], ["scaled"], name="scale"),
        helper.make_node("MatMul", ["scaled", "w"], ["h"], name="layer"),
        helper.make_node("Relu", ["h"], ["y"], name="after"),
    ]
    weights = {"tenth": np.float32(0.1), "w": np.ones((6, 4), np.float32)}
    assert index_arithmetic(graph_of(nodes, weights, kind), 256).nodes == found


def test_learned_weights_are_no_positions_however_large() -> None:
    rng = np.random.default_rng(0)
    nodes = [cast("ids", "x", TensorProto.FLOAT), helper.make_node("MatMul", ["x", "w"], ["y"], name="layer")]
    weights = {"w": (1000 * rng.standard_normal((6, 4))).astype(np.float32)}
    assert index_arithmetic(graph_of(nodes, weights), 256).nodes == {"cast_x"}


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_mask_as_large_as_float32_stays_finite(precision: str, tmp_path: Path) -> None:
    """It is reckoned from integers, in FP32; cast to FP16 as it is, it would be infinite, and a masked row NaN."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(10, 16), nn.Linear(16, 4)

        def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            x = self.embed(tokens)
            far = (1.0 - mask[:, None, :].float()) * torch.finfo(torch.float32).min
            return self.head(torch.softmax(x @ x.transpose(1, 2) + far, -1) @ x)  # type: ignore[no-any-return]

    model = exported(Masked().eval(), ("tokens:int64[batch,6]", "mask:int64[batch,6]"), tmp_path)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 10, (4, 6))
    shown = Dataset("", {"tokens": tokens, "mask": np.ones((4, 6), np.int64)}, None, "none is masked here")
    given = HalfOnnx(precision, shown).run(model, tmp_path / "next", quiet)  # type: ignore[arg-type]
    mask = rng.integers(0, 2, (4, 6)) * (np.arange(4) > 0)[:, None] | (np.arange(6) == 0) * (np.arange(4) > 0)[:, None]
    fed = {"tokens": tokens, "mask": mask}
    expected, got = (OnnxBackend(file, 1).infer(fed)["output"] for file in (model, given.model))  # type: ignore[arg-type]
    assert np.isfinite(got).all(), "of the first, too, of which everything is masked"
    assert error_of({"y": expected[1:]}, {"y": got[1:]}) < 0.05


def test_scores_beside_boxes_in_pixels_are_compared_by_themselves() -> None:
    rng = np.random.default_rng(0)
    boxes, scores = rng.uniform(0, 640, (2, 50, 4)), rng.uniform(0, 1, (2, 50, 1))
    expected = {"y": np.concatenate([boxes, scores], 2).astype(np.float32)}
    assert error_of(expected, {"y": np.concatenate([boxes, 0 * scores], 2)}) > 0.1
    assert error_of(expected, {"y": expected["y"].astype(np.float16)}) < 0.01


def test_a_layer_that_rounds_too_much_is_found_by_value_and_named(tmp_path: Path) -> None:
    """A large offset is added and taken off again: FP16 and BF16 lose what was between."""
    weights = {"w": np.eye(6, dtype=np.float32), "offset": np.float32(3000.3)}
    nodes = [
        helper.make_node("MatMul", ["ids", "w"], ["a"], name="first"),
        helper.make_node("Add", ["a", "offset"], ["b"], name="up"),
        helper.make_node("Sub", ["b", "offset"], ["c"], name="down"),
        helper.make_node("MatMul", ["c", "w"], ["y"], name="last"),
    ]
    path = tmp_path / "model.onnx"
    onnx.save(onnx.shape_inference.infer_shapes(graph_of(nodes, weights, TensorProto.FLOAT)), path)
    spec = TensorSpec.parse("ids:float32[batch,6]")
    model = OnnxModel(path, Signature((spec,), (TensorSpec.parse("y:float32[batch,6]"),)))
    data = Dataset("", {"ids": np.random.default_rng(0).standard_normal((8, 6)).astype(np.float32)}, None, "")
    (tmp_path / "next").mkdir()
    given = HalfOnnx("bf16", data).run(model, tmp_path / "next", quiet)
    kept = {name for name, reason in given.details["kept_float32"].items() if "rounds it too much" in reason}
    assert kept
    assert kept <= {"up", "down"}
    assert given.details["error"] < 0.1
    assert not any("accuracy." in warning and "scale" in warning for warning in given.warnings)


def test_an_error_that_only_accumulates_is_left_and_told_by_its_size() -> None:
    nodes = [f"n{index}" for index in range(100)]
    parity = repaired(nodes, lambda more: 0.5 * (1 - len(more) / 100), 0.1, "FP16")
    assert parity.kept == {}
    assert parity.error == pytest.approx(0.5)


@pytest.mark.parametrize("culprits", [{"n3"}, {"n99"}, {"n0", "n50"}])
def test_culprits_are_found_one_after_the_other(culprits: set[str]) -> None:
    nodes = [f"n{index}" for index in range(100)]
    parity = repaired(nodes, lambda more: 10.0 ** len(culprits - set(more)) - 1, 0.1, "FP16")
    assert set(parity.kept) == culprits
    assert parity.error == 0


class Shuffled(nn.Module):
    """Half of the channels pass by, both halves are joined and interleaved (Ma et al., ShuffleNet V2, 2018)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.a, self.b = conv(3, 16), conv(8, 8, kernel=1), conv(8, 8, groups=8)
        self.last, self.head = conv(16, 32, kernel=1), nn.Linear(32, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for _ in range(2):
            left, right = x.chunk(2, 1)
            x = torch.cat((left, self.b(self.a(right))), 1)
            n, c, h, w = x.shape
            x = x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)
        return self.head(self.last(x).mean((2, 3)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_joined_8_bit_tensors_run_beside_half_precision(precision: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = exported(Shuffled().eval(), ("x:float32[batch,3,16,16]",), tmp_path)
    data = random_data(model, 16)
    (tmp_path / "half").mkdir()
    eight = QuantizeOnnx("static", data, target="tensorrt").run(model, tmp_path / "next", quiet).model
    given = HalfOnnx(precision, data, target="tensorrt").run(eight, tmp_path / "half", quiet)  # type: ignore[arg-type]
    graph = onnx.load(given.model.path).graph  # type: ignore[union-attr]
    joins = [node for node in graph.node if node.op_type == "Concat"]
    restored = {name for node in graph.node if node.op_type == "DequantizeLinear" for name in node.output}
    assert any(set(node.input) <= restored for node in joins), "else nothing is joined in INT8"
    assert off_by(eight, given.model, data) < 0.1  # type: ignore[arg-type]
    if precision == "fp16":  # a server opens it as it is, with no options of ours
        ort.InferenceSession(given.model.path, providers=["CPUExecutionProvider"])  # type: ignore[union-attr]
