"""What stands for large weights while ONNX Runtime quantizes dynamically: nobody can tell that it did."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import ModelProto, helper

from compress.model import OnnxModel
from compress.quantize import stand_ins
from compress.quantize.int8_onnx import dynamic, plain
from compress.quantize.quantize_onnx import QuantizeOnnx
from compress.runtime.backends import open_model
from compress.runtime.machine import int8_saturates
from tests.unit.compress.onnx_graphs import normal, written
from tests.unit.compress.quantize.test_writers_random import build, models

ALL, NONE = -1, 1 << 40


def made_of(path: Path, least: int, *, reduce_range: bool) -> tuple[ModelProto, int]:
    """The quantized model where weights over `least` bytes have stand-ins, and how many had."""
    seen = []

    class Counted(stand_ins.StandIns):
        def __init__(self, model: ModelProto, left: list[str]) -> None:
            super().__init__(model, left)
            seen.append(len(self._nodes))

    with (
        patch.object(stand_ins, "LARGE", least),
        patch("compress.quantize.int8_onnx.StandIns", Counted),
    ):
        return dynamic(plain(path), ["left"], reduce_range=reduce_range), seen[0]


def assert_same(path: Path, *, reduce_range: bool = False) -> int:
    with_them, count = made_of(path, ALL, reduce_range=reduce_range)
    without, none = made_of(path, NONE, reduce_range=reduce_range)
    assert none == 0
    for model in (with_them, without):
        del model.graph.value_info[:]  # of a Gemm that was cut in two, the shape between is told of whole weights alone
    assert with_them == without
    return count


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(drawn=models(), reduce_range=st.booleans())
def test_whatever_the_graph_the_file_is_the_same_bit_by_bit(
    drawn: tuple[list[str], str, int, int, list[int]], reduce_range: bool
) -> None:
    with tempfile.TemporaryDirectory() as root:
        assert assert_same(build(drawn, Path(root)).path, reduce_range=reduce_range) > 0


@pytest.mark.parametrize("reduce_range", [False, True])
def test_layers_of_each_form_tables_and_odd_channels_have_stand_ins(tmp_path: Path, reduce_range: bool) -> None:
    odd = normal(32, 48, seed=3)
    odd[:, 0], odd[:, 1], odd[:, 2] = 0, 1e-42, np.abs(odd[:, 2])  # nothing, less than any scale, of one sign
    weights = {
        "table": normal(9000, 32), "odd": odd, "up": normal(64, 48, seed=1), "bias": normal(64), "down": normal(64, 8),
        "kept": normal(8, 8),
    }  # fmt: skip
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["rows"], name="rows"),
        helper.make_node("MatMul", ["rows", "odd"], ["a"], name="odd"),
        helper.make_node("Gemm", ["a", "up", "bias"], ["b"], name="up", transB=1),
        helper.make_node("Gemm", ["b", "down"], ["c"], name="down"),
        helper.make_node("MatMul", ["c", "kept"], ["y"], name="left"),
    ]
    model = written(nodes, weights, tmp_path, inputs=("ids:int64[batch]",), outputs=["y:float32[batch,8]"])
    assert assert_same(model.path, reduce_range=reduce_range) == 4


def error_of_dynamic(tmp_path: Path, nodes: list[onnx.NodeProto], weights: dict[str, Any]) -> float:
    """The largest difference of the outputs by dynamic INT8, as a share of the largest output."""
    model = written(nodes, weights, tmp_path, inputs=("x:float32[batch,32]",), outputs=["y:float32[batch,32]"])
    (tmp_path / "made").mkdir()
    made = QuantizeOnnx("dynamic").run(model, tmp_path / "made", lambda *_: None).model
    assert isinstance(made, OnnxModel)
    x = {"x": normal(16, 32, seed=5)}
    want, got = (open_model(each, threads=1).infer(x)["y"] for each in (model, made))
    return float(np.abs(want - got).max() / np.abs(want).max())


OTHERS = {
    "turned, too": [helper.make_node("Gemm", ["a", "w"], ["y"], name="second", transB=1)],
    "as it is": [helper.make_node("Gemm", ["a", "w"], ["y"], name="second")],
    "by a MatMul": [helper.make_node("MatMul", ["a", "w"], ["y"], name="second")],
    "scaled": [helper.make_node("Gemm", ["a", "w"], ["y"], name="second", transB=1, alpha=0.5)],
    "added": [helper.make_node("ReduceMean", ["w"], ["m"], name="m", keepdims=1),
              helper.make_node("MatMul", ["a", "w"], ["b"], name="second"), helper.make_node("Add", ["b", "m"], ["y"])],
}  # fmt: skip


@pytest.mark.parametrize("others", OTHERS.values(), ids=OTHERS)
def test_a_layer_that_is_applied_again_is_quantized_as_it_is(tmp_path: Path, others: list[onnx.NodeProto]) -> None:
    if int8_saturates() and others is OTHERS["turned, too"]:
        pytest.skip(
            "the exact products that tests ask for without VNNI replace a weight that two layers share twice, and fail"
        )
    first = helper.make_node("Gemm", ["x", "w"], ["a"], name="first", transB=1)
    assert error_of_dynamic(tmp_path, [first, *others], {"w": normal(32, 32)}) < 0.05


@pytest.mark.parametrize("weight", [normal(4, 32, 32, seed=1), normal(32, seed=1)], ids=["a stack", "a vector"])
def test_a_weight_that_is_no_matrix_stays_in_float(tmp_path: Path, weight: Any) -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["a"], name="first")]
    nodes += [
        helper.make_node("MatMul", ["a", "deep"], ["b"], name="deep"),
        helper.make_node("ReduceMean", ["b"], ["y"], name="mean", keepdims=0, axes=[0]),
    ] if weight.ndim == 3 else [
        helper.make_node("MatMul", ["a", "deep"], ["b"], name="deep"),
        helper.make_node("Unsqueeze", ["b", "axis"], ["c"], name="c"), helper.make_node("Add", ["c", "a"], ["y"]),
    ]  # fmt: skip
    weights = {"w": normal(32, 32), "deep": weight} | ({} if weight.ndim == 3 else {"axis": np.array([1])})
    if weight.ndim == 3:
        nodes[-1] = helper.make_node("ReduceMean", ["b", "axes"], ["y"], name="mean", keepdims=0)
        weights["axes"] = np.array([0])
    assert error_of_dynamic(tmp_path, nodes, weights) < 0.05


def test_what_the_quantizer_needs_whole_has_none(tmp_path: Path) -> None:
    """Of more axes, shared by unlike readers, scaled, seen from outside or from a body, or not finite."""
    broken = normal(8, 8)
    broken[0, 0] = np.nan
    weights = {"shared": normal(8, 8), "scaled": normal(8, 8), "shown": normal(8, 8), "deep": normal(1, 8, 8)}
    nodes = [
        helper.make_node("MatMul", ["x", "shared"], ["a"], name="a"),
        helper.make_node("Add", ["a", "shared"], ["b"], name="b"),
        helper.make_node("Gemm", ["b", "scaled"], ["c"], name="c", alpha=0.5),
        helper.make_node("MatMul", ["c", "shown"], ["d"], name="d"),
        helper.make_node("MatMul", ["d", "deep"], ["e"], name="e"),
        helper.make_node("Identity", ["shown"], ["seen"], name="f"),
        helper.make_node("Squeeze", ["e"], ["y"], name="g"),
    ]
    outputs = ["y:float32[batch,8]", "seen:float32[batch,8]"]
    model = written(nodes, weights, tmp_path, inputs=("x:float32[8,8]",), outputs=outputs)
    with patch.object(stand_ins, "LARGE", ALL):
        shown = stand_ins.StandIns(onnx.load(model.path), []).shown
        assert shown == onnx.load(model.path)
        weights = {"broken": broken}
        nodes = [helper.make_node("MatMul", ["x", "broken"], ["y"], name="a")]
        model = written(nodes, weights, tmp_path / "nan", inputs=("x:float32[8,8]",), outputs=["y:float32[8,8]"])
        assert stand_ins.StandIns(onnx.load(model.path), []).shown == onnx.load(model.path)
