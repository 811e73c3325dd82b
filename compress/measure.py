"""MACs, parameters, bytes: counted in the model at hand."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import torch
from onnx import shape_inference
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from compress.artifact import Signature
from compress.backends.bfloat16 import emulated
from compress.backends.onnxrt import is_half
from compress.latency import Latency, latency
from compress.model import call, example_inputs

__all__ = ["Latency", "cores", "latency", "onnx_layer_bytes", "onnx_macs", "onnx_params", "torch_macs", "torch_params"]


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def torch_params(module: nn.Module) -> int:
    """Number of trainable and fixed weights; buffers (running statistics) don't count."""
    return sum(parameter.numel() for parameter in module.parameters())


def torch_macs(module: nn.Module, signature: Signature) -> int:
    """Multiply-accumulates for one sample: half of the FLOPs that torch counts for convolutions and matrix products."""
    inputs = example_inputs(signature.inputs, 1)
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # its one operator for a whole encoder layer is not counted
    try:
        counting = FlopCounterMode(display=False, custom_mapping=_UNCOUNTED)
        with counting as counter, torch.no_grad():
            call(module, signature.inputs, inputs)
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
    return int(counter.get_total_flops()) // 2


def _rnn_flops(inputs: Sequence[int], weight: Sequence[int], recurrent: Sequence[int], *_: Any, **__: Any) -> int:
    """Of one fused recurrent layer: both matrices at each step of each sequence."""
    return 2 * inputs[0] * inputs[1] * (math.prod(weight) + math.prod(recurrent))


def _attention_flops(query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any) -> int:
    """Of the scores and of their product with the values, both [batch, heads, length, size]."""
    return 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


_UNCOUNTED = {
    torch.ops.aten.mkldnn_rnn_layer: _rnn_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
}


def onnx_params(path: Path) -> int:
    """Number of weights in the file's initializers; scales, zero-points and shapes don't count."""
    graph = onnx.load(path).graph
    not_weights = {name for node in graph.node if node.op_type in _QDQ for name in node.input[1:]}
    not_weights |= {name for node in graph.node if node.op_type in _SHAPED for name in node.input[1:]}
    return sum(int(np.prod(t.dims)) for t in graph.initializer if t.name not in not_weights)


def onnx_layer_bytes(path: Path) -> dict[str, int]:
    """Bytes of the weights of each convolution, matrix product and embedding, by the node's name."""
    graph = onnx.load(path).graph
    sizes = {t.name: len(t.raw_data) or int(np.prod(t.dims)) * 4 for t in graph.initializer}
    for node in graph.node:
        if node.op_type == "DequantizeLinear" and node.input[0] in sizes:
            sizes[node.output[0]] = sizes[node.input[0]]
    found: dict[str, int] = {}
    for node in graph.node:
        at = 0 if node.op_type == "Gather" else 3 if node.op_type.startswith("QLinear") else 1
        if node.op_type in _WEIGHTED and len(node.input) > at and node.input[at] in sizes:
            found[node.name.removesuffix("_quant").removesuffix("_rows")] = sizes[node.input[at]]
    return found


_WEIGHTED = (
    "Conv", "ConvTranspose", "ConvInteger", "QLinearConv", "Gemm", "MatMul", "MatMulInteger", "QLinearMatMul", "Gather",
)  # fmt: skip
_QDQ = ("QuantizeLinear", "DequantizeLinear")
_SHAPED = ("Reshape", "Expand", "Slice", "ReduceMean", "ReduceSum", "Unsqueeze", "Squeeze", "Pad", "Resize", "Tile")


_RECURRENT = ("LSTM", "GRU", "RNN")
_MULTIPLYING = ("Conv", "ConvTranspose", "ConvInteger", "Gemm", "MatMul", "MatMulInteger", *_RECURRENT)


def onnx_macs(path: Path) -> int:
    """Multiply-accumulates for one sample of the convolutions and matrix products in a file.

    Shapes are inferred; where inference can't tell them (a reshape to sizes that are computed), the model runs once.
    """
    model = onnx.load(path)
    nodes = [node for node in model.graph.node if node.op_type in _MULTIPLYING]
    wanted = {name for node in nodes for name in (*node.input[:3], node.output[0]) if name}
    shapes = _inferred_shapes(model)
    if any(0 in shapes.get(name, (0,)) for name in wanted):
        shapes |= _seen_shapes(path, wanted - {tensor.name for tensor in model.graph.initializer})
    total = 0
    for node in nodes:
        left, right, out = (shapes[name] for name in (node.input[0], node.input[1], node.output[0]))
        if node.op_type.startswith("Conv"):
            grown = left if node.op_type == "ConvTranspose" else out  # where the kernel is applied at each position
            total += int(np.prod(grown[2:]) * grown[0] * np.prod(right))
        elif node.op_type in _RECURRENT:  # both matrices at each step [steps, batch, features] of each direction
            total += left[0] * left[1] * int(np.prod(right) + np.prod(shapes[node.input[2]]))
        else:
            transposed = any(a.name == "transA" and a.i for a in node.attribute)
            total += int(np.prod(out)) * (left[0] if transposed else left[-1])
    return total


def _inferred_shapes(given: onnx.ModelProto) -> dict[str, tuple[int, ...]]:
    """Shapes [of one sample] by tensor; 0 is an unknown dimension."""
    model = onnx.ModelProto()
    model.CopyFrom(given)
    for value in (*model.graph.input, *model.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.dim_value = 1
    del model.graph.value_info[:]
    graph = shape_inference.infer_shapes(model, data_prop=True).graph
    shapes = {t.name: tuple(t.dims) for t in graph.initializer}
    for value in (*graph.value_info, *graph.input, *graph.output):
        shapes[value.name] = tuple(dim.dim_value for dim in value.type.tensor_type.shape.dim)
    return shapes


def _seen_shapes(path: Path, names: Collection[str]) -> dict[str, tuple[int, ...]]:
    """Shapes [of one sample, every other symbolic dimension 1] of tensors, from one run."""
    model = onnx.load(path)
    if is_half(path, onnx.TensorProto.BFLOAT16):
        model = emulated(model)
    inputs = {
        value.name: np.zeros(
            [dim.dim_value or 1 for dim in value.type.tensor_type.shape.dim],
            onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type),
        )
        for value in model.graph.input
    }
    there = {value.name for value in (*model.graph.output, *model.graph.input)}
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in there)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    running = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    outputs = [output.name for output in running.get_outputs()]
    found = {name: tuple(values.shape) for name, values in inputs.items()}
    return found | {
        name: tuple(values.shape) for name, values in zip(outputs, running.run(outputs, inputs), strict=True)
    }
