"""Every stage that writes ONNX knows what the bodies of If and Loop read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from compress.formats.onnx.scope import captured, drop_dead, drop_unused, fresh, name_nodes, names_in, read, sort
from compress.model import OnnxModel
from compress.onnx_export.fold import FoldOnnx
from compress.quantize.graph import Graph
from compress.quantize.half.half_onnx import HalfOnnx
from compress.quantize.quantize_onnx import QuantizeOnnx
from compress.quantize.smooth_onnx import SmoothOnnx
from compress.runtime.backends import OnnxBackend
from compress.runtime.measure import onnx_params
from compress.stage import Stage
from tests.unit.compress.onnx_graphs import branching, data_for, looping, normal, written
from tests.unit.compress.prune.test_prune_channels import quiet
from tests.unit.compress.quantize.test_targets import cosine

Writer = Callable[[Any], Stage]
WRITERS: dict[str, Writer] = {
    "fold": lambda _: FoldOnnx(),
    "unfuse": lambda _: FoldOnnx(unfuse=True),
    "smooth": lambda data: SmoothOnnx(data, scalings=True),
    "static": lambda data: QuantizeOnnx("static", data),
    "tensorrt": lambda data: QuantizeOnnx("static", data, target="tensorrt"),
    "dynamic": lambda _: QuantizeOnnx("dynamic"),
    "weights": lambda _: QuantizeOnnx("weights"),
    "fp16": lambda data: HalfOnnx("fp16", data),
    "bf16": lambda data: HalfOnnx("bf16", data, "tensorrt"),
}


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("graph", [branching, looping])
def test_bodies_still_find_what_they_read(graph: Callable[[Path], OnnxModel], writer: str, tmp_path: Path) -> None:
    model = graph(tmp_path / "float")
    data = data_for(model)
    (tmp_path / "next").mkdir()
    given = WRITERS[writer](data).run(model, tmp_path / "next", quiet)
    assert isinstance(given.model, OnnxModel)
    assert cosine(model, given.model, data) > 0.999


def test_an_activation_that_a_body_reads_is_not_cut_by_the_relu_after_it(tmp_path: Path) -> None:
    """ONNX Runtime's quantizer gives what a Relu takes the range of what it gives: half of `before` would be 0."""
    model = branching(tmp_path / "float")
    (tmp_path / "next").mkdir()
    given = QuantizeOnnx("static", data_for(model)).run(model, tmp_path / "next", quiet)
    assert "Relu" in given.details["operators"]


def test_so_is_one_that_is_an_output(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Gemm", ["x", "w", "b"], ["y"], name="layer"),
        helper.make_node("Relu", ["y"], ["h"], name="relu"),
        helper.make_node("Gemm", ["h", "v"], ["z"], name="last"),
    ]
    weights = {"w": normal(32, 8), "b": normal(8), "v": normal(8, 4)}
    outputs = ("y:float32[batch,8]", "z:float32[batch,4]")
    model = written(nodes, weights, tmp_path / "float", outputs=outputs)
    (tmp_path / "next").mkdir()
    given = QuantizeOnnx("static", data_for(model)).run(model, tmp_path / "next", quiet)
    assert cosine(model, given.model, data_for(model)) > 0.999  # type: ignore[arg-type]


@pytest.mark.parametrize("low", [0.5, None, -1.0])
def test_the_bounds_of_a_clip_hold_in_int8(low: float | None, tmp_path: Path) -> None:
    """An 8-bit range always holds 0: it is no lower bound of 0.5."""
    nodes = [
        helper.make_node("Gemm", ["x", "w", "b"], ["h"], name="layer"),
        helper.make_node("Clip", ["h", "" if low is None else "low", "high"], ["c"], name="clip"),
        helper.make_node("Gemm", ["c", "v"], ["y"], name="last"),
    ]
    bounds = {"high": np.float32(2)} | ({} if low is None else {"low": np.float32(low)})
    weights = {"w": normal(32, 8), "b": normal(8), "v": normal(8, 8, seed=2), **bounds}
    model = written(nodes, weights, tmp_path / "float")
    (tmp_path / "next").mkdir()
    given = QuantizeOnnx("static", data_for(model)).run(model, tmp_path / "next", quiet)
    assert cosine(model, given.model, data_for(model)) > 0.998  # type: ignore[arg-type]


def test_layers_inside_a_body_are_named_as_float(tmp_path: Path) -> None:
    model = branching(tmp_path / "float")
    (tmp_path / "next").mkdir()
    given = QuantizeOnnx("weights").run(model, tmp_path / "next", quiet)
    assert given.details["layers_float"]["e0"] == "inside a branch or a loop"


def test_smoothing_takes_no_tensor_apart_that_a_body_reads(tmp_path: Path) -> None:
    graph = Graph(branching(tmp_path / "float").path)
    assert {"h", "before", "shared", "then_only", "else_only"} <= graph.outputs


def test_a_body_captures_what_it_does_not_make(tmp_path: Path) -> None:
    branch = onnx.load(branching(tmp_path / "if").path).graph
    assert captured(branch.node[4]) == {"h", "before", "shared", "then_only", "else_only"}
    loop = onnx.load(looping(tmp_path / "loop").path).graph
    assert captured(loop.node[1]) == {"step", "start"}
    assert {"step", "start", "times", "y"} <= read(loop)
    assert {"s0", "state", "y"} <= names_in(loop)


def test_what_nothing_reads_goes_and_what_a_body_reads_stays(tmp_path: Path) -> None:
    graph = onnx.load(looping(tmp_path).path).graph
    graph.initializer.append(onnx.numpy_helper.from_array(normal(4), "spare"))
    graph.node.append(helper.make_node("Neg", ["start"], ["nobody"], name="spare"))
    before = {tensor.name for tensor in graph.initializer}
    drop_unused(graph)
    assert {tensor.name for tensor in graph.initializer} == before - {"spare"}
    drop_dead(graph)
    assert [node.name for node in graph.node] == ["first_layer", "loop", "last_layer"]


def test_nodes_are_sorted_by_what_their_bodies_read(tmp_path: Path) -> None:
    graph = onnx.load(branching(tmp_path).path).graph
    backwards = list(graph.node)[::-1]
    del graph.node[:]
    graph.node.extend(backwards)
    sort(graph)
    names = [node.name for node in graph.node]
    assert names.index("if") > max(names.index("relu"), names.index("greater"))
    graph.node[0].input[0] = "y"
    with pytest.raises(ValueError, match="circle"):
        sort(graph)


def test_each_node_gets_a_name_of_its_own() -> None:
    nodes = [
        helper.make_node("Neg", [a], [b], name=name)
        for a, b, name in (("x", "a", ""), ("a", "b", "n"), ("b", "y", "n"))
    ]
    shown = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy"]
    model = helper.make_model(helper.make_graph(nodes, "g", shown[:1], shown[1:]))
    name_nodes(model)
    assert [node.name for node in model.graph.node] == ["Neg_a", "n", "n_2"]
    assert fresh("a", {"a", "a_2"}) == "a_3"


def test_weights_inside_a_body_are_counted(tmp_path: Path) -> None:
    model = onnx.load(branching(tmp_path).path)
    whole = onnx_params(tmp_path / "model.onnx")
    body = model.graph.node[4].attribute[0].g
    body.initializer.append(next(t for t in model.graph.initializer if t.name == "then_only"))
    body.initializer.append(next(t for t in model.graph.initializer if t.name == "else_only"))
    left = [t for t in model.graph.initializer if t.name not in {i.name for i in body.initializer}]
    del model.graph.initializer[:]
    model.graph.initializer.extend(left)
    onnx.save(model, tmp_path / "moved.onnx")
    assert onnx_params(tmp_path / "moved.onnx") == whole


def test_what_is_written_runs(tmp_path: Path) -> None:
    model = looping(tmp_path)
    assert np.isfinite(OnnxBackend(model, 1).infer(data_for(model).inputs)["y"]).all()


def test_small_shares_of_a_softmax_are_not_lost_in_int8(tmp_path: Path) -> None:
    """ONNX Runtime's quantizer gives it the range from 0 to 1: of 1,000 classes, each would have a share of 0."""
    nodes = [
        helper.make_node("Gemm", ["x", "w"], ["h"], name="layer"),
        helper.make_node("Softmax", ["h"], ["y"], name="softmax"),
    ]
    weights = {"w": 0.1 * normal(32, 1000)}
    model = written(nodes, weights, tmp_path / "float", outputs=("y:float32[batch,1000]",))
    (tmp_path / "next").mkdir()
    given = QuantizeOnnx("static", data_for(model)).run(model, tmp_path / "next", quiet)
    assert cosine(model, given.model, data_for(model)) > 0.999  # type: ignore[arg-type]


def test_nor_are_they_between_two_layers(tmp_path: Path) -> None:
    """ONNX Runtime fuses a Softmax between 8-bit numbers, and computes zeros where its scale is not what it expects."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"], name="layer"),
        helper.make_node("Softmax", ["h"], ["s"], name="softmax"),
        helper.make_node("MatMul", ["s", "v"], ["y"], name="last"),
    ]
    weights = {"w": 0.1 * normal(32, 32), "v": normal(32, 8)}
    model = written(nodes, weights, tmp_path / "float")
    (tmp_path / "next").mkdir()
    given = QuantizeOnnx("static", data_for(model)).run(model, tmp_path / "next", quiet)
    assert cosine(model, given.model, data_for(model)) > 0.999  # type: ignore[arg-type]
