"""An ONNX file of one layer with so many channels, in the precision of the export, to be timed by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, TensorProto, helper, numpy_helper

from compress.artifact import Signature, TensorSpec
from compress.model import OnnxModel
from compress.prune.latency.layers import Shape
from compress.quantize.int8_onnx import finish
from compress.quantize.quantize_onnx import QuantizeOnnx, quantized
from compress.quantize.tied_tables import ties

__all__ = ["layer_model", "nothing"]

OPSET, IR = 17, 8
RANGE = (-3.0, 3.0)  # of standard normal numbers
DTYPES = {TensorProto.FLOAT: "float32", TensorProto.UINT8: "uint8", TensorProto.INT8: "int8"}


def layer_model(shape: Shape, inputs: int, outputs: int, quantize: QuantizeOnnx | None, path: Path) -> OnnxModel:
    """Write a layer with random weights; what INT8 layers hand on to each other is 8-bit at its ends, too.

    Args:
        shape: of the layer.
        inputs, outputs: channels that it has left.
        quantize: how its weights and activations become 8-bit; None for float32.
        path: is written.
    """
    model = _float(shape, inputs, outputs)
    if quantize is not None:
        original = model
        sums = (-3 * inputs**0.5, 3 * inputs**0.5)
        ranges = {"x": RANGE, "y": sums, "z": sums}
        model = quantized(quantize, original, ranges)
        _bare(model)
        finish(model, path, ties(original))
        model = onnx.load(path)
    else:
        onnx.save(model, path)
    return OnnxModel(path, _signature(model))


def nothing(path: Path) -> OnnxModel:
    """Write a graph of one number, which takes what any call takes."""
    one = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 1])
    other = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 1])
    model = _model([helper.make_node("Abs", ["x"], ["y"], "layer")], [one], [other], [])
    onnx.save(model, path)
    return OnnxModel(path, _signature(model))


def _float(shape: Shape, inputs: int, outputs: int) -> ModelProto:
    random = np.random.default_rng(0)
    groups = outputs if shape.depthwise else shape.groups
    batch, *spatial = shape.given
    if shape.kind == "linear":
        sizes: tuple[int, ...] = (inputs, outputs)
        given: list[int] = [*shape.given, inputs]
    else:
        sides = (inputs, outputs // groups) if shape.kind == "transposed" else (outputs, inputs // groups)
        sizes = (*sides, *shape.window["kernel_shape"])
        given = [batch, inputs, *spatial]
    weights = [numpy_helper.from_array(random.standard_normal(sizes, np.float32), "w")]
    if shape.bias:
        weights.append(numpy_helper.from_array(random.standard_normal(outputs, np.float32), "b"))
    more = ["b"] if shape.bias else []
    if shape.kind != "linear":
        kind = {"conv": "Conv", "transposed": "ConvTranspose"}[shape.kind]
        nodes = [helper.make_node(kind, ["x", "w", *more], ["y"], "layer", group=groups,
                                  **{name: list(values) for name, values in shape.window.items()})]  # fmt: skip
    elif len(given) == 2:
        nodes = [helper.make_node("Gemm", ["x", "w", *more], ["y"], "layer")]
    elif shape.bias:
        nodes = [helper.make_node("MatMul", ["x", "w"], ["z"], "layer"),
                 helper.make_node("Add", ["z", "b"], ["y"], "add")]  # fmt: skip
    else:
        nodes = [helper.make_node("MatMul", ["x", "w"], ["y"], "layer")]
    entry = helper.make_tensor_value_info("x", TensorProto.FLOAT, given)
    made = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    return onnx.shape_inference.infer_shapes(_model(nodes, [entry], [made], weights))


def _bare(model: ModelProto) -> None:
    """Take away, in place, the steps from float to 8 bits at its beginning and back at its end."""
    graph = model.graph
    first = [node for node in graph.node if node.op_type == "QuantizeLinear" and node.input[0] == "x"]
    last = [node for node in graph.node if node.op_type == "DequantizeLinear" and node.output[0] == "y"]
    types = {tensor.name: tensor.data_type for tensor in graph.initializer}
    read_by = [node for node in graph.node if "x" in node.input]
    if len(first) == 1 and len(read_by) == 1:
        graph.input[0].name = first[0].output[0]
        graph.input[0].type.tensor_type.elem_type = types[first[0].input[2]]
        graph.node.remove(first[0])
    if len(last) == 1:
        graph.output[0].name = last[0].input[0]
        graph.output[0].type.tensor_type.elem_type = types[last[0].input[2]]
        graph.node.remove(last[0])


def _model(nodes: list[Any], inputs: list[Any], outputs: list[Any], weights: list[Any]) -> ModelProto:
    graph = helper.make_graph(nodes, "layer", inputs, outputs, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR)


def _signature(model: ModelProto) -> Signature:
    specs = []
    for value in (model.graph.input[0], model.graph.output[0]):
        kind = value.type.tensor_type
        specs.append(TensorSpec(value.name, DTYPES[kind.elem_type], tuple(dim.dim_value for dim in kind.shape.dim)))
    return Signature((specs[0],), (specs[1],))
