"""Where Q/DQ nodes stand for TensorRT, and what it makes of the file: told by `lint_tensorrt`, which reads it anew."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import NodeProto, TensorProto, helper, numpy_helper

from compress.data.dataset import Dataset
from compress.model import OnnxModel
from compress.quantize.half.half_onnx import HalfOnnx
from compress.quantize.place_qdq import place
from compress.quantize.quantize_onnx import QuantizeOnnx
from compress.tensorrt.lint import lint_tensorrt
from tests.families import family
from tests.unit.compress.prune.test_prune_channels import quiet
from tests.unit.compress.quantize.test_half_onnx import exported, random_data
from tests.unit.compress.quantize.test_targets import cosine, zero_points

RNG = np.random.default_rng(0)


def conv(name: str, given: str, made: str, weights: dict[str, np.ndarray], channels: int = 4) -> NodeProto:
    weights[f"{name}_w"] = RNG.standard_normal((channels, 4, 1, 1)).astype(np.float32)
    weights[f"{name}_b"] = RNG.standard_normal(channels).astype(np.float32)
    return helper.make_node("Conv", [given, f"{name}_w", f"{name}_b"], [made], name=name)


def model(nodes: list[NodeProto], weights: dict[str, np.ndarray], output: str) -> onnx.ModelProto:
    shape = ["batch", 4, 6, 6]
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info(output, TensorProto.FLOAT, None)],
        [numpy_helper.from_array(values, name) for name, values in weights.items()],
    )  # fmt: skip
    found = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    return onnx.shape_inference.infer_shapes(found)


def placed(nodes: list[NodeProto], weights: dict[str, np.ndarray], output: str, **ranges: float) -> onnx.ModelProto:
    found = model(nodes, weights, output)
    names = {"x"} | {name for node in found.graph.node for name in node.output}
    place(found, {name: (-ranges.get(name, 1.0), ranges.get(name, 1.0)) for name in names})
    onnx.checker.check_model(found, full_check=True)
    return found


def int8_inputs(found: onnx.ModelProto, name: str) -> list[bool]:
    """Of a node, which inputs come restored from INT8."""
    restored = {out for node in found.graph.node if node.op_type == "DequantizeLinear" for out in node.output}
    node = next(node for node in found.graph.node if node.name == name)
    return [given in restored for given in node.input]


def quantized(found: onnx.ModelProto) -> set[str]:
    return {node.input[0] for node in found.graph.node if node.op_type == "QuantizeLinear"}


def relu(given: str, made: str) -> NodeProto:
    return helper.make_node("Relu", [given], [made], name=made)


def test_a_layers_inputs_are_quantized_and_its_bias_and_output_are_not() -> None:
    weights: dict[str, np.ndarray] = {}
    found = placed([conv("a", "x", "h", weights), relu("h", "r"), conv("b", "r", "y", weights)], weights, "y")
    assert int8_inputs(found, "a") == int8_inputs(found, "b") == [True, True, False]
    assert quantized(found) == {"x", "r"}, "not h, between the layer and the Relu that is fused into it"


def test_of_a_residual_addition_the_shortcut_is_quantized_and_the_layer_before_it_is_not() -> None:
    weights: dict[str, np.ndarray] = {}
    nodes = [
        conv("a", "x", "h", weights), helper.make_node("Add", ["h", "x"], ["s"], name="add"), relu("s", "r"),
        conv("b", "r", "y", weights),
    ]  # fmt: skip
    assert int8_inputs(placed(nodes, weights, "y"), "add") == [False, True]


def test_of_two_layers_that_are_added_the_shorter_way_is_the_shortcut() -> None:
    weights: dict[str, np.ndarray] = {}
    nodes = [
        conv("short", "x", "s", weights), conv("one", "x", "h", weights), conv("two", "h", "t", weights),
        helper.make_node("Add", ["s", "t"], ["a"], name="add"), relu("a", "r"), conv("b", "r", "y", weights),
    ]  # fmt: skip
    assert int8_inputs(placed(nodes, weights, "y"), "add") == [True, False]


def test_an_addition_of_no_layers_output_takes_int8_on_both_sides() -> None:
    weights: dict[str, np.ndarray] = {}
    nodes = [
        relu("x", "p"), helper.make_node("Sigmoid", ["x"], ["q"], name="q"),
        helper.make_node("Add", ["p", "q"], ["a"], name="add"), conv("b", "a", "y", weights),
    ]  # fmt: skip
    assert int8_inputs(placed(nodes, weights, "y"), "add") == [True, True]


@pytest.mark.parametrize("after", ["Softmax", "output"])
def test_what_no_int8_layer_takes_stays_in_float(after: str) -> None:
    """Without weights, INT8 in wants INT8 out."""
    weights: dict[str, np.ndarray] = {}
    nodes = [conv("a", "x", "h", weights), helper.make_node("Add", ["h", "x"], ["s"], name="add")]
    nodes += [helper.make_node("Softmax", ["s"], ["y"], name="softmax")] if after == "Softmax" else [relu("s", "y")]
    assert int8_inputs(placed(nodes, weights, "y"), "add") == [False, False]


def test_what_is_concatenated_or_moved_shares_a_scale() -> None:
    weights: dict[str, np.ndarray] = {}
    pool = helper.make_node("MaxPool", ["x"], ["m"], name="pool", kernel_shape=[1, 1])
    nodes = [
        pool, conv("a", "x", "h", weights), helper.make_node("Concat", ["m", "h"], ["c"], name="cat", axis=1),
        helper.make_node("Transpose", ["c"], ["t"], name="t", perm=[0, 1, 3, 2]),
    ]  # fmt: skip
    weights["last_w"] = RNG.standard_normal((2, 8, 1, 1)).astype(np.float32)
    nodes.append(helper.make_node("Conv", ["t", "last_w"], ["y"], name="last"))
    found = placed(nodes, weights, "y", m=1.0, h=4.0, c=4.0, x=2.0)
    assert int8_inputs(found, "cat") == [True, True]
    assert int8_inputs(found, "pool") == [True]
    scales = {t.name: float(numpy_helper.to_array(t)) for t in found.graph.initializer if t.name.endswith("_scale")}
    assert len({round(value, 6) for value in scales.values()}) == 1, "one for x, m, h and t"


def test_each_layer_has_a_restoring_node_of_its_own_and_each_tensor_is_quantized_once() -> None:
    weights: dict[str, np.ndarray] = {}
    nodes = [conv("a", "x", "h", weights), conv("b", "x", "i", weights)]
    nodes.append(helper.make_node("Concat", ["h", "i"], ["y"], name="cat", axis=1))
    found = placed(nodes, weights, "y")
    kinds = [node.op_type for node in found.graph.node]
    assert kinds.count("QuantizeLinear") == 1
    assert kinds.count("DequantizeLinear") == 4


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 40), st.integers(0, 2**31))
def test_a_weight_is_within_half_a_step_of_its_channels_scale(channels: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    values = (rng.standard_normal((channels, 4, 1, 1)) * 10.0 ** rng.integers(-6, 4, (channels, 1, 1, 1))).astype("f4")
    node = helper.make_node("Conv", ["x", "w"], ["y"], name="conv")
    found = placed([node], {"w": values}, "y")
    tensors = {t.name: numpy_helper.to_array(t) for t in found.graph.initializer}
    whole, scale = tensors["w_int8_0"].astype(np.float64), tensors["w_scale_0"].reshape(-1, 1, 1, 1)
    assert np.all(np.abs(whole * scale - values) <= 0.5001 * scale)
    assert np.all(tensors["w_zero_0"] == 0)


def in_int8(name: str, folder: Path) -> tuple[OnnxModel, OnnxModel, Dataset]:
    """A family in float32 and in INT8 for TensorRT, and the data that it was calibrated on."""
    module, inputs = family(name)
    float32 = exported(module, inputs, folder)
    data = random_data(float32, 32)
    (folder / "int8").mkdir()
    eight = QuantizeOnnx("static", data, target="tensorrt").run(float32, folder / "int8", quiet).model
    assert isinstance(eight, OnnxModel)
    return float32, eight, data


@pytest.mark.parametrize("name", ["residual", "unet", "inverted", "vit"])
def test_in_fp16_the_scales_are_too_and_nothing_stays_in_fp32(name: str, tmp_path: Path) -> None:
    """A cast between a DequantizeLinear and its layer would part them, and TensorRT would compute in float."""
    float32, eight, data = in_int8(name, tmp_path)
    half = HalfOnnx("fp16", data, "tensorrt").run(eight, tmp_path / "next", quiet)
    assert isinstance(half.model, OnnxModel)
    # But for 8-bit tensors that are joined, with what restores them: ONNX Runtime refuses them with FP16 scales.
    joins = [node for node in onnx.load(half.model.path).graph.node if node.op_type == "Concat" and name == "unet"]
    assert half.details["precision"]["fp32"] == sum(1 + len(node.input) for node in joins)
    kept = {name: reason for name, reason in half.details["kept_float32"].items() if "_cat" not in name}
    assert set(kept.values()) <= {"what it takes stays in FP32"}, "the inputs are float32"
    assert zero_points(half.model.path) == {0}
    assert cosine(float32, half.model, data) > 0.97
    found, before = lint_tensorrt(half.model.path), lint_tensorrt(eight.path)
    assert not found.refused
    assert found.counts["INT8"] == before.counts["INT8"], "what was INT8 is so still"
    assert "FP32" not in found.counts
    graph = onnx.load(half.model.path).graph
    casts = {out for node in graph.node if node.op_type == "Cast" for out in node.output}
    restored = {out for node in graph.node if node.op_type == "DequantizeLinear" for out in node.output}
    assert not any(set(node.input) & restored for node in graph.node if node.op_type == "Cast")
    assert not any(set(node.input) & casts for node in graph.node if node.op_type == "DequantizeLinear")


@pytest.mark.parametrize("name", ["residual", "bert"])
def test_in_bf16_what_was_int8_stays_so_though_onnx_has_no_such_convolution(name: str, tmp_path: Path) -> None:
    """Opset 20 defines no BF16 for Conv: its Q/DQ nodes then stay in FP32 with it."""
    float32, eight, data = in_int8(name, tmp_path)
    half = HalfOnnx("bf16", data, "tensorrt").run(eight, tmp_path / "next", quiet).model
    assert isinstance(half, OnnxModel)
    assert lint_tensorrt(half.path).counts["INT8"] == lint_tensorrt(eight.path).counts["INT8"]
    assert cosine(float32, half, data) > 0.97


def test_a_scale_too_small_for_fp16_keeps_its_layer_in_fp32(tmp_path: Path) -> None:
    weights: dict[str, np.ndarray] = {}
    nodes = [conv("tiny", "x", "h", weights), relu("h", "r"), conv("b", "r", "y", weights)]
    weights["tiny_w"][0] = 1e-6
    path = tmp_path / "model.onnx"
    onnx.save(placed(nodes, weights, "y"), path)
    from compress.quantize.half.half_onnx import float32_islands

    kept = float32_islands(onnx.load(path), {"x": (-1.0, 1.0)})
    assert "below what FP16 holds" in kept["tiny"]
    assert kept["tiny_input1_DequantizeLinear"] == "its layer stays in FP32"
    assert "b" not in kept
