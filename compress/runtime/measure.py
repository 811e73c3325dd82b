"""MACs, parameters, bytes: counted in the model at hand."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from compress.artifact import Signature
from compress.formats.native.onnx_part import OnnxPart
from compress.formats.onnx.counted import counted_graph
from compress.formats.onnx.scope import bodies, inner_bodies, inner_nodes
from compress.host.cores import cores_here
from compress.model import Arrays, call, sample_inputs
from compress.model.unfused import unfused
from compress.runtime.branches import with_branches_taken
from compress.runtime.latency import Latency, latency
from compress.runtime.onnx_shapes import shapes_for
from compress.runtime.products import countable, multiplies, product_macs, weights_in

__all__ = [
    "Latency",
    "cores",
    "latency",
    "onnx_layer_bytes",
    "onnx_macs",
    "onnx_params",
    "onnx_work",
    "torch_macs",
    "torch_params",
    "torch_work",
]


def cores() -> int:
    """Threads that this process may run at the same time, by its CPUs and its container's quota."""
    return cores_here().count


def torch_params(module: nn.Module) -> int:
    """Number of trainable and fixed weights, those of parts in ONNX, too; buffers (running statistics) don't count."""
    kept = sum(layer.weights for layer in module.modules() if isinstance(layer, OnnxPart))
    return kept + sum(parameter.numel() for parameter in module.parameters())


def torch_macs(module: nn.Module, signature: Signature) -> int:
    """Multiply-accumulates for one sample of the signature's representative sizes, without those of parts in ONNX.

    They are half of the FLOPs that torch counts for convolutions and matrix products: of what can be pruned.
    """
    return _torch_macs(module, signature)


def torch_work(module: nn.Module, signature: Signature) -> Work:
    """The same with those of parts in ONNX, counted as `onnx_work` does; of their Ifs, the branch that runs counts."""
    found: list[Work] = []

    def seen(part: nn.Module, given: tuple[Any, ...]) -> None:
        assert isinstance(part, OnnxPart)  # noqa: S101  for mypy
        found.append(_part_work(part, given))

    handles = [each.register_forward_pre_hook(seen) for each in module.modules() if isinstance(each, OnnxPart)]
    try:
        macs = _torch_macs(module, signature)
    finally:
        for handle in handles:
            handle.remove()
    return Work(macs + sum(each.macs for each in found), sum(each.uncounted for each in found))


def _part_work(part: OnnxPart, given: Sequence[torch.Tensor]) -> Work:
    data = part.onnx()
    names = [value.name for value in onnx.ModelProto.FromString(data).graph.input]
    arrays = {name: each.detach().cpu().numpy() for name, each in zip(names, given, strict=True)}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "part.onnx"
        path.write_bytes(data)
        return _file_work(path, arrays, every=True)


def _torch_macs(module: nn.Module, signature: Signature) -> int:
    inputs = sample_inputs(signature, 1)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    for parameter in trained:  # torch follows whose gradients flow where, and fails on a view of one
        parameter.requires_grad_(False)
    try:
        counting = FlopCounterMode(display=False, custom_mapping=_UNCOUNTED)
        with unfused(), counting as counter, torch.no_grad():  # one operator for a whole encoder layer is not counted
            call(module, signature.inputs, inputs)
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)
    return int(counter.get_total_flops()) // 2


def _rnn_flops(inputs: Sequence[int], weight: Sequence[int], recurrent: Sequence[int], *_: Any, **__: Any) -> int:
    """Of one fused recurrent layer: both matrices at each step of each sequence."""
    return 2 * inputs[0] * inputs[1] * (math.prod(weight) + math.prod(recurrent))


def _attention_flops(query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any) -> int:
    """Of the scores and of their product with the values, both [batch, heads, length, size]."""
    return 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def _vector_flops(matrix: Sequence[int], *_: Any, **__: Any) -> int:
    """Of a matrix, or a vector, times a vector."""
    return 2 * math.prod(matrix)


def _trilinear_flops(one: Sequence[int], weight: Sequence[int], other: Sequence[int], *_: Any, **__: Any) -> int:
    """Of nn.Bilinear, [samples, 1, in1, 1], [1, out, in1, in2] and [samples, 1, 1, in2]: a product with each weight."""
    del other
    return 2 * one[0] * math.prod(weight)


def _distance_flops(one: Sequence[int], other: Sequence[int], *_: Any, **__: Any) -> int:
    """Of all distances between the rows of two matrices."""
    return 2 * math.prod(one) * other[-2]


_UNCOUNTED = {
    torch.ops.aten.mv: _vector_flops,
    torch.ops.aten.dot: _vector_flops,
    torch.ops.aten._trilinear: _trilinear_flops,
    torch.ops.aten._cdist_forward: _distance_flops,
    torch.ops.aten._euclidean_dist: _distance_flops,
    torch.ops.aten.mkldnn_rnn_layer: _rnn_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
}


def onnx_params(path: Path) -> int:
    """Number of weights in the file, as initializers or constants; scales, zero-points, shapes and what nothing reads
    don't count."""
    graph = counted_graph(path).graph
    not_weights = {name for node in graph.node if node.op_type in _QDQ for name in node.input[1:]}
    not_weights |= {name for node in graph.node if node.op_type in _SHAPED for name in node.input[1:]}
    not_weights |= {name for node in graph.node for name in node.input[_AFTER.get(node.op_type, len(node.input)) :]}
    not_weights |= {name for node in graph.node if node.op_type == "Range" for name in node.input}
    for node in graph.node:
        not_weights |= {node.input[at] for at in _RANGES.get(node.op_type, ()) if at < len(node.input)}
    # A dynamically quantized product is multiplied by the input's scale times the weight's.
    ranged = {node.output[1] for node in graph.node if node.op_type == "DynamicQuantizeLinear"}
    not_weights |= {
        name for node in graph.node if node.op_type == "Mul" and ranged & {*node.input} for name in node.input
    }
    inside = [t for body in inner_bodies(graph) for t in body.initializer]
    found = {t.name: int(np.prod(t.dims)) for t in graph.initializer if t.name not in not_weights}
    found |= _few_bits(graph)
    return sum(found.values()) + sum(int(np.prod(t.dims)) for t in inside if t.name not in not_weights)


def _few_bits(graph: onnx.GraphProto) -> dict[str, int]:
    """How many weights stand in the bytes of each initializer that ONNX Runtime's operators of few bits read."""
    sizes = {t.name: math.prod(t.dims) for t in graph.initializer}
    moved = {node.output[0]: node.input[0] for node in graph.node if node.op_type == "Reshape"}
    found: dict[str, int] = {}
    for node in graph.node:
        if node.op_type in _FEW_BITS:
            told = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
            name = node.input[_FEW_BITS[node.op_type]]
            name = moved.get(name, name)
            if name in sizes:
                whole = sizes[name] * 8 // max(1, told.get("bits", 4))
                found[name] = told["K"] * told["N"] if {"K", "N"} <= told.keys() else found.get(name, whole)
    return found


def onnx_layer_bytes(path: Path) -> dict[str, int]:
    """Bytes of the weights of each convolution, matrix product, recurrent layer and embedding, by the node's name."""
    graph = counted_graph(path).graph
    sizes = {t.name: math.prod(t.dims) * _BITS.get(t.data_type, 32) // 8 for t in graph.initializer}
    for node in graph.node:
        # Turned, or as a table's rows: two layers share it.
        if node.op_type in ("DequantizeLinear", "Transpose", "Reshape") and node.input[0] in sizes:
            sizes[node.output[0]] = sizes[node.input[0]]
    found: dict[str, int] = {}
    for node in graph.node:
        at = 0 if node.op_type in ("Gather", "GatherBlockQuantized") else 3 if node.op_type in _QUANTIZED else 1
        read = node.input[1:3] if node.op_type in _RECURRENT else node.input[at : at + 1]
        if node.op_type in (*_WEIGHTED, *_RECURRENT) and any(name in sizes for name in read):
            held = sum(sizes.get(name, 0) for name in read)
            found[node.name.removesuffix("_quant").removesuffix("_rows")] = held
    return found


_BITS = {
    **{getattr(onnx.TensorProto, name): 4 for name in ("INT4", "UINT4")},
    **{getattr(onnx.TensorProto, name): 8 for name in ("INT8", "UINT8", "BOOL", "FLOAT8E4M3FN", "FLOAT8E5M2")},
    **{getattr(onnx.TensorProto, name): 16 for name in ("INT16", "UINT16", "FLOAT16", "BFLOAT16")},
    **{getattr(onnx.TensorProto, name): 64 for name in ("INT64", "UINT64", "DOUBLE")},
}
_WEIGHTED = (
    "Conv", "ConvTranspose", "ConvInteger", "QLinearConv", "Gemm", "MatMul", "MatMulInteger", "QLinearMatMul", "QGemm",
    "Gather", "MatMulNBits", "GatherBlockQuantized",
)  # fmt: skip
_FEW_BITS = {"MatMulNBits": 1, "GatherBlockQuantized": 0}  # where their weights stand
_QDQ = ("QuantizeLinear", "DequantizeLinear")
_AFTER = {"MatMulInteger": 2, "ConvInteger": 2, "DynamicQuantizeLSTM": 8}  # where zero-points and scales begin
# Where scales and zero-points of other tools' operators stand; those of the weights come before a bias, if at all.
_RANGES = {
    "QLinearConv": (1, 2, 4, 5, 6, 7), "QLinearMatMul": (1, 2, 4, 5, 6, 7), "QGemm": (1, 2, 4, 5, 7, 8),
    "DynamicQuantizeMatMul": (2, 3), "MatMulIntegerToFloat": (2, 3, 4, 5),
    "MatMulNBits": (2, 3, 4), "GatherBlockQuantized": (2, 3),
}  # fmt: skip
_SHAPED = ("Reshape", "Expand", "Slice", "ReduceMean", "ReduceSum", "Unsqueeze", "Squeeze", "Pad", "Resize", "Tile")


_RECURRENT = ("LSTM", "GRU", "RNN", "DynamicQuantizeLSTM")
_QUANTIZED = ("QLinearConv", "QLinearMatMul", "QGemm")  # their operands are inputs 0 and 3
_MULTIPLYING = (
    "Conv", "ConvTranspose", "ConvInteger", "Gemm", "MatMul", "MatMulInteger", "DynamicQuantizeMatMul",
    "MatMulIntegerToFloat", "MatMulNBits", "Einsum", *_QUANTIZED, *_RECURRENT,
)  # fmt: skip


def _einsum_macs(node: onnx.NodeProto, shapes: Sequence[Sequence[int]]) -> int:
    """A product for each combination of the indices of two operands, of more one after the other.

    Those that an ellipsis stands for are the first operand's.
    """
    equation = next(onnx.helper.get_attribute_value(a).decode() for a in node.attribute if a.name == "equation")
    sizes: dict[str, int] = {}
    terms: list[list[str]] = []
    inputs, _, output = equation.replace(" ", "").partition("->")
    for term, shape in zip(inputs.split(","), shapes, strict=True):
        before, dots, behind = term.partition("...")
        letters = [
            *before,
            *([f".{at}" for at in range(len(shape) - len(before) - len(behind))] if dots else ()),
            *behind,
        ]
        for letter, size in zip(letters, shape, strict=True):
            sizes[letter] = max(sizes.get(letter, 1), size)
        terms.append(letters)
    if len(terms) < 3:
        return math.prod(sizes.values())
    total, made = 0, set(terms[0])
    for at, term in enumerate(terms[1:], 1):
        total += math.prod(sizes[letter] for letter in made | set(term))
        wanted = {letter for later in terms[at + 1 :] for letter in later} | set(output)
        made = {letter for letter in made | set(term) if letter in wanted or letter.startswith(".")}
    return total


@dataclass(frozen=True)
class Work:
    """Multiply-accumulates of a file.

    Attributes:
        macs: of convolutions and matrix products; of an If, those of the branch that runs where sizes decide, else of
            the larger one.
        uncounted: convolutions and matrix products that run as often as the data has it (in a Loop or a Scan), or in
            sizes that nothing tells, and operators with weights of which nobody here knows how they multiply; they are
            not in `macs`.
    """

    macs: int
    uncounted: int


def onnx_macs(path: Path, signature: Signature) -> int:
    """Multiply-accumulates of the convolutions and matrix products in a file, for one sample of representative sizes.

    Args:
        path: an ONNX file.
        signature: of it, with its sizes.
    """
    return onnx_work(path, signature).macs


def onnx_work(path: Path, signature: Signature) -> Work:
    """The same, and what it leaves out. Calls of functions count as what they hold.

    Args:
        path: an ONNX file.
        signature: of it, with its sizes. Where it fixes the batch, a call's samples are counted, not one.
    """
    return _file_work(path, sample_inputs(signature, 1), every=False)


def _file_work(path: Path, inputs: Arrays, *, every: bool) -> Work:
    model = counted_graph(path)
    weights = weights_in(model.graph)
    ifs = [node for node in (*model.graph.node, *inner_nodes(model.graph)) if node.op_type == "If"]
    names = {node.output[0] for node in ifs if _has_products(node, weights)}
    runs = with_branches_taken(path, inputs, names, every=every) if names else None
    model = model if runs is None else runs
    each = (*model.graph.node, *inner_nodes(model.graph))
    nodes = [node for node in each if node.op_type in _MULTIPLYING or countable(node)]
    wanted = {name for node in nodes for name in (*node.input[:4], node.output[0]) if name}
    return _work(model.graph, shapes_for(path, inputs, wanted, model, runs), weights)


def _has_products(node: onnx.NodeProto, weights: Collection[str]) -> bool:
    return any(_multiplies(each, weights) for each in inner_nodes(onnx.GraphProto(node=[node])))


def _multiplies(node: onnx.NodeProto, weights: Collection[str]) -> bool:
    return node.op_type in _MULTIPLYING or multiplies(node, weights)


def _work(graph: onnx.GraphProto, shapes: Mapping[str, Sequence[int]], weights: Collection[str]) -> Work:
    macs = uncounted = 0
    for node in graph.node:
        if _multiplies(node, weights):
            known = all(name in shapes for name in (*node.input[:4], node.output[0]) if name)
            found = _node_macs(node, shapes) if known else None
            macs, uncounted = macs + (found or 0), uncounted + (found is None)
            continue
        branches = [_work(body, shapes, weights) for body in bodies(node)]
        if node.op_type == "If":
            larger = max(branches, key=lambda each: (each.macs, each.uncounted))
            macs, uncounted = macs + larger.macs, uncounted + larger.uncounted
        elif branches:
            uncounted += sum(_multiplies(each, weights) for each in inner_nodes(onnx.GraphProto(node=[node])))
    return Work(macs, uncounted)


def _node_macs(node: onnx.NodeProto, shapes: Mapping[str, Sequence[int]]) -> int | None:
    if node.op_type not in _MULTIPLYING:
        return product_macs(node, shapes)
    if node.op_type == "Einsum":
        return _einsum_macs(node, [shapes[name] for name in node.input]) if len(node.input) > 1 else 0
    second = 3 if node.op_type in _QUANTIZED else 1
    left, right = shapes[node.input[0]], shapes[node.input[second]]
    if node.op_type in _RECURRENT:  # both matrices at each step [steps, batch, features] of each direction
        return left[0] * left[1] * int(np.prod(right) + np.prod(shapes[node.input[2]]))
    out = shapes[node.output[0]]
    if "Conv" in node.op_type:
        grown = left if node.op_type == "ConvTranspose" else out  # where the kernel is applied at each position
        return int(np.prod(grown[2:]) * grown[0] * np.prod(right))
    transposed = any(a.name == "transA" and a.i for a in node.attribute)
    return int(np.prod(out)) * (left[0] if transposed else left[-1])
