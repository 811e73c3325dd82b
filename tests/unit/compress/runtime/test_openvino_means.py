"""Means of 8 bits, which OpenVINO's CPU plugin computes wrong where a tensor has three dimensions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from compress.artifact import Signature, TensorSpec
from compress.model import OnnxModel
from compress.runtime.backends import open_model

SIZES = st.sampled_from([1, 2, 3, 6, 8, 16, 17, 32, 64])


def rounded(nodes: list[Any], held: list[Any], given: str, name: str, scale: float) -> str:
    """Q and DQ behind a tensor; the name of what they give."""
    held += [
        numpy_helper.from_array(np.float32(scale), f"{name}_s"),
        numpy_helper.from_array(np.uint8(128), f"{name}_z"),
    ]
    nodes += [
        helper.make_node("QuantizeLinear", [given, f"{name}_s", f"{name}_z"], [f"{name}_q"]),
        helper.make_node("DequantizeLinear", [f"{name}_q", f"{name}_s", f"{name}_z"], [f"{name}_d"]),
    ]
    return f"{name}_d"


def file_of(path: Path, shape: list[int | str], axes: list[int], keep: int, before: bool, after: bool) -> OnnxModel:
    """The mean of x over some axes, rounded to 8 bits before it and behind it."""
    nodes: list[Any] = []
    held: list[Any] = [numpy_helper.from_array(np.array(axes, np.int64), "axes")]
    what = rounded(nodes, held, "x", "a", 0.05) if before else "x"
    nodes.append(helper.make_node("ReduceMean", [what, "axes"], ["m"], keepdims=keep))
    last = rounded(nodes, held, "m", "b", 0.02) if after else "m"
    nodes.append(helper.make_node("Identity", [last], ["y"]))
    left = [1 if axis in axes else size for axis, size in enumerate(shape) if keep or axis not in axes]
    values = [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)]
    made = [helper.make_tensor_value_info("y", TensorProto.FLOAT, left)]
    graph = helper.make_graph(nodes, "g", values, made, held)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9), path)
    specs = (TensorSpec("x", "float32", tuple(shape)),), (TensorSpec("y", "float32", tuple(left)),)
    return OnnxModel(path, Signature(*specs))


def apart(model: OnnxModel, inputs: dict[str, np.ndarray[Any, Any]]) -> float:
    """How far OpenVINO's answers are from ONNX Runtime's at most."""
    first, second = (
        open_model(OnnxModel(model.path, model.signature, runtime=name), threads=1).infer(inputs)["y"]
        for name in ("onnxruntime", "openvino")
    )
    return float(np.abs(first - second).max())


@pytest.mark.usefixtures("openvino")
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_means_of_any_shape_are_within_a_step_of_onnx_runtimes(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    sizes = data.draw(st.lists(SIZES, min_size=1, max_size=3))
    axes = data.draw(st.lists(st.integers(1, len(sizes)), min_size=1, max_size=len(sizes), unique=True))
    batch = data.draw(st.sampled_from([1, 5, 37, 64]))
    assume(batch * np.prod(sizes) < 1_000_000)
    keep, before, after = (data.draw(st.booleans()) for _ in range(3))
    path = tmp_path_factory.mktemp("means") / "m.onnx"
    model = file_of(path, ["batch", *sizes], sorted(axes), int(keep), before, after)
    x = np.random.default_rng(0).normal(size=(batch, *sizes)).astype(np.float32) * 2
    assert apart(model, {"x": x}) <= 0.0201


@pytest.mark.usefixtures("openvino")
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("keep", [0, 1])
@pytest.mark.parametrize("axis", [1, 2])
def test_of_three_dimensions_every_row_of_64_is_right(tmp_path: Path, axis: int, keep: int, after: bool) -> None:
    model = file_of(tmp_path / "m.onnx", ["batch", 32, 6], [axis], keep, before=True, after=after)
    x = np.random.default_rng(0).normal(size=(64, 32, 6)).astype(np.float32) * 2
    assert apart(model, {"x": x}) <= 0.0201
