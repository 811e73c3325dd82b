"""What OpenVINO's CPU plugin computes wrong in 8 bits by itself: reductions, and padding."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from compress.artifact import Signature, TensorSpec
from compress.errors import StageError
from compress.model import OnnxModel
from compress.runtime.backends import open_model, openvino_kernels
from compress.runtime.backends.openvino_cpu import library
from compress.runtime.backends.openvino_kernels import with_sound_kernels
from compress.runtime.footprint import footprint

KINDS = ("ReduceL1", "ReduceL2", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceSum")
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


def file_of(
    path: Path, shape: list[int | str], axes: list[int], keep: int, before: bool, after: bool, kind: str = "ReduceMean"
) -> OnnxModel:
    """A reduction of x over some axes, rounded to 8 bits before it and behind it."""
    nodes: list[Any] = []
    held: list[Any] = [numpy_helper.from_array(np.array(axes, np.int64), "axes")]
    what = rounded(nodes, held, "x", "a", 0.05) if before else "x"
    if not before:
        nodes.append(helper.make_node("Relu", [what], ["r"]))
        what = "r"
    nodes.append(helper.make_node(kind, [what, "axes"], ["m"], keepdims=keep))
    last = rounded(nodes, held, "m", "b", 0.02) if after else "m"
    nodes.append(helper.make_node("Identity", [last], ["y"]))
    taken = [axis % len(shape) for axis in axes]
    left = [1 if axis in taken else size for axis, size in enumerate(shape) if keep or axis not in taken]
    return saved(path, nodes, held, shape, left)


def pooled(path: Path, shape: list[int | str]) -> OnnxModel:
    """The mean of all positions of x [batch, channels, positions], rounded before it and behind it."""
    nodes: list[Any] = []
    held: list[Any] = []
    what = rounded(nodes, held, "x", "a", 0.05)
    nodes.append(helper.make_node("GlobalAveragePool", [what], ["m"]))
    nodes.append(helper.make_node("Identity", [rounded(nodes, held, "m", "b", 0.02)], ["y"]))
    return saved(path, nodes, held, shape, [*shape[:2], 1])


def padded(path: Path, at: int, axes: int, value: float, behind: str = "Identity") -> OnnxModel:
    """The x [batch, 4, …], one more before and behind along an axis, rounded before it and behind it alike."""
    nodes: list[Any] = []
    width = [int(axis == at) for axis in range(axes)]
    held: list[Any] = [
        numpy_helper.from_array(np.array(2 * width, np.int64), "width"),
        numpy_helper.from_array(np.float32(value), "value"),
    ]
    what = rounded(nodes, held, "x", "a", 0.05)
    nodes.append(helper.make_node("Pad", [what, "width", "value"], ["p"]))
    nodes.append(helper.make_node(behind, [rounded(nodes, held, "p", "b", 0.05)], ["y"]))
    sizes = [4 + 2 * width[axis] for axis in range(1, axes)]
    left: list[int | str] = ["batch", *sizes] if behind == "Identity" else [*reversed(sizes), "batch"]
    return saved(path, nodes, held, ["batch", *[4] * (axes - 1)], left)


def normalized(path: Path, kind: str, square: str, axis: int, shape: list[int | str], alone: bool) -> OnnxModel:
    """A normalization of x over an axis that is written out; unless it stands alone, what is divided is an answer, too."""
    nodes: list[Any] = []
    held: list[Any] = [
        numpy_helper.from_array(np.array([axis], np.int64), "axes"),
        numpy_helper.from_array(np.float32(2), "two"),
        numpy_helper.from_array(np.float32(1e-3), "least"),
    ]
    base = what = rounded(nodes, held, "x", "a", 0.05)
    if kind == "layer":
        nodes.append(helper.make_node("ReduceMean", [what, "axes"], ["m"], keepdims=1))
        nodes.append(helper.make_node("Sub", [what, "m"], ["c"]))
        base = "c"
    nodes += [
        helper.make_node(square, [base, "two" if square == "Pow" else base], ["p"]),
        helper.make_node("ReduceMean", ["p", "axes"], ["v"], keepdims=1),
        helper.make_node("Add", ["v", "least"], ["e"]),
        helper.make_node("Sqrt", ["e"], ["s"]),
        helper.make_node("Div", [base, "s"], ["d"]),
        helper.make_node(*(("Identity", ["d"]) if alone else ("Add", ["d", base])), ["y"]),
    ]
    return saved(path, nodes, held, shape, shape)


def saved(path: Path, nodes: list[Any], held: list[Any], shape: list[int | str], left: list[int | str]) -> OnnxModel:
    """A file from x to y, float32 of these shapes."""
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
@settings(max_examples=100, deadline=None)
@given(st.data())
def test_reductions_of_any_shape_are_within_a_step_of_onnx_runtimes(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    sizes = data.draw(st.lists(SIZES, min_size=1, max_size=3))
    axes = data.draw(st.lists(st.integers(1, len(sizes)), min_size=1, max_size=len(sizes), unique=True))
    batch = data.draw(st.sampled_from([1, 5, 37, 64]))
    assume(batch * np.prod(sizes) < 1_000_000)
    keep, before, after = (data.draw(st.booleans()) for _ in range(3))
    path = tmp_path_factory.mktemp("means") / "m.onnx"
    shape = [f"free{at}" if data.draw(st.booleans()) else size for at, size in enumerate(sizes)]
    kind = data.draw(st.sampled_from(KINDS))
    model = file_of(path, ["batch", *shape], sorted(axes), int(keep), before, after, kind)
    x = np.random.default_rng(0).normal(size=(batch, *sizes)).astype(np.float32)
    assert apart(model, {"x": x}) <= 0.0201 + 1e-6 * np.abs(x).sum() / batch


FREE: list[tuple[list[int | str], list[int]]] = [
    (["batch", 32, 6], [1]),
    (["batch", 32, 6], [2]),
    (["batch", "seq", 6], [1]),
    (["batch", "seq", 6], [2]),
    (["batch", "seq", 6], [1, 2]),
    (["batch", 32, "w"], [1]),
    (["batch", 32, "w"], [-1]),
    (["batch", "seq", "w"], [0, 2]),
]
ROWS = (1, 8, 64)


def drawn(rows: int) -> dict[str, np.ndarray[Any, Any]]:
    return {"x": np.random.default_rng(0).normal(size=(rows, 32, 6)).astype(np.float32) * 2}


@pytest.mark.usefixtures("openvino")
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("keep", [0, 1])
@pytest.mark.parametrize(("shape", "axes"), FREE)
def test_of_three_dimensions_every_row_is_right_whichever_of_them_are_free(
    tmp_path: Path, shape: list[int | str], axes: list[int], keep: int, after: bool
) -> None:
    model = file_of(tmp_path / "m.onnx", shape, axes, keep, before=True, after=after)
    for rows in ROWS:
        assert apart(model, drawn(rows)) <= 0.0201, rows


LARGEST: list[tuple[list[int | str], list[int]]] = [
    (["batch", 32, 6], [1]),
    (["batch", 32, 6], [2]),
    (["batch", 4, 8, 6], [1]),
    (["batch", 4, 8, 6], [1, 2]),
    (["batch", 4, 8, 6], [2, 3]),
    (["batch", "seq", 8, 6], [1, 3]),
    (["batch", 2, 2, 8, 6], [3]),
]


def of(shape: list[int | str], rows: int) -> dict[str, np.ndarray[Any, Any]]:
    sizes = [rows, *(each if isinstance(each, int) else 4 for each in shape[1:])]
    return {"x": np.random.default_rng(0).normal(size=sizes).astype(np.float32)}


@pytest.mark.usefixtures("openvino")
@pytest.mark.parametrize("keep", [0, 1])
@pytest.mark.parametrize("kind", ["ReduceMax", "ReduceMin"])
@pytest.mark.parametrize(("shape", "axes"), LARGEST)
def test_the_largest_of_floats_is_right_rounded_to_8_bits(
    tmp_path: Path, shape: list[int | str], axes: list[int], kind: str, keep: int
) -> None:
    model = file_of(tmp_path / "m.onnx", shape, axes, keep, before=False, after=True, kind=kind)
    for rows in ROWS:
        assert apart(model, of(shape, rows)) <= 0.0201, rows


PADS = [(at, axes, value) for axes in (2, 3, 4) for at in range(1, axes) for value in (0.0, 1.0)]


@pytest.mark.usefixtures("openvino")
@pytest.mark.parametrize("behind", ["Identity", "Transpose"])
@pytest.mark.parametrize(("at", "axes", "value"), PADS)
def test_what_is_put_around_8_bits_is_as_large_as_said(
    tmp_path: Path, at: int, axes: int, value: float, behind: str
) -> None:
    model = padded(tmp_path / "m.onnx", at, axes, value, behind)
    for rows in ROWS:
        assert apart(model, of(["batch", *[4] * (axes - 1)], rows)) <= 0.0501, rows


@pytest.mark.usefixtures("openvino")
@pytest.mark.parametrize("shape", [["batch", 32, 6], ["batch", 32, "w"]])
def test_a_pool_of_all_positions_is_such_a_mean(tmp_path: Path, shape: list[int | str]) -> None:
    model = pooled(tmp_path / "m.onnx", shape)
    for rows in ROWS:
        assert apart(model, drawn(rows)) <= 0.0201, rows


@pytest.mark.usefixtures("openvino")
@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("shape", [["batch", 32, 6], ["batch", "seq", 6]])
@pytest.mark.parametrize("axis", [0, 1, 2, -1])
@pytest.mark.parametrize("square", ["Pow", "Mul"])
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_normalizations_that_are_written_out_are_right(
    tmp_path: Path, kind: str, square: str, axis: int, shape: list[int | str], alone: bool
) -> None:
    model = normalized(tmp_path / "m.onnx", kind, square, axis, shape, alone)
    for rows in ROWS:
        assert apart(model, drawn(rows)) <= 1e-4, rows


@pytest.mark.usefixtures("openvino")
@pytest.mark.parametrize("shape", [["batch", 32, 6], ["batch", "seq", 6]])
@pytest.mark.parametrize(
    ("kind", "square", "made"), [("layer", "Pow", "MVN"), ("layer", "Mul", "MVN"), ("rms", "Pow", "RMS")]
)
def test_normalizations_of_the_last_axis_stay_one_operator(
    tmp_path: Path, kind: str, square: str, made: str, shape: list[int | str]
) -> None:
    model = normalized(tmp_path / "m.onnx", kind, square, -1, shape, alone=True)
    core = library().Core()
    graph = core.compile_model(with_sound_kernels(core.read_model(str(model.path))), "CPU").get_runtime_model()
    run = [node.get_rt_info()["layerType"].astype(str) for node in graph.get_ordered_ops()]
    assert run.count(made) == 1
    assert "Reduce" not in run


@pytest.mark.usefixtures("openvino")
def test_what_is_weighed_is_what_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "kernels.py"
    other.write_text("def with_sound_kernels(graph):\n    raise SystemExit('it was asked')\n")
    model = replace(padded(tmp_path / "m.onnx", 1, 3, 0.0, "Identity"), runtime="openvino")
    assert footprint(model, threads=1).load_ms > 0
    monkeypatch.setattr(openvino_kernels, "__file__", str(other))
    with pytest.raises(StageError, match="it was asked"):
        footprint(model, threads=1)
